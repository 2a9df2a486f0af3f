"""Keys and values in eight bits: the two formats, to the bit.

``int8``: each token's key in each head has a scale of its own, and so has its value. With a the
largest absolute value of the entry, in float32:

    scale = a / 127        code = x * (127 / a), rounded half to even, within ±127

An entry of zeros has the scale 0. One that holds NaN or infinity reads back as NaN throughout, and
no other entry does: its codes are finite, its scale is not.

``float8_e4m3fn``: x within ±448, rounded half to even; no scale. NaN stays, infinity becomes ±448.

A compiled writer produces the same bits, NaN's own aside. Which tokens lie where, ``storage`` says.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_CODE = 127
MAX_FP8 = 448.0


def quantize(x: "Tensor", dtype: "torch.dtype") -> "tuple[Tensor, Tensor | None]":
    """Entries as they are stored: codes in ``dtype``, and the scales if it has them.

    Any other dtype than the two above is a plain cast. Shapes: [..., D] → [..., D] and [...].
    """
    import torch

    if dtype == torch.float8_e4m3fn:
        return x.float().clamp(-MAX_FP8, MAX_FP8).to(dtype), None
    if dtype != torch.int8:
        return x.to(dtype), None
    x = x.float()
    amax = x.abs().amax(-1)
    inverse = torch.full_like(amax, MAX_CODE) / amax  # 127 / amax in Python would round twice
    # Where amax is 0, so small that 127 / amax overflows, or not finite, products may be NaN.
    codes = (x * inverse[..., None]).nan_to_num(0.0).round().clamp(-MAX_CODE, MAX_CODE)
    return codes.to(dtype), amax / MAX_CODE


def dequantize(codes: "Tensor", scales: "Tensor | None") -> "Tensor":
    """Stored entries as attention reads them: float32, or as they are if they are no codes.

    Shapes: [..., D] and [...] → [..., D].
    """
    import torch

    if codes.dtype == torch.float8_e4m3fn:
        return codes.float()
    return codes if scales is None else codes * scales[..., None]


def bits(x: "Tensor") -> "Tensor":
    """The same memory in a dtype that every operation of torch knows."""
    import torch

    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
