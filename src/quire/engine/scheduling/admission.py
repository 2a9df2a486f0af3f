"""Which sequences may come beside those that run: the headroom to leave, and what they displace.

A newcomer comes if it and all others are expected to find room to the end. If room will be short
some steps from now, it comes if that pays: until then it shares the steps that are taken anyway,
and then a sequence makes room and computes again what it had. Both are seconds, by the measured
costs.

What all of them will need is worked out at most once a plan, and each that comes is added to it:
``company`` has the numbers, ``headroom`` the estimate.
"""

from dataclasses import dataclass

import numpy as np

from quire.engine.scheduling.headroom import Counts, Curves, Outlook, OutputLengths, Prospects
from quire.engine.scheduling.plan_builder import PlanBuilder, StateCheckpoints
from quire.engine.scheduling.policy import Policy, SchedulerLimits
from quire.engine.scheduling.preemption import SwapSpace
from quire.engine.scheduling.queues import Queues
from quire.engine.scheduling.step_costs import Costs
from quire.engine.sequence import FinishReason, Sequence
from quire.engine.statistics import Statistics
from quire.engine.step_plan import Chunk
from quire.kv import Accounting, BlockKey, Extension, Fits, Never, NotNow, PrefixHit, TokenIds
from quire.units import format_count

# -- admission -------------------------------------------------------------------------------------


# Of what a sequence had that made room. Some is still cached when it comes back, and it makes room
# later than is said with caution: a half is best of what was tried, from 0.3 to 1.
_LOST_PART = 0.5
_MOST_AT_ONCE = 64  # newcomers


