"""The scheduler: which tokens of which sequences the next step computes, and which sequences wait.

There is no prefill phase and no decode phase. A sequence has tokens and computed tokens, and each
step hands out tokens so that the computed ones catch up; then the sequence's next token is sampled.
The scheduler takes room while it plans, so that a plan can always be carried out.

``plan`` admits the sequences that wait (``_admit``), extends those that run (``_serve``) and
preempts the last of them where room is short (``_preempt``); ``update`` takes in what the step
computed. The order of sequences is ``scheduling.policy``'s, and how much room a newcomer must leave
free is ``scheduling.admission``'s.
"""

import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np

from quire.engine.scheduling.admission import Admission, InBatchPrefixes
from quire.engine.scheduling.headroom import RunningSet
from quire.engine.scheduling.offload_policy import OffloadPolicy
from quire.engine.scheduling.plan_builder import NO_DRAFTS, Drafts, FaultIsolation, PlanBuilder
from quire.engine.scheduling.policy import POLICIES, SchedulerLimits
from quire.engine.scheduling.queues import Queues, WaitingReason
from quire.engine.scheduling.slot_allocator import AllocationFailure, Attempt, SlotAllocator
from quire.engine.scheduling.step_costs import Costs
from quire.engine.scheduling.swap_space import SwapSpace, num_bytes, readable_tokens, slots_of
from quire.engine.sequence import FinishReason, Request, Sequence
from quire.engine.statistics import Statistics
from quire.engine.step_plan import Chunk, Sampled, Save, StepPlan, TokenOutput
from quire.kv import Accounting, Fits, Retention
from quire.units import format_bytes

log = logging.getLogger(__name__)

__all__ = ["NO_DRAFTS", "Drafts", "Scheduler", "SchedulerLimits"]


