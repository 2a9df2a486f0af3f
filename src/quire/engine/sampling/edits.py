"""Changes to rows of logits before a token is chosen: gathered row by row, made all at once.

``make`` makes them in numpy; ``device.edits`` makes the same on a device.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from quire.engine.params import SamplingParams
from quire.engine.sampling.tally import Tally

Ids = NDArray[np.int64]


class Edits:
    """In the order in which they are made: what is barred, biases, penalties.

    Definitions: vLLM's. The repetition penalty divides a logit above 0 and multiplies one below;
    then the frequency penalty is subtracted as often as the token came, the presence penalty once.
    A row has one mask, one set of biases and one of penalties at most, each id in them once.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.masks: list[tuple[int, NDArray[np.uint8]]] = []
        self.barred: list[tuple[int, Ids]] = []  # a row more than once, and its ids too
        self.biases: list[tuple[int, Ids, NDArray[np.float32]]] = []
        self.penalties: list[tuple[int, Ids, Ids, SamplingParams]] = []

    def bar(self, row: int, token_ids: list[int]) -> None:
        """These must not come."""
        self.barred.append((row, self._known(token_ids)))

    def allow(self, row: int, bits: NDArray[np.uint8]) -> None:
        """Only these may come; a bit a token, the lowest of a byte first."""
        self.masks.append((row, bits))

    def bias(self, row: int, biases: Mapping[int, float]) -> None:
        token_ids = self._known(list(biases))
        values = np.array([biases[token_id] for token_id in token_ids.tolist()], np.float32)
        self.biases.append((row, token_ids, values))

    def penalise(self, row: int, tally: Tally, params: SamplingParams) -> None:
        """As the tally stands now."""
        self.penalties.append((row, tally.token_ids.copy(), tally.counts.copy(), params))

    def __bool__(self) -> bool:
        return bool(self.masks or self.barred or self.biases or self.penalties)

    def make(self, logits: NDArray[np.float32]) -> None:
        if self.masks:
            every_byte = np.arange(256, dtype=np.uint8)[:, None]
            is_clear = np.unpackbits(every_byte, axis=1, bitorder="little") == 0
            terms = np.where(is_clear, np.float32(-np.inf), np.float32(0))  # of a byte's 8 tokens
            with np.errstate(invalid="ignore"):  # a row with +inf was no good before
                for row, bits in self.masks:
                    logits[row] += terms.take(bits, axis=0).ravel()[: self.vocab_size]
        if self.barred:
            ids = [ids for _, ids in self.barred]
            logits[_rows([row for row, _ in self.barred], ids), np.concatenate(ids)] = -np.inf
        if self.biases:
            ids = [ids for _, ids, _ in self.biases]
            values = np.concatenate([values for _, _, values in self.biases])
            logits[_rows([row for row, _, _ in self.biases], ids), np.concatenate(ids)] += values
        if self.penalties:
            self._make_penalties(logits)

    def _make_penalties(self, logits: NDArray[np.float32]) -> None:
        ids = [ids for _, ids, _, _ in self.penalties]
        where = _rows([row for row, _, _, _ in self.penalties], ids), np.concatenate(ids)
        counts = np.concatenate([counts for _, _, counts, _ in self.penalties])
        each = [
            (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
            for _, _, _, p in self.penalties
        ]
        spread = np.repeat(np.array(each, np.float32), [len(own) for own in ids], axis=0)
        repetition, frequency, presence = spread.T
        found = logits[where]
        found = np.where(found > 0, found / repetition, found * repetition)
        logits[where] = found - frequency * counts - presence * (counts > 0)

    def _known(self, token_ids: list[int]) -> Ids:
        """Without those that the model has no logit for."""
        ids = np.array(token_ids, np.int64)
        return ids[ids < self.vocab_size]


def _rows(rows: list[int], ids: list[Ids]) -> Ids:
    """Each row as often as it has ids."""
    return np.repeat(np.array(rows, np.int64), [len(own) for own in ids])