class Admission:
    """Asks what is free for how much is to come. The watermark stays free in any case."""

    def __init__(
        self, limits: SchedulerLimits, policy: Policy, queues: Queues, costs: Costs
    ) -> None:
        self.company = queues.company
        self._queues, self._costs = queues, costs
        self._lengths = OutputLengths()
        self._limits, self._grade = limits, policy.grade
        # In this plan: what is to come of those that run; of grades up to one, when so many had
        # left; and the bytes that they would take besides if all came to their limits at once.
        self._outlook: Outlook | None = None
        self._outlook_of = (0, 0)
        self._more_at_worst = 0.0
        self._num_expected = 0  # sequences in that outlook
        self._own_part = 1.0  # of what a sequence holds: the rest it shares
        # What newcomers will take besides what each holds when it has come, and that.
        self._asked: dict[Sequence, tuple[Curves, float]] = {}
        self._held_back: list[Sequence] = []  # in this plan …
        self._held_back_bytes = 0  # … what they will need when they come …
        self._held_back_most_bytes = 0  # … and what they can come to hold

    def note_ended(self, num_output_tokens: int, reason: FinishReason) -> None:
        """An output has come to its end, or to its limit."""
        self._lengths.note(num_output_tokens, cut_off=reason == "length")

    def begin_plan(self) -> None:
        self.company.note_step()
        self._outlook = None
        self._asked.clear()
        self._held_back.clear()
        self._held_back_bytes = self._held_back_most_bytes = 0

    def note_held_back(self, newcomer: Sequence, num_found: int) -> None:
        """It keeps its place: those behind it find the room taken that it will need.

        ``num_found``: tokens that it will share then.
        """
        self._held_back.append(newcomer)
        tokens = np.array([num_found, newcomer.num_tokens])
        longest = np.array([self._limits.longest(newcomer.request)])
        shared, alone = self.company.accounting.bytes_alone(tokens, longest).tolist()
        self._held_back_bytes += alone - shared
        self._held_back_most_bytes += self.company.bytes_at_most(newcomer)
        self.note_came(newcomer)

    def note_came(self, newcomer: Sequence) -> None:
        """It is one of those that run, for the newcomers after it in this plan."""
        if self._outlook is not None:
            curves, held_bytes = self._ask(newcomer, self._outlook)
            self._outlook.add(curves)
            self._more_at_worst += self.company.bytes_at_most(newcomer) - held_bytes
            self._num_expected += 1 + len(newcomer.siblings)

    def kept_bytes(self, newcomer: Sequence, spare_bytes: int) -> int:
        """What must stay free beside a newcomer, so that it and its company find room to the end.

        Those who would make room for it are no company. Of what is kept, ``spare_bytes`` are
        elsewhere: in swap space, for those that lack room at the peak.
        """
        least = self._limits.watermark_bytes
        if self._limits.headroom != 0 and self.company:
            least = max(least, self._headroom_bytes(newcomer, spare_bytes))
        return least + self._held_back_bytes

    def could_displace(self, newcomer: Sequence, kept_bytes: int) -> bool:
        """Whether there would be room for a newcomer if all of a worse grade made room."""
        accounting = self.company.accounting
        worse = self.company.prospects(self._grade(newcomer), worse=True)
        freed = int((worse.freed_bytes * worse.count * worse.has_room).sum())
        need = int(self.company.to_come(newcomer).freed_bytes.sum()) + kept_bytes
        return need <= accounting.ceiling.now_bytes - accounting.held_bytes + freed

    def _headroom_bytes(self, newcomer: Sequence, spare_bytes: int) -> int:
        """What all will take besides, at their peak; 0 if there is room for all that they may, or
        if it pays to come all the same.
        """
        company, share = self.company, self._limits.headroom
        own, most = company.bytes_at_most(newcomer), company.accounting.ceiling.now_bytes
        if company.most_bytes + self._held_back_most_bytes + own <= most:
            return 0
        outlook = self._look_ahead(self._grade(newcomer))
        if outlook is None:
            return 0
        # Some share what they hold, and some would make room.
        held_bytes = company.accounting.held_bytes
        if self._more_at_worst + own + held_bytes <= most:
            return 0
        curves, newcomer_bytes = self._ask(newcomer, outlook)
        growth = outlook.need_bytes(curves)
        peak = float(growth.max())
        if share is None:
            share, taken_bytes = 1.0, held_bytes + newcomer_bytes + self._held_back_bytes
            room_bytes = most - taken_bytes + spare_bytes
            if peak > room_bytes:
                # If all found room in the end, it would come. As it is, so many will on average.
                part = min(1.0, most / max(1.0, taken_bytes + peak))
                num_later = part * (self._num_expected + 1 + len(newcomer.siblings))
                num_steps = int(outlook.moments[(growth > room_bytes).argmax()])
                if self._pays(newcomer, num_steps, num_later):
                    return 0
        return int(share * peak) - spare_bytes

    def _pays(self, newcomer: Sequence, num_steps: int, num_later: float) -> bool:
        """Whether to come is worth it, where room will be short in so many steps.

        Until then it has a part in steps that are taken anyway; if it waits, it has one in later
        steps, with ``num_later`` sequences. Then it, or another one like it, makes room, and
        computes again what it had, but for what others hold too.
        """
        prompt_steps = newcomer.num_tokens / self._limits.max_num_batched_tokens
        gained_s = self._costs.prices.step_s * (num_steps - prompt_steps) / num_later
        num_tokens = int(self._own_part * newcomer.num_tokens) + num_steps
        return gained_s > _LOST_PART * self._costs.recompute_s(num_tokens)

    def _ask(self, newcomer: Sequence, outlook: Outlook) -> tuple[Curves, float]:
        """What a newcomer will take besides what it holds when it has come, and that.

        Those behind it are worked out with it, as many as were asked for so far: many cost little
        more than one.
        """
        if newcomer not in self._asked:
            count = min(1 + len(self._asked), _MOST_AT_ONCE)
            several = list(dict.fromkeys([newcomer, *self._queues.next_ones(count)]))
            prospects = self.company.to_come(*several)
            expected, variance = outlook.curves_of_each(prospects)
            leaders = (place for place, each in enumerate(several) if each.siblings)
            for follower, leader in enumerate(leaders, len(several)):
                expected[leader] += expected[follower]
                variance[leader] += variance[follower]
            held_bytes = prospects.held_bytes[: len(several)].tolist()
            for place, each in enumerate(several):
                self._asked[each] = (expected[place], variance[place]), held_bytes[place]
        return self._asked[newcomer]

    def _look_ahead(self, grade: int) -> Outlook | None:
        """Of those that run with this grade or a better one; None: there are none."""
        of = grade, self.company.num_left
        if self._outlook is None or self._outlook_of != of:
            running = self.company.prospects(grade)
            if not len(running.count):
                return None
            self._asked.clear()
            there = running.only(running.has_room)
            self._outlook, self._outlook_of = (
                Outlook(
                    running,
                    self._lengths.survival(there.num_output, there.count.astype(np.float64)),
                    self._bytes_at,
                    horizon=self._limits.max_model_len,
                ),
                of,
            )
            at_worst = self._bytes_at(running.longest[:, None], running)[:, 0] * running.count
            held = (there.held_bytes * there.count).sum()
            self._more_at_worst = float(at_worst.sum() - held)
            self._num_expected = int(running.count.sum())
            alone = float((there.held_bytes * there.count).sum())
            own = float((there.freed_bytes * there.count).sum())
            self._own_part = own / alone if alone else 1.0
            for newcomer in self._held_back:
                self.note_came(newcomer)
        return self._outlook

    def _bytes_at(self, num_tokens: Counts, of: Prospects) -> Counts:
        """Shapes: num_tokens i64[S, T]."""
        tokens = np.minimum(num_tokens, self._limits.max_model_len)
        return self.company.accounting.bytes_alone(tokens, of.longest[:, None])


