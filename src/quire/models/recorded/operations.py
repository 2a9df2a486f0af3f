"""What a recorded pass consists of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from quire.attention import VaryingCall
from quire.kernels.threads import KernelCall
from quire.models.executors.hooks import PackedStep

# -- operations ------------------------------------------------------------------------------------


class Operator:
    """One of torch's operators, with its arguments."""

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
        """Return the same as a kernel's call; None if there is no such kernel."""
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
        """Return the same as a kernel's call; None if there is no such kernel."""
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


# -- arena -----------------------------------------------------------------------------------------

# Memory that recordings work in.


class Arena:
    """Lent piece by piece, and lent again as soon as no tensor in a piece is left.

    All recordings of a model share them, for two are never played at once.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}  # by size
        self._users: dict[int, int] = {}  # of each piece, by the address of its storage
        self._lent: dict[int, Tensor] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Make a tensor of one's [*shape], strides and dtype, in memory of recordings alone."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
        nbytes = 1 << ((last + 1) * tensor.itemsize - 1).bit_length()
        free = self._free.setdefault(nbytes, [])
        piece = free.pop() if free else torch.empty(nbytes, dtype=torch.uint8)
        self._lent[piece.data_ptr()] = piece
        cut = piece[: (last + 1) * tensor.itemsize].view(tensor.dtype)
        made = cut.as_strided(tensor.shape, tensor.stride())
        self.saw(made)
        return made

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor [*shape] lies in a piece."""
        return _place(tensor) in self._lent

    def saw(self, tensor: Tensor) -> None:
        """Keep a piece from being lent again as long as a tensor [*shape] in it lives."""
        place = _place(tensor)
        self._users[place] = self._users.get(place, 0) + 1
        finalize(tensor, self._left, place)

    def _left(self, place: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            piece = self._lent.pop(place)
            self._free[piece.numel()].append(piece)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
