"""An estimate of how much the running sequences will still grow, from the outputs that have ended.

A newcomer is admitted if all sequences are expected to run to their ends beside it. So the question
is how many bytes all of them will hold at their peak: some grow while others end. The lengths of
earlier outputs tell how long an output becomes, given its length so far. The estimate is Kaplan and
Meier's: an output that was cut off at its limit, or still runs, counts as *at least* that long.

A wrong estimate costs a preemption, or lets a newcomer wait; ``admission`` decides.

Source: LightLLM's past-future scheduler (Gong et al. 2025), with expectation and spread in place of
drawn lengths.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quire.engine.scheduling.policy import Policy, SchedulerLimits
from quire.engine.sequence import Sequence
from quire.kv import Accounting

# -- headroom --------------------------------------------------------------------------------------


Counts: TypeAlias = npt.NDArray[np.int64]
Shares: TypeAlias = npt.NDArray[np.float64]
Curves: TypeAlias = tuple[Shares, Shares]
BytesAt: TypeAlias = Callable[[Counts, "Prospects"], Counts]

# Outputs that are assumed from the start, so that the first estimates are cautious.
_PRIOR_TOKENS = (32, 128, 512, 2048)
_PRIOR_WEIGHT = 0.25  # of each
_ENDLESS_WEIGHT = 0.25  # of an output that is longer than all others
_KEPT = 256  # outputs that are remembered
_DECAY = 0.99  # of an output's weight, with each output that ends after it
_SPREADS = 1.0  # standard deviations that are kept free beyond the expectation
_NUM_MOMENTS = 32  # at which the need is computed, besides those at which a limit is reached


@dataclass(frozen=True, slots=True)
class Survival:
    """The share of outputs that are longer than a number of tokens."""

    lengths: Counts  # i64[N], ascending, unlike
    shares: Shares  # f64[N + 1]: of outputs longer than those before the i-th length

    def __call__(self, num_tokens: Counts) -> Shares:
        """Return the shares longer than ``num_tokens``. Past the longest they halve per doubling.

        Shapes: i64[…] to f64[…].
        """
        longest = self.lengths[-1]
        share = self.shares[np.searchsorted(self.lengths, num_tokens, "right")]
        result: Shares = share * (longest / np.maximum(num_tokens, longest))
        return result


class OutputLengths:
    """The lengths of outputs that have ended. The latest weigh most."""

    def __init__(self) -> None:
        self._lengths = np.zeros(_KEPT, np.int64)
        self._ended = np.zeros(_KEPT, bool)  # False: it was cut off there
        self._count = 0

    def note(self, num_tokens: int, *, cut_off: bool) -> None:
        """Note an output's length, and whether it was ``cut_off`` at its limit."""
        place = self._count % _KEPT
        self._lengths[place], self._ended[place] = num_tokens, not cut_off
        self._count += 1

    def survival(self, running: Counts, times: Shares) -> Survival:
        """Estimate lengths. Shapes: running i64[S], unfinished lengths; times f64[S], of each."""
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
    """Sequences as arrays [S]: an entry for each, or one for several that are about alike."""

    count: Counts  # i64: sequences that the entry stands for; the rest is of each of them
    num_tokens: Counts  # i64: tokens at the end of this step
    num_output: Counts  # i64: … of them generated
    most_output: Counts  # i64: … and the most that it may generate
    sure: npt.NDArray[np.bool_]  # nothing but that limit ends it
    has_room: npt.NDArray[np.bool_]  # it runs
    held_bytes: Shares  # f64: what it holds by itself, now or at its admission …
    freed_bytes: Shares  # f64: … and what of that is freed with it, since no other shares it

    @property
    def longest(self) -> Counts:
        """i64[S]: the most tokens of each."""
        return self.num_tokens + self.most_output - self.num_output

    @property
    def num_left(self) -> Counts:
        """i64[S]: the most steps after this one, with one token a step."""
        return (self.most_output - self.num_output - 1).clip(0)

    def only(self, chosen: npt.NDArray[np.bool_]) -> "Prospects":
        """Return the chosen entries. Shapes: chosen bool[S], or i64 indices."""
        names = [field.name for field in fields(self)]
        return Prospects(**{name: getattr(self, name)[chosen] for name in names})