# -- slot allocation -------------------------------------------------------------------------------

# Room for what a sequence computes next: how it is asked for, and what helps where it is refused.
#
# No sequence is preempted here: the scheduler does that, where an ``AllocationFailure`` leaves it
# a choice.


_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationFailure:
    """A refusal; nothing has changed. ``final``: no other's room would help."""

    verdict: NotNow | Never
    num_tokens: int
    final: bool

    @property
    def lacking_bytes(self) -> int:
        """What more would have to be free, at least; 0 if that is not known."""
        if isinstance(self.verdict, Never):
            return 0
        return max(0, self.verdict.need_bytes - self.verdict.free_bytes)

    def detail(self, longest: int) -> str:
        """For people, of a sequence that could become so long."""
        return (
            f"no room for {format_count(self.num_tokens)} tokens, of {format_count(longest)} "
            f"at most: {self.verdict}"
        )


@dataclass(slots=True)
class Attempt:
    """What is asked for: tokens up to ``stop``, the first ``start`` of them without computing.

    It is good until anything changes.
    """

    start: int
    stop: int
    token_ids: TokenIds  # all that the sequence has, if they were looked up
    hit: PrefixHit | None = None
    num_restored: int = 0  # of the first ones, behind the hit, from swap
    found: PrefixHit | None = None  # the hit that there was at first

    def chunk(self, sequence: Sequence) -> Chunk:
        return Chunk(
            sequence=sequence,
            start=self.start,
            stop=self.stop,
            num_restored=self.num_restored,
            samples=self.stop == sequence.num_tokens,
        )


class SlotAllocator:
    """Asks the accounting."""

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
        """Room for a sequence's next chunk, which ``look_up`` has just told.

        ``num_others`` run beside it. ``kept_bytes`` stay free if it comes anew.
        """
        # A newcomer beside others must find room for all that is already there to compute, or the
        # others would soon have to make it. Alone it may go as far as it can.
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
            # In chunks it may still come so far when it has more of the memory.
            final = final and not (num_others and self._fits_in_chunks(sequence))
            return AllocationFailure(verdict=verdict, num_tokens=num_tokens, final=final)

    def look_up(self, sequence: Sequence, budget: int) -> Attempt:
        """Which tokens a sequence computes next, and which it need not."""
        start, hit, num_restored = sequence.num_computed_tokens, None, 0
        token_ids = _NO_TOKENS
        if not start and not sequence.lacks_prompt_logprobs:  # which are not kept
            token_ids = np.array(sequence.token_ids, np.int32)
            hit = self.accounting.match_prefix(sequence.seq_id, token_ids)
            num_restored = max(0, sequence.num_saved_tokens - hit.num_tokens)
            start = hit.num_tokens + num_restored
        stop = self.snapshots.end(
            start, min(sequence.num_tokens, start + budget), sequence.num_tokens
        )
        return Attempt(start, stop, token_ids, hit, num_restored, found=hit)

    def _taken(self, sequence: Sequence, attempt: Attempt) -> Chunk:
        sequence.needs_room_at_once = False
        sequence.num_computed_tokens = attempt.start
        num_hit_tokens = attempt.hit.num_tokens if attempt.hit else 0
        self._statistics.note_came(sequence, attempt.found, num_hit_tokens)
        if attempt.hit and not sequence.num_preemptions:
            sequence.num_cached_tokens = attempt.hit.num_tokens
        if not attempt.num_restored:  # what was saved is cached all the same, or of no use
            self._swap.release(sequence)
        return attempt.chunk(sequence)

    def _ask_for_less(self, sequence: Sequence, attempt: Attempt, budget: int) -> bool:
        """What may still help where no other will make room; False if nothing does.

        A window that moves in smaller steps holds less at once; what a hit holds may lie scattered
        over pages, so that less fits than would anew; what was saved comes back in one piece.
        """
        if attempt.stop > attempt.start + 1 and not sequence.needs_room_at_once:
            attempt.stop = attempt.start + (attempt.stop - attempt.start) // 2
        elif attempt.hit is not None and attempt.start:
            attempt.hit, attempt.num_restored, attempt.start = None, 0, 0
            attempt.stop = min(sequence.num_tokens, budget)
        elif self._fits_in_chunks(sequence) and self._has_more_than_last_time(sequence):
            sequence.needs_room_at_once = False
            sequence.began_again_with = sequence.num_tokens, self._room_bytes
        else:
            return False
        return True

    def _lift_ceiling(self, verdict: Never | NotNow) -> bool:
        """A sequence alone need not wait for the machine: a lowered ceiling gives way to it.

        So one sequence always gets on, and none ends for a shortage that will pass.
        """
        ceiling = self.accounting.ceiling
        if isinstance(verdict, Never) or ceiling.now_bytes == ceiling.capacity_bytes:
            return False
        lacking = verdict.need_bytes + verdict.kept_bytes - verdict.free_bytes
        if lacking > 0:
            self.accounting.resize(ceiling.now_bytes + lacking, for_now=True)
        return lacking > 0

    def _fits_in_chunks(self, sequence: Sequence) -> bool:
        """Whether one that asks for all of its room at once could do without, all by itself."""
        longest = self._limits.longest(sequence.request)
        return sequence.needs_room_at_once and isinstance(
            self.accounting.could_hold(sequence.num_tokens, max_tokens=longest), Fits
        )

    def _has_more_than_last_time(self, sequence: Sequence) -> bool:
        """Whether it has more tokens, or more room, than when it last began again in chunks."""
        num_tokens, room_bytes = sequence.began_again_with
        return sequence.num_tokens > num_tokens or self._room_bytes > room_bytes

    @property
    def _room_bytes(self) -> int:
        return self.accounting.ceiling.capacity_bytes - self.accounting.held_bytes


