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


# -- the running set -------------------------------------------------------------------------------

# The running sequences as numbers side by side: what a newcomer's admission is worked out from.
#
# What never changes of a sequence is noted when it begins to run, so that asking takes no look at
# each of them. How long they have become is counted on from one look to the next; the more there
# are, the more seldom they are looked at.


_FIRST_ROOM = 64
_FEW = 64  # so many are taken one by one; of more, those that are about alike together
_PER_OCTAVE = 3  # lengths are about alike if they differ by less than this part of a doubling
_MOST_CLASSES = 64  # of lengths: 21 octaves
_LOOKED_AT = 256  # sequences whose length is looked at in a step, on average


class RunningSet:
    """Who runs, in any order: the last one takes the place of one that leaves."""

    def __init__(self, limits: SchedulerLimits, policy: Policy, accounting: Accounting) -> None:
        self.accounting = accounting
        self.num_left = 0  # that ran and do so no longer
        self.most_bytes = 0  # that all can come to hold
        self._limits, self._grade = limits, policy.grade
        self._members: list[Sequence] = []
        self._places: dict[int, int] = {}
        # By place: prompt and most output tokens, whether only its limit ends it, grade, bytes at
        # most, and tokens when all were last looked at.
        self._numbers = np.zeros((6, _FIRST_ROOM), np.int64)
        self._num_steps = 0  # since then: each has about so many tokens more
        self._bytes_at: dict[int, int] = {}  # what one takes by itself that can become so long
        # Whose prompt is not computed, or had not been at the last look.
        self._beginning: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._members)

    def join(self, sequence: Sequence) -> None:
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
        """None runs any more, in an empty cache."""
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
        """What it and the siblings that wait for its prompt can come to hold."""
        longest = self._limits.longest(sequence.request)
        if longest not in self._bytes_at:
            several = np.array([longest])
            self._bytes_at[longest] = int(self.accounting.bytes_alone(several, several)[0])
        return self._bytes_at[longest] * (1 + len(sequence.siblings))

    def prospects(self, grade: int, *, worse: bool = False) -> Prospects:
        """Of those that run with this grade or a better one, or of those with a ``worse`` one."""
        self._look()
        numbers = self._numbers[:, : len(self._members)]
        # One whose prompt takes several steps, or that a step leaves out, has not become longer.
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
        # What several share is given back by the last of them: on average each has that part.
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
        """Of some that wait, one after the other; then of the siblings behind those that have any,
        in the same order.
        """
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
        """Raises: AssertionError if these are not they, or a number of theirs is off."""
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
        """See how long all have become, unless that was lately."""
        self._beginning = {s for s in self._beginning if _is_beginning(s)}
        if self._num_steps > len(self._members) // _LOOKED_AT:
            tokens = [sequence.num_tokens for sequence in self._members]
            self._numbers[5, : len(tokens)] = tokens
            self._num_steps = 0


def joined(*several: Prospects) -> Prospects:
    """Side by side."""
    names = [field.name for field in fields(Prospects)]
    return Prospects(**{n: np.concatenate([getattr(p, n) for p in several]) for n in names})


def _followers(leaders: Prospects, num_siblings: Counts, accounting: Accounting) -> Prospects:
    """Siblings that wait for a prompt will share it, and then grow as the one does that computes
    it; what is shared is given back with that one's.
    """
    held = accounting.bytes_alone(leaders.num_tokens, leaders.longest).astype(np.float64)
    return replace(
        leaders,
        count=num_siblings,
        has_room=np.zeros(len(held), bool),
        held_bytes=held,
        freed_bytes=0 * held,
    )


def _about_alike(prospects: Prospects) -> Prospects:
    """The same with one entry, of means, for all that have generated and may yet generate about as
    much. Those that may yet generate about as much go on as long as the last of them.
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
    """Whether nothing else ends it."""
    params = sequence.request.params
    return params.ignore_eos and not params.stop and not params.stop_token_ids
