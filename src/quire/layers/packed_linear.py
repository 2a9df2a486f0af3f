"""A linear layer whose weights are whole numbers of 8 or 4 bits.

Its own forward function is the slow twin of the kernels that stand in for it during a pass
(``quire.layers.fused``): it makes all of its weights float32 each time.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.layers.cpu.packed_weight import PackedForm, PackedWeight

MOST_CODE = 127.0  # of an input


class PackedLinear(nn.Module):
    """x [..., K] to x · Wᵀ + bias, [..., N] in x's dtype. Products are added up in float32."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        """``dtype``: of the inputs that kernels are made for, until the module is cast."""
        super().__init__()
        self.in_features, self.out_features = weight.num_inputs, weight.num_outputs
        self.rounds_inputs = False  # to 8 bits, as the kernels do that are asked for it
        self.bits, self.group_size = weight.form.bits, weight.form.group_size
        self.has_zeros, self.scale_dtype = weight.form.has_zeros, weight.form.scale_dtype
        self.packed: Tensor
        self.register_buffer("packed", weight.data)
        self.like: Tensor  # nothing but a dtype, which follows a cast as that of a bias does
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the inputs that kernels are made for."""
        return self.like.dtype

    @property
    def packed_weight(self) -> PackedWeight:
        """Its weight, where it lies now."""
        form = PackedForm(
            bits=self.bits,
            group_size=self.group_size,
            has_zeros=self.has_zeros,
            scale_dtype=self.scale_dtype,
        )
        return PackedWeight(self.packed, self.out_features, self.in_features, form)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., K] → [..., N] in torch, with weights that are made anew."""
        bias = None if self.bias is None else self.bias.float()
        weight, inputs = self.packed_weight.dequantized(), x.float()
        if self.rounds_inputs:
            inputs = rounded_inputs(inputs, self.group_size)
        return functional.linear(inputs, weight, bias).to(x.dtype)

    def extra_repr(self) -> str:
        """Say what ``print(model)`` shows."""
        zeros = ", with zeros" if self.has_zeros else ""
        inputs = ", rounds inputs" if self.rounds_inputs else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"{self.bits} bits, groups of {self.group_size}{zeros}{inputs}, "
            f"bias={self.bias is not None}"
        )


def rounded_inputs(x: Tensor, group_size: int) -> Tensor:
    """Round f32[..., K] to whole numbers up to ±127 of a scale for each group of a row.

    A group in which there is one that is no finite number becomes NaN as a whole.
    """
    padded = functional.pad(x, (0, -x.shape[-1] % group_size))
    groups = padded.reshape(*x.shape[:-1], padded.shape[-1] // group_size, group_size)
    largest = groups.abs().amax(-1, keepdim=True)
    most = torch.full_like(largest, MOST_CODE)  # torch divides a number by multiplying: not exact
    codes = (groups * (most / largest)).round().nan_to_num(0.0, MOST_CODE, -MOST_CODE)
    return (codes * (largest / most)).flatten(-2)[..., : x.shape[-1]]
