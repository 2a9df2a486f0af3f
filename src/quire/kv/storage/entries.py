"""One layer's keys and values as tensors: where a slot's entry is written and read.

Both storages make their layers of these; which bytes they lie in is theirs to say.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.kv.interface import EntryWriter, LayerView, MakeWriter

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# -- quantized -------------------------------------------------------------------------------------

# Keys and values in eight bits: the two formats, to the bit.
#
# ``int8``: each token's key in each head has a scale of its own, and so has its value. With a the
# largest absolute value of the entry, in float32:
#
#     scale = a / 127        code = x * (127 / a), rounded half to even, within ±127
#
# An entry of zeros has the scale 0. One that holds NaN or infinity reads back as NaN throughout,
# and no other entry does: its codes are finite, its scale is not.
#
# ``float8_e4m3fn``: x within ±448, rounded half to even; no scale. NaN stays, infinity becomes
# ±448.
#
# A compiled writer produces the same bits, NaN's own aside. Which tokens lie where, ``storage``
# says.


MAX_CODE = 127
MAX_FP8 = 448.0


def quantize(x: "Tensor", dtype: "torch.dtype") -> "tuple[Tensor, Tensor | None]":
    """Quantize entries [..., D] to codes [..., D] in ``dtype``, and scales [...] if it has them.

    Any other dtype than the two above is a plain cast.
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
    """Return stored entries [..., D], with scales [...], as attention reads them.

    Codes become float32; other entries stay as they are.
    """
    import torch

    if codes.dtype == torch.float8_e4m3fn:
        return codes.float()
    return codes if scales is None else codes * scales[..., None]


def bits(x: "Tensor") -> "Tensor":
    """View a tensor [..., D] in a dtype that every operation of torch knows."""
    import torch

    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


# -- entries ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entries:
    """A layer's keys, or its values, and the scales where they are codes that have some."""

    codes: "Tensor"  # ranges: [K, slots, D]; blocks: [N, K, B, D]
    scales: "Tensor | None" = None  # f32, the same without D

    @property
    def parts(self) -> "list[Tensor]":
        return [bits(part) for part in (self.codes, self.scales) if part is not None]

    def quantize(self, x: "Tensor") -> "Entries":
        """Quantize x [T, K, D] as it is stored here."""
        return Entries(*quantize(x, self.codes.dtype))

    def read(self, index: Any) -> "Tensor":
        scales = None if self.scales is None else self.scales[index]
        return dequantize(self.codes[index], scales)


def stored(
    keys: Entries, values: Entries, k: "Tensor", v: "Tensor"
) -> "Iterator[tuple[Tensor, Tensor]]":
    """Yield (where, what) for each part of new entries [T, K, D] and [T, K, Dv]."""
    for held, x in ((keys, k), (values, v)):
        yield from zip(held.parts, held.quantize(x).parts, strict=True)


def layer_view(keys: Entries, values: Entries, *, slots_per_row: int) -> LayerView:
    """Make the view of a layer's keys and values."""
    return LayerView(
        k=keys.codes,
        v=values.codes,
        k_scale=keys.scales,
        v_scale=values.scales,
        slots_per_row=slots_per_row,
    )


class RangeLayer:
    """A layer whose sequences lie in ranges of at most ``longest`` slots: entries [K, slots, D]."""

    __slots__ = ("_keys", "_values", "_writer", "view")

    def __init__(
        self, keys: Entries, values: Entries, longest: int, make_writer: MakeWriter | None
    ) -> None:
        self._keys, self._values = keys, values
        self.view = layer_view(
            _from_every_slot(keys, longest), _from_every_slot(values, longest), slots_per_row=1
        )
        self._writer: EntryWriter | None = make_writer and make_writer(self.view)

    @property
    def parts(self) -> "list[Tensor]":
        """All that a slot has: [K, slots, D] and [K, slots]."""
        return [*self._keys.parts, *self._values.parts]

    def write(self, slots: "Tensor", k: "Tensor", v: "Tensor") -> None:
        if self._writer is not None:
            self._writer(slots, k, v)
            return
        for rows, new in stored(self._keys, self._values, k, v):
            rows.index_copy_(1, slots, new.transpose(0, 1))

    def gather(self, slots: "Tensor") -> tuple["Tensor", "Tensor"]:
        index = (slice(None), slots)
        return self._keys.read(index), self._values.read(index)

    def save(self, slots: "Tensor") -> "list[Tensor]":
        """Copy out each part, tokens first: [T, K, D] and [T, K]."""
        return [part[:, slots].transpose(0, 1).contiguous() for part in self.parts]

    def load(self, slots: "Tensor", parts: "list[Tensor]") -> None:
        for held, part in zip(self.parts, parts, strict=True):
            held.index_copy_(1, slots, part.to(held.device).transpose(0, 1))


def _from_every_slot(held: Entries, longest: int) -> Entries:
    """[K, slots, D] → [slots - longest + 1, K, longest, D]: row i is the range from slot i on."""

    def every(rows: "Tensor") -> "Tensor":
        return rows.unfold(1, longest, 1).transpose(0, 1).movedim(-1, 2)

    return Entries(every(held.codes), None if held.scales is None else every(held.scales))
