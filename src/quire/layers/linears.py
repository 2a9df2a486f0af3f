"""Stand-ins for linear layers, alone or side by side on one input."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from quire.layers.cpu.linear import BoundLinear, CpuLinear
from quire.layers.stand_ins import StandIn, agrees, is_plain, random_like, stand_in

_SIBLINGS = ("q_proj", "k_proj", "v_proj")


class Linears:
    """Finds them. What was tried on one is not tried again on others of its size."""

    def __init__(self, cpu: CpuLinear) -> None:
        self._cpu = cpu
        self._tried: dict[object, bool] = {}

    def find(self, module: nn.Module) -> StandIn | str | None:
        """A stand-in; why there is none; or None for what is no linear layer."""
        if not isinstance(module, nn.Linear):
            return None
        if reason := self.unsupported(module):
            return reason
        bound = self._bind([module])

        def forward(x: Tensor) -> Tensor:
            return bound(x)[0]

        return stand_in(module, forward)

    def find_siblings(self, module: nn.Module) -> list[StandIn]:
        """For the layers that make queries, keys and values: whichever comes first finds all."""
        layers = [getattr(module, name, None) for name in _SIBLINGS]
        plain = [x for x in layers if isinstance(x, nn.Linear) and not self.unsupported(x)]
        if len(plain) < len(layers) or len({x.in_features for x in plain}) > 1:
            return []
        if len({x.weight.dtype for x in plain}) > 1:
            return []
        together = _Together(self._bind(plain), [self._bind([x]) for x in plain])
        found = [stand_in(layer, together.forward_of(n)) for n, layer in enumerate(plain)]
        return [part for part in found if isinstance(part, StandIn)]

    def unsupported(self, layer: nn.Linear) -> str | None:
        """Why a linear layer keeps its own product; None if it need not."""
        if type(layer) is not nn.Linear:
            return "it is a linear layer of another kind"
        given = [p for p in (layer.weight, layer.bias) if p is not None]
        if any(type(p) is not nn.Parameter for p in given) or not is_plain(layer):
            return "its weights or its call are not torch's own"
        if reason := self._cpu.unsupported([layer.weight]):
            return reason
        key = layer.weight.shape, layer.weight.dtype, layer.bias is None
        if key not in self._tried:
            self._tried[key] = self._try(layer)
        return None if self._tried[key] else "it computes something else"

    def _bind(self, layers: Sequence[nn.Linear]) -> BoundLinear:
        return self._cpu.bind([x.weight for x in layers], [x.bias for x in layers])

    def _try(self, layer: nn.Linear) -> bool:
        bound = self._bind([layer])
        with torch.inference_mode():
            inputs = [random_like(layer.weight, 1, n, layer.in_features) for n in (1, 3)]
            return all(agrees(bound(x)[0], layer(x), of_sums=True) for x in inputs)


class _Together:
    """Products of one input: the first call for it computes all, the others take theirs.

    A call with another input than the last one computes all again; so each is right, whatever the
    model does between them, and only a model that gives each its own input loses by it.
    """

    def __init__(self, bound: BoundLinear, alone: Sequence[BoundLinear]) -> None:
        self._bound = bound
        self._alone = alone
        self._input: Tensor | None = None  # of what waits to be taken
        self._waiting: dict[int, Tensor] = {}

    def forward_of(self, index: int) -> Callable[[Tensor], Tensor]:
        """What the layer of that number computes."""

        def forward(x: Tensor) -> Tensor:
            if x is not self._input:
                if x.numel() // x.shape[-1] > self._bound.most_rows:
                    return self._alone[index](x)[0]
                self._input, self._waiting = x, dict(enumerate(self._bound(x)))
            found = self._waiting.pop(index, None)
            if not self._waiting:
                self._input = None
            return self._alone[index](x)[0] if found is None else found

        return forward
