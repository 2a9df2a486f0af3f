"""The rows whose tokens are drawn, in the order in which a device can take them together.

Sorting is the dearest part of drawing, so rows are apart by what their filters need: nothing,
their few largest weights, or all of them in order.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.sampling.device.draws import drawn
from quire.engine.sampling.device.filters import (
    Filters,
    cut,
    floors_by_sorting,
    floors_of_largest,
    weights_of,
)
from quire.engine.sampling.draws import keys_at
from quire.engine.sampling.work import Lot

FEW = 256  # the greatest top-k that is looked for instead of sorting
_TINY = np.finfo(np.float32).tiny

Need = Literal["nothing", "the largest", "order"]


@dataclass(frozen=True, slots=True)
class Part:
    """Lots [start, stop), whose filters need the same."""

    start: int
    stop: int
    need: Need
    has_floors: bool = True  # some row has a min-p
    num_largest: int = 0


class Lots:
    """A step's. ``arrays`` is what ``draw`` needs on the device."""

    def __init__(self, lots: list[Lot], vocab_size: int) -> None:
        rows, places, rules = zip(*lots, strict=True)
        params = [own.params for own in rules]
        top_k = np.array([min(p.top_k, vocab_size) for p in params])
        top_k[top_k < 1] = vocab_size
        top_p = np.array([p.top_p for p in params])
        min_p = np.array([p.min_p for p in params], np.float32)
        is_ordered = (top_k < vocab_size) | (top_p < 1)
        needs = np.where(is_ordered, np.where(top_k <= FEW, 1, 2), 0)
        order = np.argsort(needs, kind="stable")
        keys = np.array([own.key for own in rules], np.uint64)
        temperatures = np.array([p.temperature for p in params])
        self.arrays: dict[str, NDArray[Any]] = {
            "lot_rows": np.array(rows)[order],
            "lot_keys": keys_at(keys, np.array(places)).view(np.int64)[order],
            "temperatures": np.maximum(temperatures, _TINY).astype(np.float32)[order],
            "top_k": top_k[order],
            "tails": (1.0 - top_p)[order],
            "min_p": min_p[order],
        }
        in_order = self.arrays["lot_rows"] == np.arange(len(lots))
        self.is_first_rows = bool(in_order.all())
        ends = np.searchsorted(needs[order], [0, 1, 2, 3]).tolist()
        most = int(self.arrays["top_k"][ends[1] : ends[2]].max(initial=0))
        floored = bool(self.arrays["min_p"][: ends[1]].any())
        parts = (
            Part(ends[0], ends[1], "nothing", has_floors=floored),
            Part(ends[1], ends[2], "the largest", num_largest=most),
            Part(ends[2], ends[3], "order"),
        )
        self._parts = [part for part in parts if part.start < part.stop]

    def pieces(self, num_rows: int) -> Iterator[tuple[Part, slice]]:
        """Of so many lots at most, each of one part."""
        for part in self._parts:
            for start in range(part.start, part.stop, num_rows):
                yield part, slice(start, min(start + num_rows, part.stop))


def draw(
    part: Part, piece: slice, logits: Tensor, peaks: Tensor, sent: Mapping[str, Tensor]
) -> Tensor:
    """A token for each lot of a piece, from its row of ``logits`` and the row's largest: i64[R]."""
    weights = weights_of(logits, peaks, sent["temperatures"][piece])
    filters = Filters(sent["top_k"][piece], sent["tails"][piece], sent["min_p"][piece])
    if part.need == "order":
        cut(weights, floors_by_sorting(weights, filters))
    elif part.need == "the largest":
        cut(weights, floors_of_largest(weights, filters, part.num_largest))
    elif part.has_floors:
        cut(weights, filters.min_p)
    # The weights of a row that is not finite are no numbers, and its token is of no account.
    return drawn(weights, sent["lot_keys"][piece]).clamp_(max=logits.shape[-1] - 1)
