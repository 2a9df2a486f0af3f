"""What a recorded pass consists of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils._pytree import tree_leaves

from quire.attention import VaryingCall
from quire.kernels.threads import KernelCall
from quire.models.executors.hooks import PackedStep


class Operator:
    """One of torch's, with what it was given."""

    def __init__(self, func: Any, given: Any, outs: Sequence[Tensor]) -> None:
        self._func = func
        self._args, self._kwargs = given
        self._outs = outs  # where what it gives goes; none if it changes what it is given

    def __call__(self, step: PackedStep, asked: int) -> None:
        results = self._func(*self._args, **self._kwargs)
        if self._outs:
            for out, result in zip(self._outs, tree_leaves(results), strict=True):
                out.copy_(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A layer's new keys [T, K, D] and values [T, K, Dv] go where the step says."""

    layer: int
    k: Tensor
    v: Tensor

    def __call__(self, step: PackedStep, asked: int) -> None:
        step.storage.write(
            self.layer, step.batches[self.layer].slots, self.k[:asked], self.v[:asked]
        )

    def call(self, step: PackedStep) -> VaryingCall | None:
        """The same as a kernel's call; None if there is no such kernel."""
        if (plays := step.backend.plays) is None:
            return None
        return plays.write(step.storage.view(self.layer), self.k, self.v)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """A layer's queries [T, H, D] read what the step says: [T, H, Dv]."""

    layer: int
    q: Tensor
    out: Tensor
    scale: float
    softcap: float | None
    sinks: Tensor | None

    def __call__(self, step: PackedStep, asked: int) -> None:
        self.out[:asked] = step.backend.attend(
            self.q[:asked],
            step.storage.view(self.layer),
            step.batches[self.layer],
            spec=step.specs[self.layer],
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def call(self, step: PackedStep) -> VaryingCall | None:
        """The same as a kernel's call; None if there is no such kernel."""
        if (plays := step.backend.plays) is None:
            return None
        return plays.attend(
            self.q,
            self.out,
            step.storage.view(self.layer),
            spec=step.specs[self.layer],
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
        )


Part: TypeAlias = Operator | Write | Attend | KernelCall
