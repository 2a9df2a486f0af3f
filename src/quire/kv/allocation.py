"""The results of an allocation: three types, each with the numbers that prove it.

A refusal has changed nothing. After ``NotNow`` the caller can wait; ``Never`` does not change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from quire.kv.block_steps import Counts
from quire.spec import Group, KeptWhole
from quire.units import format_bytes, format_count

# -- results ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """There is room; a caller that asked for it has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotNow:
    """There is no room at present: ``need_bytes > free_bytes - kept_bytes``.

    It fits once holders end. If bytes are not what is lacking, ``option`` says what is: a window
    for one more sequence (max_num_seqs), or mappings of addresses to pages (vm.max_map_count, of
    the system).

    The asking sequence may be the only holder: if it must copy itself to grow, or lies scattered
    over pages, it fits only if it ends too and begins again.
    """

    need_bytes: int  # by which the held bytes would rise
    free_bytes: int  # that no sequence holds; cached blocks count as free
    holders: tuple[int, ...]  # ids of the sequences that hold memory, the asking one included
    kept_bytes: int = 0  # of the free ones, set aside for others
    option: str = "kv_cache_memory_bytes"  # what to raise

    def __str__(self) -> str:
        if self.option != "kv_cache_memory_bytes":
            return (
                f"{len(self.holders)} sequences take all that {self.option} allows: it fits when "
                f"one ends, or raise {self.option}"
            )
        aside = f", {format_bytes(self.kept_bytes)} of it set aside" if self.kept_bytes else ""
        return (
            f"{format_bytes(self.need_bytes)} more KV memory is needed and "
            f"{format_bytes(self.free_bytes)} is free{aside}; {len(self.holders)} sequences or "
            f"pins hold the rest: it fits when they end, or raise {self.option}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Never:
    """There is no room even if all others ended: ``need_bytes > capacity_bytes``, or too long.

    It is the result of one step. Behind a window smaller steps may go further, because a sequence
    holds at once what a step adds.
    """

    need_bytes: int
    capacity_bytes: int
    fitting_tokens: int  # the longest sequence that would fit in one such step
    option: str  # what to raise

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.need_bytes)} of KV memory is needed and "
            f"{format_bytes(self.capacity_bytes)} is all there can be: at most "
            f"{format_count(self.fitting_tokens)} tokens fit; raise {self.option}"
        )


AllocationResult: TypeAlias = Fits | NotNow | Never
FITS = Fits()


# -- the most on the way ---------------------------------------------------------------------------

# The most that one sequence holds at once on its way to a length decides what can ever fit. Under
# full attention that is what it holds at the end. Windows release the blocks that they have passed,
# so the peak depends on where blocks and window fall: each cache walks over all lengths once.


def peak_bytes(
    groups: Sequence[Group],
    unit_tokens: Sequence[int],
    unit_bytes: Sequence[int],
    max_tokens: int,
    *,
    granule_units: Sequence[int] | None = None,
) -> Counts:
    """Compute, for each length, the most bytes held on the way, token by token.

    A group is held in units (blocks, pages) of ``unit_tokens`` and ``unit_bytes``; a granule of
    ``granule_units`` is committed as one. Returns: i64[max_tokens + 1].
    """
    held = np.zeros(max_tokens + 1, np.int64)
    begin = np.arange(max_tokens, dtype=np.int64)  # before each token
    together = granule_units or [1] * len(groups)
    for group, size, num_bytes, granule in zip(
        groups, unit_tokens, unit_bytes, together, strict=True
    ):
        if isinstance(group.spec, KeptWhole):
            held[1:] += group.spec.num_places * num_bytes
            continue
        units = begin // size + 1 - group.live_start(begin) // size
        held[1:] += -(-units // granule) * granule * num_bytes
    return np.maximum.accumulate(held)


def verdict_on_length(num_tokens: int, peaks: Counts, capacity_bytes: int) -> Fits | Never:
    """Tell whether a sequence can ever be ``num_tokens`` long; ``peaks``: bytes of each length."""
    longest = len(peaks) - 1
    if num_tokens <= longest and peaks[num_tokens] <= capacity_bytes:
        return FITS
    return Never(
        need_bytes=int(peaks[min(num_tokens, longest)]),
        capacity_bytes=capacity_bytes,
        fitting_tokens=int(np.searchsorted(peaks, capacity_bytes, "right")) - 1,
        option="max_model_len" if num_tokens > longest else "kv_cache_memory_bytes",
    )
