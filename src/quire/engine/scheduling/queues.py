"""Who waits and who runs, in the order of the policy, and who waits for somebody else's prompt."""

from bisect import insort
from typing import Literal, get_args

from quire.engine.scheduling.policy import Policy
from quire.engine.sequence import Sequence
from quire.strategies import Accounting

WaitingReason = Literal[
    "kv_memory",  # for bytes, its own or those that others will need
    "max_num_seqs",  # for a seat
    "token_budget",  # for tokens of a step
    "preempted",  # it has just made room itself
    "next_step",  # it came after the last plan
    "sibling",  # for the prompt that another continuation of its request computes
    "choice",  # for a search that chooses its next token
]
WAITING_REASONS: tuple[str, ...] = get_args(WaitingReason)


class Queues:
    """Each sequence that has not ended is in one place: waiting, running, or behind its leader."""

    def __init__(self, policy: Policy) -> None:
        self.waiting: list[Sequence] = []  # by rank
        self.running: list[Sequence] = []  # by rank
        self.first_waits_for: WaitingReason = "next_step"  # the first to come, and all behind it
        self._rank = policy.rank
        self._known: dict[int, Sequence] = {}  # wherever it is
        self._leaders: dict[int, Sequence] = {}  # whose prompt a sibling waits for

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._leaders)

    @property
    def decoding(self) -> list[Sequence]:
        """The running sequences of which only the last token is to be computed, each by itself."""
        return [
            s
            for s in self.running
            if s.num_computed_tokens == s.num_tokens - 1 and s.goes_its_own_way
        ]

    @property
    def everybody(self) -> list[Sequence]:
        """But for those behind their leaders."""
        return [*self.running, *self.waiting]

    @property
    def first_to_come(self) -> Sequence | None:
        """Of those that wait for room, and for nothing else."""
        return next((s for s in self.waiting if not s.awaits_choice), None)

    def by_reason(self) -> dict[str, int]:
        """How many wait for what. Any thread may ask."""
        waiting, counts = list(self.waiting), dict.fromkeys(WAITING_REASONS, 0)
        counts["choice"] = sum(s.awaits_choice for s in waiting)
        counts[self.first_waits_for] = len(waiting) - counts["choice"]
        counts["sibling"] = len(self._leaders)
        return counts

    def all_wait(self) -> list[Sequence]:
        """Nobody runs any more, not even who was on the way from one place to another.

        Returns: everybody.
        """
        self._known = {i: s for i, s in self._known.items() if s.finish_reason is None}
        going_on = self._known.values()
        for leader in going_on:
            leader.siblings = [s for s in leader.siblings if s.finish_reason is None]
        self._leaders = {s.seq_id: leader for leader in going_on for s in leader.siblings}
        on_their_own = (s for s in going_on if s.seq_id not in self._leaders)
        self.running, self.waiting = [], sorted(on_their_own, key=self._rank)
        return self.waiting

    def wait(self, sequence: Sequence) -> None:
        self._known[sequence.seq_id] = sequence
        insort(self.waiting, sequence, key=self._rank)

    def run(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=self._rank)

    def leave(self, sequence: Sequence) -> None:
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def follow(self, leader: Sequence, siblings: list[Sequence]) -> None:
        """These wait until the leader's prompt is computed."""
        leader.siblings = siblings
        self._known.update((sibling.seq_id, sibling) for sibling in siblings)
        self._leaders.update((sibling.seq_id, leader) for sibling in siblings)

    def part(self, leader: Sequence) -> list[Sequence]:
        """Those who wait for this leader, and do so no longer."""
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            del self._leaders[sibling.seq_id]
        return siblings

    def end(self, sequence: Sequence) -> bool:
        """It is nowhere any more. True if it was by itself, and not behind a leader."""
        del self._known[sequence.seq_id]
        leader = self._leaders.pop(sequence.seq_id, None)
        if leader is None:
            self.leave(sequence)
        else:
            leader.siblings.remove(sequence)
        return leader is None

    def check(self, accounting: Accounting) -> None:
        """Raises: AssertionError if somebody is lost, out of order, or holds other room."""
        places = [*self.running, *self.waiting, *(self._known[i] for i in self._leaders)]
        assert sorted(s.seq_id for s in places) == sorted(self._known), "somebody is nowhere"
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=self._rank), "a queue is out of order"
        siblings = {s.seq_id: leader for leader in self.everybody for s in leader.siblings}
        assert siblings == self._leaders, "a sibling has lost its leader"
        for sequence in self.running:
            held = accounting.num_tokens(sequence.seq_id)
            assert held >= sequence.num_computed_tokens, "a computed token is held nowhere"
        for sequence in self.waiting:
            assert not accounting.num_tokens(sequence.seq_id), "a waiting sequence holds room"
