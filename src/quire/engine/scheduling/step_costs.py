"""What steps and copies take here, in seconds, as measured while the engine serves.

A step takes so long by itself, and so much more for each of its tokens and for each entry of keys
and values that attention reads. To compute a token again costs the second; what a sequence shares
by coming beside others is the first. Both decide who comes (``admission``), and whether a sequence
that makes room is swapped or computes again (``preemption``).
"""

from dataclasses import dataclass
from itertools import combinations
from math import inf

import numpy as np
import numpy.typing as npt

_NEW_SHARE = 0.2  # of a new measurement, in a mean of all
_FITTED_EVERY = 16  # steps
_LONGEST_BITS = 32  # of a step's number of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Seconds that a step takes."""

    step_s: float  # whatever is in it …
    token_s: float  # … and for each token more


class Costs:
    """Means in which the latest measurements weigh most; prices that are given stay.

    Steps are kept by the order of magnitude of their tokens, a mean for each: so steps that take in
    long prompts still count when there have been thousands of short ones since.
    """

    def __init__(self, *, bytes_per_token: int = 0, prices: Prices | None = None) -> None:
        self.save_s_per_byte = 0.0
        self.load_s_per_byte = 0.0
        self._bytes_per_token = bytes_per_token  # of all layers, before a window has passed any
        self._is_given, self._known = prices is not None, prices
        self._num_steps = 0  # that were noted …
        self._fits_at = 0  # … and how many it takes until prices are worked out anew
        self._takes_text = False  # a step has: before, it is not known what a token takes
        # Of steps with a step, its tokens and its entries as parts of its seconds: f64[bits, 3].
        self._moments = np.zeros((_LONGEST_BITS, 3, 3))
        self._parts = np.zeros((_LONGEST_BITS, 3))

    @property
    def prices(self) -> Prices:
        """As far as they are known. Before a step has taken in text, a token costs infinitely."""
        if self._known is None or (not self._is_given and self._num_steps >= self._fits_at):
            self._fits_at = self._num_steps + min(self._num_steps, _FITTED_EVERY)
            step_s, token_s, _ = _fit(self._moments.sum(axis=0), self._parts.sum(axis=0))
            self._known = Prices(step_s=step_s, token_s=token_s if self._takes_text else inf)
        return self._known

    @property
    def swap_pays(self) -> bool:
        """Whether it is the cheaper way for most."""
        return self.swap_s(self._bytes_per_token) < self.prices.token_s

    def give(self, prices: Prices) -> None:
        """What steps take is known, and not to be measured: the same decisions each time."""
        self._is_given, self._known = True, prices

    def note_step(self, num_tokens: int, num_sequences: int, num_read: int, seconds: float) -> None:
        """A step of so many sequences, whose attention has read so many entries."""
        if self._is_given or not num_tokens or seconds <= 0:
            return
        self._takes_text |= num_tokens > 2 * num_sequences
        parts = np.array([1.0, num_tokens, num_read]) / seconds
        bits = num_tokens.bit_length()
        share = _NEW_SHARE if self._parts[bits].any() else 1.0
        self._moments[bits] += share * (np.outer(parts, parts) - self._moments[bits])
        self._parts[bits] += share * (parts - self._parts[bits])
        self._num_steps += 1

    def note_saved(self, num_bytes: int, seconds: float) -> None:
        self.save_s_per_byte = _mean(self.save_s_per_byte, seconds / num_bytes)

    def note_loaded(self, num_bytes: int, seconds: float) -> None:
        self.load_s_per_byte = _mean(self.load_s_per_byte, seconds / num_bytes)

    def recompute_s(self, num_tokens: int) -> float:
        """In steps that are taken anyway."""
        return num_tokens * self.prices.token_s

    def swap_s(self, num_bytes: int) -> float:
        """There and back."""
        return num_bytes * (self.save_s_per_byte + self.load_s_per_byte)


def _mean(mean: float, new: float) -> float:
    return new if not mean else mean + _NEW_SHARE * (new - mean)


def _fit(moments: npt.NDArray[np.float64], parts: npt.NDArray[np.float64]) -> list[float]:
    """x ≥ 0 with the least sum of (parts·x − 1)², which counts errors in proportion.

    Shapes: moments f64[3, 3], parts f64[3]. There are few enough unknowns to try which are above 0.
    """
    scale = np.sqrt(np.diag(moments))
    scale[scale == 0] = 1.0
    scaled, target = moments / np.outer(scale, scale), parts / scale
    best, least = np.zeros(3), 0.0
    for count in (1, 2, 3):
        for chosen in map(list, combinations(range(3), count)):
            found = np.linalg.lstsq(scaled[np.ix_(chosen, chosen)], target[chosen], rcond=1e-9)[0]
            error = -float(found @ target[chosen])  # and what is the same for all
            if (found >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(3), error
                best[chosen] = found
    result: list[float] = (best / scale).tolist()
    return result
