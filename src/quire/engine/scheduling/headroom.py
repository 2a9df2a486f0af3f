"""How much the running sequences will still grow, learned from the outputs that have ended.

A newcomer is admitted only if, as far as can be told, all can run to the end beside it. So
the question is how many bytes all of them together will hold at their peak: some grow while others
end. How long an output becomes is told by those before it (Kaplan and Meier's estimate: what was
cut off at its limit, or still runs, counts as *at least* so long), given how long it is already.

Nothing here decides; a wrong guess costs a preemption, or a newcomer's wait.

Source: the estimate of future need is that of LightLLM's past-future scheduler (Gong et al. 2025),
with expectation and spread in place of drawn lengths.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Counts: TypeAlias = npt.NDArray[np.int64]
Shares: TypeAlias = npt.NDArray[np.float64]
Curves: TypeAlias = tuple[Shares, Shares]
BytesAt: TypeAlias = Callable[[Counts, "Prospects"], Counts]

# Before anything is known, and for ever a little: a few outputs of very different lengths.
_PRIOR_TOKENS = (32, 128, 512, 2048)
_PRIOR_WEIGHT = 0.25  # of each
_ENDLESS_WEIGHT = 0.25  # something is always longer than all that was seen
_KEPT = 256  # outputs that are remembered …
_DECAY = 0.99  # … each for so much less with every one that ends after it
_SPREADS = 1.0  # standard deviations that are kept free beyond the expectation
_NUM_MOMENTS = 32  # at which the need is looked at, besides those at which a limit is reached


@dataclass(frozen=True, slots=True)
class Survival:
    """The share of outputs that are longer than a number of tokens."""

    lengths: Counts  # i64[N], ascending, unlike
    shares: Shares  # f64[N + 1]: of outputs longer than those before the i-th length

    def __call__(self, num_tokens: Counts) -> Shares:
        """Beyond all that is known, as long again is as likely as not."""
        longest = self.lengths[-1]
        share = self.shares[np.searchsorted(self.lengths, num_tokens, "right")]
        result: Shares = share * (longest / np.maximum(num_tokens, longest))
        return result


class OutputLengths:
    """The outputs that have ended, the latest ones weighing most."""

    def __init__(self) -> None:
        self._lengths = np.zeros(_KEPT, np.int64)
        self._ended = np.zeros(_KEPT, bool)  # by itself; otherwise it was cut off there
        self._count = 0

    def note(self, num_tokens: int, *, cut_off: bool) -> None:
        place = self._count % _KEPT
        self._lengths[place], self._ended[place] = num_tokens, not cut_off
        self._count += 1

    def survival(self, running: Counts, times: Shares) -> Survival:
        """As it looks now; ``running``: i64[S], how long outputs are that have not ended, and how
        many are so long.
        """
        known = min(self._count, _KEPT)
        ages = (self._count - 1 - np.arange(known)) % _KEPT
        lengths = np.concatenate([_PRIOR_TOKENS, self._lengths[:known], running])
        ended = np.concatenate([np.ones(4, bool), self._ended[:known], np.zeros(len(running))])
        weights = np.concatenate([np.full(4, _PRIOR_WEIGHT), _DECAY**ages, times])
        distinct, which = np.unique(lengths, return_inverse=True)
        there = np.bincount(which, weights)
        at_least = np.cumsum(there[::-1])[::-1] + _ENDLESS_WEIGHT
        ends = np.bincount(which, weights * ended) / at_least
        return Survival(distinct, np.concatenate([[1.0], np.cumprod(1 - ends)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospects:
    """Sequences side by side, an entry each, or one for several that are about alike: [S]."""

    count: Counts  # i64: for how many it stands; all that follows is of each of them
    num_tokens: Counts  # i64: that it has, and will hold at the end of this step
    num_output: Counts  # i64: … of them generated
    most_output: Counts  # i64: … that it may generate at most
    sure: npt.NDArray[np.bool_]  # nothing but that limit ends it
    has_room: npt.NDArray[np.bool_]  # it runs; the others are still to come
    held_bytes: Shares  # f64: what it holds now, by itself, or when it has come …
    freed_bytes: Shares  # f64: … and what of that goes back if it ends, since no other shares it

    @property
    def longest(self) -> Counts:
        """i64[S]: tokens at most."""
        return self.num_tokens + self.most_output - self.num_output

    @property
    def num_left(self) -> Counts:
        """i64[S]: steps after this one, at most. Each gets one token a step."""
        return (self.most_output - self.num_output - 1).clip(0)

    def only(self, chosen: npt.NDArray[np.bool_]) -> "Prospects":
        names = [field.name for field in fields(self)]
        return Prospects(**{name: getattr(self, name)[chosen] for name in names})


class Outlook:
    """How many bytes more sequences will hold together, moment by moment.

    What is asked of a newcomer, and what it adds when it has come, takes no look at the others.
    """

    def __init__(
        self, prospects: Prospects, survival: Survival, bytes_at: BytesAt, *, horizon: int
    ) -> None:
        """``bytes_at`` maps i64[S, T] tokens of prospects to bytes; none lasts for more steps than
        ``horizon``.
        """
        self._survival, self._bytes_at = survival, bytes_at
        self.moments = _moments(prospects.num_left, horizon)  # i64[T]: steps from now on
        self._expected, self._variance = self.curves(prospects)

    def need_bytes(self, newcomers: Curves) -> Shares:
        """f64[T]: bytes by which all, with these, will exceed what they hold now."""
        expected, variance = newcomers
        spread: Shares = np.sqrt(self._variance + variance)
        return self._expected + expected + _SPREADS * spread

    def add(self, newcomers: Curves) -> None:
        """These have come."""
        self._expected, self._variance = (
            self._expected + newcomers[0],
            self._variance + newcomers[1],
        )

    def curves(self, prospects: Prospects) -> Curves:
        """f64[T] each: the bytes that are expected beyond those held now, and their variance."""
        expected, variance = self.curves_of_each(prospects)
        return expected.sum(axis=0), variance.sum(axis=0)

    def curves_of_each(self, prospects: Prospects) -> Curves:
        """The same of each entry: f64[S, T]."""
        output, left = prospects.num_output[:, None], prospects.num_left[:, None]  # [S, 1]
        there = self._survival(output + self.moments) / self._survival(output)
        there[prospects.sure] = 1.0
        # It is there up to its limit; if that is no moment of ours, up to the next one.
        there *= np.arange(len(self.moments)) <= np.searchsorted(self.moments, left)
        tokens = prospects.num_tokens[:, None] + np.minimum(self.moments, left)
        freed = prospects.freed_bytes[:, None]
        size = self._bytes_at(tokens, prospects) - prospects.held_bytes[:, None] + freed
        count = prospects.count[:, None]
        return count * (there * size - freed), count * there * (1 - there) * size**2


def _moments(num_left: Counts, horizon: int) -> Counts:
    """Steps from now on at which the need may be greatest: before a limit, and some between."""
    between = np.geomspace(1, max(1, horizon), _NUM_MOMENTS).astype(np.int64)
    return np.unique(np.concatenate([[0], num_left, between]))
