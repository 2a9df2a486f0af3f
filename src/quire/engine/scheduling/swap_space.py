"""Swap space: which preempted sequences have saved entries, and where their bytes lie in the cache.

This is the part of swapping that needs no tensor; ``engine.swap`` moves the bytes.
"""

from collections.abc import Iterable

from quire.engine.sequence import Sequence
from quire.kv import Accounting
from quire.kv.interface import Slots
from quire.spec import Group, KeptWhole


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
        """Take space for the entries of a sequence's computed tokens."""
        assert num_bytes <= self.free_bytes
        assert sequence.seq_id not in self._held
        self._held[sequence.seq_id] = num_bytes
        self.used_bytes += num_bytes
        sequence.num_saved_tokens = sequence.num_computed_tokens

    def release(self, sequence: Sequence) -> None:
        """Give back the space of a sequence's saved entries, if it has some."""
        sequence.num_saved_tokens = 0
        if sequence.seq_id in self._held:
            self.used_bytes -= self._held.pop(sequence.seq_id)
            self._left.append(sequence.seq_id)

    def drain(self) -> list[int]:
        """Return the ids of sequences whose saved entries can be dropped."""
        left, self._left = self._left, []
        return left

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Check the space against all unfinished sequences. Raises: AssertionError."""
        saved = {s.seq_id for s in sequences if s.num_saved_tokens}
        assert saved == set(self._held), "a sequence without saved entries holds swap space"
        assert sum(self._held.values()) == self.used_bytes <= self.capacity_bytes


def slots_of(accounting: Accounting, number: int, seq_id: int, tokens: range) -> Slots:
    """Return the slots i64[T] of a sequence's tokens in a group, or those of its state."""
    if isinstance(accounting.groups[number].spec, KeptWhole):
        return accounting.table(number, seq_id)[: len(tokens)]
    return accounting.slots(number, seq_id, tokens.start, tokens.stop)


def readable_tokens(groups: tuple[Group, ...], start: int, stop: int) -> list[range]:
    """Return which of the tokens [start, stop) a later token can read, for each group.

    A state stands for all tokens so far: of a group that keeps one, that is the last token.
    """
    return [range(max(start, group.live_start(stop)), stop) for group in groups]


def num_bytes(groups: tuple[Group, ...], tokens: list[range]) -> int:
    """Return the bytes of the entries of these tokens in each group, or of its state."""
    return sum(
        group.bytes_for(len(of))
        if isinstance(group.spec, KeptWhole)
        else group.bytes_per_token * len(of)
        for group, of in zip(groups, tokens, strict=True)
    )
