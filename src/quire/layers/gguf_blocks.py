"""Weights as GGUF files store them in Q8_0 and Q4_0, read into codes and scales.

    w[n][k] = code[n][k] * scale[n][k // 32]

A row is blocks of 32 inputs, one after the other: a scale in float16, and 32 codes. In 8 bits they
are as they are; in 4 bits they count from 8, and byte b has inputs b and 16 + b. So nothing is
rounded anew: what is packed has the very numbers of the file. Source: ggml's ggml-common.h.
"""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from quire.layers.cpu.packed_weight import PackedForm, PackedWeight, pack

GROUP = 32
_SCALE_BYTES = 2
_MIDDLE = 8  # of codes of 4 bits
GGUF_BITS: Final[Mapping[str, int]] = MappingProxyType({"Q8_0": 8, "Q4_0": 4})


def packed_bytes(kind: str, blocks: Tensor) -> int:
    """Count the bytes of what ``pack_blocks`` makes of u8[N, bytes of a row]."""
    bits, (num_outputs, row_bytes) = GGUF_BITS[kind], blocks.shape
    inputs = row_bytes // (_SCALE_BYTES + GROUP * bits // 8) * GROUP
    return prod(PackedForm(bits=bits, group_size=GROUP).shape(num_outputs, inputs))


def pack_blocks(kind: str, blocks: Tensor, out: Tensor | None = None) -> PackedWeight:
    """Pack the rows of a matrix, u8[N, bytes of a row], of a kind of ``GGUF_BITS``.

    ``out`` is where the data is to lie, u8[bytes].
    Raises: ValueError for scales that are no finite numbers.
    """
    bits = GGUF_BITS[kind]
    num_outputs = blocks.shape[0]
    by_group = blocks.view(num_outputs, -1, _SCALE_BYTES + GROUP * bits // 8)
    scales = by_group[..., :_SCALE_BYTES].contiguous().view(torch.float16).squeeze(-1)
    if not bool(scales.isfinite().all()):
        raise ValueError("there are scales that are no finite numbers")
    codes = by_group[..., _SCALE_BYTES:]
    if bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], -1).view(torch.int8) - _MIDDLE
    else:
        codes = codes.contiguous().view(torch.int8)
    return pack(codes.reshape(num_outputs, -1), scales, None, bits=bits, group_size=GROUP, out=out)
