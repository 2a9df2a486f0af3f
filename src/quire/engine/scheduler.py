"""Which tokens of which sequences the next step computes, and which must wait or make room.

There is no prefill phase and no decode phase: a sequence has tokens and computed tokens, and each
step hands out tokens so that computed catches up. A sequence that has caught up gets its next token
sampled. Room is taken while planning, so a plan can always be carried out.

Which goes first is a ``policy``; which may come beside others, ``admission``; how room is asked
for, ``room``; which makes room for which and how it comes back, ``preemption``.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass

from quire.engine.scheduling.admission import (
    Admission,
    AllocationFailure,
    InBatchPrefixes,
    SlotAllocator,
)
from quire.engine.scheduling.headroom import RunningSet
from quire.engine.scheduling.plan_builder import NO_DRAFTS, Drafts, PlanBuilder
from quire.engine.scheduling.policy import POLICIES, SchedulerLimits
from quire.engine.scheduling.preemption import Preemption, SchedulerStats, SwapSpace
from quire.engine.scheduling.queues import Queues, WaitingReason
from quire.engine.scheduling.step_costs import Costs
from quire.engine.scheduling.update import (
    FaultIsolation,
    append,
    is_embedding,
    kept_drafts,
    mark_computed,
    pooled,
)
from quire.engine.sequence import FinishReason, Request, Sequence
from quire.engine.statistics import Statistics
from quire.engine.step_plan import Chunk, Sampled, StepPlan, TokenOutput
from quire.kv import Accounting, Fits

__all__ = ["NO_DRAFTS", "Drafts", "Scheduler", "SchedulerLimits"]


_ASKED_AGAIN = 16  # plans after a refusal


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why one that waits could not come.

    That stays so for some plans while others only grow. Then it is asked anew: the closer their
    ends come, the less a newcomer grows beside them.
    """

    newcomer: Sequence
    reason: WaitingReason
    num_plans: int  # that there had been
    num_left: int  # that had ended or made room by then
    free_bytes: int

    def stands(self, newcomer: Sequence, num_plans: int, num_left: int, free_bytes: int) -> bool:
        return (
            newcomer is self.newcomer
            and num_plans - self.num_plans < _ASKED_AGAIN
            and num_left == self.num_left
            and free_bytes <= self.free_bytes
        )


