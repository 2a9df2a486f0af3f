"""Train Quire's demo model: a small Qwen3 that writes Python, from the standard library alone.

Every command of Quire needs a model to show what it does, and a download is a poor first
experience.  This script makes the model that ships inside the package from nothing but the
``.py`` files that come with the Python interpreter that runs it:

    python tools/train_demo_model.py               # the shipped recipe: an hour on two free cores
    python tools/train_demo_model.py --steps 300   # a quick, much weaker model
    python tools/train_demo_model.py --export-only # write the newest checkpoint out again

It trains a byte-level BPE tokenizer, trains the model (Muon for the matrices, AdamW for the rest;
warm-up, constant rate, linear decay), measures it on modules that neither tokenizer nor model has
seen, against a modified Kneser-Ney n-gram model of the same tokens, and writes weights, tokenizer
and a model card with the measured numbers to ``--out``.  An interrupted run continues from its
last checkpoint in ``--work-dir``.  Needs torch >= 2.9 (for ``torch.optim.Muon``).
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import platform
import re
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Ids = npt.NDArray[np.int64]

# Small, typical library modules of different kinds; their tests are kept out of training too.
HELD_OUT = (
    *("calendar", "configparser", "csv", "difflib", "fileinput", "graphlib", "heapq", "netrc"),
    *("sched", "shlex", "statistics", "tempfile", "textwrap", "timeit"),
)
# Tables, generated files, fixtures in Python 2 or with deliberate errors: not the style to learn.
SKIP_DIRS = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
SKIP_FILES = re.compile(
    r"_sysconfigdata|^config-|lib2to3/tests/|test/(encoded_|.*data/|bad)|__phello"
)
TEST_DIR = re.compile(r"(^|/)(test|tests|idle_test)/")

END = "<|endoftext|>"  # id 0: between files, at the end of generation, and for padding
VOCABULARY, CONTEXT = 4096, 2048
# Runs of newlines and of spaces are tokens of their own, so an indentation costs one token and a
# prompt may end after a newline; only a single space may lead a word.
PIECES = r"\n+| {2,}|\t+| ?[^\W\d]+| ?\d{1,3}| ?[^\s\w]+|\s"

STEP_TOKENS = 8192
MICRO_TOKENS = 4096  # of one backward pass: half the memory of the whole batch, and no slower
WARMUP_STEPS, DECAY_STEPS = 100, 250
MUON_RATE, ADAM_RATE = 0.02, 3e-3
SPLIT_SHARE = 0.03  # of the tokens that start with white space; see Batches
# (sequence length, share of tokens from test suites): short sequences while most is learnt, the
# full context and nearly pure library code while the rate decays.
STAGES = ((512, 0.35), (CONTEXT, 0.10))
DECODING = {0.0: "greedy", 0.8: "temperature 0.8"}
PROMPTS = ("def fibonacci(n):\n", 'class Stack:\n    """', "import os\n\ndef ")

OUT, WORK = Path("src/quire/demo_model"), Path("build/demo_model")
STEPS = 1050
STEPS_HELP = (
    f"Length of the run. Its last {DECAY_STEPS} steps, at most half, are the decay; "
    "until that has begun, a run may be continued with another length."
)
console = Console()


@dataclass(frozen=True)
class Corpus:
    """Source texts: two kinds to train on, and what is held out (by module name)."""

    library: list[str]
    tests: list[str]
    held_out: dict[str, str]

    @property
    def fingerprint(self) -> str:
        parts = "\0".join([*self.library, "|", *self.tests, "|", *self.held_out.values()])
        return hashlib.sha256(parts.encode()).hexdigest()[:16]


def _read_library() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIP_DIRS.intersection(name.split("/")) or SKIP_FILES.search(name):
            continue
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        if len(text) >= 200 and sum(map(str.isdigit, text)) <= 0.15 * len(text):
            yield name, text  # neither a stub nor a table


def load_corpus() -> Corpus:
    """Read the standard library and split it; near duplicates of held-out files are dropped."""

    def long_lines(text: str) -> set[str]:
        return {line.strip() for line in text.splitlines() if len(line.strip()) > 25}

    files = dict(_read_library())
    held = {name: files[f"{name}.py"] for name in HELD_OUT if f"{name}.py" in files}
    if missing := set(HELD_OUT) - set(held):
        raise SystemExit(f"this Python lacks library sources: {', '.join(sorted(missing))}")
    held_lines = set[str]().union(*map(long_lines, held.values()))
    parts: tuple[list[str], list[str]] = ([], [])
    seen = set[str]()
    for name, text in files.items():
        lines = long_lines(text)
        copied = len(lines & held_lines) > 0.2 * max(len(lines), 1)
        module = Path(name).stem.removeprefix("test_").lstrip("_")
        if module not in HELD_OUT and not copied and text not in seen:
            parts[bool(TEST_DIR.search(name))].append(text)
            seen.add(text)
    return Corpus(*parts, held)


