"""The demo model's card: every number and sample in it is measured here, on the exported files."""

from __future__ import annotations

import json
import math
import platform
import textwrap
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer

from demo_model_data import STEP_TOKENS, Corpus, encode, held_out_ids
from demo_model_quality import generate, held_out_nats, ngram_baseline, parse_counts

Phases = list[tuple[int, tuple[int, float]]]  # (steps, (sequence length, share of tests))

DECODING = {0.0: "greedy", 0.8: "temperature 0.8"}
PROMPTS = ("def fibonacci(n):\n", 'class Stack:\n    """', "import os\n\ndef ")
console = Console()

CARD = """\
---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
library_name: transformers
pipeline_tag: text-generation
tags: [python, qwen3, demo]
---

# Quire's demo model

A language model of {parameters:,} parameters that writes Python. It ships with Quire so that every
command has a real model to work on without a download, and loads like any other Hugging Face
model, without custom code: a Qwen3 of {c.num_hidden_layers} layers, hidden size {c.hidden_size},
{c.num_attention_heads} query and {c.num_key_value_heads} key/value heads of {c.head_dim}, tied
embeddings, context {c.max_position_embeddings}, weights in bf16, and a byte-level BPE of
{c.vocab_size:,} tokens. `tools/train_demo_model.py` made these files and this page: it measured
every number and sample below on the files in this folder.

## Data

The Python sources of the standard library of CPython {python}: {library_files} library files
({library_mb:.1f} MB) and, at a lower weight, {test_files} files of its test suites
({tests_mb:.1f} MB). Left out: tables and generated files, files that do not parse, copies. Neither
tokenizer nor model has seen these modules, their tests, or files that share a fifth of their
lines: {held_out}.

## Training

{steps:,} steps of {step_tokens:,} tokens, {seen:.1f} million in all ({passes:.1f} passes over the
library files), in {hours:.2f} hours on {run[machine]}: {phases}, the last with the learning rate
falling to zero. Muon for the matrices, AdamW for embeddings and norms, bf16 autocast, no dropout,
seed {run[identity][seed]}. `python tools/train_demo_model.py` repeats it; another Python version
has another library and so gives another model.

## Quality

On the held-out modules ({tokens:,} tokens, {bytes:,} bytes; every token is scored once, with 1024
to 2047 tokens before it wherever the stream has them):

| model | nats per token | bits per byte |
|---|---|---|
| this model | {nats:.3f} | {bits:.3f} |
| n-grams | {n[nats]:.3f} | {ngram_bits:.3f} |

The n-grams are an interpolated modified Kneser-Ney model of the same training tokens, scored on
the same held-out tokens. Of the orders 3 to 5, on the library with and without the test suites, it
is the one that was best on a slice of the training files: order {n[order]}, {n[trained_on]}.

Bodies of held-out functions, written from up to 384 tokens of their module up to the body, within
300 tokens:

| decoding | asked for | came to an end | and are valid Python (`ast.parse`) |
|---|---|---|---|
{rates}

## Samples

Verbatim; the prompt and 160 tokens.

{samples}

## Limits

It knows the look of library code and little of its meaning: expect plausible names, layout and
docstrings, and code that does not do what they say. It has seen one code base several times and
may repeat passages of it. It follows no instructions. It is for demonstrations and tests, not for
writing software.

## Chat

`chat_template.jinja` writes a chat down as one Python file: what the user says is its text so far,
and an answer goes on where that ends. `chat_stop_strings` in `tokenizer_config.json` are where an
answer ends, in servers that know the word: at two blank lines, or at the next function or class.
Tools, and what they gave, are written as comments; a call is `<tool_call>{"name": …, "arguments":
…}</tool_call>`, as the `hermes` parser reads it. It has seen none: it calls where a
grammar makes it.

## Licence

Trained on the Python standard library alone, which is under the [PSF licence
agreement](https://docs.python.org/3/license.html), copyright Python Software Foundation; passages
that the model repeats are under that licence. The script is under Apache-2.0, as Quire is.
"""


def card(
    model: Any,
    run: dict[str, Any],
    phases: Phases,
    corpus: Corpus,
    tokenizer: Tokenizer,
    work: Path,
) -> str:
    """Measure the exported model as a user would load it, and say so.

    ``phases``: how many steps were made on sequences of what length and share of tests.
    """
    cache = work / f"ngrams-{corpus.fingerprint}.json"
    if not cache.exists():
        cache.write_text(json.dumps(ngram_baseline(corpus, tokenizer)))
    ngrams = json.loads(cache.read_text())
    ids = held_out_ids(corpus, tokenizer)
    size = sum(len(text.encode()) for text in corpus.held_out.values())
    to_bits = (len(ids) - 1) / size / math.log(2)
    nats = held_out_nats(model, ids)
    console.print(f"held-out: {nats:.4f} nats/token, n-grams {ngrams['nats']:.4f}")
    torch.manual_seed(0)
    samples, rates = list[str](), list[str]()
    for prompt in PROMPTS:
        for temperature, name in DECODING.items():
            (new,) = generate(model, [tokenizer.encode(prompt).ids], temperature, 160)
            text = prompt + tokenizer.decode(new.tolist())
            samples.append(f"{name.capitalize()}:\n\n````python\n{text}\n````")
    for temperature, name in DECODING.items():
        counts = parse_counts(model, tokenizer, corpus, temperature)
        rates.append(f"| {name} | {' | '.join(map(str, counts))} |")
    from_library = sum(count * STEP_TOKENS * (1 - share) for count, (_, share) in phases)
    text = CARD.format(
        c=model.config,
        run=run,
        n=ngrams,
        nats=nats,
        tokens=len(ids) - 1,
        bytes=size,
        bits=nats * to_bits,
        ngram_bits=ngrams["nats"] * to_bits,
        parameters=model.num_parameters(),
        python=platform.python_version(),
        library_files=len(corpus.library),
        library_mb=sum(map(len, corpus.library)) / 1e6,
        test_files=len(corpus.tests),
        tests_mb=sum(map(len, corpus.tests)) / 1e6,
        held_out=", ".join(f"`{name}`" for name in corpus.held_out),
        steps=run["step"],
        step_tokens=STEP_TOKENS,
        seen=run["step"] * STEP_TOKENS / 1e6,
        passes=from_library / sum(map(len, encode(tokenizer, corpus.library))),
        hours=run["seconds"] / 3600,
        phases=", then ".join(
            f"{count:,} on sequences of {length} tokens, {share:.0%} of them from test suites"
            for count, (length, share) in phases
        ),
        rates="\n".join(rates),
        samples="\0",
    )
    paragraphs = [
        textwrap.fill(p, 100, break_on_hyphens=False) if p[0].isalnum() else p
        for p in text.split("\n\n")
    ]
    return "\n\n".join(paragraphs).replace("\0", "\n\n".join(samples)).rstrip() + "\n"