_ASKED_AGAIN = 16  # plans after a refusal


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why the first waiting sequence was refused.

    A refusal stands for some plans while the running sequences only grow. Then the scheduler asks
    again: the closer their ends come, the less a newcomer grows beside them.
    """

    newcomer: Sequence
    reason: WaitingReason
    num_plans: int  # at the refusal
    num_left: int  # sequences that had ended or been preempted by then
    free_bytes: int

    def stands(self, newcomer: Sequence, num_plans: int, num_left: int, free_bytes: int) -> bool:
        """Return whether asking again would give the same answer."""
        return (
            newcomer is self.newcomer
            and num_plans - self.num_plans < _ASKED_AGAIN
            and num_left == self.num_left
            and free_bytes <= self.free_bytes
        )


class Scheduler:
    """Serves sequences in the order of its policy; the last of them are preempted for the first."""

    def __init__(
        self,
        accounting: Accounting,
        limits: SchedulerLimits,
        *,
        swap: SwapSpace | None = None,
        costs: Costs | None = None,
        statistics: Statistics | None = None,
        offload: OffloadPolicy | None = None,
    ) -> None:
        self.limits = limits
        self.offload = offload  # which asks tiers for what newcomers do not find cached
        self.token_budget = limits.max_num_batched_tokens  # of a step at present: at least 1
        self.statistics = statistics or Statistics(limits.max_model_len)
        self.swap = swap or SwapSpace()
        self.costs = costs or Costs()
        policy = POLICIES[limits.policy]
        self._grade = policy.grade
        self._queues = Queues(policy, RunningSet(limits, policy, accounting))
        self._admission = Admission(limits, policy, self._queues, self.costs)
        self._room = SlotAllocator(accounting, self.swap, limits, self.statistics)
        self.suspects = FaultIsolation()
        self._in_batch = InBatchPrefixes(self._room)
        self._num_sequences = 0  # added since the start
        self._ended: list[Sequence] = []  # since the last update; the next one reports them
        self._outputs: list[TokenOutput] = []  # of an update that raised an error half-way
        self._saves: list[Save] = []  # of sequences that this plan preempts
        self._preempted: set[int] = set()  # in this plan
        self._lacking_bytes = 0  # to the first waiting sequence, without the headroom
        self._num_plans = 0
        self._refusal: _Refusal | None = None  # of the first waiting sequence, while it stands

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        return self._queues.num_waiting

    @property
    def waiting_by_reason(self) -> dict[str, int]:
        """How many sequences wait for what, since the last plan. Any thread may ask."""
        return self._queues.by_reason()

    @property
    def num_preemptions(self) -> int:
        return self.statistics.num_preemptions

    @property
    def has_unfinished(self) -> bool:
        return bool(self.num_running or self.num_waiting or self._ended or self._outputs)

    @property
    def decoding(self) -> list[Sequence]:
        """The running sequences of which the next step computes the last token alone."""
        return self._queues.decoding

    @property
    def held_back(self) -> Mapping[int, Sequence]:
        """By id of each sequence that the last plan held back: the one that computes its prefix."""
        return self._in_batch.waits_for

    @property
    def most_logits(self) -> int:
        """The most tokens of one step whose logits are wanted, drafts apart."""
        if any(sequence.lacks_prompt_logprobs for sequence in self._queues.on_their_own):
            return self.limits.max_num_batched_tokens
        return min(self.limits.max_num_seqs, self.num_running + self.num_waiting)

    def check_request(self, request: Request) -> None:
        """Check that a prompt can run. Raises: RequestTooLong if it never can."""
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
        """Plan the next step and take its room; the plan is empty if sequences only ended.

        ``drafts`` are guesses at the next tokens, by sequence id. The plan leaves out those for
        which there is no room.
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
            if step.takes_in_text:  # a waiting sequence may find more of its prompt next time
                self._refusal = None
            if step.chunks or not self._give_way():
                return StepPlan.of(
                    step.chunks,
                    saves=self._drain_saves(),
                    num_outlooks=self._admission.num_outlooks,
                )

    def update(self, plan: StepPlan, sampled: Several[Sampled]) -> list[TokenOutput]:
        """Append the sampled tokens (of each of ``plan.draws``) and free what has ended."""
        draws = list(zip(plan.draws, sampled, strict=True))
        num_kept = {  # drafts that hold, by the id of each sequence that had some and goes on
            draw.sequence.seq_id: len(result.token_ids) - 1
            for draw, result in draws
            if draw.drafts and not result.error
        }
        self.statistics.note_step(plan, num_kept)
        for draw, result in draws:
            if result.error:
                draw.sequence.fault = result.fault
                self.fail(draw.sequence, result.error)
        pooling = [chunk for chunk in plan.chunks if chunk.pools]
        for chunk in pooling:
            found = chunk.sequence.embedding
            if found is None or not np.isfinite(found).all():
                chunk.sequence.fault = "model"
                self.fail(chunk.sequence, "the model's hidden state is not all finite numbers")
        self._mark_computed(plan.chunks, num_kept)
        for leader in [draw.sequence for draw, _ in draws if draw.sequence.siblings]:
            self._part(leader)
        self._outputs += [
            TokenOutput(sequence=ended, token_id=None, finish_reason=ended.finish_reason)
            for ended in self._ended
        ]
        self._ended.clear()
        self._outputs += [
            TokenOutput(sequence=chunk.sequence, token_id=None, finish_reason="stop")
            for chunk in pooling
            if chunk.sequence.finish_reason is None
        ]
        for draw, result in draws:
            if draw.sequence.finish_reason is None:
                self._outputs += self._append(draw.sequence, result)
        self.statistics.note_tokens(self._outputs)
        for output in self._outputs:
            if output.token_id is not None and output.sequence.lacks_retention:
                self._retain(output.sequence)
            if self.offload is not None and output.sequence.request.leaves_blocks:
                self.offload.offer(output.sequence)
            if output.finish_reason is not None:
                self.finish(output.sequence, output.finish_reason)
        outputs, self._outputs = self._outputs, []
        return outputs

    def note_steps(self, count: int) -> None:
        """Note steps that were taken without a plan: each gave every sequence one token."""
        self._num_plans += count
        self._queues.company.note_step(count)

    def choose(self, sequence: Sequence, token_id: int) -> None:
        """Append a token that a search chose, and let the sequence go on."""
        sequence.token_ids.append(token_id)
        self._queues.chosen(sequence)

    def replace(self, sequence: Sequence, parent: Sequence) -> None:
        """Drop a beam and fork ``parent`` in its place, between two steps. Both await a choice."""
        self._queues.leave(sequence)
        self._accounting.free(sequence.seq_id)
        self.swap.release(sequence)
        sequence.token_ids = list(parent.token_ids)
        sequence.awaits_choice = parent.awaits_choice
        self._branch(parent, sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, detail: str = "") -> None:
        """End a sequence and free what it holds. A second call does nothing."""
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
        if self.offload is not None:
            self.offload.forget(sequence)
            if sequence.fault == "model":
                self.offload.drop(sequence)
        self._accounting.free(
            sequence.seq_id,
            forget=sequence.fault == "model",
            # Of one that was broken off, the client may ask again.
            ended=reason in ("stop", "length") and sequence.request.params.cache_hint == "ends",
        )

    def fail(self, sequence: Sequence, detail: str, reason: FinishReason = "error") -> None:
        """End a sequence that cannot be computed. The next update reports it."""
        if sequence.finish_reason is None:
            self._ended.append(sequence)
            self.finish(sequence, reason, detail)

    def finish_all(self, reason: FinishReason, detail: str = "") -> None:
        """End every sequence, and report none of them."""
        while sequences := self._queues.on_their_own:  # a leader that ends leaves an heir
            for sequence in sequences:
                self.finish(sequence, reason, detail)
        self._ended.clear()

    def preempt_youngest(self, *, spare_oldest: bool) -> bool:
        """Take the last running sequence's room between two steps. Return False if none is left.

        With ``spare_oldest`` the only running sequence is not preempted. No entries are saved:
        saving takes memory, which is what is short.
        """
        running = self._queues.running
        if len(running) <= spare_oldest:
            return False
        # A sequence that was alone comes back in one piece, or ends if it is too long for that.
        running[-1].needs_room_at_once = len(running) == 1
        self._preempt(running[-1], "the machine", may_swap=False)
        return True

    def lose(self, sequence: Sequence) -> None:
        """Drop a sequence's saved entries, which cannot be read, and let it compute them again."""
        self.swap.release(sequence)
        if self._queues.is_running(sequence):
            self._send_back(sequence)

    def drop_saved(self) -> None:
        """Drop all saved entries."""
        for sequence in self._queues.on_their_own:
            self.swap.release(sequence)

    def restart(self, accounting: Accounting) -> None:
        """Let every sequence begin anew in an empty cache. Saved entries stay in swap."""
        self._room.accounting = accounting
        if self.offload is not None:
            self.offload.use(accounting)
        for save in self._drain_saves():
            self.swap.release(save.sequence)
        for sequence in self._queues.all_wait(accounting):
            self._register(sequence)

    def check(self) -> None:
        """Check that the queues agree with the cache. Raises: AssertionError."""
        self._accounting.check()
        self._queues.check(self._accounting)
        self.swap.check(self._queues.on_their_own)
        assert self.num_running <= self.limits.max_num_seqs

    @property
    def _accounting(self) -> Accounting:
        return self._room.accounting

    # -- queues ----------------------------------------------------------------------------------

    def _lead(self, leader: Sequence, siblings: list[Sequence]) -> None:
        """Queue a sequence whose prompt ``siblings`` wait for."""
        self._register(leader)
        self._queues.follow(leader, siblings)
        self._queues.wait(leader)

    def _part(self, leader: Sequence) -> None:
        """Let siblings share the prompt that their leader has computed, and go on by themselves."""
        for sibling in self._queues.part(leader):
            sibling.num_cached_tokens = leader.num_cached_tokens
            sibling.prompt_logprobs = leader.prompt_logprobs
            self.statistics.note_shared(leader, sibling)
            self._branch(leader, sibling)

    def _branch(self, parent: Sequence, sequence: Sequence) -> None:
        """Fork ``parent`` into a sequence of the same tokens, or let the sequence compute them."""
        has_seat = self._queues.is_running(parent) and self.num_running < self.limits.max_num_seqs
        if has_seat and isinstance(self._accounting.fork(parent.seq_id, sequence.seq_id), Fits):
            sequence.num_computed_tokens = parent.num_computed_tokens
            sequence.most_computed_tokens = parent.num_computed_tokens
            self._queues.run(sequence)
        else:
            self._register(sequence)
            self._queues.wait(sequence)

    def _register(self, sequence: Sequence) -> None:
        """Tell the accounting of a sequence that has no tokens computed."""
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
        self._preempted.clear()
        self._lacking_bytes = 0
        self._admission.begin_plan()
        self._in_batch.begin_plan()
        self._queues.num_held_back = 0

    def _let_come(self, step: PlanBuilder) -> WaitingReason:
        """Admit the sequences that can come. Return why the next one cannot."""
        queues, served = self._queues, None
        while len(queues.waiting) > queues.num_held_back:
            newcomer = queues.waiting[queues.num_held_back]
            if self._refusal and self._refusal.stands(newcomer, *self._free()):
                return self._refusal.reason
            if not step.budget:
                return "token_budget"
            if newcomer.seq_id in self._preempted:
                return "preempted"
            lost, grade = self.num_preemptions, self._grade(newcomer)
            if served is None or grade > served:
                # The running sequences that it could not displace go first.
                self._serve(step, at_most=grade)
                served = grade
                # Room that a preempted sequence has just left is not a newcomer's.
                if self.num_preemptions > lost:
                    return "kv_memory"
                continue  # a leader that has ended may have left an heir in the queue
            if not self._admit(step, newcomer):
                full = self._num_seats_taken >= self.limits.max_num_seqs
                reason: WaitingReason = "max_num_seqs" if full else "kv_memory"
                self._refusal = _Refusal(newcomer, reason, *self._free())
                return reason
        return "next_step"

    def _serve(self, step: PlanBuilder, *, at_most: int | None = None) -> None:
        """Extend the running sequences of grades up to ``at_most``, or preempt for them."""
        running, served = self._queues.running, step.served
        if len(served) == len(running):
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
            step.withdraw_drafts(self._accounting)  # before a sequence is preempted
            self._extend(step, due[fitting])
            due = [s for s in due[fitting + 1 :] if s.seq_id not in self._preempted]

    def _extend(self, step: PlanBuilder, sequence: Sequence) -> None:
        """Take room for a running sequence's next chunk, and preempt others for it, or itself."""
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
            # The first sequence is never preempted for others, so that one always goes on.
            victim = self._victim(running if alone else running[max(1, place) :])
            # A sequence that is alone and finds no room grows by copying into a larger buffer.
            # Begun anew in one piece it fits, or it never will.
            victim.needs_room_at_once = alone
            self._preempt(victim, f"sequence {sequence.seq_id}")
            if victim is sequence:
                return

    def _admit(self, step: PlanBuilder, newcomer: Sequence) -> bool:
        """Admit a waiting sequence, or hold it back for a prefix that this step computes.

        Running sequences of a worse grade are preempted for it. Return False if it must wait, and
        all behind it.
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
                if self._waits_for_tiers(newcomer, attempt):
                    self._queues.num_held_back += 1
                    return True
                num_found = self._in_batch.holds_back(step, newcomer, attempt)
                if num_found:
                    self._queues.num_held_back += 1
                    self._admission.note_held_back(newcomer, num_found)
                    return True
            kept_bytes = self._admission.kept_bytes(newcomer, self._spare_swap_bytes)
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
                    if self.offload is not None:
                        self.offload.note_admitted(newcomer, attempt.hit)
                    step.add([answer])
                    return True
                if answer.final:
                    self._end_for_lack_of_room(newcomer, answer)
                    return True
                self._lacking_bytes = answer.lacking_bytes
            if displaces is None:  # sequences are preempted only if the newcomer then fits
                displaces = bool(worse) and self._admission.could_displace(newcomer, kept_bytes)
            if not worse or not displaces:
                return False
            step.withdraw_drafts(self._accounting)
            self._preempt(self._victim(worse), f"sequence {newcomer.seq_id}")

    def _waits_for_tiers(self, newcomer: Sequence, attempt: Attempt) -> bool:
        """Return whether blocks that a newcomer would compute are on their way from tiers."""
        return self.offload is not None and self.offload.holds_back(
            newcomer, attempt.token_ids, attempt.hit
        )

    @property
    def _num_seats_taken(self) -> int:
        """Seats of the running sequences, and of those that are held back."""
        return self.num_running + self._queues.num_held_back

    def _free(self) -> tuple[int, int, int]:
        """Return what a refusal depends on: plans, sequences that have left, and free bytes."""
        accounting = self._accounting
        free_bytes = accounting.ceiling.now_bytes - accounting.held_bytes
        free_bytes += self._spare_swap_bytes
        return self._num_plans, self._admission.company.num_left, free_bytes

    def _give_way(self) -> bool:
        """Preempt sequences that await a choice, where no other runs, for one that waits for room.

        Return False if there are not both.
        """
        # What waits for a prefix or for tiers needs no room yet.
        if not (self._queues.running and self._queues.num_waiting_for_room):
            return False
        enough = self._accounting.held_bytes - self._lacking_bytes
        while self._queues.running:
            self._preempt(self._queues.running[-1], "one that it waits for")
            if self._accounting.held_bytes <= enough:
                break
        return True

    # -- preemption ------------------------------------------------------------------------------

    def _victim(self, candidates: Several[Sequence]) -> Sequence:
        """Return the sequence to preempt, of these in their order: the last of the worst grade.

        A sequence that has just come back is spared once, or it would be computed again and again.
        """
        worst = self._grade(candidates[-1])
        choice = [s for s in candidates if self._grade(s) == worst]
        victim = next((s for s in reversed(choice) if not s.came_back), choice[-1])
        for sequence in choice:
            sequence.came_back = False
        return victim

    def _preempt(self, victim: Sequence, why: str, *, may_swap: bool = True) -> None:
        """Take a sequence's room and queue it again; save its entries if that is the cheaper way.

        Otherwise it computes them again. The log has the cost of both.
        """
        num_tokens = victim.num_computed_tokens
        tokens = readable_tokens(self._accounting.groups, 0, num_tokens)
        size = num_bytes(self._accounting.groups, tokens)
        swap_s, recompute_s = self.costs.swap_s(size), self.costs.recompute_s(num_tokens)
        swaps = (
            may_swap
            and 0 < size <= self.swap.free_bytes
            and swap_s < recompute_s
            and not victim.lacks_prompt_logprobs  # for which its tokens are computed again anyway
        )
        log.info(
            "sequence %d is preempted for %s: %d tokens, %s; %s, %.3g s (to recompute them: "
            "%.3g s, to swap: %.3g s with %s of swap space free)",
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
        self.statistics.num_preemptions += 1
        if swaps:
            self.statistics.num_swaps += 1
            self.statistics.saved_bytes += size
            self.swap.take(victim, size)
            slots = tuple(
                slots_of(self._accounting, group, victim.seq_id, own)
                for group, own in enumerate(tokens)
            )
            self._saves.append(Save(sequence=victim, slots=slots, num_bytes=size))
        self._preempted.add(victim.seq_id)
        self._send_back(victim)

    def _send_back(self, sequence: Sequence) -> None:
        """Move a running sequence to the waiting ones, with nothing computed."""
        self._queues.leave(sequence)
        self._accounting.free(sequence.seq_id)
        self._register(sequence)
        self._queues.wait(sequence)

    def _drain_saves(self) -> tuple[Save, ...]:
        """Return what is to be saved before storage changes.

        A sequence that was admitted again in the same plan found its entries still cached.
        """
        saves, self._saves = self._saves, []
        return tuple(save for save in saves if save.sequence.num_saved_tokens)

    @property
    def _spare_swap_bytes(self) -> int:
        """Free swap space, if saving is cheaper than computing again."""
        free_bytes = self.swap.free_bytes
        return free_bytes if free_bytes and self.costs.swap_pays else 0

    def _end_for_lack_of_room(self, sequence: Sequence, refusal: AllocationFailure) -> None:
        self.fail(sequence, refusal.detail(self.limits.longest(sequence.request)), "capacity")

    # -- an update -------------------------------------------------------------------------------

    def _retain(self, sequence: Sequence) -> None:
        """Have the cache keep of a computed prompt what its client asks for."""
        request = sequence.request
        sequence.lacks_retention = False
        sequence.num_retained_tokens = self._accounting.retain(
            sequence.seq_id,
            Retention(
                owner=request.keys.tenant,
                marks=request.retained_tokens,
                clock=lambda: self.statistics.now_s,
            ),
        )

    def _mark_computed(self, chunks: Iterable[Chunk], num_kept: Mapping[int, int]) -> None:
        """Tell the cache which tokens are computed: it may share full blocks of them.

        ``num_kept``: how many of a chunk's drafts hold, by sequence id.
        """
        going_on = [chunk for chunk in chunks if chunk.sequence.finish_reason is None]
        if not going_on:
            return
        accounting, counts, tokens = self._accounting, list[int](), list[int]()
        for chunk in going_on:
            sequence, stop = chunk.sequence, chunk.stop
            if chunk.drafts:
                stop += num_kept[sequence.seq_id] - len(chunk.drafts)
                if stop < chunk.stop:
                    accounting.trim(sequence.seq_id, stop)
            sequence.num_computed_tokens = stop
            if chunk.start == sequence.most_computed_tokens and not chunk.num_restored:
                sequence.most_computed_tokens = stop  # as mostly
            else:
                self._note_computed(chunk, stop)
            count = stop - chunk.start + chunk.num_restored
            counts.append(count)
            if count == 1 and not chunk.num_restored:
                tokens.append(sequence.token_ids[chunk.start])
            else:
                tokens += chunk.new_token_ids[:count]
        accounting.mark_computed(
            [chunk.sequence.seq_id for chunk in going_on],
            None if counts.count(1) == len(counts) else counts,
            np.array(tokens, np.int32),
        )
        self._room.snapshots.keep(accounting, going_on)

    def _note_computed(self, chunk: Chunk, stop: int) -> None:
        """Count the tokens of a chunk that were computed before, or came back from swap."""
        sequence, groups = chunk.sequence, self._accounting.groups
        most = sequence.most_computed_tokens
        if chunk.start < most:
            self.statistics.num_recomputed_tokens += min(stop, most) - chunk.start
        if stop > most:
            sequence.most_computed_tokens = stop
        if chunk.num_restored:
            readable = readable_tokens(groups, chunk.start - chunk.num_restored, chunk.start)
            self.statistics.loaded_bytes += num_bytes(groups, readable)
            self.swap.release(sequence)

    def _append(self, sequence: Sequence, result: Sampled) -> list[TokenOutput]:
        """Append the sampled tokens up to the sequence's end, if they have it."""
        if sequence.request.beam is not None:
            sequence.awaits_choice = True
            logprobs = result.logprobs[0]
            return [
                TokenOutput(sequence=sequence, token_id=None, finish_reason=None, logprobs=logprobs)
            ]
        if len(result.token_ids) == 1 and not (result.logprobs or result.ends):  # as mostly
            (token_id,) = result.token_ids
            sequence.token_ids.append(token_id)
            reason = self.limits.finish_reason(sequence, token_id)
            return [
                TokenOutput(
                    sequence=sequence,
                    token_id=token_id,
                    is_text=reason != "stop",
                    finish_reason=reason,
                )
            ]
        outputs: list[TokenOutput] = []
        for place, token_id in enumerate(result.token_ids):
            sequence.token_ids.append(token_id)
            reason = self.limits.finish_reason(sequence, token_id)
            is_text = reason != "stop"
            if reason is None and result.ends and place == len(result.token_ids) - 1:
                reason = "stop"
            outputs.append(
                TokenOutput(
                    sequence=sequence,
                    token_id=token_id,
                    is_text=is_text,
                    finish_reason=reason,
                    logprobs=result.logprobs[place] if result.logprobs else None,
                )
            )
            if reason is not None:
                break
        return outputs
