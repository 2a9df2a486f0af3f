"""How often each token has come in a sequence, kept as it grows: what penalties go by.

Only tokens that came have an entry, so a long vocabulary costs nothing.
"""

import numpy as np
from numpy.typing import NDArray

from quire.engine.sequence import Sequence


class Tally:
    """The distinct tokens of one sequence, and how often each was generated.

    The prompt's are among them, with a count of 0, if ``with_prompt``.
    """

    def __init__(self, sequence: Sequence, *, with_prompt: bool) -> None:
        prompt = sequence.request.prompt_token_ids if with_prompt else ()
        ids = np.unique(np.array(prompt, np.int64))
        self._num_prompt_ids = self._num_ids = len(ids)
        self._ids = np.concatenate([ids, np.zeros(64, np.int64)])
        self._counts = np.zeros(len(self._ids), np.int64)
        self._entries = dict(zip(ids.tolist(), range(len(ids)), strict=True))

    @property
    def token_ids(self) -> NDArray[np.int64]:
        return self._ids[: self._num_ids]

    @property
    def counts(self) -> NDArray[np.int64]:
        return self._counts[: self._num_ids]

    def add(self, token_id: int) -> None:
        entry = self._entries.setdefault(token_id, self._num_ids)
        if entry == self._num_ids:
            if entry == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[entry] = token_id
            self._num_ids += 1
        self._counts[entry] += 1

    def take_back(self, token_id: int) -> None:
        """Undo the latest ``add`` that was not taken back, of this token."""
        entry = self._entries[token_id]
        self._counts[entry] -= 1
        if entry >= self._num_prompt_ids and not self._counts[entry]:
            del self._entries[token_id]
            self._num_ids -= 1
