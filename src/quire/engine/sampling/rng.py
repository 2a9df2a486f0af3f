"""Randomness by counting: the draw for a token depends on its sequence's key and its place alone.

So a text is the same whatever else is in the batch, and after it was computed again. A draw is a
race: each weight divided by a number from the exponential distribution, and the largest wins. Where
rounding has moved the weights a little, it ends differently only as often as they have moved; the
place where summed weights pass a number would move with all the weights before it. So that few
numbers are needed, blocks of weights race first, and then those of the block that has won.

Torch has no unsigned 64-bit arithmetic. Sums and products of int64 wrap around to the same bits,
and what a shift to the right brings in from the sign is masked away.

Source: splitmix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 128  # weights that are summed before any of them is looked at
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB
_WRAP = 2**64

# -- keys ------------------------------------------------------------------------------------------


def key_of_seed(seed: int) -> int:
    """Return the key of a sequence that was given a seed, any whole number."""
    number = seed % _WRAP
    number = (number ^ (number >> 30)) * _FIRST_FACTOR % _WRAP
    number = (number ^ (number >> 27)) * _SECOND_FACTOR % _WRAP
    return number ^ (number >> 31)


def key_of_sequence(engine_seed: int, seq_id: int) -> int:
    """Return the key of a sequence that was given no seed."""
    return key_of_seed(key_of_seed(engine_seed) + seq_id * _GOLDEN)


def keys_at(keys: list[int], places: list[int]) -> NDArray[np.int64]:
    """Return the key of each token ``places[i]`` of the sequence with ``keys[i]``: i64[R]."""
    found = [
        key_of_seed(key + (place + 1) * _GOLDEN) for key, place in zip(keys, places, strict=True)
    ]
    return np.array(found, np.uint64).view(np.int64)


# -- draws -----------------------------------------------------------------------------------------


def uniforms(keys: Tensor, first: int, count: int) -> Tensor:
    """Return numbers ``first`` to ``first + count`` of each key, above 0 and below 1.

    Shapes: keys i64[R], the bits of unsigned keys; f64[R, count]. The last bit of a number is 1, so
    that none of them is 0.
    """
    numbers = torch.arange(first + 1, first + count + 1, device=keys.device) * _signed(_GOLDEN)
    bits = _shifted(_mixed(keys[:, None] + numbers), 11)
    return (bits.double() + 0.5) * 2.0**-53


def padded(weights: Tensor) -> Tensor:
    """Return weights [R, vocabulary] with zeros up to whole blocks: [R, blocks x BLOCK]."""
    missing = -weights.shape[-1] % BLOCK
    return torch.nn.functional.pad(weights, (0, missing)) if missing else weights


def drawn(weights: Tensor, keys: Tensor) -> Tensor:
    """Draw a token of each row, each as often as its weight says: i64[R].

    Shapes: weights f32[R, blocks x BLOCK], none below 0 and some above; keys i64[R].
    """
    blocks = weights.view(len(weights), -1, BLOCK)
    # The numbers of both rounds at once: the first ones are for the tokens of the block that wins.
    handicaps = -uniforms(keys, 0, BLOCK + blocks.shape[1]).log()
    # In float64, so that neither the device nor the number of rows decides how a sum is rounded.
    block = (blocks.sum(-1, dtype=torch.float64) / handicaps[:, BLOCK:]).argmax(-1)
    return block * BLOCK + (block_of(blocks, block) / handicaps[:, :BLOCK]).argmax(-1)


def block_of(blocks: Tensor, block: Tensor) -> Tensor:
    """Return one block of each row: blocks [R, blocks, BLOCK], block i64[R] → [R, BLOCK]."""
    return blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0]


def _mixed(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ _shifted(numbers, 30)) * _signed(_FIRST_FACTOR)
    numbers = (numbers ^ _shifted(numbers, 27)) * _signed(_SECOND_FACTOR)
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, num_bits: int) -> Tensor:
    """Shift to the right, zeros coming in."""
    mask: int = 2 ** (64 - num_bits) - 1
    return (numbers >> num_bits) & mask


def _signed(number: int) -> int:
    """Return the whole number of 64 bits whose bits are those of one above 2 ** 63."""
    return number - _WRAP
