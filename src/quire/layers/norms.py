"""Stand-ins for norms: modules with one vector of weights and a small number for safety."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.tensors import KINDS
from quire.layers.cpu.linear import CpuLinear
from quire.layers.cpu.norm import Norm, NormForm, NormShape
from quire.layers.cpu.rows import ROW_KINDS
from quire.layers.stand_ins import StandIn, agrees, answer, random_like, settings, stand_in

_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
# Llama's and Gemma's first.
_FORMS = tuple(
    NormForm(rounds_first=first, from_one=one)
    for first, one in ((True, False), (False, True), (False, False), (True, True))
)


class Norms:
    """Finds them. What one was found to be, all of its class, size and settings are."""

    def __init__(self, cpu: CpuLinear) -> None:
        self._cpu = cpu
        self._tried: dict[object, Norm | None] = {}

    def find(self, module: nn.Module) -> StandIn | str | None:
        """A stand-in; why there is none; or None for what is no such norm."""
        weight, eps = module._parameters.get("weight"), _epsilon(module)
        if weight is None or weight.dim() != 1 or eps is None or module._modules:
            return None
        if module._buffers or any(
            p is not weight for p in module._parameters.values() if p is not None
        ):
            return "it has more than one vector of weights"
        if KINDS.get(weight.dtype) not in ROW_KINDS:
            return f"there is no kernel for {weight.dtype}"
        key = type(module), settings(module), len(weight), weight.dtype, eps
        if key not in self._tried:
            self._tried[key] = self._try(module, weight, eps)
        norm = self._tried[key]
        if norm is None:
            return "it is no root mean square norm of a known form"
        return stand_in(module, _forward(module, norm, weight.dtype))

    def _try(self, module: nn.Module, weight: Tensor, eps: float) -> Norm | None:
        width, kind = len(weight), KINDS[weight.dtype]
        # With other weights than its own: ones, as a model has before it is trained, tell nothing.
        twin, weights = copy.copy(module), random_like(weight, width)
        twin._parameters = {"weight": nn.Parameter(weights)}
        sizes = (1.0, 30.0, eps**0.5)
        inputs = [random_like(weight, 1, 3, width, seed=n) * size for n, size in enumerate(sizes)]
        with torch.inference_mode():
            wanted = [answer(twin, x) for x in inputs]
            for form in _FORMS:
                shape = NormShape(width=width, kind=kind, eps=eps, form=form)
                norm = Norm(shape, self._cpu.kernels, self._cpu.threads)
                if all(agrees(norm(x, weights), y) for x, y in zip(inputs, wanted, strict=True)):
                    return norm
        return None


def _epsilon(module: nn.Module) -> float | None:
    found = (getattr(module, name, None) for name in _EPSILONS)
    return next((eps for eps in found if isinstance(eps, float)), None)


def _forward(module: nn.Module, norm: Norm, dtype: torch.dtype) -> Callable[..., Any]:
    own, weight = module.forward, module.weight

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or x.dtype is not dtype or weight.dtype is not dtype:
            return own(x, *args, **kwargs)
        return norm(x, weight)

    return forward
