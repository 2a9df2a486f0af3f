"""A step's work in numpy, for logits that lie in the host's memory.

It reads a vocabulary several times faster than torch does on a CPU.
"""

from collections.abc import Sequence as Several
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.sampling.batch import SamplingBatch, Wanted
from quire.engine.sampling.logits_processors import Rules
from quire.engine.sampling.rng import drawn, keys_at, padded, passed, rows_at_once
from quire.engine.sequence import TokenLogprobs
from quire.engine.step_plan import PromptRows

# -- filters ---------------------------------------------------------------------------------------

# Temperature, min-p, top-k and top-p, each row by its own, in vLLM's order.
#
# What a filter keeps depends on a token's weight alone: of equal weights all stay or none. Weights
# are relative to the row's largest, which is 1.


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


# -- logprobs --------------------------------------------------------------------------------------

# Log-probabilities as the model has them, before penalties, masks, temperature and filters.


def logprobs_of(
    logits: NDArray[np.float32], rows: list[int], token_ids: list[int], num_top: list[int]
) -> list[TokenLogprobs]:
    """Of one token in each of some rows, beside its row's ``num_top`` likeliest; -1: beside all.

    Equal tokens have the same rank, and the lower id comes first.
    """
    at_once = rows_at_once(logits.shape[-1])
    found: list[TokenLogprobs] = []
    with np.errstate(invalid="ignore"):  # a row that is not finite gives what is no number
        for begin in range(0, len(rows), at_once):
            part = slice(begin, begin + at_once)
            found += _of_rows(logits[rows[part]], token_ids[part], num_top[part])
    return found


def prompt_logprobs_of(logits: Tensor, rows: PromptRows) -> list[TokenLogprobs]:
    """Of the prompt's tokens ``rows.start`` + 1 and on, as many as there are rows."""
    num_top = rows.sequence.request.params.prompt_logprobs or 0
    at_once = rows_at_once(logits.shape[-1])
    found: list[TokenLogprobs] = []
    for begin in range(0, rows.num_rows, at_once):
        count = min(at_once, rows.num_rows - begin)
        own = logits[rows.row + begin : rows.row + begin + count].float().numpy()
        first = rows.start + begin + 1
        token_ids = rows.sequence.token_ids[first : first + count]
        found += logprobs_of(own, list(range(count)), token_ids, [num_top] * count)
    return found


def _of_rows(
    logits: NDArray[np.float32], token_ids: list[int], num_top: list[int]
) -> list[TokenLogprobs]:
    chosen = logits[np.arange(len(logits)), token_ids]
    ranks = np.count_nonzero(logits > chosen[:, None], axis=-1) + 1
    peaks = logits.max(-1)
    sums = np.exp(logits - peaks[:, None]).sum(-1)
    norms = peaks.astype(np.float64) + np.log(sums.astype(np.float64))
    return [
        TokenLogprobs(
            token_id=token_ids[row],
            logprob=float(chosen[row] - norms[row]),
            rank=int(ranks[row]),
            top=tuple(zip(top.tolist(), (logits[row, top] - norms[row]).tolist(), strict=True)),
        )
        for row, top in enumerate(_likeliest(logits, num_top))
    ]


def _likeliest(logits: NDArray[np.float32], num_top: list[int]) -> list[NDArray[np.int64]]:
    """So many token ids of each row, the likeliest first."""
    size = logits.shape[-1]
    counts = np.array([size if num < 0 else min(num, size) for num in num_top])
    if not counts.any():
        return [np.empty(0, np.int64)] * len(logits)
    least = np.sort(logits, axis=-1)[np.arange(len(logits)), size - np.maximum(counts, 1)]
    found: list[NDArray[np.int64]] = []
    for row, floor, count in zip(logits, least, counts, strict=True):
        ids = np.flatnonzero(row >= floor)
        found.append(ids[np.argsort(-row[ids], kind="stable")[:count]])
    return found


# -- a step on the host ----------------------------------------------------------------------------


Floats = NDArray[np.float32]


@final
class HostChoices:
    def __init__(self, logits: Tensor, work: SamplingBatch) -> None:
        self.prompt_logprobs = [prompt_logprobs_of(logits, rows) for rows in work.prompt_rows]
        self._raw = raw = _rows_of(logits, work)
        tokens, peaks = _largest(raw)
        self._peaks, sound, edited = peaks, np.isfinite(peaks), raw
        if work.edits:
            edited = raw.copy()
            work.edits.make(edited)
            tokens, peaks = _largest(edited)
            sound &= peaks > -np.inf
        self.sound: list[bool] = sound.tolist()
        lots = work.lots if sound.all() else [lot for lot in work.lots if self.sound[lot[0]]]
        at_once = rows_at_once(raw.shape[-1])
        for begin in range(0, len(lots), at_once):
            rows, places, rules = zip(*lots[begin : begin + at_once], strict=True)
            own = np.array(rows)
            tokens[own] = _drawn(edited[own], peaks[own], np.array(places), rules)
        self.tokens: list[int] = tokens.tolist()

    def peak(self, row: int) -> float:
        return float(self._peaks[row])

    def logprobs(self, wanted: Several[Wanted]) -> list[TokenLogprobs]:
        rows = [row for row, _ in wanted]
        token_ids = [self.tokens[row] for row in rows]
        return logprobs_of(self._raw, rows, token_ids, [num_top for _, num_top in wanted])


def _rows_of(logits: Tensor, work: SamplingBatch) -> Floats:
    """The work's rows; not to be written to."""
    logits = logits[: len(work.rows)] if work.is_all else logits[work.rows]
    found: Floats = logits.float().numpy()
    return found


def _drawn(
    logits: Floats, peaks: Floats, places: NDArray[np.int64], rules: tuple[Rules, ...]
) -> NDArray[np.int64]:
    """A random token for each row: the one at ``places[i]`` of the sequence with ``rules[i]``."""
    params = [own.params for own in rules]
    weights = weights_of(logits, peaks, np.array([p.temperature for p in params]))
    if any(own.is_filtered for own in rules):
        cut(
            weights,
            top_k=np.array([p.top_k for p in params]),
            top_p=np.array([p.top_p for p in params]),
            min_p=np.array([p.min_p for p in params]),
        )
    keys = np.array([own.key for own in rules], np.uint64)
    return drawn(weights, keys_at(keys, places))


def _largest(logits: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Of each row the token with the largest logit, the lowest of equals, and its logit.

    NaN counts as larger than anything.
    """
    tokens = logits.argmax(-1)
    return tokens, logits[np.arange(len(logits)), tokens]
