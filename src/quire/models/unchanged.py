"""Whether a model is still what it was."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel

from quire.layers.stand_ins import Kept, slots_of


class Unchanged:
    """By its layers, hooks and weights, and where these lie."""

    def __init__(self, model: PreTrainedModel) -> None:
        modules = list(model.modules())
        kept: list[dict[str, Any]] = []
        for module in modules:
            kept += module._parameters, module._buffers, module._modules
        slots = slots_of(*kept)
        self._kept = Kept(slots, modules)
        self._tensors = [value for _, _, value in slots if isinstance(value, Tensor)]
        self._places = self._where()
        self._num_threads = torch.get_num_threads()

    def holds(self) -> bool:
        return (
            self._kept.holds()
            and not torch_modules._global_forward_hooks
            and not torch_modules._global_forward_pre_hooks
            and self._where() == self._places
            and torch.get_num_threads() == self._num_threads
        )

    def _where(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]
