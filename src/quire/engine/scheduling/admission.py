"""Admission: how much room a newcomer must leave free, and which newcomers wait for a prefix.

A newcomer is admitted if it and the running sequences are expected to find room to their ends. If
room will be short some steps from now, the newcomer is admitted if that pays: until then it shares
the steps that are taken anyway, and then a sequence is preempted and computes again what it had.
Both are compared in seconds, by the measured costs.

``headroom`` estimates what all running sequences will need, at most once a plan; each newcomer that
is admitted is added to the estimate.
"""

import numpy as np

from quire.engine.scheduling.headroom import Counts, Curves, Outlook, OutputLengths, Prospects
from quire.engine.scheduling.plan_builder import PlanBuilder
from quire.engine.scheduling.policy import Policy, SchedulerLimits
from quire.engine.scheduling.queues import Queues
from quire.engine.scheduling.slot_allocator import Attempt, SlotAllocator
from quire.engine.scheduling.step_costs import Costs
from quire.engine.sequence import FinishReason, Sequence
from quire.engine.step_plan import Chunk
from quire.kv import BlockKey

# The part of a preempted sequence's tokens that it is taken to compute again. Some of them are
# still cached when it comes back, and it is preempted later than the cautious estimate says. Of
# parts from 0.3 to 1 a half did best.
_LOST_PART = 0.5
_MOST_AT_ONCE = 64  # newcomers


