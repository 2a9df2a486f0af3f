"""What attention sees of a layer, whichever strategy holds it, and what writes into it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """One layer's keys and values, as every attention kernel sees them.

    Entry i of a block table is row i here. The strategies that hold ranges give overlapping rows
    (row i begins one token after row i - 1), so a range is a table of one entry.

    Slot s is entry ``s % slots_per_row`` of row ``s // slots_per_row``. That is B for blocks and 1
    for ranges, where the last slots begin no row of the tensor, but have addresses all the same: a
    compiled kernel goes by strides.

    Keys and values that are codes have scales where their format has them (``quantized``).
    """

    k: "Tensor"  # [N, K, B, D], any strides
    v: "Tensor"  # [N, K, B, Dv]
    slots_per_row: int
    k_scale: "Tensor | None" = None  # f32[N, K, B]
    v_scale: "Tensor | None" = None  # f32[N, K, B]
    # What a kernel has worked out about the view, for the steps that come after the first one.
    memo: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


class EntryWriter(Protocol):
    """Puts entries into one layer's slots, as they are stored there."""

    def __call__(self, slots: "Tensor", k: "Tensor", v: "Tensor") -> None:
        """Shapes: slots i64[T], k [T, K, D], v [T, K, Dv]."""
        ...


MakeWriter: TypeAlias = Callable[[LayerView], EntryWriter]
