"""What the prefix index learned and lost, in order: enough to rebuild it elsewhere.

The fields are those of vLLM's KV-cache events, one block an event.
"""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A block can be found from now on."""

    block_hash: bytes  # chained SHA-256: over the parent's, the extra keys and the token ids
    parent_block_hash: bytes | None  # None for a sequence's first block
    token_ids: tuple[int, ...]
    extra_keys: tuple[tuple[str, str], ...]  # tagged: salt and adapter of the root, images
    group_idx: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """A block can be found no longer."""

    block_hash: bytes
    group_idx: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """Nothing can be found any more."""


BlockEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
