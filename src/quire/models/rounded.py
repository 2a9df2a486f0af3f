"""A model's own run with its keys and values rounded as a cache in another dtype rounds them.

What a run through such a cache is held against: the rounding itself may turn a router to another
expert, so nothing can be said of a difference that includes it.
"""

from typing import Any, final

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

from quire.kv.storage.entries import dequantize, quantize


@final
class RoundedCache(DynamicCache):
    """Transformers' own cache, given entries that have been in ``dtype``."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        super().__init__(config=config)
        self._dtype = dtype

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        k, v = (
            dequantize(*quantize(x, self._dtype)).to(x.dtype) for x in (key_states, value_states)
        )
        entries: tuple[Tensor, Tensor] = super().update(k, v, layer_idx, *args, **kwargs)
        return entries
