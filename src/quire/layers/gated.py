"""Stand-ins for gated feed-forward layers: ``down(act(gate(x)) * up(x))`` as a whole."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.tensors import KINDS
from quire.layers.cpu.activation import ACTIVATIONS, torch_activation
from quire.layers.cpu.gate import Gate, GateShape
from quire.layers.cpu.linear import CpuLinear
from quire.layers.linears import Linears
from quire.layers.stand_ins import (
    StandIn,
    agrees,
    answer,
    is_plain,
    random_like,
    settings,
    stand_in,
)

_NAMES = ("gate_proj", "up_proj", "down_proj")
_REACH = 2.0  # of a trial's inputs to the activation, where kinds of it differ


class GatedLayers:
    """Finds them. What one was found to be, all of its class, sizes and settings are."""

    def __init__(self, cpu: CpuLinear, linears: Linears) -> None:
        self._cpu = cpu
        self._linears = linears
        self._tried: dict[object, bool] = {}

    def find(self, module: nn.Module) -> StandIn | str | None:
        """A stand-in; why there is none; or None for what is no such layer."""
        children = [module._modules.get(name) for name in _NAMES]
        if None in children:
            return None
        layers = [child for child in children if isinstance(child, nn.Linear)]
        if len(layers) < len(_NAMES):
            return "it has other parts than linear layers and an activation"
        for layer in layers:
            if reason := self._linears.unsupported(layer):
                return reason
        others = [child for child in module.children() if child not in layers]
        name = _activation(others[0]) if len(others) == 1 else None
        if name is None or module._parameters or module._buffers:
            return "it has other parts than linear layers and an activation with a kernel"
        gate, up, _ = layers
        if gate.weight.shape != up.weight.shape or gate.weight.dtype != up.weight.dtype:
            return "its gate and what it gates differ in shape"
        gated = _Gated(self._cpu, name, layers, module.forward)
        sizes = [(*x.weight.shape, x.weight.dtype, x.bias is None) for x in layers]
        key = type(module), settings(module), name, *sizes
        if key not in self._tried:
            self._tried[key] = _try(module, gate, gated)
        if not self._tried[key]:
            return "it computes something else than a gated layer"
        return stand_in(module, gated, (*layers, *others))


class _Gated:
    """The whole layer: all of it by kernels for few rows, all but the products for many."""

    def __init__(
        self, cpu: CpuLinear, activation: str, layers: Sequence[nn.Linear], own: Callable[..., Any]
    ) -> None:
        gate, up, down = layers
        biases = [gate.bias, up.bias]
        self._own = own
        self._dtype = gate.weight.dtype
        self._gated = cpu.bind_gated(gate.weight, up.weight, activation, biases)
        self._both = cpu.bind([gate.weight, up.weight], biases)
        shape = GateShape(width=gate.out_features, activation=activation, kind=KINDS[self._dtype])
        self._join = Gate(shape, cpu.kernels, cpu.threads)
        self._down = cpu.bind([down.weight], [down.bias])
        self.most_rows = self._gated.most_rows  # that are few

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or x.dtype is not self._dtype:
            return self._own(x, *args, **kwargs)
        if x.numel() // x.shape[-1] <= self.most_rows:
            return self._down(self._gated(x))[0]
        return self._down(self._join(*self._both(x)))[0]


def _try(module: nn.Module, gate: nn.Linear, gated: _Gated) -> bool:
    with torch.inference_mode():
        for num_rows in (1, 3, gated.most_rows + 1):
            x = random_like(gate.weight, 1, num_rows, gate.in_features)
            x *= _REACH / gate(x).float().std()
            if not agrees(gated(x), answer(module, x), of_sums=True):
                return False
    return True


def _activation(module: nn.Module) -> str | None:
    """The name of the kernel that does what a module does; None if there is none."""
    if not is_plain(module) or [*module.parameters()]:
        return None
    x = torch.linspace(-12, 12, 241)
    with torch.inference_mode():
        y = answer(module, x)
        return next((a for a in ACTIVATIONS if agrees(torch_activation(a)(x), y)), None)
