"""Temperature, min-p, top-k and top-p, each row by its own, in vLLM's order.

What a filter keeps depends on a token's weight alone: of equal weights all stay or none. Weights
are relative to the row's largest, which is 1.
"""

import numpy as np
from numpy.typing import NDArray

from quire.engine.sampling.draws import padded, passed

_TINY = float(np.finfo(np.float32).tiny)


def weights_of(
    logits: NDArray[np.float32], peaks: NDArray[np.float32], temperatures: NDArray[np.float64]
) -> NDArray[np.float32]:
    """exp((logit - peak) / temperature), and zeros up to the width that ``drawn`` wants.

    From the peak down, so that a temperature close to 0 cannot divide it to infinity.
    """
    num_rows, vocab_size = logits.shape
    weights = np.zeros((num_rows, padded(vocab_size)), np.float32)
    inside = weights[:, :vocab_size]
    np.subtract(logits, peaks[:, None], out=inside)
    with np.errstate(over="ignore"):
        inside /= np.maximum(temperatures, _TINY).astype(np.float32)[:, None]
    np.exp(inside, out=inside)
    return weights


def cut(
    weights: NDArray[np.float32],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
) -> None:
    """Make what the filters exclude 0. ``top_k`` below 1 and ``top_p`` 1 are off."""
    size = weights.shape[-1]
    top_k = np.where((top_k < 1) | (top_k > size), size, top_k)
    floors = min_p.astype(np.float32)
    ordered = (top_k < size) | (top_p < 1)
    rows = slice(None) if ordered.all() else np.flatnonzero(ordered)
    if ordered.any():
        floors[rows] = _floors(weights[rows], top_k[rows], top_p[rows], floors[rows])
    np.multiply(weights, weights >= floors[:, None], out=weights)


def _floors(
    weights: NDArray[np.float32],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    floors: NDArray[np.float32],
) -> NDArray[np.float32]:
    """The least weight of each row that is kept, if ``floors`` are so before top-k and top-p."""
    rows = np.arange(len(weights))
    ordered = np.sort(weights, axis=-1)
    floors = np.maximum(floors, ordered[rows, weights.shape[-1] - top_k])
    ordered *= ordered >= floors[:, None]
    # Of the smallest weights those go that add up to 1 - top_p of all at most.
    return np.maximum(floors, ordered[rows, passed(ordered, 1.0 - top_p)])
