"""The queues: which sequences run and which wait, in the order of the policy."""

from bisect import bisect_left, bisect_right, insort
from typing import Literal, get_args

from quire.engine.scheduling.headroom import RunningSet
from quire.engine.scheduling.policy import Policy
from quire.engine.sequence import Sequence
from quire.kv import Accounting

WaitingReason = Literal[
    "kv_memory",  # there are too few bytes for it, or for what others will need
    "max_num_seqs",  # all seats are taken
    "token_budget",  # the step has no tokens left
    "preempted",  # it was preempted in the same plan
    "next_step",  # it came after the last plan
    "prefix",  # another sequence computes its prefix in the same step
    "sibling",  # another continuation of its request computes the prompt
    "choice",  # a beam search must choose its next token
]
WAITING_REASONS: tuple[str, ...] = get_args(WaitingReason)


class Queues:
    """Holds each unfinished sequence in one place.

    A sequence waits for room, waits for a choice and holds nothing, runs, or waits for its leader's
    prompt. All but the last are sorted by rank, so that one is found without a look at the others.
    """

    def __init__(self, policy: Policy, company: RunningSet) -> None:
        self.company = company  # the running sequences, as numbers
        self.waiting: list[Sequence] = []  # for room, by rank
        self.undecided: list[Sequence] = []  # for a choice, without room
        self.running: list[Sequence] = []  # by rank
        self.num_held_back = 0  # of the first waiting sequences: for a prefix or for tiers
        # What the first of the others waits for, and all behind it.
        self.first_waits_for: WaitingReason = "next_step"
        self._rank, self._grade = policy.rank, policy.grade
        self._known: dict[int, Sequence] = {}  # all unfinished sequences, by id
        self._leaders: dict[int, Sequence] = {}  # by sibling's id

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.undecided) + len(self._leaders)

    @property
    def num_waiting_for_room(self) -> int:
        """Return how many wait that are not held back."""
        return len(self.waiting) - self.num_held_back

    @property
    def decoding(self) -> list[Sequence]:
        """The running sequences of which the next step computes the last token alone."""
        return [
            s
            for s in self.running
            if s.num_computed_tokens == len(s.token_ids) - 1 and s.goes_its_own_way
        ]

    @property
    def on_their_own(self) -> list[Sequence]:
        """All sequences but those that wait for their leader's prompt."""
        return [*self.running, *self.waiting, *self.undecided]

    def next_ones(self, count: int) -> list[Sequence]:
        """Return the first ``count`` sequences that wait for room and are not held back."""
        return self.waiting[self.num_held_back : self.num_held_back + count]

    def num_running_up_to(self, grade: int) -> int:
        """Return how many run that a newcomer of this grade cannot displace: the first ones."""
        if not self.running or self._grade(self.running[-1]) <= grade:
            return len(self.running)
        return bisect_right(self.running, grade, key=self._grade)

    def by_reason(self) -> dict[str, int]:
        """Return how many sequences wait for what. Any thread may ask."""
        counts = dict.fromkeys(WAITING_REASONS, 0)
        num_held_back = min(self.num_held_back, len(self.waiting))
        counts[self.first_waits_for] = len(self.waiting) - num_held_back
        counts["prefix"] = num_held_back
        counts["choice"] = len(self.undecided)
        counts["sibling"] = len(self._leaders)
        return counts

    def all_wait(self, accounting: Accounting) -> list[Sequence]:
        """Move every sequence to the waiting ones, since the cache is empty.

        Return all but those that wait for their leader's prompt, by rank.
        """
        self._known = {i: s for i, s in self._known.items() if s.finish_reason is None}
        going_on = self._known.values()
        for leader in going_on:
            leader.siblings = [s for s in leader.siblings if s.finish_reason is None]
        self._leaders = {s.seq_id: leader for leader in going_on for s in leader.siblings}
        on_their_own = [s for s in going_on if s.seq_id not in self._leaders]
        on_their_own.sort(key=self._rank)
        self.running = []
        self.company.restart(accounting)
        self.waiting = [s for s in on_their_own if not s.awaits_choice]
        self.undecided = [s for s in on_their_own if s.awaits_choice]
        return on_their_own

    def wait(self, sequence: Sequence) -> None:
        """Let a sequence that holds nothing wait."""
        self._known[sequence.seq_id] = sequence
        self._put(self.undecided if sequence.awaits_choice else self.waiting, sequence)

    def chosen(self, sequence: Sequence) -> None:
        """Let a sequence go on, whose next token was chosen, or wait if it has no room."""
        held_nothing = self._take_from(self.undecided, sequence)
        sequence.awaits_choice = False
        if held_nothing:
            self._put(self.waiting, sequence)

    def run(self, sequence: Sequence) -> None:
        """Count a sequence that has room as running."""
        self._put(self.running, sequence)
        self.company.join(sequence)

    def come(self, sequence: Sequence) -> None:
        """Move the first sequence that waited for room to the running ones."""
        assert self.waiting[self.num_held_back] is sequence, "another one waits before it"
        del self.waiting[self.num_held_back]
        self.run(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue."""
        if self._take_from(self.running, sequence):
            self.company.leave(sequence)
            return
        found = any(self._take_from(queue, sequence) for queue in (self.waiting, self.undecided))
        assert found, f"sequence {sequence.seq_id} is in no queue"

    def is_running(self, sequence: Sequence) -> bool:
        """Return whether a sequence runs."""
        return self._place(self.running, sequence) is not None

    def place(self, sequence: Sequence) -> int:
        """Return a running sequence's place among them, by rank."""
        place = self._place(self.running, sequence)
        assert place is not None, f"sequence {sequence.seq_id} does not run"
        return place

    def follow(self, leader: Sequence, siblings: list[Sequence]) -> None:
        """Let siblings wait until the leader's prompt is computed."""
        leader.siblings = siblings
        self._known.update((sibling.seq_id, sibling) for sibling in siblings)
        self._leaders.update((sibling.seq_id, leader) for sibling in siblings)

    def part(self, leader: Sequence) -> list[Sequence]:
        """Return the siblings that waited for this leader, and let them go."""
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            del self._leaders[sibling.seq_id]
        return siblings

    def end(self, sequence: Sequence) -> bool:
        """Remove a sequence that has ended. Return False if it waited for its leader's prompt."""
        del self._known[sequence.seq_id]
        leader = self._leaders.pop(sequence.seq_id, None)
        if leader is None:
            self.leave(sequence)
        else:
            leader.siblings.remove(sequence)
        return leader is None

    def check(self, accounting: Accounting) -> None:
        """Check each sequence's place, order and room. Raises: AssertionError."""
        places = [*self.on_their_own, *(self._known[i] for i in self._leaders)]
        assert sorted(s.seq_id for s in places) == sorted(self._known), "a sequence is nowhere"
        for queue in (self.running, self.waiting, self.undecided):
            assert queue == sorted(queue, key=self._rank), "a queue is out of order"
        siblings = {s.seq_id: leader for leader in self.on_their_own for s in leader.siblings}
        assert siblings == self._leaders, "a sibling has lost its leader"
        self.company.check(self.running)
        for sequence in self.running:
            held = accounting.num_tokens(sequence.seq_id)
            assert held >= sequence.num_computed_tokens, "a computed token is held nowhere"
        assert not any(s.awaits_choice for s in self.waiting), "it waits for a choice, not for room"
        assert all(s.awaits_choice for s in self.undecided), "it waits for no choice"
        for sequence in (*self.waiting, *self.undecided):
            assert not accounting.num_tokens(sequence.seq_id), "a waiting sequence holds room"

    def _put(self, queue: list[Sequence], sequence: Sequence) -> None:
        if queue and self._rank(queue[-1]) > self._rank(sequence):
            insort(queue, sequence, key=self._rank)
        else:
            queue.append(sequence)

    def _place(self, queue: list[Sequence], sequence: Sequence) -> int | None:
        place = bisect_left(queue, self._rank(sequence), key=self._rank)
        return place if place < len(queue) and queue[place] is sequence else None

    def _take_from(self, queue: list[Sequence], sequence: Sequence) -> bool:
        place = self._place(queue, sequence)
        if place is not None:
            del queue[place]
        return place is not None
