"""The loop: plan, run, sample, update. Read ``Engine.step`` first."""

from quire.engine.runner import Runner
from quire.engine.sampler import Sampler
from quire.engine.scheduler import Scheduler, TokenOutput
from quire.engine.sequence import FinishReason, Sequence


class Engine:
    """Sequences in, tokens out."""

    def __init__(self, scheduler: Scheduler, runner: Runner, sampler: Sampler) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._sampler = sampler

    def step(self) -> list[TokenOutput]:
        """One forward pass over whatever is due; what it did for each sequence that it served."""
        plan = self.scheduler.plan()
        tokens: list[int] = []
        if plan.chunks:
            logits = self._runner.run(plan)
            tokens = self._sampler.sample(logits, plan.sampling)
        outputs = self.scheduler.update(plan, tokens)
        for output in outputs:
            if output.finish_reason is not None:
                self._sampler.forget(output.sequence)
        return outputs

    def finish(self, sequence: Sequence, reason: FinishReason, detail: str = "") -> None:
        """End a sequence between two steps. Does nothing if it has ended."""
        self.scheduler.finish(sequence, reason, detail)
        self._sampler.forget(sequence)
