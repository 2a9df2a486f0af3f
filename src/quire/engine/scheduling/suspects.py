"""Sequences that were in a step that failed and left their states of no use.

Which of them is at fault is not known. They begin anew, one at a time in a step, until each has
come past the tokens at which it failed; one that fails then ends.
"""

from quire.engine.sequence import Sequence


class Suspects:
    """Which sequences are computed alone, and up to how many tokens."""

    def __init__(self) -> None:
        self._until: dict[Sequence, int] = {}

    def __bool__(self) -> bool:
        return bool(self._until)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._until

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self._until[sequence] = num_tokens

    def acquit(self) -> None:
        """Those that have come so far, or have ended."""
        self._until = {
            sequence: until
            for sequence, until in self._until.items()
            if sequence.finish_reason is None and sequence.num_computed_tokens < until
        }

    def among(self, due: list[Sequence], *, or_all: bool) -> list[Sequence]:
        """Those of the sequences that are suspects; without any, all of them or none."""
        return [s for s in due if s in self._until] or (due if or_all else [])
