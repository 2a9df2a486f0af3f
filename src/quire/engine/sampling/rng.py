"""Randomness by counting: the draw for a token depends on its sequence's key and its place alone.

So a text is the same whatever else is in the batch, and after it was computed again. A draw is a
race: each weight divided by a number from the exponential distribution, and the largest wins. Where
rounding has moved the weights a little, it ends differently only as often as they have moved; the
place where summed weights pass a number would move with all the weights before it. So that few
numbers are needed, blocks of weights race first, and then those of the block that has won.

Source: splitmix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 128  # weights that are summed before any of them is looked at
_CACHED = 2**18  # weights; 1 MiB


def key_of_seed(seed: int) -> int:
    """The key of a sequence that was given a seed, any whole number."""
    return int(_mixed(np.array([seed % 2**64], np.uint64))[0])


def key_of_sequence(engine_seed: int, seq_id: int) -> int:
    """The key of one that was not."""
    keys = np.array([key_of_seed(engine_seed)], np.uint64)
    return int(_mixed(keys + np.array([seq_id % 2**64], np.uint64) * _GOLDEN)[0])


def keys_at(keys: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A key for each token ``places[i]`` of the sequence with ``keys[i]``."""
    return _mixed(keys + (places.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def uniforms(keys: NDArray[np.uint64], first: int, count: int) -> NDArray[np.float64]:
    """Numbers ``first`` to ``first + count`` of each key, above 0 and below 1: [len(keys), count].

    The last bit is 1, so that none of them is 0.
    """
    numbers = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    bits = _mixed(keys[:, None] + numbers * _GOLDEN) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def rows_at_once(num_weights: int) -> int:
    """So many rows that what is computed with them stays in a processor's own cache."""
    return max(1, _CACHED // num_weights)


def padded(num_weights: int) -> int:
    """How many weights a row has room for in ``drawn``; those past its end are 0."""
    return -(-num_weights // _BLOCK) * _BLOCK


def drawn(weights: NDArray[np.float32], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """A token of each row, each as often as its weight says.

    Shapes: weights [R, padded(vocabulary)], none below 0 and some above; keys [R].
    """
    blocks = weights.reshape(len(weights), -1, _BLOCK)
    block = _winners(blocks.sum(-1), keys, _BLOCK)
    return block * _BLOCK + _winners(blocks[np.arange(len(blocks)), block], keys, 0)


def _winners(
    weights: NDArray[np.float32], keys: NDArray[np.uint64], first: int
) -> NDArray[np.int64]:
    """The token that wins each row's race, run with its key's numbers from ``first`` on."""
    handicaps = -np.log(uniforms(keys, first, weights.shape[1]))
    winners: NDArray[np.int64] = (weights / handicaps).argmax(-1)
    return winners


def passed(weights: NDArray[np.float32], numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """The first token of each row where the sum of the weights is above its number's share.

    Shapes: weights [R, padded(vocabulary)], none below 0 and some above; numbers [R], in [0, 1).
    """
    blocks = weights.reshape(len(weights), -1, _BLOCK)
    sums = blocks.sum(-1).cumsum(-1, dtype=np.float64)
    block, left = _passed(sums, numbers * sums[:, -1])
    inside = blocks[np.arange(len(blocks)), block].cumsum(-1, dtype=np.float64)
    token, _ = _passed(inside, left)
    return block * _BLOCK + token


def _passed(
    sums: NDArray[np.float64], shares: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Where growing sums first are above a share, and what is left of it there.

    A share that rounding has lifted to the whole falls on the last that adds something.
    """
    shares = np.minimum(shares, np.nextafter(sums[:, -1], 0.0))
    first = (sums <= shares[:, None]).sum(-1)
    before = np.where(first > 0, sums[np.arange(len(sums)), first - 1], 0.0)
    return first, shares - before


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
