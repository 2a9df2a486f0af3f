"""Which sequences are swapped out: the part of swapping that needs no tensor.

The bytes themselves are ``engine.swap``'s.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from quire.engine.sequence import Sequence

Clock: TypeAlias = Callable[[], float]  # seconds since some moment


class SwapSpace:
    """Bytes for saved entries, and which sequences have some."""

    def __init__(self, capacity_bytes: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._held: dict[int, int] = {}
        self._left: list[int] = []  # since ``drain``

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    def take(self, sequence: Sequence, num_bytes: int) -> None:
        assert num_bytes <= self.free_bytes
        assert sequence.seq_id not in self._held
        self._held[sequence.seq_id] = num_bytes
        self.used_bytes += num_bytes
        sequence.num_saved_tokens = sequence.num_computed_tokens

    def release(self, sequence: Sequence) -> None:
        """What was saved of it is not needed any more. Does nothing if nothing was."""
        sequence.num_saved_tokens = 0
        if sequence.seq_id in self._held:
            self.used_bytes -= self._held.pop(sequence.seq_id)
            self._left.append(sequence.seq_id)

    def drain(self) -> list[int]:
        """Sequences whose saved entries can be dropped."""
        left, self._left = self._left, []
        return left

    def check(self, sequences: Iterable[Sequence]) -> None:
        """``sequences``: all that have not ended. Raises: AssertionError if the books are off."""
        saved = {s.seq_id for s in sequences if s.num_saved_tokens}
        assert saved == set(self._held), "swap space of a sequence that has nothing saved"
        assert sum(self._held.values()) == self.used_bytes <= self.capacity_bytes
