"""Pages for the next step, made ready while a device computes this one.

A runner returns as soon as a device has been given its work; until the tokens are asked for, the
host has nothing to do. To create a page takes the driver long, disturbs no kernel, and changes no
address: those wait for the time between two steps.
"""

from typing import Any, final

from quire.engine.parts import Runner
from quire.engine.plan import StepPlan
from quire.memory.residency import Resident


@final
class AheadRunner:
    """Another runner, after each of whose steps pages are prepared."""

    def __init__(self, runner: Runner, resident: Resident) -> None:
        self._runner, self._resident = runner, resident

    @property
    def overwrites_states(self) -> bool:
        return self._runner.overwrites_states

    def close(self) -> None:
        self._runner.close()

    def run(self, plan: StepPlan) -> Any:
        logits = self._runner.run(plan)
        self._resident.prepare()
        return logits
