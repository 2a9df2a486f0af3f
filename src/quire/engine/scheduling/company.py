"""The running sequences as numbers side by side: what a newcomer's admission is worked out from.

What never changes of a sequence is noted when it begins to run, so that asking takes no look at
each of them. How long they have become is counted on from one look to the next; the more there are,
the more seldom they are looked at.
"""

from dataclasses import fields, replace

import numpy as np

from quire.engine.scheduling.headroom import Counts, Prospects, Shares
from quire.engine.scheduling.limits import Limits
from quire.engine.scheduling.policy import Policy
from quire.engine.sequence import Sequence
from quire.kv import Accounting

_FIRST_ROOM = 64
_FEW = 64  # so many are taken one by one; of more, those that are about alike together
_PER_OCTAVE = 3  # lengths are about alike if they differ by less than this part of a doubling
_MOST_CLASSES = 64  # of lengths: 21 octaves
_LOOKED_AT = 256  # sequences whose length is looked at in a step, on average


class Company:
    """Who runs, in any order: the last one takes the place of one that leaves."""

    def __init__(self, limits: Limits, policy: Policy, accounting: Accounting) -> None:
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

    def note_step(self) -> None:
        """Most have one token more."""
        self._num_steps += 1

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


def _most_output(sequence: Sequence, limits: Limits) -> int:
    return limits.longest(sequence.request) - sequence.num_prompt_tokens


def _ends_by_length(sequence: Sequence) -> bool:
    """Whether nothing else ends it."""
    params = sequence.request.params
    return params.ignore_eos and not params.stop and not params.stop_token_ids
