"""Room for the tokens that a sequence computes next, and what helps where the cache refuses it.

No sequence is preempted here: where an ``AllocationFailure`` leaves a choice, the scheduler
preempts.
"""

from dataclasses import dataclass

import numpy as np

from quire.engine.scheduling.plan_builder import StateCheckpoints, outside_images
from quire.engine.scheduling.policy import SchedulerLimits
from quire.engine.scheduling.swap_space import SwapSpace
from quire.engine.sequence import Sequence
from quire.engine.statistics import Statistics
from quire.engine.step_plan import Chunk
from quire.kv import Accounting, Extension, Fits, Never, NotNow, PrefixHit, TokenIds
from quire.units import format_count

_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationFailure:
    """A refusal that has changed nothing. ``final``: preempting other sequences would not help."""

    verdict: NotNow | Never
    num_tokens: int
    final: bool

    @property
    def lacking_bytes(self) -> int:
        """How much more must be free at least; 0 if that is not known."""
        if isinstance(self.verdict, Never):
            return 0
        return max(0, self.verdict.need_bytes - self.verdict.free_bytes)

    def detail(self, longest: int) -> str:
        """Return a sentence for a sequence that can have ``longest`` tokens."""
        return (
            f"no room for {format_count(self.num_tokens)} tokens, of {format_count(longest)} "
            f"at most: {self.verdict}"
        )


@dataclass(slots=True)
class Attempt:
    """A request for room up to token ``stop``, of which the first ``start`` need no computing.

    It holds until the cache changes.
    """

    start: int
    stop: int
    token_ids: TokenIds  # all of the sequence's, if they were looked up
    hit: PrefixHit | None = None
    num_restored: int = 0  # tokens behind the hit that come back from swap
    found: PrefixHit | None = None  # the hit before ``hit`` was given up


