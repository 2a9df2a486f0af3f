"""What the running sequences will hold, as far as is told by outputs that have ended.

The question at every newcomer is how many bytes all of them together will hold at their peak, and
when there will be more than there is: some grow while others end. How long an output becomes is
told by those before it (Kaplan and Meier's estimate: what was cut off at its limit, or still runs,
counts as *at least* so long), given how long it is already.

Each sequence has an expectation for a few moments to come, and its spread. What is asked for are
sums over all of them, kept as sequences come and go: a newcomer costs the same beside one or
beside a thousand. Now and then all are told anew, since sequences have gone on and more is known.

Nothing here decides; a wrong guess costs a preemption, or a newcomer's wait.

Source: the estimate of future need is that of LightLLM's past-future scheduler (Gong et al. 2025),
with expectation and spread in place of drawn lengths.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Counts: TypeAlias = npt.NDArray[np.int64]
Shares: TypeAlias = npt.NDArray[np.float64]
BytesAt: TypeAlias = Callable[[Counts], Counts]

# Before anything is known, and for ever a little: a few outputs of very different lengths.
_PRIOR_TOKENS = (32, 128, 512, 2048)
_PRIOR_WEIGHT = 0.25  # of each
_ENDLESS_WEIGHT = 0.25  # something is always longer than all that was seen
_KEPT = 256  # outputs that are remembered …
_DECAY = 0.99  # … each for so much less with every one that ends after it
_SPREADS = 1.0  # standard deviations that are kept free beyond the expectation
EVERY_MOMENT = 32  # steps from now that are looked at one by one …
_NUM_LATER = 48  # … and so many of those behind, at growing distances


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

    def survival(self, running: Counts) -> Survival:
        """As it looks now; ``running``: i64[S], how long outputs are that have not ended."""
        known = min(self._count, _KEPT)
        ages = (self._count - 1 - np.arange(known)) % _KEPT
        lengths = np.concatenate([_PRIOR_TOKENS, self._lengths[:known], running])
        ended = np.concatenate([np.ones(4, bool), self._ended[:known], np.zeros(len(running))])
        weights = np.concatenate([np.full(4, _PRIOR_WEIGHT), _DECAY**ages, np.ones(len(running))])
        distinct, which = np.unique(lengths, return_inverse=True)
        there = np.bincount(which, weights)
        at_least = np.cumsum(there[::-1])[::-1] + _ENDLESS_WEIGHT
        ends = np.bincount(which, weights * ended) / at_least
        return Survival(distinct, np.concatenate([[1.0], np.cumprod(1 - ends)]))


def moments(horizon: int) -> Counts:
    """Steps from now on that are looked at: i64[T], ascending from 0 to ``horizon``."""
    later = np.geomspace(EVERY_MOMENT, max(EVERY_MOMENT, horizon), _NUM_LATER).astype(np.int64)
    return np.unique(np.concatenate([np.arange(EVERY_MOMENT), later]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospects:
    """Sequences side by side, an entry each: i64[S]."""

    num_tokens: Counts  # that each has, and will hold at the end of this step
    num_output: Counts  # … of them generated
    most_output: Counts  # … that it may generate at most
    sure: npt.NDArray[np.bool_]  # nothing but that limit ends it
    held_bytes: Counts  # what it holds now, by itself, or when it has come …
    own_bytes: Counts  # … and what of that goes back if it ends, since nobody shares it

    @property
    def longest(self) -> Counts:
        """Tokens at most."""
        return self.num_tokens + self.most_output - self.num_output


def expected_bytes(
    prospects: Prospects, survival: Survival, at: Counts, bytes_at: BytesAt
) -> tuple[Shares, Shares]:
    """What each will hold that nobody else does, at moments from now on.

    Each gets one token a step. ``bytes_at`` maps i64[S, T] tokens to bytes. Returns: expectation
    and variance, f64[S, T].
    """
    output = prospects.num_output[:, None]  # [S, 1]
    left = prospects.most_output[:, None] - output - 1  # steps after this one, at most
    there = np.where(prospects.sure[:, None], 1.0, survival(output + at) / survival(output))
    there *= at <= left
    tokens = prospects.num_tokens[:, None] + np.minimum(at, left.clip(0))
    more = bytes_at(tokens) - (prospects.held_bytes - prospects.own_bytes)[:, None]
    return there * more, there * (1 - there) * more.astype(np.float64) ** 2  # no i64 holds it


@dataclass(slots=True)
class Outlook:
    """Of one sequence, or the sum over several."""

    expected: Shares  # f64[T] bytes …
    variance: Shares  # … and how far off they may be
    num_sequences: int = 0
    own_bytes: int = 0  # that would be free without them, now
    most_bytes: int = 0  # if all come to their limits at the same time

    @classmethod
    def of_none(cls, num_moments: int) -> "Outlook":
        return cls(np.zeros(num_moments), np.zeros(num_moments))

    def add(self, other: "Outlook", sign: int = 1) -> None:
        self.expected += sign * other.expected
        self.variance += sign * other.variance
        self.num_sequences += sign * other.num_sequences
        self.own_bytes += sign * other.own_bytes
        self.most_bytes += sign * other.most_bytes

    def scale(self, factor: float) -> None:
        """So much more is expected; what all come to at most stays."""
        self.expected *= factor
        self.variance *= factor**2

    @property
    def need(self) -> Shares:
        """f64[T] bytes that will do, as is likely."""
        need: Shares = self.expected + _SPREADS * np.sqrt(self.variance.clip(0))
        return np.minimum(need, self.most_bytes)


def outlooks(
    prospects: Prospects, survival: Survival, at: Counts, bytes_at: BytesAt
) -> list[Outlook]:
    """Of each of these sequences. ``bytes_at`` and ``at`` are as in ``expected_bytes``."""
    expected, variance = expected_bytes(prospects, survival, at, bytes_at)
    shared = prospects.held_bytes - prospects.own_bytes
    most = bytes_at(prospects.longest[:, None])[:, 0] - shared
    rows = zip(expected, variance, prospects.own_bytes.tolist(), most.tolist(), strict=True)
    return [
        Outlook(row, spread, num_sequences=1, own_bytes=own, most_bytes=limit)
        for row, spread, own, limit in rows
    ]
