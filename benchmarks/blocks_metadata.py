"""What our pool and its index keep for a block, in bytes: the ``metadata`` case of blocks_worker.

Everything is as tracemalloc counts it, numpy's arrays included, by the module that asked for it:

``pool``          by block: reference counts, nodes, ages, the eviction policy's order
``index``         by node, beside its key
``key_bytes``     the bytes object of a block's token ids: it stands where vLLM has a hash
``key_entry``     the rest of the key: its tuple, its slot in the dictionary, the node's id
``ghosts``        what the eviction policy remembers of blocks that are gone
``sequences``     tables: by sequence, and only here because nothing is left out

``beside_key`` is pool + index; ``key`` is key_bytes + key_entry. ``unhashed`` is what stands before
the first token, but for ghosts and tables. The peer's ``key`` is its hashes alone, and the slots of
its dictionary are in its ``beside_key``: what compares without regard to that is the sum.
"""

import gc
import sys
import tracemalloc
from collections import Counter
from pathlib import PurePath

import numpy as np
from blocks_harness import BLOCK_SIZE, Answer

from quire.kv import DEFAULT_POLICY, FITS, POLICIES, BlockCoordinator, PoolSize
from quire.spec import FullAttention, Group

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


def metadata(*, num_blocks: int) -> Answer:
    """Bytes a block with every block cached, by part."""
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
        make_policy=POLICIES[DEFAULT_POLICY],
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
