"""Which sequence makes room, how it is to come back, and what that costs.

The last one by rank makes room, with one exception: one that has just come back is spared while
there is another choice, or it would be computed again and again. Its entries are lost, or saved if
that is the cheaper way; every victim is logged with its cost.
"""

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import TypeAlias

from quire.engine.scheduling.policy import Policy
from quire.engine.scheduling.step_costs import Costs
from quire.engine.sequence import Sequence
from quire.engine.statistics import Statistics
from quire.engine.step_plan import Chunk, Save
from quire.kv import Accounting
from quire.kv.interface import Slots
from quire.spec import Group, KeptWhole
from quire.units import format_bytes

# -- swap space ------------------------------------------------------------------------------------

# Which sequences are swapped out: the part of swapping that needs no tensor.
#
# The bytes themselves are ``engine.swap``'s.


Clock: TypeAlias = Callable[[], float]  # seconds since some moment


class SwapSpace:
    """Bytes for saved entries, and which sequences have some."""

    def __init__(self, capacity_bytes: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._held: dict[int, int] = {}
        self._left: list[int] = []  # since ``drain``

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    def take(self, sequence: Sequence, num_bytes: int) -> None:
        assert num_bytes <= self.free_bytes
        assert sequence.seq_id not in self._held
        self._held[sequence.seq_id] = num_bytes
        self.used_bytes += num_bytes
        sequence.num_saved_tokens = sequence.num_computed_tokens

    def release(self, sequence: Sequence) -> None:
        """What was saved of it is not needed any more. Does nothing if nothing was."""
        sequence.num_saved_tokens = 0
        if sequence.seq_id in self._held:
            self.used_bytes -= self._held.pop(sequence.seq_id)
            self._left.append(sequence.seq_id)

    def drain(self) -> list[int]:
        """Sequences whose saved entries can be dropped."""
        left, self._left = self._left, []
        return left

    def check(self, sequences: Iterable[Sequence]) -> None:
        """``sequences``: all that have not ended. Raises: AssertionError if the books are off."""
        saved = {s.seq_id for s in sequences if s.num_saved_tokens}
        assert saved == set(self._held), "swap space of a sequence that has nothing saved"
        assert sum(self._held.values()) == self.used_bytes <= self.capacity_bytes


# -- preemption ------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """What making room has cost since the start, and how much swap space is in use."""

    num_preemptions: int = 0
    num_swaps: int = 0  # of them by saving the entries
    num_recomputed_tokens: int = 0  # computed before, lost, and computed again
    saved_bytes: int = 0  # swapped out …
    loaded_bytes: int = 0  # … and in
    swap_used_bytes: int = 0  # now


class Preemption:
    """Chooses victims and keeps the books. Queues and room are the scheduler's."""

    def __init__(
        self, policy: Policy, swap: SwapSpace, costs: Costs, statistics: Statistics
    ) -> None:
        self.swap, self.costs = swap, costs
        self._policy = policy
        self._statistics = statistics
        self._saves: list[Save] = []  # since ``drain``

    @property
    def stats(self) -> SchedulerStats:
        counted = self._statistics
        return SchedulerStats(
            num_preemptions=counted.num_preemptions,
            num_swaps=counted.num_swaps,
            num_recomputed_tokens=counted.num_recomputed_tokens,
            saved_bytes=counted.saved_bytes,
            loaded_bytes=counted.loaded_bytes,
            swap_used_bytes=self.swap.used_bytes,
        )

    @property
    def spare_bytes(self) -> int:
        """Room elsewhere for a victim, if going there is cheaper than computing again."""
        free_bytes = self.swap.free_bytes
        return free_bytes if free_bytes and self.costs.swap_pays else 0

    def victim(self, candidates: Several[Sequence]) -> Sequence:
        """The one that makes room, of these in their order."""
        worst = self._policy.grade(candidates[-1])
        choice = [s for s in candidates if self._policy.grade(s) == worst]
        victim = next((s for s in reversed(choice) if not s.came_back), choice[-1])
        for sequence in choice:  # it has been spared once
            sequence.came_back = False
        return victim

    def take(self, victim: Sequence, accounting: Accounting, why: str, *, may_swap: bool) -> None:
        """Note that a sequence loses its room; the caller takes it. Says how it comes back."""
        num_tokens = victim.num_computed_tokens
        tokens = readable_tokens(accounting.groups, 0, num_tokens)
        size = num_bytes(accounting.groups, tokens)
        swap_s, recompute_s = self.costs.swap_s(size), self.costs.recompute_s(num_tokens)
        swaps = (
            may_swap
            and 0 < size <= self.swap.free_bytes
            and swap_s < recompute_s
            and not victim.lacks_prompt_logprobs  # for which its tokens are computed again anyway
        )
        log.info(
            "sequence %d makes room for %s: %d tokens, %s; %s, %.3g s (to recompute them: %.3g s, "
            "to swap: %.3g s with %s of swap space free)",
            victim.seq_id,
            why,
            num_tokens,
            format_bytes(size),
            "swap" if swaps else "recompute",
            swap_s if swaps else recompute_s,
            recompute_s,
            swap_s,
            format_bytes(self.swap.free_bytes),
        )
        victim.num_preemptions += 1
        self._statistics.num_preemptions += 1
        if swaps:
            self._statistics.num_swaps += 1
            self._statistics.saved_bytes += size
            self.swap.take(victim, size)
            slots = tuple(
                slots_of(accounting, group, victim.seq_id, of) for group, of in enumerate(tokens)
            )
            self._saves.append(Save(sequence=victim, slots=slots, num_bytes=size))

    def note_computed(self, chunk: Chunk, stop: int, groups: tuple[Group, ...]) -> None:
        """A chunk is computed up to ``stop``, perhaps not for the first time."""
        sequence = chunk.sequence
        most = sequence.most_computed_tokens
        if chunk.start < most:
            self._statistics.num_recomputed_tokens += min(stop, most) - chunk.start
        if stop > most:
            sequence.most_computed_tokens = stop
        if chunk.num_restored:
            readable = readable_tokens(groups, chunk.start - chunk.num_restored, chunk.start)
            self._statistics.loaded_bytes += num_bytes(groups, readable)
            self.swap.release(sequence)

    def drain(self) -> tuple[Save, ...]:
        """What is to be saved before storage changes anything.

        A sequence may have come back since: it found what it had computed still cached.
        """
        saves, self._saves = self._saves, []
        return tuple(save for save in saves if save.sequence.num_saved_tokens)


def slots_of(accounting: Accounting, number: int, seq_id: int, tokens: range) -> Slots:
    """Where a sequence's entries of these tokens are in a group; its state's, if it keeps one."""
    if isinstance(accounting.groups[number].spec, KeptWhole):
        return accounting.table(number, seq_id)[: len(tokens)]
    return accounting.slots(number, seq_id, tokens.start, tokens.stop)


def readable_tokens(groups: tuple[Group, ...], start: int, stop: int) -> list[range]:
    """Those of the tokens [start, stop) that a later one can still read, in each group.

    Of a state that is the last one, which it stands for.
    """
    return [range(max(start, group.live_start(stop)), stop) for group in groups]


def num_bytes(groups: tuple[Group, ...], tokens: list[range]) -> int:
    """Of so many tokens in each group, or of its state."""
    return sum(
        group.bytes_for(len(of))
        if isinstance(group.spec, KeptWhole)
        else group.bytes_per_token * len(of)
        for group, of in zip(groups, tokens, strict=True)
    )