class Scheduler:
    """Serves sequences in the order of its policy; the last of them make room and go on later."""

    def __init__(
        self,
        accounting: Accounting,
        limits: SchedulerLimits,
        *,
        swap: SwapSpace | None = None,
        costs: Costs | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        self.limits = limits
        self.token_budget = limits.max_num_batched_tokens  # of a step, for now: at least 1
        self.statistics = statistics or Statistics(limits.max_model_len)
        self.swap = swap or SwapSpace()
        self.costs = costs or Costs()
        policy = POLICIES[limits.policy]
        self._grade = policy.grade
        self._queues = Queues(policy, RunningSet(limits, policy, accounting))
        self._admission = Admission(limits, policy, self._queues, self.costs)
        self._room = SlotAllocator(accounting, self.swap, limits, self.statistics)
        self.suspects = FaultIsolation()
        self._preemption = Preemption(policy, self.swap, self.costs, self.statistics)
        self._in_batch = InBatchPrefixes(self._room)
        self._num_sequences = 0  # that have ever come
        self._ended: list[Sequence] = []  # since the last update, to be reported by the next one
        self._outputs: list[TokenOutput] = []  # of an update that has not come to its end
        self._made_room: set[int] = set()  # in this plan
        self._lacking_bytes = 0  # to the first that waits, in this plan; kept ones not counted
        self._num_plans = 0
        self._refusal: _Refusal | None = None  # of the first that waits, while it stands

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        return self._queues.num_waiting

    @property
    def waiting_by_reason(self) -> dict[str, int]:
        """How many wait for what, as of the last plan. Any thread may ask."""
        return self._queues.by_reason()

    @property
    def num_preemptions(self) -> int:
        return self.statistics.num_preemptions

    @property
    def stats(self) -> SchedulerStats:
        return self._preemption.stats

    @property
    def has_unfinished(self) -> bool:
        return bool(self.num_running or self.num_waiting or self._ended or self._outputs)

    @property
    def decoding(self) -> list[Sequence]:
        """The running sequences of which only the last token is to be computed, each by itself."""
        return self._queues.decoding

    @property
    def held_back(self) -> Mapping[int, Sequence]:
        """By id of each that the last plan held back: the one that computes what it begins with."""
        return self._in_batch.waits_for

    @property
    def most_logits(self) -> int:
        """Tokens of a step whose logits may be wanted, guesses apart: of one that has so many."""
        if any(sequence.lacks_prompt_logprobs for sequence in self._queues.on_their_own):
            return self.limits.max_num_batched_tokens
        return min(self.limits.max_num_seqs, self.num_running + self.num_waiting)

    def check_request(self, request: Request) -> None:
        """Raises: RequestTooLong for a prompt that can never run."""
        self.limits.check_request(request, self._accounting)

    def add(self, request: Request, *, arrived_s: float = 0.0) -> list[Sequence]:
        """Queue a request's continuations. Raises: RequestTooLong."""
        self.check_request(request)
        first = self._num_sequences
        self._num_sequences += request.params.n
        leader, *siblings = (
            Sequence(request, seq_id=first + i, index=i, arrived_s=arrived_s)
            for i in range(request.params.n)
        )
        self._lead(leader, siblings)
        return [leader, *siblings]

    def plan(self, drafts: Drafts = NO_DRAFTS) -> StepPlan:
        """The next step. Its room is already taken; it may be empty if sequences only ended.

        ``drafts``: guesses at what comes next, by sequence id. They are left out where there is no
        room for them.
        """
        self.suspects.acquit()
        while True:
            step = PlanBuilder(
                self.limits,
                drafts,
                self._room.snapshots,
                budget=self.token_budget,
                one_chunk=bool(self.suspects),
            )
            self._begin_plan()
            self._queues.first_waits_for = self._let_come(step)
            self._serve(step)
            if step.takes_in_text:  # what waits may find more of it next time
                self._refusal = None
            if step.chunks or not self._give_way():
                return StepPlan.of(step.chunks, saves=self._preemption.drain())

    def update(self, plan: StepPlan, sampled: Several[Sampled]) -> list[TokenOutput]:
        """Append the sampled tokens (of each of ``plan.draws``), free what has ended."""
        draws = list(zip(plan.draws, sampled, strict=True))
        num_kept = kept_drafts(draws)
        self.statistics.note_step(plan, num_kept)
        for draw, result in draws:
            if result.error:
                draw.sequence.fault = result.fault
                self.fail(draw.sequence, result.error)
        for chunk in plan.chunks:
            if chunk.pools and not is_embedding(chunk.sequence.embedding):
                chunk.sequence.fault = "model"
                self.fail(chunk.sequence, "the model's hidden state is not all finite numbers")
        mark_computed(self._room, self._preemption, plan.chunks, num_kept)
        for leader in [draw.sequence for draw, _ in draws if draw.sequence.siblings]:
            self._part(leader)
        self._outputs += [
            TokenOutput(sequence=ended, token_id=None, finish_reason=ended.finish_reason)
            for ended in self._ended
        ]
        self._ended.clear()
        self._outputs += pooled(plan.chunks)
        for draw, result in draws:
            if draw.sequence.finish_reason is None:
                self._outputs += append(draw.sequence, result, self.limits)
        self.statistics.note_tokens(self._outputs)
        for output in self._outputs:
            if output.finish_reason is not None:
                self.finish(output.sequence, output.finish_reason)
        outputs, self._outputs = self._outputs, []
        return outputs

    def note_steps(self, count: int) -> None:
        """Note steps that were taken without a plan: each gave every sequence one token."""
        self._num_plans += count
        self._queues.company.note_step(count)

    def choose(self, sequence: Sequence, token_id: int) -> None:
        """Go on with a token that was chosen outside."""
        sequence.token_ids.append(token_id)
        self._queues.chosen(sequence)

    def replace(self, sequence: Sequence, parent: Sequence) -> None:
        """Drop a continuation and go on from where another one is, sharing what that one holds.

        Between two steps. Both await a choice then.
        """
        self._queues.leave(sequence)
        self._accounting.free(sequence.seq_id)
        self.swap.release(sequence)
        sequence.token_ids = list(parent.token_ids)
        sequence.awaits_choice = parent.awaits_choice
        self._branch(parent, sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, detail: str = "") -> None:
        """End a sequence, wherever it is, and free what it holds. A second call does nothing."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason, sequence.finish_detail = reason, detail
        self.statistics.note_end(sequence, reason)
        if reason in ("stop", "length") and sequence.request.pooling is None:
            self._admission.note_ended(sequence.num_output_tokens, reason)
        if not self._queues.end(sequence):
            return
        if sequence.siblings:
            heir, *others = self._queues.part(sequence)
            self._lead(heir, others)
        self.swap.release(sequence)
        self._accounting.free(sequence.seq_id, forget=sequence.fault == "model")

    def fail(self, sequence: Sequence, detail: str, reason: FinishReason = "error") -> None:
        """End a sequence that cannot be computed; the next update reports it."""
        if sequence.finish_reason is None:
            self._ended.append(sequence)
            self.finish(sequence, reason, detail)

    def finish_all(self, reason: FinishReason, detail: str = "") -> None:
        """End every sequence; there is nothing left to report."""
        while sequences := self._queues.on_their_own:  # a leader that ends leaves an heir
            for sequence in sequences:
                self.finish(sequence, reason, detail)
        self._ended.clear()

    def preempt_youngest(self, *, spare_oldest: bool) -> bool:
        """Take a running sequence's room away between two steps; False if there is none to take.

        With ``spare_oldest`` one sequence goes on, so that one always does. Nothing is saved of it:
        that would take memory, where it is memory that is lacking.
        """
        running = self._queues.running
        if len(running) <= spare_oldest:
            return False
        # The last one begins anew in one piece, or ends if it is too long for that now.
        running[-1].needs_room_at_once = len(running) == 1
        self._preempt(running[-1], "the machine", may_swap=False)
        return True

    def lose(self, sequence: Sequence) -> None:
        """What was saved of a sequence cannot be read: it has nothing computed, and goes back."""
        self.swap.release(sequence)
        if self._queues.is_running(sequence):
            self._send_back(sequence)

    def drop_saved(self) -> None:
        """What is swapped out is of no use any more."""
        for sequence in self._queues.on_their_own:
            self.swap.release(sequence)

    def restart(self, accounting: Accounting) -> None:
        """Every sequence begins anew, in an empty cache; what is swapped out stays there."""
        self._room.accounting = accounting
        for save in self._preemption.drain():
            self.swap.release(save.sequence)
        for sequence in self._queues.all_wait(accounting):
            self._announce(sequence)

    def check(self) -> None:
        """Raises: AssertionError if the queues and the cache disagree."""
        self._accounting.check()
        self._queues.check(self._accounting)
        self.swap.check(self._queues.on_their_own)
        assert self.num_running <= self.limits.max_num_seqs

    @property
    def _accounting(self) -> Accounting:
        return self._room.accounting

    # -- queues ----------------------------------------------------------------------------------

    def _lead(self, leader: Sequence, siblings: list[Sequence]) -> None:
        """Queue a sequence whose prompt others wait for."""
        self._announce(leader)
        self._queues.follow(leader, siblings)
        self._queues.wait(leader)

    def _part(self, leader: Sequence) -> None:
        """The prompt is computed: its siblings share it from now on, and go their own ways."""
        for sibling in self._queues.part(leader):
            sibling.num_cached_tokens = leader.num_cached_tokens
            sibling.prompt_logprobs = leader.prompt_logprobs
            self.statistics.note_shared(leader, sibling)
            self._branch(leader, sibling)

    def _branch(self, parent: Sequence, sequence: Sequence) -> None:
        """Share what ``parent`` holds with a sequence of the same tokens; else it computes them."""
        has_seat = self._queues.is_running(parent) and self.num_running < self.limits.max_num_seqs
        if has_seat and isinstance(self._accounting.fork(parent.seq_id, sequence.seq_id), Fits):
            sequence.num_computed_tokens = parent.num_computed_tokens
            sequence.most_computed_tokens = parent.num_computed_tokens
            self._queues.run(sequence)
        else:
            self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        """Let a sequence that holds nothing wait."""
        self._announce(sequence)
        self._queues.wait(sequence)

    def _announce(self, sequence: Sequence) -> None:
        sequence.num_computed_tokens = 0
        if sequence.lacks_prompt_logprobs:
            sequence.prompt_logprobs = []
        self._accounting.add(
            sequence.seq_id,
            max_tokens=self.limits.longest(sequence.request),
            keys=sequence.request.keys,
            priority=sequence.request.priority,
        )

    # -- a plan ----------------------------------------------------------------------------------

    def _begin_plan(self) -> None:
        self._num_plans += 1
        self._made_room.clear()
        self._lacking_bytes = 0
        self._admission.begin_plan()
        self._in_batch.begin_plan()
        self._queues.num_held_back = 0

    def _let_come(self, step: PlanBuilder) -> WaitingReason:
        """Admit as many as can come; why the next one could not."""
        queues, served = self._queues, None
        while len(queues.waiting) > queues.num_held_back:
            newcomer = queues.waiting[queues.num_held_back]
            if self._refusal and self._refusal.stands(newcomer, *self._free()):
                return self._refusal.reason
            if not step.budget:
                return "token_budget"
            if newcomer.seq_id in self._made_room:
                return "preempted"
            lost, grade = self.num_preemptions, self._grade(newcomer)
            if served is None or grade > served:
                # First those who would not make room for it.
                self._serve(step, at_most=grade)
                served = grade
                # Room for which a sequence was just preempted is not a newcomer's.
                if self.num_preemptions > lost:
                    return "kv_memory"
                continue  # one that ended meanwhile may have left an heir
            if not self._admit(step, newcomer):
                full = self._num_seats_taken >= self.limits.max_num_seqs
                reason: WaitingReason = "max_num_seqs" if full else "kv_memory"
                self._refusal = _Refusal(newcomer, reason, *self._free())
                return reason
        return "next_step"

    def _serve(self, step: PlanBuilder, *, at_most: int | None = None) -> None:
        """What running sequences have to compute, of grades up to ``at_most``."""
        running, served = self._queues.running, step.served
        if len(served) == len(running):  # all of them: one with a chunk makes no room
            return
        if at_most is not None:
            running = running[: self._queues.num_running_up_to(at_most)]
        due = [s for s in running if s.seq_id not in served and not s.awaits_choice]
        if step.one_chunk:
            due = self.suspects.among(due, or_all=at_most is None)
        while step.budget and due:
            chunks = step.chunks_due(due)
            fitting = self._accounting.try_extend_each(
                [chunk.sequence.seq_id for chunk in chunks], [chunk.stop for chunk in chunks]
            )
            step.add(chunks[:fitting])
            if fitting == len(chunks):
                break
            step.withdraw_drafts(self._accounting)  # before one makes room for what is certain
            self._extend(step, due[fitting])
            due = [s for s in due[fitting + 1 :] if s.seq_id not in self._made_room]

    def _extend(self, step: PlanBuilder, sequence: Sequence) -> None:
        """Take room for a running sequence's next chunk; others make room for it, or it does."""
        running = self._queues.running
        while True:
            answer = self._room.take(
                sequence,
                step.budget,
                self._room.look_up(sequence, step.budget),
                is_running=True,
                num_others=len(running) - 1,
                kept_bytes=0,
            )
            if isinstance(answer, Chunk):
                step.add([answer])
                return
            if answer.final:
                self._end_for_lack_of_room(sequence, answer)
                return
            alone, place = len(running) == 1, self._queues.place(sequence)
            # The first one makes no room for others, so that one always gets on.
            victim = self._preemption.victim(running if alone else running[max(1, place) :])
            # Alone and yet without room: growing in place takes more than there is, as a copy
            # into a larger buffer does. Begun anew in one piece it fits, or else never will.
            victim.needs_room_at_once = alone
            self._preempt(victim, f"sequence {sequence.seq_id}")
            if victim is sequence:
                return

    def _admit(self, step: PlanBuilder, newcomer: Sequence) -> bool:
        """Let one come that waits, or hold it back for a prefix that this step computes.

        Those of a worse grade make room for it. False: it waits, and all behind it.
        """
        running, grade = self._queues.running, self._grade(newcomer)
        displaces: bool | None = None
        while True:
            worse = running[self._queues.num_running_up_to(grade) :]
            has_seat = self._num_seats_taken < self.limits.max_num_seqs
            if not (has_seat or worse):
                return False
            attempt = self._room.look_up(newcomer, step.budget)
            if displaces is None:
                num_found = self._in_batch.holds_back(step, newcomer, attempt)
                if num_found:
                    self._queues.num_held_back += 1
                    self._admission.note_held_back(newcomer, num_found)
                    return True
            kept_bytes = self._admission.kept_bytes(newcomer, self._preemption.spare_bytes)
            if has_seat:
                answer = self._room.take(
                    newcomer,
                    step.budget,
                    attempt,
                    is_running=False,
                    num_others=self.num_running,
                    kept_bytes=kept_bytes,
                )
                if isinstance(answer, Chunk):
                    newcomer.came_back = newcomer.num_preemptions > 0
                    newcomer.most_found_tokens = -1
                    self._queues.come(newcomer)
                    self._admission.note_came(newcomer)
                    step.add([answer])
                    return True
                if answer.final:
                    self._end_for_lack_of_room(newcomer, answer)
                    return True
                self._lacking_bytes = answer.lacking_bytes
            if displaces is None:  # only if it comes in the end
                displaces = bool(worse) and self._admission.could_displace(newcomer, kept_bytes)
            if not worse or not displaces:
                return False
            step.withdraw_drafts(self._accounting)
            self._preempt(self._preemption.victim(worse), f"sequence {newcomer.seq_id}")

    @property
    def _num_seats_taken(self) -> int:
        """Those that are held back have theirs already."""
        return self.num_running + self._queues.num_held_back

    def _free(self) -> tuple[int, int, int]:
        """What a refusal depends on: plans, how many have left, and free bytes, also in swap."""
        accounting = self._accounting
        free_bytes = accounting.ceiling.now_bytes - accounting.held_bytes
        free_bytes += self._preemption.spare_bytes
        return self._num_plans, self._admission.company.num_left, free_bytes

    def _give_way(self) -> bool:
        """No sequence can be computed: those that await a choice make room for one that waits.

        False if there are not both: some that await a choice, and one that waits for room.
        """
        if not (self._queues.running and self._queues.waiting):
            return False
        enough = self._accounting.held_bytes - self._lacking_bytes
        while self._queues.running:
            self._preempt(self._queues.running[-1], "one that it waits for")
            if self._accounting.held_bytes <= enough:
                break
        return True

    def _preempt(self, victim: Sequence, why: str, *, may_swap: bool = True) -> None:
        """Take a sequence's room away. It goes back to the queue, and comes back later."""
        self._preemption.take(victim, self._accounting, why, may_swap=may_swap)
        self._made_room.add(victim.seq_id)
        self._send_back(victim)

    def _send_back(self, sequence: Sequence) -> None:
        """From the running to the waiting ones, with nothing computed."""
        self._queues.leave(sequence)
        self._accounting.free(sequence.seq_id)
        self._begin(sequence)

    def _end_for_lack_of_room(self, sequence: Sequence, refusal: AllocationFailure) -> None:
        self.fail(sequence, refusal.detail(self.limits.longest(sequence.request)), "capacity")
