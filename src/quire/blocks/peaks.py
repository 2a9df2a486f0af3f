"""The most that one sequence holds at once on its way to a length: what can ever fit.

Under full attention that is what it holds at the end. Windows give back what they have passed, so
the peak is a matter of where blocks and window fall; it is found by walking, once a cache.
"""

from collections.abc import Sequence

import numpy as np

from quire.blocks.steps import Counts
from quire.blocks.verdicts import FITS, Fits, Never
from quire.spec import Group, KeptWhole


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
