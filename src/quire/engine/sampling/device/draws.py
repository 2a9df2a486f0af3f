"""The race of ``sampling.draws`` on a device: the same numbers to the bit, the same two rounds.

Torch has no unsigned 64-bit arithmetic. Sums and products of int64 wrap around to the same bits,
and what a shift to the right brings in from the sign is masked away.
"""

import torch
from torch import Tensor

BLOCK = 128  # weights that are summed before any of them is looked at, as on the host
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_FACTOR = 0x94D049BB133111EB - 2**64


def uniforms(keys: Tensor, first: int, count: int) -> Tensor:
    """Numbers ``first`` to ``first + count`` of each key, above 0 and below 1.

    Shapes: keys i64[R], the bits of the host's keys; f64[R, count].
    """
    numbers = torch.arange(first + 1, first + count + 1, device=keys.device) * _GOLDEN
    bits = _shifted(_mixed(keys[:, None] + numbers), 11)
    return (bits.double() + 0.5) * 2.0**-53


def padded(weights: Tensor) -> Tensor:
    """With zeros up to the next whole block: [R, whole blocks] of [R, vocabulary]."""
    missing = -weights.shape[-1] % BLOCK
    return torch.nn.functional.pad(weights, (0, missing)) if missing else weights


def drawn(weights: Tensor, keys: Tensor) -> Tensor:
    """A token of each row, each as often as its weight says: i64[R].

    Shapes: weights f32[R, whole blocks], none below 0 and some above; keys i64[R].
    """
    blocks = weights.view(len(weights), -1, BLOCK)
    # The numbers of both rounds at once: the first ones are for the tokens of the block that wins.
    handicaps = -uniforms(keys, 0, BLOCK + blocks.shape[1]).log()
    # In float64, so that neither the device nor the number of rows decides how a sum is rounded.
    block = (blocks.sum(-1, dtype=torch.float64) / handicaps[:, BLOCK:]).argmax(-1)
    return block * BLOCK + (block_of(blocks, block) / handicaps[:, :BLOCK]).argmax(-1)


def block_of(blocks: Tensor, block: Tensor) -> Tensor:
    """One block of each row: [R, BLOCK] of [R, blocks, BLOCK]."""
    return blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0]


def _mixed(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST_FACTOR
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND_FACTOR
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, num_bits: int) -> Tensor:
    """To the right, zeros coming in."""
    mask: int = 2 ** (64 - num_bits) - 1
    return (numbers >> num_bits) & mask
