"""What the demo model is worth: its loss, an n-gram baseline, and how often its code parses."""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch.nn import functional as F

from demo_model_data import CONTEXT, VOCABULARY, Corpus, Ids, encode, held_out_ids

console = Console()


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
