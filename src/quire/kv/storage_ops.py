"""The operations that accounting asks of storage, in order: commit, map, copy and release pages.

Slots are counted per group: slot s is the place of one token in each layer of the group. A
recurrent group has one slot a block, which is a whole state.

Where sequences see blocks through windows (``virtual`` with sharing) there are two kinds of slots:
those of the pool, where entries lie, and those of the windows, where they are seen. ``Commit``,
``Copy`` and ``Release`` speak of the pool's.
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
    """Release the pages of slots [start, stop) of a group, which no window shows any more."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Map:
    """Show slots [source, source + num_slots) of the pool in the windows, from ``target`` on.

    Nothing was shown there.
    """

    group: int
    source: int
    target: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Unmap:
    """Show nothing in slots [start, stop) of the windows."""

    group: int
    start: int
    stop: int


StorageOp: TypeAlias = Commit | Copy | Release | Map | Unmap
