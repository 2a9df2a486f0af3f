"""Log-probabilities as the model has them, before penalties, masks, temperature and filters."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.plan import PromptRows
from quire.engine.sampling.draws import rows_at_once
from quire.engine.sequence import TokenLogprobs


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