# -- prefixes that this step computes --------------------------------------------------------------

# Newcomers whose prefix a step computes anyway: they wait for it, and then share it.
#
# A newcomer is held back while a sequence of the same step fills the block that it would compute
# first. So each one that waits has another that gets on, and none waits for one that waits itself.
#
# Source: SGLang's in-batch prefix caching puts such requests behind others, too.


_MOST_IN_VAIN = 3  # steps that one waits without having found more afterwards


class InBatchPrefixes:
    """Which blocks a step fills, and which sequences wait for them."""

    def __init__(self, room: SlotAllocator) -> None:
        self._room = room
        self.waits_for: dict[int, Sequence] = {}  # by id of the waiting one: the one it waits for
        self._filled: dict[BlockKey, Chunk] = {}
        self._num_seen = 0  # chunks of the step

    def begin_plan(self) -> None:
        self.waits_for.clear()
        self._filled.clear()
        self._num_seen = 0

    def holds_back(self, step: PlanBuilder, newcomer: Sequence, attempt: Attempt) -> int:
        """How many tokens a newcomer will find if it waits for what this step computes.

        0 if it is not to wait. If it is, that is noted.
        """
        if not step.takes_in_text:
            self._num_seen = len(step.chunks)  # of one token each: nothing to see in them
            return 0
        if attempt.hit is None or attempt.num_restored:
            return 0
        self._see(step)
        accounting, num_found = self._room.accounting, attempt.hit.num_tokens
        block = accounting.next_block(newcomer.seq_id, newcomer.token_ids, attempt.hit)
        chunk = self._filled.get(block[0]) if block else None
        if chunk is None:
            return 0
        num_then = self._num_found_after(chunk, attempt)
        if num_then - num_found < step.limits.shared_tokens:
            return 0
        if num_found > newcomer.most_found_tokens:
            newcomer.most_found_tokens, newcomer.num_waits_in_vain = num_found, 0
        elif newcomer.num_waits_in_vain == _MOST_IN_VAIN:
            return 0
        else:
            newcomer.num_waits_in_vain += 1
        self.waits_for[newcomer.seq_id] = chunk.sequence
        return num_then

    def _see(self, step: PlanBuilder) -> None:
        """The chunks that have come into the step since the last look."""
        accounting = self._room.accounting
        for chunk in step.chunks[self._num_seen :]:
            stop = chunk.stop - len(chunk.drafts)
            if stop - chunk.start > 1:
                block = accounting.next_block(chunk.sequence.seq_id, chunk.sequence.token_ids)
                if block is not None and block[1] <= stop:
                    self._filled.setdefault(block[0], chunk)
        self._num_seen = len(step.chunks)

    def _num_found_after(self, chunk: Chunk, attempt: Attempt) -> int:
        """Tokens that an attempt would find when a chunk's sequence has come to its end, or, where
        states are kept at a few places only, when the chunk is computed.
        """
        other = np.array(chunk.sequence.token_ids[: len(attempt.token_ids) - 1], np.int32)
        different = (attempt.token_ids[: len(other)] != other).nonzero()[0]
        num_common = int(different[0]) if len(different) else len(other)
        if self._room.accounting.state_block_size == 0:
            return num_common
        stop = chunk.stop - len(chunk.drafts)
        keeps = self._room.snapshots.keeps(chunk.sequence, chunk.start, stop)
        return stop if keeps and stop <= num_common else 0
