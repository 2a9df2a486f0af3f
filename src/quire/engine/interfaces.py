"""The protocols of an engine's parts.

The engine of a model has ``runner``, ``sampling``, ``kv_cache``, ``swap`` and ``speculation``. The
planner has parts of its own, which only move a clock. The loop around them is the same.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from quire.engine.scheduling.plan_builder import Drafts
from quire.engine.sequence import Sequence
from quire.engine.step_plan import Chunk, Sampled, Save, StepPlan
from quire.kv import Accounting


class ModelChanged(Exception):
    """The model was changed since the last step, so that what the cache holds is not its own."""


class Runner(Protocol):
    """Computes a step for which storage has carried out what accounting decided."""

    def run(self, plan: StepPlan) -> Any:
        """Return logits [rows, vocabulary]: of each chunk from ``logits_from`` on, in order.

        The sequence of a chunk that ``pools`` gets its ``embedding``.

        Raises: ModelChanged before anything is computed, once for each change.
        """
        ...

    @property
    def overwrites_states(self) -> bool:
        """Whether a failed step leaves its sequences with useless states."""
        ...

    def close(self) -> None:
        """Give back what the runner holds beside the model."""
        ...


class Sampler(Protocol):
    """Chooses tokens by the runner's logits."""

    def sample(self, logits: Any, plan: StepPlan) -> list[Sampled]:
        """Return what came of each of ``plan.draws``. A second call returns the same."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has ended."""
        ...


class Drafter(Protocol):
    """Guesses the next tokens. A wrong guess costs the time to compute it, and nothing else."""

    def propose(self, sequences: list[Sequence]) -> Drafts:
        """Guess tokens that may follow, for some of these sequences, by id."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has ended."""
        ...

    def close(self) -> None:
        """Give back what the drafter holds."""
        ...


class EngineKV(Protocol):
    """An accounting, and the storage that carries out what it decides."""

    @property
    def accounting(self) -> Accounting: ...

    @property
    def refusal(self) -> Exception | None:
        """Why storage could not follow, or None. After a refusal only ``restart`` helps."""
        ...

    @property
    def committed_bytes(self) -> int: ...

    def carry_out(self) -> None:
        """End the accounting's step."""
        ...

    def restart(self) -> None:
        """Begin again with an empty cache. Raises: MemoryUnavailable."""
        ...


class Swap(Protocol):
    """Keeps the entries of preempted sequences."""

    def save(self, saves: Iterable[Save]) -> list[Sequence]:
        """Copy entries out of the cache. Return the sequences whose entries were not saved."""
        ...

    def load(self, chunk: Chunk) -> bool:
        """Copy the entries that a chunk counts on back. Return False if they are lost."""
        ...

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the saved entries of these sequences."""
        ...

    def close(self) -> None:
        """Drop everything."""
        ...
