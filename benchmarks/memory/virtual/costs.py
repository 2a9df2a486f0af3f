"""What calls cost from Python: mappings and pages, a prompt's hit, a decode step, whole texts."""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.memory.virtual.caches import FORMS, ONE_HEAD, QWEN3_4B, Cache, make_cache, prompt
from quire import LLM, SamplingParams
from quire.kv import Commit, Extension, Map, Release, StorageOp, Unmap
from quire.kv.virtual_shared import SharedVirtualAccounting
from quire.models.loader import load

_BLOCK = 16
GEOMETRIES = {
    "a page": (ONE_HEAD, 1),  # of a block of 16 tokens
    "Qwen3-4B, 2.25 MiB": (QWEN3_4B, 36),
}
DECODING = ("virtual, shared", "virtual, private", "paged")
HIT_TOKENS = 1_024
NUM_PROMPTS, NEW_TOKENS, PROMPT_TOKENS = 8, 48, 128
Seconds = dict[str, list[float]]

# -- one call ------------------------------------------------------------------------------------


def calls(geometry: str, *, num_blocks: int, repeats: int) -> Seconds:
    """Seconds a change of one block, carried out by ``storage.apply`` one after the other."""
    spec, layers = GEOMETRIES[geometry]
    tokens = num_blocks * _BLOCK
    cache = make_cache("virtual, shared", spec, layers, tokens=tokens, longest=tokens)
    found: Seconds = {}
    slots = range(0, tokens, _BLOCK)
    # From the back, so that no two neighbours in the pool are seen as neighbours.
    scattered = [Map(0, tokens - _BLOCK - s, s, _BLOCK) for s in slots]
    in_order = [Map(0, s, s, _BLOCK) for s in slots]
    hide = [Unmap(0, s, s + _BLOCK) for s in slots]
    for _ in range(repeats):
        steps: Iterable[tuple[str, Sequence[StorageOp]]] = (
            ("Commit", [Commit(0, s, s + _BLOCK) for s in slots]),
            ("Map, a mapping of its own", scattered),
            ("Unmap, a mapping of its own", hide),
            ("Map, beside the one before", in_order),
            ("Unmap, from the front", hide),
            ("Map, 16 blocks at once", [Map(0, s, s, 16 * _BLOCK) for s in slots[::16]]),
            ("Unmap, 16 blocks at once", [Unmap(0, s, s + 16 * _BLOCK) for s in slots[::16]]),
            ("Release", [Release(0, s, s + _BLOCK) for s in slots]),
        )
        for name, changes in steps:
            begun = time.perf_counter()
            cache.storage.apply(changes)
            found.setdefault(name, []).append((time.perf_counter() - begun) / len(changes))
    cache.storage.close()
    return found


# -- a hit ---------------------------------------------------------------------------------------


def hits(*, repeats: int) -> Seconds:
    """Seconds that a hit of 1,024 tokens takes: until it has room, and then until it is read.

    To read is to touch each page once: a page that is mapped anew faults then.
    """
    cache = make_cache(
        "virtual, shared", QWEN3_4B, 36, tokens=2 * HIT_TOKENS, longest=2 * HIT_TOKENS, num_seqs=4
    )
    accounting = cache.accounting
    assert isinstance(accounting, SharedVirtualAccounting)
    ids = prompt(HIT_TOKENS + 1)
    cache.add(0, HIT_TOKENS)
    _read(cache, 0)
    accounting.mark_computed([0], [HIT_TOKENS], ids[:HIT_TOKENS])
    cache.free([0])
    found: Seconds = {}
    for number in range(2 * repeats):
        how = "mapped anew" if number % 2 else "adopted"
        if how == "mapped anew":
            accounting._windows.give_up_parked()
            cache.step()
        begun = time.perf_counter()
        accounting.add(number)
        hit = accounting.match_prefix(number, ids)
        accounting.try_extend(number, len(ids), Extension(hit=hit))
        changes = cache.step()
        shown = time.perf_counter()
        _read(cache, number)
        found.setdefault(f"room for it, {how}", []).append(shown - begun)
        found.setdefault(f"first read, {how}", []).append(time.perf_counter() - shown)
        assert hit.num_tokens == HIT_TOKENS
        num_shown = sum(c.num_slots for c in changes if isinstance(c, Map))
        assert num_shown == _BLOCK + (HIT_TOKENS if how == "mapped anew" else 0), changes
        cache.free([number])
    cache.storage.close()
    return found


