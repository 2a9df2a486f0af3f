"""torch's tensors in the kernels' words: kinds, addresses and strides in bytes."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

KINDS: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float32: "f32",
        torch.float16: "f16",
        torch.bfloat16: "bf16",
        torch.int8: "i8",
        torch.float8_e4m3fn: "f8",
    }
)


def words(tensor: Tensor | None, num_strides: int) -> tuple[int, ...]:
    """A tensor's address and its first strides in bytes; zeros for none."""
    if tensor is None:
        return (0,) * (1 + num_strides)
    size = tensor.element_size()
    return tensor.data_ptr(), *(size * stride for stride in tensor.stride()[:num_strides])


def with_dense_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, in which the elements of a row lie side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