class SlotAllocator:
    """Asks the accounting for room, and for less where it refuses."""

    def __init__(
        self,
        accounting: Accounting,
        swap: SwapSpace,
        limits: SchedulerLimits,
        statistics: Statistics,
    ) -> None:
        self.accounting = accounting
        self.snapshots = StateCheckpoints(accounting)
        self._swap = swap
        self._limits = limits
        self._statistics = statistics

    def take(
        self,
        sequence: Sequence,
        budget: int,
        attempt: Attempt,
        *,
        is_running: bool,
        num_others: int,
        kept_bytes: int,
    ) -> Chunk | AllocationFailure:
        """Take room for a sequence's next chunk, which ``look_up`` has just found.

        ``num_others`` sequences run beside it. ``kept_bytes`` stay free if it is a newcomer.
        """
        # A newcomer beside others must find room for all tokens that it has, or others would soon
        # be preempted for it. Alone it may go as far as it can.
        anew = not sequence.num_computed_tokens and num_others > 0
        while True:
            num_tokens = sequence.num_tokens if sequence.needs_room_at_once else attempt.stop
            verdict = self.accounting.try_extend(
                sequence.seq_id,
                num_tokens,
                Extension(
                    hit=attempt.hit,
                    external_tokens=attempt.num_restored,
                    promised_tokens=sequence.num_tokens if anew else 0,
                    kept_bytes=kept_bytes if anew else 0,
                ),
            )
            if isinstance(verdict, Fits):
                return self._taken(sequence, attempt)
            if not num_others and self._lift_ceiling(verdict):
                continue
            final = isinstance(verdict, Never) or not (is_running or num_others)
            if final and self._ask_for_less(sequence, attempt, budget):
                continue
            # In chunks it may still come this far once it has more of the memory.
            final = final and not (num_others and self._fits_in_chunks(sequence))
            return AllocationFailure(verdict=verdict, num_tokens=num_tokens, final=final)

    def look_up(self, sequence: Sequence, budget: int) -> Attempt:
        """Find the tokens that a sequence computes next, and those that it need not compute."""
        start, hit, num_restored = sequence.num_computed_tokens, None, 0
        token_ids = _NO_TOKENS
        if not start and not sequence.lacks_prompt_logprobs:  # the cache keeps none
            token_ids = np.array(sequence.token_ids, np.int32)
            hit = self.accounting.match_prefix(sequence.seq_id, token_ids)
            num_restored = max(0, sequence.num_saved_tokens - hit.num_tokens)
            start = hit.num_tokens + num_restored
        stop = self.snapshots.end(
            start, min(sequence.num_tokens, start + budget), sequence.num_tokens
        )
        stop = self._whole(sequence, start, stop)
        return Attempt(start, stop, token_ids, hit, num_restored, found=hit)

    def _taken(self, sequence: Sequence, attempt: Attempt) -> Chunk:
        sequence.needs_room_at_once = False
        sequence.num_computed_tokens = attempt.start
        num_hit_tokens = attempt.hit.num_tokens if attempt.hit else 0
        self._statistics.note_came(sequence, attempt.found, num_hit_tokens)
        if attempt.hit and not sequence.num_preemptions:
            # What was found of the tokens that another engine has generated is no prompt.
            sequence.num_cached_tokens = min(num_hit_tokens, sequence.num_prompt_tokens)
        if not attempt.num_restored:  # the saved entries are cached as well, or of no use
            self._swap.release(sequence)
        return Chunk(
            sequence=sequence,
            start=attempt.start,
            stop=attempt.stop,
            num_restored=attempt.num_restored,
            samples=attempt.stop == sequence.num_tokens,
        )

    def _ask_for_less(self, sequence: Sequence, attempt: Attempt, budget: int) -> bool:
        """Reduce a refused request where no sequence can be preempted. Return False at its end.

        A window that moves in smaller steps holds less at once. A hit may lie scattered over pages,
        so that less fits beside it than without it. Saved entries come back in one piece.
        """
        half = attempt.start + (attempt.stop - attempt.start) // 2
        half = self._whole(sequence, attempt.start, half)
        if attempt.start < half < attempt.stop and not sequence.needs_room_at_once:
            attempt.stop = half
        elif attempt.hit is not None and attempt.start:
            attempt.hit, attempt.num_restored, attempt.start = None, 0, 0
            attempt.stop = self._whole(sequence, 0, min(sequence.num_tokens, budget))
        elif self._fits_in_chunks(sequence) and self._has_more_than_last_time(sequence):
            sequence.needs_room_at_once = False
            sequence.began_again_with = sequence.num_tokens, self._room_bytes
        else:
            return False
        return True

    def _whole(self, sequence: Sequence, start: int, stop: int) -> int:
        """Return where a chunk ends that could end at ``stop``."""
        return outside_images(sequence, start, stop) if self._limits.whole_images else stop

    def _lift_ceiling(self, verdict: Never | NotNow) -> bool:
        """Raise a lowered ceiling for a sequence that is alone.

        So one sequence always goes on, and none ends for a shortage that will pass.
        """
        ceiling = self.accounting.ceiling
        if isinstance(verdict, Never) or ceiling.now_bytes == ceiling.capacity_bytes:
            return False
        lacking = verdict.need_bytes - verdict.free_bytes
        if lacking > 0:
            self.accounting.resize(ceiling.now_bytes + lacking, for_now=True)
        return lacking > 0

    def _fits_in_chunks(self, sequence: Sequence) -> bool:
        """Return whether a sequence that asks for all of its room at once fits without that."""
        longest = self._limits.longest(sequence.request)
        return sequence.needs_room_at_once and isinstance(
            self.accounting.could_hold(sequence.num_tokens, max_tokens=longest), Fits
        )

    def _has_more_than_last_time(self, sequence: Sequence) -> bool:
        """Return whether it has more tokens or room than when it last began again in chunks."""
        num_tokens, room_bytes = sequence.began_again_with
        return sequence.num_tokens > num_tokens or self._room_bytes > room_bytes

    @property
    def _room_bytes(self) -> int:
        return self.accounting.ceiling.capacity_bytes - self.accounting.held_bytes
