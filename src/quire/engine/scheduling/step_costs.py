"""What steps and copies cost on this machine, in seconds, as measured while the engine serves.

A step costs a fixed time, and more for each of its tokens and for each entry of keys and values
that attention reads. A token that is computed again costs the second; a sequence that is computed
beside others shares the first. Both decide which sequences are admitted (``admission``), and
whether a preempted sequence is swapped or computed again (``Scheduler``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Clock: TypeAlias = Callable[[], float]  # seconds since some moment

_NEW_SHARE = 0.2  # of a new measurement, in a mean of all
_FITTED_EVERY = 16  # steps
_LONGEST_BITS = 32  # of a step's number of tokens
_NOISE = 0.1  # of a step's seconds, that no measurement tells from nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Seconds that a step takes."""

    step_s: float  # for any step …
    token_s: float  # … and for each of its tokens
    tokens_are_told: bool = True  # by what was measured; else that is what its noise may hide


class Costs:
    """Means in which the latest measurements weigh most. Prices that are given never change.

    There is one mean for each order of magnitude of a step's tokens, so that steps with long
    prompts still count after thousands of short ones.
    """

    def __init__(self, *, bytes_per_token: int = 0, prices: Prices | None = None) -> None:
        self.save_s_per_byte = 0.0
        self.load_s_per_byte = 0.0
        self._bytes_per_token = bytes_per_token  # of all layers, before a window has passed any
        self._is_given, self._known = prices is not None, prices
        self._num_steps = 0  # noted so far …
        self._fits_at = 0  # … and how many there must be before prices are worked out again
        self._takes_text = False  # no step with a prompt: the price of a token is not known
        # Of steps with a step, its tokens and its entries as parts of its seconds: f64[bits, 3].
        self._moments = np.zeros((_LONGEST_BITS, 3, 3))
        self._parts = np.zeros((_LONGEST_BITS, 3))

    @property
    def prices(self) -> Prices:
        """The prices so far. Before the first step with a prompt, a token's price is infinite.

        A prompt reads as many entries as it has tokens, at least, so that both are its token's
        price: steps with prompts alone do not tell them apart. And steps with few tokens take as
        long as any other: they tell that price within their noise only. It is never below what the
        noise of the longest kind of step may hide. At 0 no long prompt would be worth loading.
        """
        if self._known is None or (not self._is_given and self._num_steps >= self._fits_at):
            self._fits_at = self._num_steps + min(self._num_steps, _FITTED_EVERY)
            step_s, token_s, read_s = _fit(self._moments.sum(axis=0), self._parts.sum(axis=0))
            self._known = Prices(step_s=step_s, token_s=inf, tokens_are_told=False)
            if self._takes_text:
                told, least = token_s + read_s, self._least_token_s()
                self._known = Prices(
                    step_s=step_s, token_s=max(told, least), tokens_are_told=told >= least
                )
        return self._known

    def _least_token_s(self) -> float:
        """Return what a token may take at least, for all that measured steps tell."""
        longest = self._parts[self._parts.any(axis=1)][-1]  # tokens as a part of its seconds
        return _NOISE / float(longest[1])

    @property
    def swap_pays(self) -> bool:
        """Whether swapping is the cheaper way for most sequences."""
        return self.swap_s(self._bytes_per_token) < self.prices.token_s

    def give(self, prices: Prices) -> None:
        """Use these prices and measure none, so that decisions are the same each time."""
        self._is_given, self._known = True, prices

    def note_step(self, num_tokens: int, num_sequences: int, num_read: int, seconds: float) -> None:
        """Note a step's seconds, and ``num_read``: the entries that its attention has read."""
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
        """Note the seconds that saving these bytes took."""
        self.save_s_per_byte = mean_of_latest(self.save_s_per_byte, seconds / num_bytes)

    def note_loaded(self, num_bytes: int, seconds: float) -> None:
        """Note the seconds that bringing these bytes back took."""
        self.load_s_per_byte = mean_of_latest(self.load_s_per_byte, seconds / num_bytes)

    def recompute_s(self, num_tokens: int) -> float:
        """Return the seconds to compute tokens in steps that are taken anyway."""
        return num_tokens * self.prices.token_s

    def swap_s(self, num_bytes: int) -> float:
        """Return the seconds to save these bytes and bring them back."""
        return num_bytes * (self.save_s_per_byte + self.load_s_per_byte)


class LoadTimes:
    """What loading blocks from tiers takes: a time for each question, and one for each block.

    Both are told apart as soon as loads of several lengths are known. A load that took much longer
    than usual counts little, since errors are taken in proportion. One thread notes, any may ask.
    """

    def __init__(self) -> None:
        # Of loads with their blocks, and one question, as parts of their seconds.
        self._moments, self._parts = np.zeros((2, 2)), np.zeros(2)
        self._fitted = 0.0, 0.0  # of a block and a question: one value, which threads share

    def note(self, num_blocks: int, seconds: float) -> None:
        """Note a load of so many blocks, at least one."""
        if seconds <= 0:
            return
        parts = np.array([num_blocks, 1.0]) / seconds
        share = _NEW_SHARE if self._parts.any() else 1.0
        self._moments += share * (np.outer(parts, parts) - self._moments)
        self._parts += share * (parts - self._parts)
        block_s, question_s = _fit(self._moments, self._parts)
        self._fitted = block_s, question_s

    def seconds(self, num_blocks: int) -> float:
        """Return what loading so many blocks is expected to take; 0 before the first load."""
        block_s, question_s = self._fitted
        return question_s + num_blocks * block_s


def mean_of_latest(mean: float, new: float) -> float:
    """Return a mean in which the latest measurements weigh most; 0: there is none yet."""
    return new if not mean else mean + _NEW_SHARE * (new - mean)


def _fit(moments: npt.NDArray[np.float64], parts: npt.NDArray[np.float64]) -> list[float]:
    """Return x ≥ 0 with the least sum of (parts·x − 1)², which weighs errors in proportion.

    Shapes: moments f64[n, n], parts f64[n]. With so few unknowns, all sets of those above 0 are
    tried; of equal ones, the first of the fewest.
    """
    num_parts = len(parts)
    scale = np.sqrt(np.diag(moments))
    scale[scale == 0] = 1.0
    scaled, target = moments / np.outer(scale, scale), parts / scale
    best, least = np.zeros(num_parts), 0.0
    for count in range(1, num_parts + 1):
        for chosen in map(list, combinations(range(num_parts), count)):
            found = np.linalg.lstsq(scaled[np.ix_(chosen, chosen)], target[chosen], rcond=1e-9)[0]
            error = -float(found @ target[chosen])  # plus a constant
            if (found >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(num_parts), error
                best[chosen] = found
    result: list[float] = (best / scale).tolist()
    return result
