"""Stand-ins for attention layers whose file has a function that turns queries and keys.

Such a layer runs its class's own code, in which the function's name means a kernel. The file itself
is left alone: other models are computed by it at the same time, and some of them are trained.
"""

import logging
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.tensors import KINDS
from quire.layers.cpu.linear import CpuLinear
from quire.layers.cpu.rotary import Rotary, RotaryShape
from quire.layers.cpu.rows import ROW_KINDS
from quire.layers.stand_ins import StandIn, agrees, answer, random_like
from quire.layers.watch import Watch

log = logging.getLogger(__name__)

ROTARY = "apply_rotary_pos_emb"


class Rotations:
    """Finds them."""

    def __init__(self, cpu: CpuLinear) -> None:
        self._cpu = cpu
        self._made: dict[FunctionType, FunctionType] = {}
        self._watches: dict[int, Watch] = {}  # of files, by the functions' ids

    def find(self, module: nn.Module) -> StandIn | None:
        """A stand-in for a layer whose code calls that function, and calls it by its name."""
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
            return None
        own = forward.__globals__.get(ROTARY)
        if not isinstance(own, FunctionType) or "forward" in vars(module):
            return None
        if forward not in self._made:
            self._made[forward] = _with(forward, {ROTARY: Rotation(own, self._cpu)})
        watch = self._watches.get(id(own)) or self._watches.setdefault(id(own), Watch(own, forward))

        def holds() -> bool:
            is_called = type(module).forward is forward and "forward" not in vars(module)
            return is_called and watch.holds()

        turned = MethodType(self._made[forward], module)
        return StandIn(module=module, forward=turned, inside=(), holds=holds)


class _Names(dict[str, Any]):
    """Some names of a file mean something else; all the others what they mean there by then."""

    def __init__(self, file: dict[str, Any], others: dict[str, Any]) -> None:
        super().__init__(others)
        self._file = file

    def __missing__(self, name: str) -> Any:
        return self._file[name]


def _with(function: FunctionType, others: dict[str, Any]) -> FunctionType:
    """The same code, in which some of the names that it reads mean something else."""
    made = FunctionType(
        function.__code__,
        _Names(function.__globals__, others),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


class Rotation:
    """Called as the model's own function is: ``(q, k, cos, sin)``.

    Heads of each new shape are tried when they first come. What does not turn out the same, and
    what is given otherwise, the function itself computes.
    """

    def __init__(self, own: Callable[..., Any], cpu: CpuLinear) -> None:
        self.own = own
        self._cpu = cpu
        self._tried: dict[object, Rotary | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rotary = self._kernel(*args) if len(args) == 4 and not kwargs else None
        return self.own(*args, **kwargs) if rotary is None else rotary(*args)

    def _kernel(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Rotary | None:
        """For q [1, H, T, D], k [1, K, T, D], cos and sin [1, T, turned] of one dtype."""
        heads, kept, angles = q.shape, k.shape, cos.shape
        if len(heads) != 4 or len(angles) != 3 or heads[0] != 1 or angles[:2] != (1, heads[2]):
            return None
        if sin.shape != angles or kept[2:] != heads[2:] or not q.dtype is k.dtype is cos.dtype:
            return None
        key = heads[1], kept[1], heads[3], angles[2], q.dtype
        try:
            return self._tried[key]
        except KeyError:
            found = self._tried[key] = self._try(q, k, cos)
            return found

    def _try(self, q: Tensor, k: Tensor, cos: Tensor) -> Rotary | None:
        """On random heads of these shapes."""
        (_, num_heads, _, width), kv_heads, turned = q.shape, k.shape[1], cos.shape[2]
        if KINDS.get(q.dtype) not in ROW_KINDS or turned % 2 or turned > width:
            return None
        shape = RotaryShape(
            query_heads=num_heads,
            kv_heads=kv_heads,
            width=width,
            turned=turned,
            kind=KINDS[q.dtype],
        )
        rotary = Rotary(shape, self._cpu.kernels, self._cpu.threads)
        given = (
            random_like(q, 1, 3, num_heads, width).transpose(1, 2),
            random_like(q, 1, 3, kv_heads, width, seed=1).transpose(1, 2),
            random_like(q, 1, 3, turned, seed=2),
            random_like(q, 1, 3, turned, seed=3),
        )
        with torch.inference_mode():
            wanted = answer(self.own, *given)
            if isinstance(wanted, tuple) and len(wanted) == 2:
                pairs = zip(rotary(*given), wanted, strict=True)
                if all(agrees(got, want, of_sums=True) for got, want in pairs):
                    return rotary
        log.info("%s keeps its own rotary positions for %s", self.own.__module__, shape)
        return None
