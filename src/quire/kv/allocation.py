"""What accounting answers when it is asked for room: three types, each with the sum that proves it.

A refusal has changed nothing. ``NotNow`` can be waited out; ``Never`` cannot, so the caller is told
at once.
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
    """There is room; a caller that asked to take it has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotNow:
    """No room at present: ``need_bytes > free_bytes - kept_bytes``. It fits once holders end.

    Where bytes are not what is lacking, ``option`` says what is: a window for one more sequence
    (max_num_seqs), or mappings of addresses to pages (vm.max_map_count, of the system).

    The asking sequence may be the only holder: where it must copy itself to grow, or lies scattered
    over pages, it fits only if it ends too and begins again.
    """

    need_bytes: int  # by which the held bytes would rise
    free_bytes: int  # that no sequence holds; what is only cached counts as free
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
    """No room for this even if all others ended: ``need_bytes > capacity_bytes``, or too long.

    As a verdict on one step: behind a window, smaller steps may still go further, because what a
    step adds is held at once.
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

# The most that one sequence holds at once on its way to a length: what can ever fit.
#
# Under full attention that is what it holds at the end. Windows give back what they have passed,
# so the peak is a matter of where blocks and window fall; it is found by walking, once a cache.


def peak_bytes(
    groups: Sequence[Group],
    unit_tokens: Sequence[int],
    unit_bytes: Sequence[int],
    max_tokens: int,
    *,
    granule_units: Sequence[int] | None = None,
) -> Counts:
    """i64[max_tokens + 1]: for each length, the most bytes held on the way, token by token.

    A group is held in units (blocks, pages) of so many tokens and bytes. ``granule_units`` are
    committed together.
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
    """Whether a sequence could ever become so long, ``peaks`` being those of each length."""
    longest = len(peaks) - 1
    if num_tokens <= longest and peaks[num_tokens] <= capacity_bytes:
        return FITS
    return Never(
        need_bytes=int(peaks[min(num_tokens, longest)]),
        capacity_bytes=capacity_bytes,
        fitting_tokens=int(np.searchsorted(peaks, capacity_bytes, "right")) - 1,
        option="max_model_len" if num_tokens > longest else "kv_cache_memory_bytes",
    )
