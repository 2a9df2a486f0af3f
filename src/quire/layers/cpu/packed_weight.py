"""Weights of a linear layer as whole numbers of 8 or 4 bits, in the order in which kernels read.

    w[n][k] = (code[n][k] - zero[n][g]) * scale[n][g]        g = k // group_size

Outputs are taken in blocks of 64. A block has a record for each group of inputs, and a record has
all of it: codes, scales, zeros. So a product reads one piece of memory from its begin to its end.

    record: codes [group_size / 8][4 panels][16 outputs][8 inputs], scales [64], zeros i8[64]

Eight inputs of an output are a word of 32 bits with 4 bits each: byte b has inputs b and 4 + b. In
8 bits they are two words, which lie four panels apart. Behind the last input and the last output
there are zeros up to whole groups and blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quire.units import align_up, ceil_div

PANEL = 16  # outputs in a vector
PANELS = 4
BLOCK = PANEL * PANELS
STEP = 8  # inputs of a word of 4 bits each
MOST_GROUP = 128  # inputs that one record is about: a larger group's scale stands in several
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedForm:
    """Everything that a record's layout depends on."""

    bits: int  # 4 or 8
    group_size: int  # inputs: a multiple of 8 up to 128
    has_zeros: bool = False  # else codes count from the middle: symmetric
    scale_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        """Raises: ValueError."""
        if self.bits not in (4, 8):
            raise ValueError(f"codes of {self.bits} bits are none of 4 and 8")
        if self.group_size % STEP or not STEP <= self.group_size <= MOST_GROUP:
            raise ValueError(
                f"a group of {self.group_size} inputs is no multiple of {STEP} up to {MOST_GROUP}"
            )
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"scales in {self.scale_dtype} have no kernel")

    @property
    def codes_bytes(self) -> int:
        """Of a record."""
        return BLOCK * self.group_size * self.bits // 8

    @property
    def scales_bytes(self) -> int:
        """Of a record."""
        return BLOCK * self.scale_dtype.itemsize

    @property
    def record_bytes(self) -> int:
        """Of a block and a group."""
        return self.codes_bytes + self.scales_bytes + BLOCK * self.has_zeros

    @property
    def least(self) -> int:
        """The lowest code; the highest is ``-least - 1``."""
        return -(1 << (self.bits - 1))

    @property
    def bits_a_weight(self) -> float:
        """With scales and zeros."""
        return self.record_bytes * 8 / (BLOCK * self.group_size)

    def shape(self, num_outputs: int, num_inputs: int) -> tuple[int, int, int]:
        """Return that of a weight's data: blocks, groups, bytes of a record."""
        groups = ceil_div(num_inputs, self.group_size)
        return ceil_div(num_outputs, BLOCK), groups, self.record_bytes


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """One weight [N, K] in its packed form."""

    data: Tensor  # u8[blocks, groups, bytes of a record]
    num_outputs: int
    num_inputs: int
    form: PackedForm

    def __post_init__(self) -> None:
        """Raises: ValueError for data of another shape."""
        shape = self.form.shape(self.num_outputs, self.num_inputs)
        if self.data.dtype != torch.uint8 or self.data.shape != shape:
            raise ValueError(f"packed data is {list(self.data.shape)}, and not {list(shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs, [N, K]."""
        return self.num_outputs, self.num_inputs

    def unpacked(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes i8[N, K], scales [N, groups] and zeros i8[N, groups]."""
        form, (blocks, groups, _) = self.form, self.data.shape
        sizes = [form.codes_bytes, form.scales_bytes, BLOCK * form.has_zeros]
        codes, scales, zeros = torch.split(self.data, sizes, dim=2)
        words = codes.reshape(blocks, groups, -1, PANELS, PANEL, 4)
        if form.bits == 4:
            words = torch.cat([words & 15, words >> 4], -1).to(torch.int8) + form.least
        else:
            words = words.view(torch.int8)
        # [blocks, groups, words, panels, outputs, inputs] to [outputs, inputs]
        whole = words.permute(0, 3, 4, 1, 2, 5).reshape(blocks * BLOCK, groups * form.group_size)
        scales = scales.contiguous().view(form.scale_dtype)
        if not form.has_zeros:
            zeros = torch.zeros(blocks, groups, BLOCK, dtype=torch.uint8)
        by_output = [
            x.transpose(1, 2).reshape(blocks * BLOCK, groups)[: self.num_outputs]
            for x in (scales, zeros.view(torch.int8))
        ]
        return whole[: self.num_outputs, : self.num_inputs], by_output[0], by_output[1]

    def dequantized(self) -> Tensor:
        """Return the weights f32[N, K]. This is the slow twin of what kernels read."""
        codes, scales, zeros = self.unpacked()
        size = self.form.group_size
        scales, zeros = (x.repeat_interleave(size, 1) for x in (scales.float(), zeros.float()))
        return (codes.float() - zeros[:, : self.num_inputs]) * scales[:, : self.num_inputs]


def pack(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    bits: int,
    group_size: int,
    out: Tensor | None = None,
) -> PackedWeight:
    """Pack codes i8[N, K], scales [N, groups] and zeros i8[N, groups] or none.

    Codes and zeros count from the middle: -8 … 7 in 4 bits. ``out``: where the data is to lie,
    u8[bytes].

    Raises: ValueError for shapes that do not belong together.
    """
    form = PackedForm(
        bits=bits, group_size=group_size, has_zeros=zeros is not None, scale_dtype=scales.dtype
    )
    num_outputs, num_inputs = codes.shape
    blocks, groups, record_bytes = form.shape(num_outputs, num_inputs)
    for name, each in (("scales", scales), ("zeros", zeros)):
        if each is not None and each.shape != (num_outputs, groups):
            raise ValueError(f"{name} are {list(each.shape)}, and not {[num_outputs, groups]}")
    more_outputs = blocks * BLOCK - num_outputs
    codes = functional.pad(codes, (0, groups * group_size - num_inputs, 0, more_outputs))
    inputs = STEP if bits == 4 else STEP // 2  # of a word
    words = codes.view(blocks, PANELS, PANEL, groups, group_size // inputs, inputs)
    words = words.permute(0, 3, 4, 1, 2, 5)
    if bits == 4:
        low, high = (words - form.least).to(torch.uint8).chunk(2, dim=-1)
        words = low | high << 4
    data = torch.empty(blocks * groups * record_bytes, dtype=torch.uint8) if out is None else out
    data = data.view(blocks, groups, record_bytes)
    data[..., : form.codes_bytes] = words.contiguous().view(torch.uint8).view(blocks, groups, -1)
    place = form.codes_bytes
    for each in (scales, zeros):
        if each is not None:
            rows = functional.pad(each, (0, 0, 0, more_outputs)).view(blocks, BLOCK, groups)
            piece = rows.transpose(1, 2).contiguous().view(torch.uint8)
            data[..., place : place + piece.shape[2]] = piece
            place += piece.shape[2]
    return PackedWeight(data, num_outputs, num_inputs, form)


def quantize(weight: Tensor, form: PackedForm, out: Tensor | None = None) -> PackedWeight:
    """Round weights [N, K] to the nearest codes of each group. ``out`` is as for ``pack``.

    Raises: ValueError for weights that are no numbers, or too large for a scale.
    """
    num_outputs, num_inputs = weight.shape
    size, least = form.group_size, form.least
    whole = functional.pad(weight.float(), (0, align_up(num_inputs, size) - num_inputs))
    groups = whole.view(num_outputs, -1, size)
    low, high = groups.amin(-1), groups.amax(-1)
    if not bool((low.isfinite() & high.isfinite()).all()):
        raise ValueError("there are weights that are no finite numbers")
    zeros = None
    if form.has_zeros:
        low, high = low.clamp(max=0), high.clamp(min=0)  # a weight of zero stays zero
        scales = ((high - low) / (2 * -least - 1)).to(form.scale_dtype)
        by = _inverse(scales)
        zeros = (least - low * by).round().clamp(least, -least - 1)
    else:
        # What is farthest from zero is the lowest code, of which there is one more.
        farthest = torch.where(high > -low, high, low)
        scales = (farthest / least).to(form.scale_dtype)
        by = _inverse(scales)
    if not bool(scales.isfinite().all()):
        raise ValueError(f"there are weights that are too large for a scale in {form.scale_dtype}")
    codes = groups * by.unsqueeze(-1)
    if zeros is not None:
        codes += zeros.unsqueeze(-1)
    codes = codes.round_().clamp_(least, -least - 1).to(torch.int8)
    return pack(
        codes.view(num_outputs, -1)[:, :num_inputs],
        scales,
        None if zeros is None else zeros.to(torch.int8),
        bits=form.bits,
        group_size=size,
        out=out,
    )


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale; 0 for groups of zeros."""
    scales = scales.float()
    return torch.where(scales == 0, torch.zeros(()), 1 / scales)
