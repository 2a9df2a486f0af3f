"""Records of a small format, for tests that need right ones."""

import numpy as np

from quire.kv.prefix_index import BlockIdentity
from quire.tiers import Name
from quire.tiers.record import Checksums, Part, RecordFormat, Seal

PARTS = (
    Part(layer=0, dtype="bfloat16", order="heads first", shape=(1, 2, 4, 4), num_bytes=128),
    Part(
        layer=1, dtype="int8", order="heads first", shape=(1, 2, 4, 4), num_bytes=96
    ),  # with scales
)
BLOCK_SIZE = 4  # tokens


def small_format(
    seal: Seal | None = None, *, fingerprint: bytes = bytes(range(32)), group: int = 0
) -> RecordFormat:
    return RecordFormat(fingerprint, group, BLOCK_SIZE, PARTS, seal or Checksums())


def chain_of_blocks(count: int, *, seed: int = 0) -> list[BlockIdentity]:
    """Make the blocks of one prompt, each after the one before it."""
    draw = np.random.default_rng(seed)
    chains = [bytes(32), *(draw.bytes(32) for _ in range(count))]
    return [
        BlockIdentity(
            parent=chains[number],
            chain=chains[number + 1],
            extras=b"",
            token_ids=draw.integers(0, 1000, BLOCK_SIZE).astype(np.int32),
        )
        for number in range(count)
    ]


def right_record(of: RecordFormat, block: BlockIdentity) -> tuple[Name, bytearray]:
    """Make a block's record, with a payload that follows from its tokens."""
    data = bytearray(of.num_bytes)
    record, header = memoryview(data), of.header(block)
    payload = np.random.default_rng(int(block.token_ids.sum())).bytes(of.payload_bytes)
    of.payload(record)[:] = payload
    of.finish(record, header)
    return of.name(header), data
