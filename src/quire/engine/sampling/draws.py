"""Tokens drawn at random: weights, filters and the race, rows of one kind at a time.

The filters are temperature, min-p, top-k and top-p, each row by its own, in vLLM's order. What a
filter keeps depends on a token's weight alone: of equal weights all stay or none. Weights are
relative to the row's largest, which is 1.

Sorting is the dearest part of drawing, so rows are apart by what their filters need: nothing, their
few largest weights, or all of them in order. Where every row has a small top-k, as most models
recommend it, the largest weights are enough and nothing is sorted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.sampling.logits_processors import Rules
from quire.engine.sampling.rng import BLOCK, block_of, drawn, keys_at, padded

FEW = 256  # the greatest top-k whose weights are selected instead of sorted
_NEXT_BELOW_ONE = 1 - 2.0**-53  # a number above 0 times this is the next one below it
_TINY = np.finfo(np.float32).tiny

# A row whose token is drawn, the token's place in its sequence, and the sequence's rules.
Lot: TypeAlias = tuple[int, int, Rules]

# -- filters ---------------------------------------------------------------------------------------


class Filters(NamedTuple):
    """What each row's parameters keep."""

    top_k: Tensor  # i64[R], from 1 to the vocabulary
    tails: Tensor  # f64[R]: 1 - top_p, the share of the smallest weights that goes
    min_p: Tensor  # f32[R]


def weights_of(logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    """Return exp((logit - peak) / temperature), and zeros up to whole blocks: f32[R, blocks x 128].

    From the peak down, so that a temperature close to 0 cannot divide it to infinity. Shapes:
    logits [R, vocabulary], peaks f32[R], temperatures f32[R], none too small to divide by.
    """
    weights = logits - peaks[:, None]  # in float32, whatever the logits are
    weights.div_(temperatures[:, None])
    if weights.is_cpu:  # numpy takes half of torch's time
        np.exp(weights.numpy(), out=weights.numpy())
    else:
        weights.exp_()
    return padded(weights)


def cut(weights: Tensor, floors: Tensor) -> None:
    """Make weights [R, n] that are below their row's floor f32[R] 0."""
    weights.mul_(weights >= floors[:, None])


def floors_by_sorting(weights: Tensor, filters: Filters) -> Tensor:
    """Find the least weight of each row that is kept: f32[R, blocks x BLOCK] → f32[R]."""
    if weights.is_cpu:  # numpy takes a third of torch's time
        ordered = torch.from_numpy(np.sort(weights.numpy(), axis=-1))
    else:
        ordered = weights.sort(-1).values
    kth = ordered.gather(1, ordered.shape[-1] - filters.top_k[:, None])[:, 0]
    floors = torch.maximum(filters.min_p, kth)
    cut(ordered, floors)
    blocks = ordered.view(len(ordered), -1, BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    # Of the smallest weights those go that add up to 1 - top_p of all at most.
    block, left = _passed(sums, filters.tails * sums[:, -1])
    inside = block_of(blocks, block)
    last, _ = _passed(inside.double().cumsum(-1), left)
    return torch.maximum(floors, inside.gather(1, last[:, None])[:, 0])


def floors_of_largest(weights: Tensor, filters: Filters, num_largest: int) -> Tensor:
    """Find the same where no row's top-k is above ``num_largest``: f32[R, n] → f32[R]."""
    largest = weights.topk(num_largest, -1).values
    kth = largest.gather(1, filters.top_k[:, None] - 1)[:, 0]
    floors = torch.maximum(filters.min_p, kth)
    # What equals the floor stays too, and is not all among the largest.
    num_equal = (weights == floors[:, None]).sum(-1) - (largest == floors[:, None]).sum(-1)
    cut(largest, floors)
    ordered = torch.cat([floors[:, None], largest.flip(-1)], -1)
    masses = ordered.double()
    masses[:, 0] *= num_equal
    sums = masses.cumsum(-1)
    last, _ = _passed(sums, filters.tails * sums[:, -1])
    return torch.maximum(floors, ordered.gather(1, last[:, None])[:, 0])


def _passed(sums: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Find where growing sums first are above a share, and what is left of it there.

    A share that rounding has lifted to the whole falls on the last that adds something.
    """
    shares = shares.minimum(sums[:, -1] * _NEXT_BELOW_ONE)
    first = torch.searchsorted(sums, shares[:, None], right=True)
    # A row that is not finite has none: it is of no account, but an index must not be out of range.
    first.clamp_(max=sums.shape[-1] - 1)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(1, first)
    return first[:, 0], shares - before[:, 0]


# -- the rows of a step ----------------------------------------------------------------------------

Need = Literal["nothing", "the largest", "order"]


@dataclass(frozen=True, slots=True)
class DrawPart:
    """Lots [start, stop), whose filters need the same."""

    start: int
    stop: int
    need: Need
    has_floors: bool = True  # some row has a min-p
    num_largest: int = 0


class DrawBatch:
    """A step's lots, in the order in which they are drawn together.

    ``arrays`` is what ``draw`` needs where the logits lie.
    """

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
        temperatures = np.array([p.temperature for p in params])
        self.arrays: dict[str, NDArray[Any]] = {
            "lot_rows": np.array(rows)[order],
            "lot_keys": keys_at([own.key for own in rules], list(places))[order],
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
            DrawPart(ends[0], ends[1], "nothing", has_floors=floored),
            DrawPart(ends[1], ends[2], "the largest", num_largest=most),
            DrawPart(ends[2], ends[3], "order"),
        )
        self._parts = [part for part in parts if part.start < part.stop]

    def pieces(self, num_rows: int) -> Iterator[tuple[DrawPart, slice]]:
        """Yield pieces of at most so many lots, each of one part."""
        for part in self._parts:
            for start in range(part.start, part.stop, num_rows):
                yield part, slice(start, min(start + num_rows, part.stop))


def draw(
    part: DrawPart, piece: slice, logits: Tensor, peaks: Tensor, sent: Mapping[str, Tensor]
) -> Tensor:
    """Draw a token for each lot of a piece: i64[R].

    Shapes: logits [R, vocabulary], the rows of the lots, and peaks f32[R], their largest logits.
    """
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