def _read(cache: Cache, seq_id: int) -> None:
    """One element of each page: a layer's entry of a token fills one."""
    (row,) = cache.accounting.table(0, seq_id)
    for layer in range(cache.layers):
        cache.storage.view(layer).k[row][0, :HIT_TOKENS, 0].sum()


# -- a step --------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class StepCost:
    """Seconds a sequence and token, over whole cycles of 16 steps."""

    form: str
    num_seqs: int
    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, part: str, seconds: float) -> None:
        self.parts.setdefault(part, []).append(seconds)

    def median_s(self, part: str | None = None) -> float:
        if part is not None:
            return statistics.median(self.parts[part])
        return statistics.median(map(sum, zip(*self.parts.values(), strict=True)))


def decoding(num_seqs: int, *, repeats: int) -> list[StepCost]:
    """Accounting and storage of steps of one token, sequences at all offsets in their blocks."""
    context = 512 + _BLOCK
    longest = context + (repeats + 2) * _BLOCK
    costs = [StepCost(form=form, num_seqs=num_seqs) for form in DECODING]
    caches = []
    for cost in costs:
        cache = make_cache(
            cost.form, ONE_HEAD, 1, tokens=2 * num_seqs * longest, longest=longest,
            num_seqs=num_seqs,
        )  # fmt: skip
        for seq_id in range(num_seqs):
            cache.accounting.add(seq_id)
            cache.extend(seq_id, 512 + seq_id % _BLOCK)
        cache.step()
        caches.append(cache)
    lengths = [512 + seq_id % _BLOCK for seq_id in range(num_seqs)]
    for turn in range(repeats + 1):
        for cost, cache in zip(costs, caches, strict=True):
            parts = _cycle(cache, [length + turn * _BLOCK for length in lengths])
            for part, seconds in parts.items():
                if turn:  # the first one is to warm up
                    cost.add(part, seconds / _BLOCK / num_seqs)
    for cache in caches:
        cache.accounting.check()
        cache.storage.close()
    return costs


def _cycle(cache: Cache, lengths: list[int]) -> dict[str, float]:
    """16 steps; each sequence passes an edge of a block once."""
    spent = {"room": 0.0, "drain": 0.0, "apply": 0.0}
    seq_ids, ends = list(range(len(lengths))), np.array(lengths)
    clock = time.perf_counter
    for _ in range(_BLOCK):
        ends = ends + 1
        begun = clock()
        fitting = cache.accounting.try_extend_each(seq_ids, ends.tolist())
        taken = clock()
        changes = cache.accounting.drain()
        drained = clock()
        cache.storage.apply(changes)
        spent["apply"] += clock() - drained
        spent["drain"] += drained - taken
        spent["room"] += taken - begun
        assert fitting == len(seq_ids), f"{fitting} of {len(seq_ids)} sequences fit"
    return spent


# -- whole texts ---------------------------------------------------------------------------------


def texts(backend: str, *, num_rounds: int, seed: int) -> tuple[Seconds, bool]:
    """Seconds of ``NUM_PROMPTS`` texts by the demo model in each form; whether all were equal."""
    model, params = load(), SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    forms = [form for form in FORMS if "stacks" not in form]
    llms = {
        form: LLM(model, attention_backend=backend, seed=seed, **_options(form)) for form in forms
    }
    found: Seconds = {name: [] for name in (*forms, "contiguous again")}
    equal = True
    for turn in range(num_rounds + 1):
        prompts = _prompts(seed + turn)
        written = set()
        for name, spent in found.items():
            llm = llms[name.removesuffix(" again")]
            begun = time.perf_counter()
            done = llm.generate(prompts, params)
            if turn:  # the first one is to warm up
                spent.append(time.perf_counter() - begun)
            written.add(tuple(one.token_ids for one in done))
        equal = equal and len(written) == 1
    for llm in llms.values():
        llm.close()
    return found, equal


def _options(form: str) -> dict[str, Any]:
    return {
        "cache": FORMS[form][0],
        "enable_prefix_caching": form in ("virtual, shared", "paged"),
        "kv_cache_memory_bytes": 2**30,
        "max_num_seqs": NUM_PROMPTS,
        "max_model_len": 512,
    }


def _prompts(seed: int) -> list[list[int]]:
    """Of a round's own, and no two begin alike: nothing is found, and all forms run equal steps."""
    prompts = np.random.default_rng(seed).integers(3, 400, (NUM_PROMPTS, PROMPT_TOKENS))
    prompts[:, 0] = 3 + (seed * NUM_PROMPTS + np.arange(NUM_PROMPTS)) % 397
    return [list(map(int, prompt)) for prompt in prompts]
