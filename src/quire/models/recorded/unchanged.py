"""Whether a model is still what it was."""

from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel


class Unchanged:
    """By its layers, hooks and weights, and where these lie: all at once, for it is asked often."""

    def __init__(self, model: PreTrainedModel) -> None:
        modules = list(model.modules())
        self._hooks = [
            hooks
            for module in modules
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._hooks += [
            torch_modules._global_forward_hooks,
            torch_modules._global_forward_pre_hooks,
        ]
        self._own = [module.__dict__ for module in modules]
        kept: list[dict[str, Any]] = []
        for module in modules:
            kept += module._parameters, module._buffers, module._modules
        slots = [(own, name, value) for own in kept for name, value in own.items()]
        self._owners = [slot[0] for slot in slots]
        self._names = [slot[1] for slot in slots]
        self._values = [slot[2] for slot in slots]
        self._tensors = [x for x in self._values if isinstance(x, Tensor)]
        self._places = self._where()
        self._num_threads = torch.get_num_threads()

    def holds(self) -> bool:
        return (
            not any(self._hooks)
            and all(map(is_, map(dict.get, self._owners, self._names), self._values))
            and not any("forward" in own for own in self._own)
            and self._where() == self._places
            and torch.get_num_threads() == self._num_threads
        )

    def _where(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]
