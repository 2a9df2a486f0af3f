"""Pages that change hands together, and the changes that ask for it."""

from dataclasses import dataclass

from quire.errors import MemoryUnavailable
from quire.kv.storage_ops import Commit, Release
from quire.memory import Region


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one region that go together: ``count`` equal pieces, ``stride`` bytes apart."""

    region: Region
    offset: int
    nbytes: int
    stride: int = 0
    count: int = 1

    def commit(self) -> None:
        self.region.commit(self.offset, self.nbytes, stride=self.stride, count=self.count)

    def decommit(self) -> None:
        self.region.decommit(self.offset, self.nbytes, stride=self.stride, count=self.count)


def back(change: Commit | Release, pages: list[Pages]) -> None:
    """Carry a change out in every layer. A commit that is refused has committed none of them."""
    if isinstance(change, Release):
        for piece in pages:
            piece.decommit()
        return
    for index, piece in enumerate(pages):
        try:
            piece.commit()
        except MemoryUnavailable:
            for done in pages[:index]:
                done.decommit()
            raise