class Admission:
    """Decides how many bytes a newcomer must leave free: the watermark at least."""

    def __init__(
        self, limits: SchedulerLimits, policy: Policy, queues: Queues, costs: Costs
    ) -> None:
        self.company = queues.company
        self._queues, self._costs = queues, costs
        self._lengths = OutputLengths()
        self._limits, self._grade = limits, policy.grade
        # In this plan: the outlook of the running sequences, the grade up to which it goes and how
        # many sequences had left then; and the bytes that they would take in addition if all came
        # to their limits at once.
        self._outlook: Outlook | None = None
        self._outlook_of = (0, 0)
        self.num_outlooks = 0  # in this plan
        self._more_at_worst = 0.0
        self._num_expected = 0  # sequences in that outlook
        self._own_part = 1.0  # of the bytes that a sequence holds: it shares the rest
        # Of newcomers: what each will take after its admission, and at it (bytes).
        self._asked: dict[Sequence, tuple[Curves, float]] = {}
        self._held_back: list[Sequence] = []  # in this plan …
        self._held_back_bytes = 0  # … what they will need at their admission …
        self._held_back_most_bytes = 0  # … and the most that they can hold

    def note_ended(self, num_output_tokens: int, reason: FinishReason) -> None:
        """Note the length of an output that has come to its end, or to its limit."""
        self._lengths.note(num_output_tokens, cut_off=reason == "length")

    def begin_plan(self) -> None:
        """Forget what the last plan has worked out."""
        self.company.note_step()
        self._outlook, self.num_outlooks = None, 0
        self._asked.clear()
        self._held_back.clear()
        self._held_back_bytes = self._held_back_most_bytes = 0

    def note_held_back(self, newcomer: Sequence, num_found: int) -> None:
        """Keep the room of a newcomer that is held back from those behind it.

        ``num_found``: tokens that it will share at its admission.
        """
        self._held_back.append(newcomer)
        tokens = np.array([num_found, newcomer.num_tokens])
        longest = np.array([self._limits.longest(newcomer.request)])
        shared, alone = self.company.accounting.bytes_alone(tokens, longest).tolist()
        self._held_back_bytes += alone - shared
        self._held_back_most_bytes += self.company.bytes_at_most(newcomer)
        self.note_came(newcomer)

    def note_came(self, newcomer: Sequence) -> None:
        """Count a newcomer as running, for the newcomers after it in this plan."""
        if self._outlook is not None:
            curves, held_bytes = self._ask(newcomer, self._outlook)
            self._outlook.add(curves)
            self._more_at_worst += self.company.bytes_at_most(newcomer) - held_bytes
            self._num_expected += 1 + len(newcomer.siblings)

    def kept_bytes(self, newcomer: Sequence, spare_bytes: int) -> int:
        """Return the bytes that must stay free beside a newcomer, so that all fit to their ends.

        Running sequences that would be preempted for it do not count. ``spare_bytes`` of swap
        space are taken off, since sequences that lack room at the peak can be saved there.
        """
        least = self._limits.watermark_bytes
        if self._limits.headroom != 0 and self.company:
            least = max(least, self._headroom_bytes(newcomer, spare_bytes))
        return least + self._held_back_bytes

    def could_displace(self, newcomer: Sequence, kept_bytes: int) -> bool:
        """Return whether a newcomer would fit if all sequences of a worse grade were preempted."""
        accounting = self.company.accounting
        worse = self.company.prospects(self._grade(newcomer), worse=True)
        freed = int((worse.freed_bytes * worse.count * worse.has_room).sum())
        need = int(self.company.to_come(newcomer).freed_bytes.sum()) + kept_bytes
        return need <= accounting.ceiling.now_bytes - accounting.held_bytes + freed

    def _headroom_bytes(self, newcomer: Sequence, spare_bytes: int) -> int:
        """Return the bytes that all will take in addition at their peak.

        0 if there is room for the most that they can take, or if admission pays all the same.
        """
        company, share = self.company, self._limits.headroom
        own, most = company.bytes_at_most(newcomer), company.accounting.ceiling.now_bytes
        if company.most_bytes + self._held_back_most_bytes + own <= most:
            return 0
        outlook = self._look_ahead(self._grade(newcomer))
        if outlook is None:
            return 0
        # Some share what they hold, and some would be preempted.
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
                # Not all will find room to their ends; this many will on average.
                part = min(1.0, most / max(1.0, taken_bytes + peak))
                num_later = part * (self._num_expected + 1 + len(newcomer.siblings))
                num_steps = int(outlook.moments[(growth > room_bytes).argmax()])
                if self._pays(newcomer, num_steps, num_later):
                    return 0
        return int(share * peak) - spare_bytes

    def _pays(self, newcomer: Sequence, num_steps: int, num_later: float) -> bool:
        """Return whether admission pays where room will be short after ``num_steps``.

        Until then the newcomer shares steps that are taken anyway; if it waits, it shares later
        ones with ``num_later`` sequences. Then it, or a sequence like it, is preempted and computes
        again what it had, without what others hold too.
        """
        prompt_steps = newcomer.num_tokens / self._limits.max_num_batched_tokens
        gained_s = self._costs.prices.step_s * (num_steps - prompt_steps) / num_later
        num_tokens = int(self._own_part * newcomer.num_tokens) + num_steps
        return gained_s > _LOST_PART * self._costs.recompute_s(num_tokens)

    def _ask(self, newcomer: Sequence, outlook: Outlook) -> tuple[Curves, float]:
        """Return what a newcomer will take after its admission, and the bytes it takes at it.

        The newcomers behind it are worked out with it, as many as were asked for so far: many cost
        little more than one.
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
        """Return the outlook of the running sequences of this grade or a better one, if any."""
        of = grade, self.company.num_left
        if self._outlook is None or self._outlook_of != of:
            running = self.company.prospects(grade)
            if not len(running.count):
                return None
            self._asked.clear()
            self.num_outlooks += 1
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
        """Return the bytes of sequences with these tokens: i64[S, T] for i64[S, T]."""
        tokens = np.minimum(num_tokens, self._limits.max_model_len)
        return self.company.accounting.bytes_alone(tokens, of.longest[:, None])


# -- prefixes that this step computes --------------------------------------------------------------

_MOST_IN_VAIN = 3  # steps that a newcomer waits without finding more of its prefix afterwards


class InBatchPrefixes:
    """Holds back newcomers whose prefix the same step computes, so that they share it afterwards.

    A newcomer waits while a sequence of the step fills the block that it would compute first. So it
    waits for a sequence that goes on, and never for one that waits itself.

    Source: SGLang's in-batch prefix caching, which puts such requests behind others too.
    """

    def __init__(self, room: SlotAllocator) -> None:
        self._room = room
        self.waits_for: dict[int, Sequence] = {}  # by the newcomer's id: the one it waits for
        self._filled: dict[BlockKey, Chunk] = {}
        self._num_seen = 0  # chunks of the step

    def begin_plan(self) -> None:
        """Forget the chunks of the last plan."""
        self.waits_for.clear()
        self._filled.clear()
        self._num_seen = 0

    def holds_back(self, step: PlanBuilder, newcomer: Sequence, attempt: Attempt) -> int:
        """Return how many tokens a newcomer will find if it waits for this step; 0: it need not.

        A newcomer that waits is noted in ``waits_for``.
        """
        if not step.takes_in_text:
            self._num_seen = len(step.chunks)  # chunks of one token fill no shared block
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
        """Note the blocks that the step's new chunks fill."""
        accounting = self._room.accounting
        for chunk in step.chunks[self._num_seen :]:
            stop = chunk.stop - len(chunk.drafts)
            if stop - chunk.start > 1:
                block = accounting.next_block(chunk.sequence.seq_id, chunk.sequence.token_ids)
                if block is not None and block[1] <= stop:
                    self._filled.setdefault(block[0], chunk)
        self._num_seen = len(step.chunks)

    def _num_found_after(self, chunk: Chunk, attempt: Attempt) -> int:
        """Return the tokens that an attempt would find once a chunk is computed.

        Where there are no states, all tokens count that the chunk's sequence will compute.
        """
        other = np.array(chunk.sequence.token_ids[: len(attempt.token_ids) - 1], np.int32)
        different = (attempt.token_ids[: len(other)] != other).nonzero()[0]
        num_common = int(different[0]) if len(different) else len(other)
        if self._room.accounting.state_block_size == 0:
            return num_common
        stop = chunk.stop - len(chunk.drafts)
        keeps = self._room.snapshots.keeps(chunk.sequence, chunk.start, stop)
        return stop if keeps and stop <= num_common else 0
