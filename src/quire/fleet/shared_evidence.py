"""What replicas tell each other of the eviction orders they have tried, by way of the door.

Each report of a replica has its evidence, and each replica hears the mean of the others'. Only what
is of alike pools is added up (``Evidence.is_like``): another policy, another block size or another
size of the cache is left out.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Final, TypeAlias, final

from quire.kv.evidence import Evidence, mean_evidence

TELL_S: Final = 5.0  # at most so often does a replica hear of the others
_MOST_FIGURES: Final = 16  # of one kind, and groups of one replica

ByGroup: TypeAlias = Sequence[Evidence | None]


@final
class SharedEvidence:
    """The evidence of a fleet's replicas, by their names."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[Evidence | None, ...]] = {}

    def note(self, replica: str, evidence: ByGroup) -> None:
        """Note what a replica says now, in place of what it said. What is no evidence is none."""
        self._by_name[replica] = tuple(
            each if _is_sound(each) else None for each in evidence[:_MOST_FIGURES]
        )

    def forget(self, replica: str) -> None:
        """Forget what a replica has said."""
        self._by_name.pop(replica, None)

    def of_others(self, replica: str) -> tuple[Evidence | None, ...]:
        """Return what a replica is to hear, by group: one has to have said something itself."""
        others = [said for name, said in self._by_name.items() if name != replica]
        found = []
        for number, own in enumerate(self._by_name.get(replica, ())):
            theirs = [said[number] for said in others if number < len(said)]
            known = [each for each in theirs if each is not None]
            found.append(None if own is None else mean_evidence(own, known))
        return tuple(found)


def _is_sound(evidence: Evidence | None) -> bool:
    """Return whether it has the types of evidence, and no more figures than orders can be."""
    if not isinstance(evidence, Evidence):
        return False
    sizes = evidence.block_tokens, evidence.num_blocks
    return all(isinstance(each, int) and each > 0 for each in sizes) and all(
        isinstance(several, tuple)
        and len(several) <= _MOST_FIGURES
        and all(isinstance(each, int | float) and isfinite(each) for each in several)
        for several in (evidence.accounts, evidence.promises)
    )
