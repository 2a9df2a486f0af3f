"""Who is swapped out, and what that costs: the part of swapping that needs no tensor.

A preempted sequence either computes its entries again or has them saved, in host memory or a file,
and brought back. Which is cheaper, is measured. The bytes themselves are ``engine.swap``'s.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import TypeAlias

from quire.engine.sequence import Sequence

Clock: TypeAlias = Callable[[], float]  # seconds since some moment

_NEW_SHARE = 0.2  # of a new measurement, in a mean of all


class SwapSpace:
    """Bytes for saved entries, and who has some."""

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
        assert saved == set(self._held), "swap space of somebody who has nothing saved"
        assert sum(self._held.values()) == self.used_bytes <= self.capacity_bytes


class Costs:
    """Seconds that things take here, as means in which the latest measurements weigh most."""

    def __init__(self, *, bytes_per_token: int = 0) -> None:
        self.compute_s_per_token = inf  # unknown: then what is known is cheaper
        self.save_s_per_byte = 0.0
        self.load_s_per_byte = 0.0
        self._bytes_per_token = bytes_per_token  # of all layers, before a window has passed any

    @property
    def swap_pays(self) -> bool:
        """Whether it is the cheaper way for most."""
        return self.swap_s(self._bytes_per_token) < self.compute_s_per_token

    def note_step(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        """A step that mostly took in text tells how long it takes to take in what was lost."""
        if num_tokens > 2 * num_sequences:
            self.compute_s_per_token = _mean(self.compute_s_per_token, seconds / num_tokens)

    def note_saved(self, num_bytes: int, seconds: float) -> None:
        self.save_s_per_byte = _mean(self.save_s_per_byte, seconds / num_bytes)

    def note_loaded(self, num_bytes: int, seconds: float) -> None:
        self.load_s_per_byte = _mean(self.load_s_per_byte, seconds / num_bytes)

    def recompute_s(self, num_tokens: int) -> float:
        return num_tokens * self.compute_s_per_token

    def swap_s(self, num_bytes: int) -> float:
        """There and back."""
        return num_bytes * (self.save_s_per_byte + self.load_s_per_byte)


def _mean(mean: float, new: float) -> float:
    return new if mean in (0.0, inf) else mean + _NEW_SHARE * (new - mean)
