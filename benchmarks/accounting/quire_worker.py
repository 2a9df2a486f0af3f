"""Our block pool and cache accounting, timed: our side of bench_blocks.

workers.py documents the protocol, the cases and what each figure encloses;
vllm_worker.py is the same for vLLM, call by call. Where the two differ:

* Sequences are stepped together. ``allocate`` is ``try_extend_each`` for all of them, ``append`` is
  ``mark_computed``: here full blocks enter the index, which vLLM does in its ``allocate_slots``.
  So the sum of the two is what to compare; the parts show where each spends it. The caller keeps
  the lengths in an array, which is timed; sampled tokens arrive in one, which is not.
* Blocks without keys come from ``BlockPool`` itself, with caching on or off alike. Where every
  block is cached, they go through ``Pools``, so that the index forgets what is evicted, as vLLM's.
* There are no hashes. ``hash`` is what stands in their place when a request arrives: its token ids
  become an int32 array.
* A hit goes to the last token but one, so the last block is used in part and copied.
"""

import gc
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.accounting.workers import (
    BLOCK_SIZE,
    Answer,
    CaseFunction,
    Figures,
    blocks_taken,
    prompt,
    serve,
    shuffled,
)
from benchmarks.harness.quiet import no_collection
from quire import __version__
from quire.kv import DEFAULT_POLICY, EVICTION_POLICIES, FITS, BlockCoordinator, Extension, PoolSize
from quire.kv.block_pool import NO_NODE
from quire.kv.interface import CacheConfig
from quire.kv.paged import PagedAccounting
from quire.spec import FullAttention, Group, SlidingWindow

NEW_TOKEN = 7
MAX_MODEL_LEN = 32_768
Ids = npt.NDArray[np.intp]
PROMPT_BLOCKS = 64
_FRAMES = 6  # deep enough to find our own module behind numpy's
_PARTS = {  # by module of quire.kv; the others are the pool's
    "prefix_index": "index",
    "prefix_cache": "index",
    "ghosts": "ghosts",
    "shadows": "ghosts",
    "tables": "sequences",
    "steps": "sequences",
    "coordinator": "sequences",
}
now = time.perf_counter_ns


def make_accounting(
    num_blocks: int, windows: list[int | None], *, caching: bool, num_seqs: int
) -> PagedAccounting:
    """Room for ``num_blocks``, from which every group draws. The shape is that of the peer's."""
    shape: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    groups = tuple(
        Group(
            spec=FullAttention(**shape)
            if window is None
            else SlidingWindow(**shape, window=window),
            layers=(layer,),
        )
        for layer, window in enumerate(windows)
    )
    config = CacheConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=num_seqs,
        capacity_bytes=num_blocks * groups[0].block_bytes(BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        enable_prefix_caching=caching,
    )
    return PagedAccounting(groups, config)


def num_held(accounting: PagedAccounting) -> int:
    pools = accounting.pools
    return sum(pools[number].num_held for number in range(len(pools)))


# -- pool ----------------------------------------------------------------------------------------


