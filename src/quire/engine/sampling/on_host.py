"""A step's work in numpy, for logits that lie in the host's memory.

It reads a vocabulary several times faster than torch does on a CPU.
"""

from collections.abc import Sequence as Several
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.sampling.draws import drawn, keys_at, rows_at_once
from quire.engine.sampling.filters import cut, weights_of
from quire.engine.sampling.logprobs import logprobs_of, prompt_logprobs_of
from quire.engine.sampling.rules import Rules
from quire.engine.sampling.work import Wanted, Work
from quire.engine.sequence import TokenLogprobs

Floats = NDArray[np.float32]


@final
class HostChoices:
    def __init__(self, logits: Tensor, work: Work) -> None:
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


def _rows_of(logits: Tensor, work: Work) -> Floats:
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
