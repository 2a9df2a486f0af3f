"""What many sequences that are alike take of one pool of blocks.

A pool commits blocks in granules of whole pages, which neighbours share: on a GPU, with pages of
2 MiB, a granule may be a thousand blocks. So a sequence among others takes its blocks, and all of
them together one granule more at most. How many blocks, and how large a granule is, the accounting
says.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from quire.kv import CacheConfig, Commit, build_accounting
from quire.kv.paged import PagedAccounting
from quire.spec import ModelSpec
from quire.units import align_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One sequence's part of a group's pool, in bytes."""

    end: int  # its blocks when it has come to its end
    most: int  # … and at most on the way
    granule: int  # what the pool commits at once

    def together(self, num_sequences: int) -> int:
        """Committed for so many at their ends, the last of them at its most."""
        if not num_sequences:
            return 0
        return align_up((num_sequences - 1) * self.end + self.most, self.granule)


def pooled_shares(
    strategy: str, spec: ModelSpec, sizes: CacheConfig, each: Iterable[int]
) -> tuple[Share, ...] | None:
    """A share of each group, for a sequence of these lengths, step by step.

    None for a strategy in which no two sequences share a granule.
    """
    accounting = build_accounting(strategy, spec, sizes)
    if not isinstance(accounting, PagedAccounting):
        return None
    groups = range(len(accounting.groups))
    block_bytes = [accounting.block_size(g) * accounting.slot_bytes(g) for g in groups]
    accounting.add(0)
    accounting.try_extend(0, 1)
    granules = [0 for _ in groups]
    for change in accounting.drain():
        if isinstance(change, Commit):
            slots = change.stop - change.start
            granules[change.group] += slots * accounting.slot_bytes(change.group)
    held = most = [0 for _ in groups]
    for num_tokens in each:
        accounting.try_extend(0, num_tokens)
        accounting.drain()
        blocks = [int((accounting.table(g, 0) >= 0).sum()) for g in groups]
        held = [count * size for count, size in zip(blocks, block_bytes, strict=True)]
        most = [max(pair) for pair in zip(most, held, strict=True)]
    return tuple(
        Share(end=end, most=peak, granule=granule)
        for end, peak, granule in zip(held, most, granules, strict=True)
    )
