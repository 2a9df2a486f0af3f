"""What replicas tell of their caches, in tests: chains of blocks, named as an engine names them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quire.engine.event_format import EventEncoder, WireEvent, decode_batch
from quire.kv import NO_KEYS, PrefixKeys
from quire.kv.prefix_index import (
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    Medium,
    chained_hash,
)
from quire.spec import FullAttention, Group, LayerSpec

KEY = b"k" * 32
FULL = FullAttention(num_kv_heads=1, head_dim=8, dtype="float32")


def groups_of(*specs: LayerSpec) -> tuple[Group, ...]:
    return tuple(Group(spec=spec, layers=(n,)) for n, spec in enumerate(specs or (FULL,)))


@dataclass(frozen=True)
class Prompt:
    """Token ids, and what tells them apart."""

    token_ids: tuple[int, ...]
    keys: PrefixKeys = NO_KEYS

    def chain(
        self, size: int
    ) -> Iterator[tuple[bytes | None, bytes, tuple[int, ...], tuple, tuple]]:
        """Each whole block: hash before it (None: none), its own, tokens, root's and own keys."""
        root, extras = self.keys.of_root(), self.keys.of_blocks(size)
        above = chained_hash(b"", root, b"")
        for n in range(len(self.token_ids) // size):
            tokens = self.token_ids[n * size : (n + 1) * size]
            own = extras[n] if n < len(extras) else ()
            name = chained_hash(above, own, np.array(tokens, np.int32).tobytes())
            yield (above if n else None), name, tokens, root, own
            above = name

    def stored(
        self, size: int, blocks: Iterable[int], group: int = 0, medium: Medium = "GPU"
    ) -> list[BlockEvent]:
        chain = list(self.chain(size))
        return [
            BlockStored(
                block_hash=chain[n][1],
                parent_block_hash=chain[n][0],
                token_ids=chain[n][2],
                extra_keys=(*(chain[n][3] if not n else ()), *chain[n][4]),
                root_keys=chain[n][3],
                group_idx=group,
                medium=medium,
            )
            for n in blocks
        ]

    def removed(
        self, size: int, blocks: Iterable[int], group: int = 0, medium: Medium = "GPU"
    ) -> list[BlockEvent]:
        chain = list(self.chain(size))
        return [
            BlockRemoved(
                block_hash=chain[n][1], root_keys=chain[n][3], group_idx=group, medium=medium
            )
            for n in blocks
        ]


CLEARED: list[BlockEvent] = [AllBlocksCleared()]


def on_the_wire(
    groups: Sequence[Group], size: int, events: Iterable[BlockEvent], key: bytes | None = KEY
) -> list[WireEvent]:
    """Events as a replica's encoder sends them, decoded."""
    return decode_batch(EventEncoder(groups, size, key=key).encode(0.0, events)).events
