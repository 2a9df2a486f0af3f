"""Sequences that are forked and written to over one region's windows, beside what they must read.

Here a sequence is a list of page numbers and a window that shows them in that order. A fork sees
the same pages; the first write to one of them copies it; a page that no sequence sees goes back.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
import torch

from conformance.memory_cases import memfd_bytes, rollup_bytes
from quire.errors import MemoryUnavailable
from quire.memory import CheckedMemory, CountedMemory, HostMemory, LimitedMemory, Window

NUM_PAGES = 96
NUM_PLACES = 20  # pages that a window has room for
HEAP_PAGES = 16
MAX_SEQUENCES = 12
HOLE = -2  # no page is its neighbour


@dataclass(slots=True, eq=False)
class Sequence:
    window: Window
    shown: torch.Tensor  # u8[places, page]
    table: list[int] = field(default_factory=list)  # pages; HOLE where it has slid past
    values: list[int] = field(default_factory=list)  # what each page must be full of


class SequencesWorld:
    """Every operation takes a source of chance, and does nothing where it is not possible."""

    def __init__(self) -> None:
        gc.collect()
        self.blocks_before, self.pss_before = memfd_bytes(), rollup_bytes("Pss_Shmem")
        self.limited = LimitedMemory(HostMemory(), limit_bytes=2**30)
        self.counted = CountedMemory(self.limited)
        memory = CheckedMemory(self.counted)
        self.page = memory.page_bytes
        self.region = memory.reserve(NUM_PAGES * self.page, heap_bytes=HEAP_PAGES * self.page)
        self.every_page = self.region.tensor(torch.uint8).view(NUM_PAGES, self.page)
        self.references: Counter[int] = Counter()
        self.sequences: list[Sequence] = []

    def begin(self, random: Random) -> None:
        if len(self.sequences) < MAX_SEQUENCES:
            self.sequences.append(self._sequence())

    def extend(self, random: Random) -> None:
        """Pages at the end: a run, or single ones from anywhere, or strided pieces in one call."""
        free = [page for page in range(NUM_PAGES) if page not in self.references]
        sequence = self._any(random)
        if sequence is None or not free or len(sequence.table) == NUM_PLACES:
            return
        room = NUM_PLACES - len(sequence.table)
        first = random.choice(free)
        length, stride = random.randint(1, 4), random.randint(4, 20)
        pages: list[int] = []
        for start in range(first, NUM_PAGES - length + 1, stride):
            piece = range(start, start + length)
            if not set(piece) <= set(free) or len(pages) + length > room:
                break
            pages += piece
        if not pages:
            pages, length = [first], 1
        self.region.commit(
            first * self.page,
            length * self.page,
            stride=stride * self.page,
            count=len(pages) // length,
        )
        assert self.every_page[pages].eq(0).all()
        end = len(sequence.table)
        self._show(sequence, end, pages)
        value = random.randint(1, 255)
        sequence.shown[end : end + len(pages)] = value
        sequence.values += [value] * len(pages)

    def write(self, random: Random) -> None:
        """Copy on write, if others see the page too; the copy takes its place in this window."""
        if (spot := self._spot(random)) is None:
            return
        sequence, place = spot
        page = sequence.table[place]
        if self.references[page] > 1:
            free = [page for page in range(NUM_PAGES) if page not in self.references]
            if not free:
                return
            copy = random.choice(free)
            self.region.commit(copy * self.page, self.page)
            self.every_page[copy] = self.every_page[page]
            sequence.window.map(place * self.page, copy * self.page, self.page)
            sequence.table[place] = copy
            self.references[copy] = 1
            self.references[page] -= 1
        value = random.randint(1, 255)
        through = random.choice([sequence.shown[place], self.every_page[sequence.table[place]]])
        through.fill_(value)
        sequence.values[place] = value

    def fork(self, random: Random) -> None:
        parent = self._any(random)
        if parent is None or len(self.sequences) == MAX_SEQUENCES:
            return
        child = self._sequence()
        self._show(child, 0, parent.table)
        child.values = list(parent.values)
        self.sequences.append(child)

    def slide(self, random: Random) -> None:
        """One page, anywhere, is seen no more."""
        if (spot := self._spot(random)) is None:
            return
        sequence, place = spot
        sequence.window.unmap(place * self.page, self.page)
        self._release([sequence.table[place]])
        sequence.table[place], sequence.values[place] = HOLE, 0

    def trim(self, random: Random) -> None:
        sequence = self._any(random)
        if sequence is None or not sequence.table:
            return
        kept = random.randrange(len(sequence.table))
        sequence.window.unmap(kept * self.page, (len(sequence.table) - kept) * self.page)
        self._release(sequence.table[kept:])
        del sequence.table[kept:], sequence.values[kept:]

    def end(self, random: Random) -> None:
        sequence = self._any(random)
        if sequence is None:
            return
        self.sequences.remove(sequence)
        sequence.window.close()
        if random.random() < 0.5:
            assert sequence.shown.eq(0).all()
        self._release(sequence.table)

    def be_refused(self, random: Random) -> None:
        """A commit past the limit has changed nothing."""
        free = [page for page in range(NUM_PAGES) if page not in self.references]
        if not free:
            return
        self.limited.limit_bytes = self.region.committed_bytes
        with pytest.raises(MemoryUnavailable, match="limit"):
            self.region.commit(random.choice(free) * self.page, self.page)
        self.limited.limit_bytes = 2**30

    def check_counters(self) -> None:
        held = len(self.references) * self.page
        assert self.region.committed_bytes == self.counted.committed_bytes == held
        self.region.check()

    def check_system(self) -> None:
        """The kernel's count of the heaps' blocks, and of pages seen, each of them once."""
        held = len(self.references) * self.page
        assert memfd_bytes() - self.blocks_before == held
        self.every_page[list(self.references)].sum()  # Pss knows the pages that were touched
        assert abs(rollup_bytes("Pss_Shmem") - self.pss_before - held) <= self.page

    def check_bytes(self) -> None:
        for sequence in self.sequences:
            wanted = sequence.values + [0] * (NUM_PLACES - len(sequence.values))
            wanted_bytes = torch.tensor(wanted, dtype=torch.uint8)[:, None]
            assert torch.equal(sequence.shown, wanted_bytes.expand(-1, self.page))

    def close(self) -> None:
        self.region.close()
        assert self.every_page.eq(0).all()
        for sequence in self.sequences:
            assert sequence.shown.eq(0).all()
        assert self.counted.committed_bytes == self.counted.reserved_bytes == 0
        assert memfd_bytes() == self.blocks_before

    def _sequence(self) -> Sequence:
        window = self.region.window(NUM_PLACES * self.page)
        return Sequence(window, window.tensor(torch.uint8).view(NUM_PLACES, self.page))

    def _any(self, random: Random) -> Sequence | None:
        return random.choice(self.sequences) if self.sequences else None

    def _spot(self, random: Random) -> tuple[Sequence, int] | None:
        """A sequence, and a place of it where there is a page."""
        spots = [
            (sequence, place)
            for sequence in self.sequences
            for place, page in enumerate(sequence.table)
            if page != HOLE
        ]
        return random.choice(spots) if spots else None

    def _show(self, sequence: Sequence, place: int, pages: list[int]) -> None:
        for start, stop in runs(pages):
            if pages[start] != HOLE:
                sequence.window.map(
                    (place + start) * self.page,
                    pages[start] * self.page,
                    (stop - start) * self.page,
                )
        sequence.table += pages
        self.references.update(page for page in pages if page != HOLE)

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            if page == HOLE:
                continue
            self.references[page] -= 1
            if not self.references[page]:
                del self.references[page]
                self.region.decommit(page * self.page, self.page)


OPERATIONS = (
    SequencesWorld.begin,
    SequencesWorld.extend,
    SequencesWorld.write,
    SequencesWorld.fork,
    SequencesWorld.slide,
    SequencesWorld.trim,
    SequencesWorld.end,
    SequencesWorld.be_refused,
)


def runs(pages: list[int]) -> Iterator[tuple[int, int]]:
    """Half-open intervals of neighbours that are neighbours in the region too."""
    start = 0
    for index in range(1, len(pages) + 1):
        if index == len(pages) or pages[index] != pages[index - 1] + 1:
            yield start, index
            start = index
