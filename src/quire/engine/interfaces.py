"""What an engine is put together from: what computes, what chooses, what keeps. Protocols only.

A model brings ``runner``, ``sampling``, ``kv_cache``, ``swap`` and ``speculation``. The
planner has others, which take no time but a clock's. The loop around them is the same.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from quire.engine.scheduling.plan_builder import Drafts
from quire.engine.sequence import Sequence
from quire.engine.step_plan import Chunk, Sampled, Save, StepPlan
from quire.kv import Accounting


class ModelChanged(Exception):
    """A model's owner has changed it since the last step: what is kept was computed by another."""


class Runner(Protocol):
    """Computes a step whose room is there: what accounting decided has been carried out."""

    def run(self, plan: StepPlan) -> Any:
        """Logits [rows, vocabulary]: those of each chunk from ``logits_from`` on, in order.

        The sequence of a chunk that ``pools`` gets its ``embedding``.

        Raises: ModelChanged, once for each change; nothing has been computed then.
        """
        ...

    @property
    def overwrites_states(self) -> bool:
        """Whether a step that fails leaves its sequences with states that are of no use."""
        ...

    def close(self) -> None:
        """Give back what it holds beside the model."""
        ...


class Sampler(Protocol):
    """Chooses tokens from what the runner beside it gives."""

    def sample(self, logits: Any, plan: StepPlan) -> list[Sampled]:
        """What came of each of ``plan.draws``. Done twice, it gives the same."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        ...


class Drafter(Protocol):
    """Guesses what comes next. A wrong guess costs the time to look at it, and nothing else."""

    def propose(self, sequences: list[Sequence]) -> Drafts:
        """Some tokens that may follow the last one, for some of these sequences, by id."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class EngineKV(Protocol):
    """An accounting, and what carries out what it decides."""

    @property
    def accounting(self) -> Accounting: ...

    @property
    def refusal(self) -> Exception | None:
        """Why it could not be carried out, if so: all that is left to do is ``restart``."""
        ...

    @property
    def committed_bytes(self) -> int: ...

    def carry_out(self) -> None:
        """End the accounting's step."""
        ...

    def restart(self) -> None:
        """Begin again, empty. Raises: MemoryUnavailable."""
        ...


class Swap(Protocol):
    """Where saved entries are while their sequences wait."""

    def save(self, saves: Iterable[Save]) -> list[Sequence]:
        """Copy these out. Returns those that were not saved."""
        ...

    def load(self, chunk: Chunk) -> bool:
        """Put back what a chunk counts on. False: it is lost."""
        ...

    def forget(self, seq_ids: Iterable[int]) -> None:
        """What was saved of these is not needed any more."""
        ...

    def close(self) -> None: ...
