"""What accounting asks of storage: pages to commit, entries to copy, pages to release, in order.

Slots are counted per group: slot s is the place of one token in each layer of the group. A
recurrent group has one slot a block, which is a whole state.
"""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Commit:
    """Back slots [start, stop) of a group with pages."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the entries of ``num_slots`` consecutive slots; source and target may overlap."""

    group: int
    source: int
    target: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give the pages of slots [start, stop) of a group back."""

    group: int
    start: int
    stop: int


Change: TypeAlias = Commit | Copy | Release
