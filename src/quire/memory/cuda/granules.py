"""Physical memory of a device in granules, and where each is mapped.

A granule is one handle of the driver, of one page: the driver unmaps whole mappings only, and pages
are shared one by one. To map and to unmap are calls of the host, not ordered with what the device
does. So a page that is hidden stays mapped until events that were recorded then, one on each stream
in use, have passed; only after that is it unmapped, and a granule that is mapped nowhere goes back.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import final

from quire.errors import MemoryUnavailable
from quire.memory.cuda.driver import Driver, DriverError
from quire.units import format_bytes

log = logging.getLogger(__name__)

Place = tuple["PageTable", int]  # and the number of a page in it


@final
class Granule:
    """Physical memory of one page."""

    __slots__ = ("handle", "places")

    def __init__(self, handle: object) -> None:
        self.handle = handle
        self.places: set[Place] = set()  # where it is mapped, hidden places included


@final
class PageTable:
    """One range of addresses: what is shown at each page, and what is hidden but still mapped."""

    __slots__ = ("hidden", "nbytes", "shown", "start")

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self.shown: dict[int, Granule] = {}
        self.hidden: dict[int, Granule] = {}


@dataclass(slots=True)
class _Hidden:
    """Pages that were hidden together; unmapped when the events have passed."""

    runs: list[tuple[PageTable, range]]
    events: list[object] = field(default_factory=list)  # fewer until the driver could record all


@final
class Granules:
    """The granules of one device; up to ``keep_bytes`` of them are kept when they are given back.

    To give back never fails: what the driver refuses is logged and tried again with the next call.
    """

    def __init__(self, driver: Driver, page_bytes: int, keep_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.keep_bytes = keep_bytes
        self.hold_bytes = 0  # created, below which nothing goes back either
        self.num_created = 0  # handles that exist
        self.streams = [driver.stream]  # on which memory is used
        self._driver = driver
        self._kept: list[Granule] = []
        self._events: list[object] = []  # to be used again
        self._hidden: deque[_Hidden] = deque()  # oldest first
        self._forsaken: deque[PageTable] = deque()  # of ranges that nobody refers to
        self._leaving: list[PageTable] = []  # the same, taken note of

    @property
    def kept_bytes(self) -> int:
        return len(self._kept) * self.page_bytes

    @property
    def hidden_bytes(self) -> int:
        """Addresses at which something is still mapped until its events have passed."""
        runs = (run for hidden in self._hidden for _, run in hidden.runs)
        return sum(map(len, runs)) * self.page_bytes

    # -- physical memory -------------------------------------------------------------------------

    def take(self, count: int) -> list[Granule]:
        """Granules with undefined content, mapped nowhere; kept ones first.

        Raises: MemoryUnavailable if the device has too little even after a wait for all that is
        hidden; then none is taken.
        """
        try:
            return self._take(count)
        except DriverError as error:
            if error.error != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
        self.settle(wait=True)
        try:
            return self._take(count)
        except DriverError as error:
            self.settle()  # so that the figures do not include what was just taken and put back
            raise MemoryUnavailable(self._refusal(count, error)) from error

    def _take(self, count: int) -> list[Granule]:
        taken = [self._kept.pop() for _ in range(min(count, len(self._kept)))]
        try:
            while len(taken) < count:
                taken.append(Granule(self._driver.create(self.page_bytes)))
                self.num_created += 1
        except DriverError:
            self.put(taken)
            raise
        return taken

    def _refusal(self, count: int, error: DriverError) -> str:
        numbers = ""
        with suppress(DriverError):
            free, total = self._driver.free_and_total()
            numbers = f" with {format_bytes(free)} of {format_bytes(total)} free"
        mine = self.num_created * self.page_bytes
        return (
            f"CUDA device {self._driver.device} refused {count} x {format_bytes(self.page_bytes)} "
            f"({error}){numbers} and {format_bytes(mine)} in use here: lower the KV budget, or "
            f"free memory of the device"
        )

    def put(self, granules: Iterable[Granule]) -> None:
        """Keep granules that are mapped nowhere; ``trim`` gives back what is too much."""
        self._kept.extend(granules)

    def trim(self, keep_bytes: int) -> None:
        """Give kept granules back to the device until ``keep_bytes`` are left, or all are held.

        Raises: DriverError; what is left then is kept.
        """
        while self.kept_bytes > keep_bytes and self.num_created * self.page_bytes > self.hold_bytes:
            self._driver.release(self._kept[-1].handle)
            self._kept.pop()
            self.num_created -= 1

    def prepare(self, nbytes: int) -> None:
        """Create granules until ``nbytes``, but no more than would stay, are kept.

        Raises: MemoryUnavailable; then none is created.
        """
        in_use = self.num_created * self.page_bytes - self.kept_bytes
        most = max(self.keep_bytes, self.hold_bytes - in_use)
        self.put(self.take(min(nbytes, most) // self.page_bytes))

    # -- addresses -------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> PageTable:
        alignment = self.page_bytes & -self.page_bytes  # the power of two in it
        return PageTable(self._driver.reserve(nbytes, alignment), nbytes)

    def forsake(self, table: PageTable) -> None:
        """Nobody refers to these addresses: the next call gives them back, and what is there.

        For finalizers, which may run on any thread and in the middle of any call.
        """
        self._forsaken.append(table)

    def show(
        self, table: PageTable, pages: Sequence[int], granules: Sequence[Granule], *, zeroed: bool
    ) -> None:
        """Map granules at pages where nothing is shown, in ascending order.

        Where something hidden is still mapped, it waits for the events.

        Raises: MemoryUnavailable; then nothing is shown there.
        """
        while not table.hidden.keys().isdisjoint(pages):
            self._unmap_oldest(wait=True)
        mapped: list[Place] = []
        try:
            for page, granule in zip(pages, granules, strict=True):
                address = table.start + page * self.page_bytes
                self._driver.map(address, self.page_bytes, granule.handle)
                table.shown[page] = granule
                granule.places.add((table, page))
                mapped.append((table, page))
            runs = [self._extent(table, run) for run in _runs(pages)]
            for address, nbytes in runs:
                self._driver.allow(address, nbytes)
            for address, nbytes in runs if zeroed else ():
                self._driver.zero(address, nbytes)
        except DriverError as error:
            self.hide(mapped)
            raise MemoryUnavailable(
                f"CUDA device {self._driver.device} could not show "
                f"{format_bytes(len(pages) * self.page_bytes)} at their addresses ({error}). If it "
                f"was a kernel that failed before, only a new process helps"
            ) from error

    def hide(self, places: Iterable[Place]) -> None:
        """Let nothing be shown at these places, as soon as the device has done its work so far."""
        pages_of: dict[PageTable, list[int]] = {}
        for table, page in places:
            if page in table.shown:
                table.hidden[page] = table.shown.pop(page)
                pages_of.setdefault(table, []).append(page)
        runs = [(table, run) for table, pages in pages_of.items() for run in _runs(sorted(pages))]
        if runs:
            self._hidden.append(_Hidden(runs))
            self._have_events(self._hidden[-1])

    def settle(self, *, wait: bool = False) -> None:
        """Unmap what was hidden, as far as its events have passed; with ``wait``, all of it."""
        try:
            while self._forsaken:
                table = self._forsaken.popleft()
                self._leaving.append(table)
                self.hide([(table, page) for page in table.shown])
            while self._hidden and self._unmap_oldest(wait=wait):
                pass
            for table in [table for table in self._leaving if not table.hidden]:
                self._driver.free(table.start, table.nbytes)
                self._leaving.remove(table)
            self.trim(self.keep_bytes)
        except DriverError as error:
            # As text: a record that is kept would keep the error, its frames, and tensors in them.
            log.warning("memory is not given back yet; that is tried again: %s", str(error))

    def __del__(self) -> None:
        # Nobody has addresses here any more, so this is the last occasion. At the end of the
        # process, or in a forked one, the driver refuses, and does not need to be asked.
        with suppress(Exception):
            self.keep_bytes = self.hold_bytes = 0
            self.settle(wait=True)
            for event in self._events:
                self._driver.destroy_event(event)

    def _unmap_oldest(self, *, wait: bool) -> bool:
        """Whether the oldest hidden pages are unmapped now. Raises: DriverError."""
        hidden = self._hidden[0]
        self._have_events(hidden)
        if len(hidden.events) < len(self.streams):
            raise DriverError("cuEventRecord", "no event could be recorded")
        if wait:
            for event in hidden.events:
                self._driver.wait(event)
        elif not all(map(self._driver.has_passed, hidden.events)):
            return False
        while hidden.runs:
            table, run = hidden.runs[-1]
            self._driver.unmap(*self._extent(table, run))
            hidden.runs.pop()
            for page in run:
                granule = table.hidden.pop(page)
                granule.places.remove((table, page))
                if not granule.places:
                    self._kept.append(granule)
        self._hidden.popleft()
        self._events += hidden.events
        return True

    def _have_events(self, hidden: _Hidden) -> None:
        """Record those that are missing: a later one than needed is only more careful."""
        for stream in self.streams[len(hidden.events) :]:
            event = None
            try:
                event = self._events.pop() if self._events else self._driver.create_event()
                self._driver.record(event, stream)
            except DriverError as error:
                log.warning("memory is given back later than it could be: %s", str(error))
                if event is not None:
                    self._events.append(event)
                return
            hidden.events.append(event)

    def _extent(self, table: PageTable, run: range) -> tuple[int, int]:
        return table.start + run.start * self.page_bytes, len(run) * self.page_bytes


def _runs(pages: Iterable[int]) -> Iterator[range]:
    """Neighbours of an ascending sequence, together."""
    start = stop = None
    for page in pages:
        if page != stop:
            if start is not None and stop is not None:
                yield range(start, stop)
            start = page
        stop = page + 1
    if start is not None and stop is not None:
        yield range(start, stop)