def make_tokenizer(corpus: Corpus, path: Path) -> Tokenizer:
    """Train the tokenizer on the library part, or load the one an earlier start has trained."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.library, trainer)
    tokenizer.save(str(path))
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[Ids]:
    return [np.array([*e.ids, 0], np.int64) for e in tokenizer.encode_batch(texts)]


class Batches:
    """Endless shuffled training sequences of one stage.

    Each follows from seed, stage and its number alone, so a resumed run finds its place by itself.
    """

    def __init__(
        self, library: list[Ids], tests: list[Ids], tokenizer: Tokenizer, stage: int, seed: int
    ) -> None:
        self.library, self.tests, self.seed = library, tests, (seed, stage)
        self.length, self.test_share = STAGES[stage]
        self.epoch, self.first, self.rows = -1, 0, np.empty((0, 0), np.int64)
        # Prompts may end inside what is one token in running text ("def " or half an indentation),
        # so now and then a token that starts with white space is shown as two.
        vocabulary = tokenizer.get_vocab()
        self.halves = np.zeros((len(vocabulary), 2), np.int64)
        for token, number in vocabulary.items():
            if token[0] in "ĠĊ" and token[1:] in vocabulary:
                self.halves[number] = vocabulary[token[0]], vocabulary[token[1:]]

    def _next_epoch(self) -> None:
        """All of the library and a fresh choice of the tests, cut and shuffled."""
        self.first += len(self.rows)
        self.epoch += 1
        rng = np.random.default_rng([*self.seed, self.epoch])
        budget = sum(map(len, self.library)) * self.test_share / (1 - self.test_share)
        documents = list(self.library)
        for i in rng.permutation(len(self.tests)):
            documents.append(self.tests[i])
            budget -= len(self.tests[i])
            if budget <= 0:
                break
        ids = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
        split = (rng.random(len(ids)) < SPLIT_SHARE) & (self.halves[ids, 1] > 0)
        out = np.repeat(ids, 1 + split)
        at = np.flatnonzero(split) + np.arange(split.sum())
        out[at], out[at + 1] = self.halves[ids[split]].T
        starts = rng.permutation((len(out) - 1) // self.length)[:, None] * self.length
        self.rows = out[starts + np.arange(self.length + 1)]

    def batch(self, number: int) -> torch.Tensor:
        """The ``number``-th batch of the stage; numbers must not go backwards."""
        count = STEP_TOKENS // self.length
        picked = []
        for row in range(number * count, (number + 1) * count):
            while row >= self.first + len(self.rows):
                self._next_epoch()
            picked.append(self.rows[row - self.first])
        return torch.from_numpy(np.stack(picked))


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def loss_of(model: Any, rows: torch.Tensor, skip: int = 0, reduction: str = "mean") -> torch.Tensor:
    """Cross-entropy in nats, behind the first ``skip`` positions.

    Products in bf16 more than double the speed, on CPUs that have them too.
    """
    with torch.autocast(rows.device.type, torch.bfloat16):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits[:, skip:]
    return F.cross_entropy(
        logits.flatten(0, 1).float(), rows[:, skip + 1 :].flatten(), reduction=reduction
    )


def held_out_nats(model: Any, ids: torch.Tensor, quick: bool = False) -> float:
    """Nats per token of a stream: each token is scored once and sees at least half a context.

    ``quick`` scores every eighth window only, for the curve during training.
    """
    half, total, count = CONTEXT // 2, 0.0, 0
    starts = range(0, len(ids) - 1, half)
    for start in starts[1::8] if quick else starts:
        begin = max(0, start - half)
        rows = ids[None, begin : start + half + 1]
        with torch.no_grad():
            total += loss_of(model, rows, start - begin, "sum").item()
        count += rows.shape[1] - 1 - (start - begin)
    return total / count


def stage_of(step: int, steps: int) -> tuple[int, int]:
    """The stage of a step, and the step's number within it."""
    start = steps - min(DECAY_STEPS, steps // 2)
    return (0, step) if step < start else (1, step - start)


class Trainer:
    """Model, optimizers and data of one run, and its checkpoint.

    No random state is saved: there is no dropout, and the order of the data is derived.
    """

    def __init__(
        self, corpus: Corpus, tokenizer: Tokenizer, work: Path, steps: int, seed: int, device: str
    ) -> None:
        self.path, self.steps, self.device = work / "checkpoint.pt", steps, device
        self.identity = identity(corpus, seed)
        self.step, self.seconds, self.curve = 0, 0.0, list[tuple[int, float]]()
        self.model = make_model(seed).to(device)
        named = list(self.model.named_parameters())
        matrix = {name for name, p in named if p.ndim == 2 and "embed" not in name}
        if not hasattr(torch.optim, "Muon"):
            raise SystemExit(
                f"training needs torch >= 2.9 for its Muon; this is {torch.__version__}"
            )
        self.optimizers: list[tuple[float, torch.optim.Optimizer]] = [
            (MUON_RATE, torch.optim.Muon([p for n, p in named if n in matrix], weight_decay=0.05)),
            (
                ADAM_RATE,
                torch.optim.AdamW(
                    [p for n, p in named if n not in matrix], betas=(0.9, 0.95), weight_decay=0.0
                ),
            ),
        ]
        library, tests = encode(tokenizer, corpus.library), encode(tokenizer, corpus.tests)
        self.batches = [Batches(library, tests, tokenizer, s, seed) for s in range(len(STAGES))]
        self.held_out = held_out_ids(corpus, tokenizer).to(device)
        self.loss = loss_of
        cpu = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
        self.machine = f"{torch.get_num_threads()} CPU threads ({cpu})"
        if device == "cuda":
            self.machine = torch.cuda.get_device_name()

    def restore(self) -> None:
        saved = load_checkpoint(self.path, self.identity, self.device)
        if saved["steps"] != self.steps and max(
            stage_of(saved["step"], n)[0] for n in (self.steps, saved["steps"])
        ):
            raise SystemExit(
                f"{self.path} is at step {saved['step']} of {saved['steps']}: one of the two "
                f"lengths has its decay begun by then, so it cannot become a run of {self.steps}"
            )
        self.step, self.seconds, self.curve = saved["step"], saved["seconds"], saved["curve"]
        self.model.load_state_dict(saved["model"])
        for (_, optimizer), state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        console.print(f"continuing at step {self.step} of {self.steps}")

    def save(self) -> None:
        state = {
            "identity": self.identity,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for _, optimizer in self.optimizers],
            **{
                name: getattr(self, name)
                for name in ("step", "steps", "seconds", "curve", "machine")
            },
        }
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.path)

    def rate(self) -> float:
        """Warm-up, constant, linear decay to zero; the end is all that depends on the length.

        So a run may be given another length before its decay, and equals one planned like that.
        """
        decay = min(DECAY_STEPS, self.steps // 2)
        return min(1.0, (self.step + 1) / WARMUP_STEPS, (self.steps - self.step) / decay)

    def advance(self) -> float:
        """One optimizer step; returns its loss."""
        begun, total = time.perf_counter(), 0.0
        stage, number = stage_of(self.step, self.steps)
        rows = self.batches[stage].batch(number).to(self.device)
        parts = rows.chunk(STEP_TOKENS // MICRO_TOKENS)
        for part in parts:
            loss = self.loss(self.model, part) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        if not math.isfinite(total):
            raise SystemExit(f"the loss became {total} at step {self.step}")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for base, optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base * self.rate()
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.seconds += time.perf_counter() - begun
        return total

    def run(self, save_every: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("training", total=self.steps, completed=self.step)
            losses, since = list[float](), time.perf_counter()
            while self.step < self.steps:
                losses.append(self.advance())
                if self.step % 20 == 0 or self.step == self.steps:
                    pace = (time.perf_counter() - since) / len(losses)
                    text = (
                        f"step {self.step}/{self.steps}  loss {np.mean(losses):.4f}  "
                        f"{STEP_TOKENS / pace:,.0f} tokens/s"
                    )
                    progress.update(task, completed=self.step, description=text)
                    if not console.is_terminal:
                        console.print(
                            f"{text}  {pace * (self.steps - self.step) / 60:.0f} min left"
                        )
                    losses, since = [], time.perf_counter()
                if self.step % save_every == 0 or self.step == self.steps:
                    nats = held_out_nats(self.model, self.held_out, quick=True)
                    self.curve.append((self.step, nats))
                    console.print(f"step {self.step}: held-out {nats:.4f} nats/token (a part)")
                    self.save()


def identity(corpus: Corpus, seed: int) -> dict[str, Any]:
    return {"seed": seed, "data": corpus.fingerprint}


def load_checkpoint(path: Path, expected: dict[str, Any], device: str) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    if saved["identity"] != expected:
        raise SystemExit(
            f"{path} is of another run (seed or Python library differ): "
            "give another --work-dir, or --no-resume to start over"
        )
    return saved


def held_out_ids(corpus: Corpus, tokenizer: Tokenizer) -> torch.Tensor:
    """One stream; the empty text in front gives the first file the usual token before it."""
    return torch.from_numpy(np.concatenate(encode(tokenizer, ["", *corpus.held_out.values()])))


class NGrams:
    """Interpolated modified Kneser-Ney: what counting alone gets from the same tokens."""

    BITS = 12  # a token; five of them pack into one integer

    def __init__(self, ids: Ids, order: int) -> None:
        grams = self.pack(ids, order)
        kinds, counts = np.unique(grams, return_counts=True)
        self.levels = [self._level(kinds, counts)]
        for n in range(order - 1, 0, -1):  # lower orders count the distinct words in front
            kinds, counts = np.unique(kinds & ((1 << self.BITS * n) - 1), return_counts=True)
            self.levels.insert(0, self._level(kinds, counts))

    def pack(self, ids: Ids, n: int) -> Ids:
        windows = np.lib.stride_tricks.sliding_window_view(ids, n)
        packed = np.zeros(len(windows), np.int64)
        for column in windows.T:
            packed = packed << self.BITS | column
        return packed

    def _level(self, kinds: Ids, counts: Ids) -> tuple[Any, ...]:
        n1, n2, n3, n4 = (int((counts == n).sum()) for n in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        discounts = np.array([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        taken = discounts[np.minimum(counts, 3)]
        contexts, first = np.unique(kinds >> self.BITS, return_index=True)
        totals = np.add.reduceat(counts, first)
        return kinds, counts - taken, contexts, totals, np.add.reduceat(taken, first) / totals

    def nats(self, ids: Ids, skip: int) -> float:
        """Mean over ``ids[skip:]``."""
        order = len(self.levels)
        chance = np.full(len(ids) - skip, 1 / VOCABULARY)
        padded = np.concatenate([np.zeros(order, np.int64), ids])  # as if files came before
        for n, (kinds, kept, contexts, totals, backoff) in enumerate(self.levels, 1):
            grams = self.pack(padded[order + skip + 1 - n :], n)
            at = np.minimum(np.searchsorted(kinds, grams), len(kinds) - 1)
            own = np.where(kinds[at] == grams, kept[at], 0.0)
            where = np.minimum(np.searchsorted(contexts, grams >> self.BITS), len(contexts) - 1)
            known = contexts[where] == grams >> self.BITS
            chance = np.where(known, own / totals[where] + backoff[where] * chance, chance)
        return float(-np.log(chance).mean())


def ngram_baseline(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Order and data are chosen on every twentieth library file; then all is counted again."""
    library, tests = encode(tokenizer, corpus.library), encode(tokenizer, corpus.tests)
    tuning = np.concatenate(library[::20])
    rest = [ids for i, ids in enumerate(library) if i % 20]
    tried = []
    for order in (3, 4, 5):
        for kind, documents in (("library", rest), ("library and tests", rest + tests)):
            nats = NGrams(np.concatenate(documents), order).nats(tuning, 0)
            tried.append((nats, order, kind))
            console.print(f"n-gram of order {order} on {kind}: {nats:.4f} nats/token (tuning)")
    _, order, kind = min(tried)
    documents = library if kind == "library" else library + tests
    held_out = held_out_ids(corpus, tokenizer).numpy()
    nats = NGrams(np.concatenate(documents), order).nats(held_out, 1)
    return {"order": order, "trained_on": kind, "nats": nats}


def generate(model: Any, prompts: list[list[int]], temperature: float, count: int) -> list[Ids]:
    """Continuations, in batches padded on the left."""
    out: list[Ids] = []
    for start in range(0, len(prompts), 32):
        group = prompts[start : start + 32]
        width = max(map(len, group))
        rows = torch.tensor([[0] * (width - len(p)) + p for p in group])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in group])
        how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        new = model.generate(rows, attention_mask=mask, max_new_tokens=count, **how)[:, width:]
        out.extend(row.numpy() for row in new)
    return out


def function_prompts(corpus: Corpus, limit: int) -> list[tuple[str, str]]:
    """(what stands before a held-out function's body, its header), evenly over all of them."""
    found = []
    for text in corpus.held_out.values():
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.body[0].lineno > node.lineno:
                top, body = node.lineno - 1, node.body[0].lineno - 1
                found.append(("".join(lines[:body]), "".join(lines[top:body])))
    return [found[i] for i in np.linspace(0, len(found) - 1, limit).astype(int)]


def parse_counts(
    model: Any, tokenizer: Tokenizer, corpus: Corpus, temperature: float
) -> tuple[int, int, int]:
    """Let the model write the bodies of held-out functions: how many, how many end, and parse."""
    asked = function_prompts(corpus, 100)
    prompts = [tokenizer.encode(before).ids[-384:] for before, _ in asked]
    ended = parsed = 0
    for (_, header), ids in zip(asked, generate(model, prompts, temperature, 300), strict=True):
        stop = np.flatnonzero(ids == 0)
        body = tokenizer.decode(ids[: stop[0] if len(stop) else None].tolist())
        indent = len(header) - len(header.lstrip(" "))
        # The function ends before the first line that is indented no deeper than its header.
        end = re.search(rf"^ {{0,{indent}}}[^\s#].*\n", body, re.MULTILINE)
        if end or len(stop):
            ended += 1
            try:
                ast.parse(textwrap.dedent(header + (body[: end.start()] if end else body)))
                parsed += 1
            except (SyntaxError, ValueError):
                pass
    return len(asked), ended, parsed


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

## Licence

Trained on the Python standard library alone, which is under the [PSF licence
agreement](https://docs.python.org/3/license.html), copyright Python Software Foundation; passages
that the model repeats are under that licence. The script is under Apache-2.0, as Quire is.
"""


def card(model: Any, run: dict[str, Any], corpus: Corpus, tokenizer: Tokenizer, work: Path) -> str:
    """Measure the exported model as a user would load it, and say so."""
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
    decay = sum(stage_of(step, run["steps"])[0] for step in range(run["step"]))
    phases = list(zip((run["step"] - decay, decay), STAGES, strict=True))
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


def export(work: Path, out: Path, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
    """Write the checkpoint as a model folder: beside ``out`` first, then file by file into it."""
    run = load_checkpoint(work / "checkpoint.pt", identity(corpus, seed), "cpu")
    model = make_model(seed)
    model.load_state_dict(run["model"])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        folder = Path(name)
        model.to(torch.bfloat16).save_pretrained(folder)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=END,
            pad_token=END,
            model_max_length=CONTEXT,
            clean_up_tokenization_spaces=False,
        ).save_pretrained(folder)
        shipped: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        text = card(shipped, run, corpus, tokenizer, work)
        (folder / "README.md").write_text(text, encoding="utf-8")
        for path in sorted(folder.iterdir()):
            path.chmod(0o644)  # libraries write some files for their owner alone
            os.replace(path, out / path.name)
    console.print(f"wrote {out}")


def main(  # noqa: PLR0913
    out: Annotated[Path, typer.Option(help="Folder for weights, tokenizer, card.")] = OUT,
    work_dir: Annotated[
        Path, typer.Option(help="Folder of the checkpoint; another start continues from it.")
    ] = WORK,
    steps: Annotated[int, typer.Option(min=20, help=STEPS_HELP)] = STEPS,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of data.")] = 0,
    resume: Annotated[bool, typer.Option(help="Continue from the checkpoint, if any.")] = True,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = 2,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compile: Annotated[bool, typer.Option(help="Use torch.compile: a fifth faster.")] = True,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    export_only: Annotated[
        bool, typer.Option("--export-only", help="Do not train; write out the checkpoint.")
    ] = False,
) -> None:
    """Train Quire's demo model on the Python standard library and write it to --out.

    The defaults are the recipe of the model that Quire ships. Interrupt the run at any time: the
    same command continues it.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is none of auto, cpu, cuda", param_hint="--device")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if export_only and not (work_dir / "checkpoint.pt").exists():
        raise typer.BadParameter(f"{work_dir} holds no checkpoint.pt", param_hint="--work-dir")
    torch.set_num_threads(threads)
    work_dir.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus()
    tokenizer = make_tokenizer(corpus, work_dir / "tokenizer.json")
    if not export_only:
        trainer = Trainer(corpus, tokenizer, work_dir, steps, seed, device)
        if compile:
            trainer.loss = torch.compile(loss_of, dynamic=False)
        if resume and trainer.path.exists():
            trainer.restore()
        trainer.run(save_every)
    export(work_dir, out, corpus, tokenizer, seed)


if __name__ == "__main__":
    typer.run(main)