def pool(*, num_blocks: int, batch: int, caching: str, repeats: int) -> Answer:
    """Take and free blocks in batches."""
    if caching in ("evicting", "scattered"):
        return _pool_evicting(num_blocks, batch, repeats, scattered=caching == "scattered")
    some = make_blocks(num_blocks).pools[0]
    num_taken = blocks_taken(num_blocks, batch)
    figures: Figures = {"allocate": [], "free": []}
    with no_collection():
        for repetition in range(repeats + 1):
            begun = now()
            held = [some.take(batch)[0] for _ in range(num_taken // batch)]
            taken = now()
            for blocks in held:
                some.release(blocks[::-1], 1, 0)
            freed = now()
            if repetition:
                figures["allocate"].append((taken - begun) / num_taken)
                figures["free"].append((freed - taken) / num_taken)
    some.check()
    return {"figures": figures, "facts": {"blocks": num_taken, "batches": num_taken // batch}}


def _pool_evicting(num_blocks: int, batch: int, repeats: int, *, scattered: bool) -> Answer:
    """Every block is cached, so each that is taken is first forgotten, by the index too."""
    cache = make_blocks(num_blocks)
    some = cache.pools
    every = some.allocate([num_blocks])[0]
    _give_keys(cache, every, 0)
    some.release(0, every[shuffled(num_blocks)] if scattered else every[::-1])
    del every
    num_taken = blocks_taken(num_blocks, batch)
    figures: Figures = {"allocate": [], "free": []}
    with no_collection():
        for repetition in range(repeats + 1):
            begun = now()
            held = [some.allocate([batch])[0] for _ in range(num_taken // batch)]
            taken = now()
            flat = np.concatenate(held)
            assert (some[0].nodes[flat] == NO_NODE).all(), "a block was taken and not forgotten"
            _give_keys(cache, flat, repetition + 1)
            begun_free = now()
            for blocks in held:
                some.release(0, blocks[::-1])
            freed = now()
            if repetition:
                figures["allocate"].append((taken - begun) / num_taken)
                figures["free"].append((freed - begun_free) / num_taken)
    assert some.num_evicted_blocks == num_taken * (repeats + 1), "not every block was evicted"
    return {"figures": figures, "facts": {"blocks": num_taken, "batches": num_taken // batch}}


def _give_keys(cache: BlockCoordinator, blocks: Ids, content: int) -> None:
    """One long prompt, different for each ``content``: a node under the other for each block."""
    index, tokens = cache.index, np.array(prompt(content, BLOCK_SIZE), np.int32)
    tip, nodes = index.root(), []
    for _ in range(len(blocks)):
        tip, _ = index.advance(tip, tokens.tobytes())
        nodes.append(tip)
    rows = index.rows(nodes)
    index.attach(0, rows, blocks)
    cache.pools[0].nodes[blocks] = rows
    index.decref(tip)


# -- a decode step -------------------------------------------------------------------------------


class _Running:
    """Sequences past their prompts, sequence i another i % 16 tokens further."""

    def __init__(
        self, accounting: PagedAccounting, first: int, num_seqs: int, prompt_tokens: int
    ) -> None:
        self.seq_ids = list(range(first, first + num_seqs))
        self.computed = prompt_tokens + np.arange(num_seqs) % BLOCK_SIZE
        self._accounting = accounting
        self._new = np.full(num_seqs, NEW_TOKEN, np.int32)
        for seq, length in zip(self.seq_ids, self.computed.tolist(), strict=True):
            accounting.add(seq)
            tokens = np.full(length, NEW_TOKEN, np.int32)
            tokens[:prompt_tokens] = prompt(seq, prompt_tokens)
            assert accounting.try_extend(seq, length) is FITS, "the pool is too small"
            accounting.mark_computed([seq], [length], tokens)
        accounting.drain()

    def cycle(self) -> tuple[int, int]:
        """16 steps: nanoseconds for room, and for what follows a sampled token."""
        allocate_ns = append_ns = 0
        extend, mark = self._accounting.try_extend_each, self._accounting.mark_computed
        for _ in range(BLOCK_SIZE):
            begun = now()
            lengths: Any = self.computed + 1
            count = extend(self.seq_ids, lengths)
            allocated = now()
            if count < len(self.seq_ids):
                raise RuntimeError("the pool is too small")
            begun_append = now()
            mark(self.seq_ids, None, self._new)
            self.computed += 1
            append_ns += now() - begun_append
            allocate_ns += allocated - begun
            self._accounting.drain()
        return allocate_ns, append_ns

    def free(self) -> None:
        for seq in self.seq_ids:
            self._accounting.free(seq)


def decode(
    *,
    num_blocks: int,
    num_seqs: int,
    windows: list[int | None],
    caching: bool,
    prompt_tokens: int,
    rewind: bool,
    repeats: int,
) -> Answer:
    """Room for one token more in every sequence, then the tokens themselves; 16 steps a cycle."""
    cycles = 1 if rewind else repeats + 1
    most_tokens = prompt_tokens + BLOCK_SIZE * (cycles + 1)
    each = -(-most_tokens // BLOCK_SIZE) * len(windows)
    accounting = make_accounting(
        num_blocks or num_seqs * each + 1, windows, caching=caching, num_seqs=num_seqs
    )
    figures: Figures = {"allocate": [], "append": []}
    running = _Running(accounting, 0, num_seqs, prompt_tokens)
    net = set()
    with no_collection():
        for repetition in range(repeats + 1):
            if rewind and repetition:
                running.free()
                running = _Running(accounting, repetition * num_seqs, num_seqs, prompt_tokens)
            held_before = num_held(accounting)
            allocate_ns, append_ns = running.cycle()
            if repetition:
                net.add(num_held(accounting) - held_before)
                figures["allocate"].append(allocate_ns / (BLOCK_SIZE * num_seqs))
                figures["append"].append(append_ns / (BLOCK_SIZE * num_seqs))
    accounting.check()
    assert len(net) == 1, f"cycles took different numbers of blocks: {net}"
    return {"figures": figures, "facts": {"blocks_per_cycle": net.pop()}}


# -- a prompt that is cached ---------------------------------------------------------------------


def full_hit(*, prompt_tokens: int, windows: list[int | None], repeats: int) -> Answer:
    """Lookup, adoption and release of a prompt that is cached whole."""
    per_prompt = -(-prompt_tokens // BLOCK_SIZE) + 1
    num_blocks = 8 * per_prompt * len(windows)
    accounting = make_accounting(num_blocks, windows, caching=True, num_seqs=8)
    tokens = prompt(0, prompt_tokens)
    accounting.add(-1)
    assert accounting.try_extend(-1, prompt_tokens) is FITS
    accounting.mark_computed([-1], [prompt_tokens], np.array(tokens, np.int32))
    accounting.free(-1)
    accounting.drain()
    figures: Figures = {"hash": [], "lookup": [], "adopt": [], "free": []}
    hits = set()
    with no_collection():
        for repetition in range(repeats + 1):
            t0 = now()
            token_ids = np.array(tokens, np.int32)
            t1 = now()
            accounting.add(repetition)
            hit = accounting.match_prefix(repetition, token_ids)
            t2 = now()
            verdict = accounting.try_extend(repetition, prompt_tokens, Extension(hit=hit))
            t3 = now()
            assert verdict is FITS
            t4 = now()
            accounting.free(repetition)
            t5 = now()
            accounting.drain()
            hits.add(hit.num_tokens)
            if repetition:
                spent = (t1 - t0, t2 - t1, t3 - t2, t5 - t4)
                for name, nanoseconds in zip(figures, spent, strict=True):
                    figures[name].append(nanoseconds / prompt_tokens)
    accounting.check()
    assert len(hits) == 1, f"hits of different lengths: {hits}"
    return {"figures": figures, "facts": {"hit_tokens": hits.pop()}}


# -- bytes ---------------------------------------------------------------------------------------


def metadata(*, num_blocks: int) -> Answer:
    """Bytes a block with every block cached, by the part that asked for them.

    Everything is as tracemalloc counts it, numpy's arrays included, by module:

    ``pool``       by block: reference counts, nodes, ages, the eviction policy's order
    ``index``      by node, beside its key
    ``key_bytes``  the bytes object of a block's token ids: it stands where vLLM has a hash
    ``key_entry``  the rest of the key: its tuple, its slot in the dictionary, the node's id
    ``ghosts``     what the eviction policy remembers of blocks that are gone
    ``sequences``  tables: by sequence, and only here because nothing is left out

    ``beside_key`` is pool + index; ``key`` is key_bytes + key_entry. ``unhashed`` is what stands
    before the first token, but for ghosts and tables. The peer's ``key`` is its hashes alone, and
    the slots of its dictionary are in its ``beside_key``: what compares without regard to that is
    the sum.
    """
    warm_up = make_blocks(2 * PROMPT_BLOCKS)
    fill(warm_up, 2 * PROMPT_BLOCKS)
    gc.collect()
    tracemalloc.start(_FRAMES)
    try:
        blocks = make_blocks(num_blocks)
        built = _by_part()
        fill(blocks, num_blocks)
        gc.collect()
        full = _by_part()
    finally:
        tracemalloc.stop()
    num_cached = blocks.pools[0].num_cached
    assert num_cached == num_blocks, f"{num_cached} of {num_blocks} blocks are cached"
    ids = blocks.index._ids
    key_bytes = sum(sys.getsizeof(key[1]) for key in ids)
    key_entry = sys.getsizeof(ids)
    key_entry += sum(sys.getsizeof(key) + sys.getsizeof(node) for key, node in ids.items())
    index = full["index"] - key_bytes - key_entry
    figures = {
        "unhashed": built["pool"] + built["index"],
        "beside_key": full["pool"] + index,
        "key": key_bytes + key_entry,
        "pool": full["pool"],
        "index": index,
        "key_bytes": key_bytes,
        "key_entry": key_entry,
        "ghosts": full["ghosts"],
        "sequences": full["sequences"],
    }
    return {"figures": {name: [value / num_blocks] for name, value in figures.items()}}


def make_blocks(num_blocks: int) -> BlockCoordinator:
    """One group of full attention, with the default policy."""
    spec = FullAttention(num_kv_heads=1, head_dim=1, dtype="int8")
    block_bytes = BLOCK_SIZE * spec.bytes_per_token
    return BlockCoordinator(
        (Group(spec=spec, layers=(0,)),),
        [PoolSize(block_bytes=block_bytes, num_blocks=num_blocks, slots=BLOCK_SIZE)],
        block_size=BLOCK_SIZE,
        capacity_bytes=num_blocks * block_bytes,
        make_policy=EVICTION_POLICIES[DEFAULT_POLICY],
    )


def fill(blocks: BlockCoordinator, num_blocks: int) -> None:
    """Prompts of 64 blocks that share nothing, one after the other, until every block is cached."""
    for first in range(0, num_blocks, PROMPT_BLOCKS):
        num_tokens = min(PROMPT_BLOCKS, num_blocks - first) * BLOCK_SIZE
        blocks.add(first)
        assert blocks.allocate(first, num_tokens) is FITS
        tokens = np.arange(first * BLOCK_SIZE, first * BLOCK_SIZE + num_tokens, dtype=np.int32)
        blocks.mark_computed([first], [num_tokens], tokens)
        blocks.free(first)
        blocks.pools.changes = []


def _by_part() -> Counter[str]:
    """Bytes in use that quire.kv asked for, by part."""
    found: Counter[str] = Counter()
    for each in tracemalloc.take_snapshot().statistics("traceback"):
        for frame in reversed(each.traceback):  # the innermost first
            path = PurePath(frame.filename)
            if path.parts[-3:-1] == ("quire", "blocks"):
                found[_PARTS.get(path.stem, "pool")] += each.size
                break
    return found


if __name__ == "__main__":
    cases: dict[str, CaseFunction] = {
        "pool": pool,
        "decode": decode,
        "full_hit": full_hit,
        "metadata": metadata,
    }
    serve("Quire", __version__, cases)
