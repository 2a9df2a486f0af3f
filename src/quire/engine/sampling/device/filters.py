"""The filters of ``sampling.filters`` on a device: each row by its own, the same definitions.

Where every row has a small top-k, as most models recommend it, the largest weights are enough and
nothing is sorted.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.engine.sampling.device.draws import BLOCK, block_of, padded

_NEXT_BELOW_ONE = 1 - 2.0**-53  # a number above 0 times this is the next one below it


class Filters(NamedTuple):
    """Of each row."""

    top_k: Tensor  # i64[R], from 1 to the vocabulary
    tails: Tensor  # f64[R]: 1 - top_p, the share of the smallest weights that goes
    min_p: Tensor  # f32[R]


def weights_of(logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    """exp((logit - peak) / temperature), and zeros up to a whole block: f32[R, whole blocks].

    Shapes: logits [R, vocabulary], peaks f32[R], temperatures f32[R], none too small to divide by.
    """
    weights = logits - peaks[:, None]  # in float32, whatever the logits are
    weights.div_(temperatures[:, None]).exp_()
    return padded(weights)


def cut(weights: Tensor, floors: Tensor) -> None:
    """Make what is below its row's floor 0."""
    weights.masked_fill_(weights < floors[:, None], 0)


def floors_by_sorting(weights: Tensor, filters: Filters) -> Tensor:
    """The least weight of each row that is kept: f32[R]."""
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
    """The same, where no row's top-k is above ``num_largest``."""
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
    """Where growing sums first are above a share, and what is left of it there.

    A share that rounding has lifted to the whole falls on the last that adds something.
    """
    shares = shares.minimum(sums[:, -1] * _NEXT_BELOW_ONE)
    first = torch.searchsorted(sums, shares[:, None], right=True)
    # A row that is not finite has none: it is of no account, but an index must not be out of range.
    first.clamp_(max=sums.shape[-1] - 1)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(1, first)
    return first[:, 0], shares - before[:, 0]