class Outlook:
    """How many bytes sequences will hold together beyond those held now, moment by moment.

    A newcomer is estimated and added without a look at the others.
    """

    def __init__(
        self, prospects: Prospects, survival: Survival, bytes_at: BytesAt, *, horizon: int
    ) -> None:
        """``bytes_at`` maps tokens i64[S, T] to bytes. ``horizon`` is the most steps of any."""
        self._survival, self._bytes_at = survival, bytes_at
        self.moments = _moments(prospects.num_left, horizon)  # i64[T]: steps after this one
        self._expected, self._variance = self.curves(prospects)

    def need_bytes(self, newcomers: Curves) -> Shares:
        """Return f64[T]: bytes by which all, with newcomers, will exceed what they hold now."""
        expected, variance = newcomers
        spread: Shares = np.sqrt(self._variance + variance)
        return self._expected + expected + _SPREADS * spread

    def add(self, newcomers: Curves) -> None:
        """Count newcomers that were admitted."""
        self._expected, self._variance = (
            self._expected + newcomers[0],
            self._variance + newcomers[1],
        )

    def curves(self, prospects: Prospects) -> Curves:
        """Return the expected bytes beyond those held now, and their variance: f64[T] each."""
        expected, variance = self.curves_of_each(prospects)
        return expected.sum(axis=0), variance.sum(axis=0)

    def curves_of_each(self, prospects: Prospects) -> Curves:
        """Return the expected bytes of each entry, and their variance: f64[S, T] each."""
        output, left = prospects.num_output[:, None], prospects.num_left[:, None]  # [S, 1]
        there = self._survival(output + self.moments) / self._survival(output)
        there[prospects.sure] = 1.0
        # A sequence lasts up to its limit, or up to the moment behind it.
        there *= np.arange(len(self.moments)) <= np.searchsorted(self.moments, left)
        tokens = prospects.num_tokens[:, None] + np.minimum(self.moments, left)
        freed = prospects.freed_bytes[:, None]
        size = self._bytes_at(tokens, prospects) - prospects.held_bytes[:, None] + freed
        count = prospects.count[:, None]
        return count * (there * size - freed), count * there * (1 - there) * size**2


def _moments(num_left: Counts, horizon: int) -> Counts:
    """Return i64[T]: the steps at which the need may be greatest, before limits and between."""
    between = np.geomspace(1, max(1, horizon), _NUM_MOMENTS).astype(np.int64)
    return np.unique(np.concatenate([[0], num_left, between]))


# -- the running set -------------------------------------------------------------------------------

_FIRST_ROOM = 64
_FEW = 64  # sequences that have an entry each; of more, those that are about alike share one
_PER_OCTAVE = 3  # classes of lengths in a doubling
_MOST_CLASSES = 64  # of lengths: 21 octaves
_LOOKED_AT = 256  # sequences whose length is read in a step, on average


