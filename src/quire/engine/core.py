"""The loop: plan, run, sample, update. Read ``Engine.step`` first."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

from quire.engine.interfaces import Drafter, EngineKV, ModelChanged, Runner, Sampler, Swap
from quire.engine.scheduler import NO_DRAFTS, Scheduler
from quire.engine.scheduling.step_costs import Clock
from quire.engine.sequence import FinishReason, Sequence
from quire.engine.step_plan import Chunk, Sampled, StepPlan, TokenOutput
from quire.errors import MemoryUnavailable, RankLost
from quire.units import format_bytes

log = logging.getLogger(__name__)

_NOTHING = StepPlan.of([])
_FINAL = (MemoryUnavailable, RankLost)  # after these no sequence can begin anew


class Engine:
    """Takes sequences in and gives tokens out, step by step."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv: EngineKV,
        runner: Runner,
        sampler: Sampler,
        drafter: Drafter | None = None,
        swap: Swap | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self._kv = kv
        self._runner = runner
        self._sampler = sampler
        self.drafter = drafter
        self._swap = swap
        self.clock = clock
        self.watch: Callable[[StepPlan], None] | None = None  # sees each plan before it is run
        self._has_failed = False  # in the last step
        self._step_s = 0.0  # seconds of the last step
        self._refused_at = (-1, 0)  # id and tokens of a sequence that was refused pages alone

    def step(self) -> list[TokenOutput]:
        """Run one forward pass, and return what it did for each sequence that it served.

        A sequence that cannot be computed ends with an error, and the others go on. Where the
        system refuses pages that accounting counts on, or a step fails half-way, all sequences
        begin anew in an empty cache.

        Raises: MemoryUnavailable if there are no addresses for that; RankLost; any error that two
        steps in a row raise.
        """
        self.scheduler.statistics.now_s = self.clock()
        try:
            outputs = self._step()
            self._has_failed = False
        except Exception as error:
            if self._has_failed or isinstance(error, _FINAL):
                raise
            self._has_failed = True
            log.exception("a step failed: all sequences are computed again")
            self.begin_anew()
            outputs = self.scheduler.update(_NOTHING, [])  # reports what has ended
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.sequence)
        self._settle()  # frees at once what the ended sequences held
        self.store_blocks()
        return outputs

    def _step(self) -> list[TokenOutput]:
        # A beam search decides between two steps. Saved entries must lie where accounting says
        # before the plan saves others of the same sequence.
        self._settle()
        self._bring()
        drafts = self.drafter.propose(self.scheduler.decoding) if self.drafter else NO_DRAFTS
        plan = self.scheduler.plan(drafts)
        self._swap_out(plan)
        self._kv.carry_out()
        if self._kv.refusal is not None:
            self._begin_with_less(plan, self._kv.refusal)
            plan = _NOTHING
        plan = self._swap_in(plan)
        if not plan.chunks:
            self._wait_for_tiers()
        if self.watch is not None:
            self.watch(plan)
        started_s = self.clock()
        try:
            sampled = self._compute(plan)
        except RankLost:
            raise
        except ModelChanged as change:
            log.info("%s: all tokens are computed again", change)
            if self.scheduler.offload is not None:
                self.scheduler.offload.stop(str(change))
            self.scheduler.drop_saved()
            self.begin_anew()
            plan, sampled = _NOTHING, []
        except Exception as error:
            log.warning("a step failed: each of its sequences is computed alone", exc_info=error)
            if self._runner.overwrites_states:
                self._begin_alone(plan, error)
                plan, sampled = _NOTHING, []
            else:
                plan, sampled = self._compute_one_by_one(plan)
        self.scheduler.statistics.now_s = now_s = self.clock()
        self._step_s = now_s - started_s
        self.scheduler.costs.note_step(
            plan.num_tokens, len(plan.chunks), plan.num_read, self._step_s
        )
        return self.scheduler.update(plan, sampled)

    def begin_anew(self) -> None:
        """Empty the cache; every sequence computes its text again. Raises: MemoryUnavailable."""
        self._kv.restart()
        self.scheduler.restart(self._kv.accounting)

    def finish(self, sequence: Sequence, reason: FinishReason, detail: str = "") -> None:
        """End a sequence between two steps, unless it has ended."""
        self.scheduler.statistics.now_s = self.clock()
        self.scheduler.finish(sequence, reason, detail)
        self._forget(sequence)
        self._drop_saved()

    def close(self, reason: FinishReason, detail: str) -> None:
        """End every sequence, and close the runner, swap and drafter."""
        self.scheduler.statistics.now_s = self.clock()
        self.scheduler.finish_all(reason, detail)
        with ExitStack() as closing:  # all of them are closed, even if one raises
            closing.callback(self._runner.close)
            if self._swap is not None:
                closing.callback(self._swap.close)
            if self.scheduler.offload is not None:
                closing.callback(self.scheduler.offload.close)
            if self.drafter is not None:
                closing.callback(self.drafter.close)

    def _compute(self, plan: StepPlan) -> list[Sampled]:
        """Return what came of each draw. A second call gives the same, unless states change."""
        if not plan.chunks:
            return []
        logits = self._runner.run(plan)
        return self._sampler.sample(logits, plan)

    def _compute_one_by_one(self, plan: StepPlan) -> tuple[StepPlan, list[Sampled]]:
        """Compute each chunk of a plan alone; sequences that cannot be computed end."""
        done: list[Chunk] = []
        sampled: list[Sampled] = []
        for chunk in plan.chunks:
            try:
                sampled += self._compute(StepPlan.of([chunk]))
            except RankLost:
                raise
            except Exception as error:
                log.exception("sequence %d cannot be computed", chunk.sequence.seq_id)
                self.scheduler.fail(chunk.sequence, f"its computation failed: {error!r}")
            else:
                done.append(chunk)
        return StepPlan.of(done), sampled

    def _begin_alone(self, plan: StepPlan, error: Exception) -> None:
        """Let a plan's sequences, whose states are lost, begin anew, one at a time in a step."""
        for chunk in plan.chunks:
            if chunk.sequence in self.scheduler.suspects and len(plan.chunks) == 1:
                log.error("sequence %d cannot be computed", chunk.sequence.seq_id, exc_info=error)
                self.scheduler.fail(chunk.sequence, f"its computation failed: {error!r}")
            else:
                self.scheduler.suspects.add(chunk.sequence, chunk.stop)
                self.scheduler.lose(chunk.sequence)

    def _begin_with_less(self, plan: StepPlan, error: Exception) -> None:
        """Empty the cache, and lower its ceiling to what the system has given it.

        Raises: MemoryUnavailable.
        """
        given = self._kv.committed_bytes
        log.warning("%s: all sequences are computed again, in %s", error, format_bytes(given))
        if len(plan.chunks) == 1:
            alone = plan.chunks[0].sequence
            point = alone.seq_id, alone.num_tokens
            if point == self._refused_at:  # a third time would end like the second
                self.scheduler.fail(alone, str(error), "capacity")
            self._refused_at = point
        self.begin_anew()
        self._kv.accounting.resize(given, for_now=True)

    def _forget(self, sequence: Sequence) -> None:
        self._sampler.forget(sequence)
        if self.drafter is not None:
            self.drafter.forget(sequence)

    def _swap_out(self, plan: StepPlan) -> None:
        """Save the entries of preempted sequences before storage changes."""
        if self._swap is not None:
            for sequence in self._swap.save(plan.saves):
                self.scheduler.lose(sequence)

    def _swap_in(self, plan: StepPlan) -> StepPlan:
        """Bring saved entries back. A sequence that has lost them begins anew in a later plan."""
        back = [chunk for chunk in plan.chunks if chunk.num_restored]
        lost = [chunk for chunk in back if self._swap is None or not self._swap.load(chunk)]
        for chunk in lost:
            self.scheduler.lose(chunk.sequence)
        return StepPlan.of(chunk for chunk in plan.chunks if chunk not in lost) if lost else plan

    def _bring(self) -> None:
        """Insert the blocks that have come from tiers. Raises: MemoryUnavailable."""
        if self.scheduler.offload is not None:
            self.scheduler.offload.bring(self._carry_out, step_s=self._step_beside)
            if self._kv.refusal is not None:
                self._begin_with_less(_NOTHING, self._kv.refusal)

    def store_blocks(self) -> bool:
        """Copy blocks out that tiers are to keep, between two steps. Return False if some wait."""
        offload = self.scheduler.offload
        if offload is None:
            return True
        offload.store(step_s=self._step_beside)
        return not offload.has_more

    def _wait_for_tiers(self) -> None:
        """Wait where no sequence can be computed before an answer of a tier, or its deadline."""
        if self.scheduler.offload is not None:
            self.scheduler.offload.wait()

    @property
    def _step_beside(self) -> float | None:
        """Return the seconds of a step, if sequences run that must not be slowed down."""
        return self._step_s if self.scheduler.num_running else None

    def _carry_out(self) -> bool:
        self._kv.carry_out()
        return self._kv.refusal is None

    def _settle(self) -> None:
        """Carry out what was decided since the last plan. Raises: MemoryUnavailable."""
        self._drop_saved()
        self._kv.carry_out()
        if self._kv.refusal is not None:
            self._begin_with_less(_NOTHING, self._kv.refusal)

    def _drop_saved(self) -> None:
        if self._swap is not None:
            self._swap.forget(self.scheduler.swap.drain())