class RunningSet:
    """The running sequences as numbers, from which ``Admission`` works.

    A sequence's constants are noted when it begins to run. Its length is counted on with each step
    and read again now and then: the more sequences there are, the less often.
    """

    def __init__(self, limits: SchedulerLimits, policy: Policy, accounting: Accounting) -> None:
        self.accounting = accounting
        self.num_left = 0  # sequences that have run and do not any more
        self.most_bytes = 0  # that all can come to hold
        self._limits, self._grade = limits, policy.grade
        self._members: list[Sequence] = []  # the last takes the place of one that leaves
        self._places: dict[int, int] = {}
        # By place: prompt and most output tokens, whether only its limit ends it, grade, most
        # bytes, and the length when it was last read.
        self._numbers = np.zeros((6, _FIRST_ROOM), np.int64)
        self._num_steps = 0  # since then; each gave most sequences a token
        self._bytes_at: dict[int, int] = {}  # most bytes by most tokens
        # Sequences whose prompt was not computed when lengths were last read.
        self._beginning: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._members)

    def join(self, sequence: Sequence) -> None:
        """Add a sequence that begins to run."""
        place = len(self._members)
        if place == self._numbers.shape[1]:
            self._numbers = np.concatenate([self._numbers, 0 * self._numbers], axis=1)
        most_bytes = self.bytes_at_most(sequence)
        self._members.append(sequence)
        self._places[sequence.seq_id] = place
        self._numbers[:, place] = (
            sequence.num_prompt_tokens,
            _most_output(sequence, self._limits),
            _ends_by_length(sequence),
            self._grade(sequence),
            most_bytes,
            sequence.num_tokens - self._num_steps,
        )
        self.most_bytes += most_bytes
        self._beginning.add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that runs no more."""
        place = self._places.pop(sequence.seq_id)
        self.most_bytes -= int(self._numbers[4, place])
        self.num_left += 1
        self._beginning.discard(sequence)
        last = self._members.pop()
        if last is not sequence:
            self._members[place] = last
            self._places[last.seq_id] = place
            self._numbers[:, place] = self._numbers[:, len(self._members)]

    def restart(self, accounting: Accounting) -> None:
        """Remove all sequences, since the cache is empty."""
        self.accounting = accounting
        self.num_left += len(self._members)
        self.most_bytes = 0
        self._bytes_at.clear()
        for each in (self._members, self._places, self._beginning):
            each.clear()

    def note_step(self, count: int = 1) -> None:
        """Note ``count`` steps, after each of which most sequences have one token more."""
        self._num_steps += count

    def bytes_at_most(self, sequence: Sequence) -> int:
        """Return the most bytes of a sequence and the siblings that wait for its prompt."""
        longest = self._limits.longest(sequence.request)
        if longest not in self._bytes_at:
            several = np.array([longest])
            self._bytes_at[longest] = int(self.accounting.bytes_alone(several, several)[0])
        return self._bytes_at[longest] * (1 + len(sequence.siblings))

    def prospects(self, grade: int, *, worse: bool = False) -> Prospects:
        """Return the running sequences of this grade or a better one, or of a ``worse`` one."""
        self._look()
        numbers = self._numbers[:, : len(self._members)]
        # A sequence whose prompt takes several steps has not become longer.
        tokens = np.minimum(numbers[5] + self._num_steps, numbers[0] + numbers[1])
        room, siblings = tokens.copy(), np.zeros_like(tokens)
        for sequence in self._beginning:
            place = self._places[sequence.seq_id]
            tokens[place] = sequence.num_tokens
            room[place] = self.accounting.num_tokens(sequence.seq_id)
            siblings[place] = len(sequence.siblings)
        chosen = (numbers[3] > grade) == worse
        prompt, most, sure = numbers[:3, chosen]
        tokens, room, siblings = tokens[chosen], room[chosen], siblings[chosen]
        held = self.accounting.bytes_alone(room, prompt + most).astype(np.float64)
        # The last sequence frees what several share: on average each frees this part.
        alone = float(held.sum())
        part = min(1.0, self.accounting.held_bytes / alone) if alone else 1.0
        running = Prospects(
            count=np.ones_like(tokens),
            num_tokens=tokens,
            num_output=tokens - prompt,
            most_output=most,
            sure=sure > 0,
            has_room=np.ones(len(tokens), bool),
            held_bytes=held,
            freed_bytes=held * part,
        )
        followed = running.only(siblings > 0)
        if len(followed.count):
            followers = _followers(followed, siblings[siblings > 0], self.accounting)
            running = joined(running, followers)
        return _about_alike(running) if len(running.count) > _FEW else running

    def to_come(self, *newcomers: Sequence) -> Prospects:
        """Return waiting sequences in this order, and then the siblings behind them."""
        prompt, tokens, most, siblings = np.array(
            [
                (s.num_prompt_tokens, s.num_tokens, _most_output(s, self._limits), len(s.siblings))
                for s in newcomers
            ]
        ).T
        held = self.accounting.bytes_alone(tokens, prompt + most).astype(np.float64)
        alone = Prospects(
            count=np.ones_like(tokens),
            num_tokens=tokens,
            num_output=tokens - prompt,
            most_output=most,
            sure=np.array([_ends_by_length(newcomer) for newcomer in newcomers]),
            has_room=np.zeros(len(tokens), bool),
            held_bytes=held,
            freed_bytes=held,
        )
        followed = siblings.nonzero()[0]
        if not len(followed):
            return alone
        followers = _followers(alone.only(followed), siblings[followed], self.accounting)
        return joined(alone, followers)

    def check(self, running: list[Sequence]) -> None:
        """Check the numbers of these running sequences. Raises: AssertionError."""
        assert {s.seq_id for s in running} == self._places.keys(), "the company is another one"
        for sequence in running:
            place = self._places[sequence.seq_id]
            assert self._members[place] is sequence, "a sequence is not at its place"
            assert self._numbers[0, place] == sequence.num_prompt_tokens
        most_bytes = int(self._numbers[4, : len(running)].sum())
        assert self.most_bytes == most_bytes, "bytes at most are miscounted"
        beginning = {s for s in running if _is_beginning(s)}
        assert beginning <= self._beginning, "one that begins is taken for one that goes on"

    def _look(self) -> None:
        """Read the lengths again if enough steps have passed."""
        self._beginning = {s for s in self._beginning if _is_beginning(s)}
        if self._num_steps > len(self._members) // _LOOKED_AT:
            tokens = [sequence.num_tokens for sequence in self._members]
            self._numbers[5, : len(tokens)] = tokens
            self._num_steps = 0


def joined(*several: Prospects) -> Prospects:
    """Return all entries of several."""
    names = [field.name for field in fields(Prospects)]
    return Prospects(**{n: np.concatenate([getattr(p, n) for p in several]) for n in names})


def _followers(leaders: Prospects, num_siblings: Counts, accounting: Accounting) -> Prospects:
    """Return the siblings that wait for a prompt: they grow as their leader does, and share it."""
    held = accounting.bytes_alone(leaders.num_tokens, leaders.longest).astype(np.float64)
    return replace(
        leaders,
        count=num_siblings,
        has_room=np.zeros(len(held), bool),
        held_bytes=held,
        freed_bytes=0 * held,
    )


def _about_alike(prospects: Prospects) -> Prospects:
    """Return one entry of means for all that have generated, and may yet generate, about as much.

    Each may yet generate as much as the entry's longest.
    """
    done, left = _class(prospects.num_output), _class(prospects.num_left)
    cells = ((prospects.sure * 2 + prospects.has_room) * _MOST_CLASSES + done) * _MOST_CLASSES
    cells += left
    count = np.bincount(cells)
    (some,) = count.nonzero()
    count = count[some]

    def mean(each: Counts | Shares) -> Shares:
        total: Shares = np.bincount(cells, each)[some].astype(np.float64)
        return total / count

    longest_left = np.zeros(_MOST_CLASSES, np.int64)
    np.maximum.at(longest_left, left, prospects.num_left)
    num_output = mean(prospects.num_output).astype(np.int64)
    return Prospects(
        count=count,
        num_tokens=mean(prospects.num_tokens).astype(np.int64),
        num_output=num_output,
        most_output=num_output + longest_left[some % _MOST_CLASSES] + 1,
        sure=some // _MOST_CLASSES**2 > 1,
        has_room=some // _MOST_CLASSES**2 % 2 > 0,
        held_bytes=mean(prospects.held_bytes),
        freed_bytes=mean(prospects.freed_bytes),
    )


def _class(lengths: Counts) -> Counts:
    classes: Counts = (np.log2(lengths + 1) * _PER_OCTAVE).astype(np.int64)
    return np.minimum(classes, _MOST_CLASSES - 1)


def _is_beginning(sequence: Sequence) -> bool:
    return bool(sequence.siblings) or sequence.num_computed_tokens + 1 < sequence.num_tokens


def _most_output(sequence: Sequence, limits: SchedulerLimits) -> int:
    return limits.longest(sequence.request) - sequence.num_prompt_tokens


def _ends_by_length(sequence: Sequence) -> bool:
    """Return whether nothing but its length ends a sequence."""
    params = sequence.request.params
    return params.ignore_eos and not params.stop and not params.stop_token_ids
