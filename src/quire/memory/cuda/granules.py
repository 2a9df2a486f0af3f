"""Physical memory of a device in granules, and where each is mapped.

A granule is one handle of the driver, of one page: the driver unmaps whole mappings only, and pages
are shared one by one. To map and to unmap are calls of the host, not ordered with what the device
does. So a page that is hidden stays mapped until a fence that was put up then has been passed; only
after that is it unmapped, and a granule that is mapped nowhere goes back.

Granules that are kept stay mapped where they were last, *parked*: to be shown there again they take
no call but zeroing. They are unmapped when they are needed elsewhere, or go back.

Source: TensorRT-LLM (parked ranges, in a draft of its virtual memory)
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import final

from quire.errors import MemoryUnavailable
from quire.memory.cuda.driver import Driver, DriverError
from quire.units import ceil_div, format_bytes

log = logging.getLogger(__name__)

# -- fences ----------------------------------------------------------------------------------------

# When memory that was given back is unused: an event on each stream that uses memory tells it.
#
# An event has passed when its stream has done all that it was given before. Events are used again.


@final
class Fence:
    """A moment on each stream, as far as the driver could note one."""

    __slots__ = ("events",)

    def __init__(self) -> None:
        self.events: dict[int, object] = {}  # by stream


@final
class Fences:
    """The fences of one device. ``streams``: those on which its memory is used."""

    def __init__(self, driver: Driver) -> None:
        self.streams = [driver.stream]
        self._driver = driver
        self._spare: list[object] = []

    def put_up(self, fence: Fence) -> None:
        """Record the events that a fence lacks: a later one than needed is only more careful."""
        for stream in {*self.streams} - fence.events.keys():
            event = None
            try:
                event = self._spare.pop() if self._spare else self._driver.create_event()
                self._driver.record(event, stream)
            except DriverError as error:
                log.warning("memory is given back with a delay: %s", str(error))
                if event is not None:
                    self._spare.append(event)
                return
            fence.events[stream] = event

    def is_passed(self, fence: Fence, *, wait: bool) -> bool:
        """Return whether all streams are past a fence; with ``wait``, wait until they are.

        Raises: DriverError.
        """
        self.put_up(fence)
        if not fence.events.keys() >= {*self.streams}:
            raise DriverError("cuEventRecord", "no event could be recorded")
        if not wait:
            return all(map(self._driver.has_passed, fence.events.values()))
        for event in fence.events.values():
            self._driver.wait(event)
        return True

    def take_down(self, fence: Fence) -> None:
        """Take back the events of a fence that has been passed."""
        self._spare += fence.events.values()
        fence.events.clear()

    def close(self) -> None:
        """Destroy the events. Raises: DriverError."""
        for event in self._spare:
            self._driver.destroy_event(event)


# -- granules --------------------------------------------------------------------------------------


Place = tuple["PageTable", int]  # and the number of a page in it


@final
class Granule:
    """Physical memory of one page."""

    __slots__ = ("handle", "is_usable", "places")

    def __init__(self, handle: object) -> None:
        self.handle = handle
        self.places: set[Place] = set()  # where it is mapped, hidden places included
        self.is_usable = False  # the device has access, at the first of them


@final
class PageTable:
    """One range of addresses: what is shown at each page, and what else is mapped there."""

    __slots__ = ("hidden", "nbytes", "parked", "parks", "shown", "start")

    def __init__(self, start: int, nbytes: int, *, parks: bool) -> None:
        self.start = start
        self.nbytes = nbytes
        self.parks = parks  # what is kept may stay here
        self.shown: dict[int, Granule] = {}
        self.hidden: dict[int, Granule] = {}  # until its fence is passed
        self.parked: dict[int, Granule] = {}  # as long as it is not needed elsewhere


@dataclass(slots=True)
class _Hidden:
    """Pages that were hidden together; unmapped when the fence has been passed."""

    runs: list[tuple[PageTable, range]]
    fence: Fence = field(default_factory=Fence)


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
        self.fences = Fences(driver)
        self._driver = driver
        self._ready: list[Granule] = []  # kept, and mapped nowhere
        self._parked: dict[Granule, Place] = {}  # kept, the one that has waited longest first
        self._hidden: deque[_Hidden] = deque()  # oldest first
        self._forsaken: deque[PageTable] = deque()  # of ranges without a reference
        self._leaving: list[PageTable] = []  # the same, taken note of

    @property
    def kept_bytes(self) -> int:
        return (len(self._ready) + len(self._parked)) * self.page_bytes

    @property
    def parked_bytes(self) -> int:
        return len(self._parked) * self.page_bytes

    @property
    def hidden_bytes(self) -> int:
        """Addresses at which something is still mapped until its fence is passed."""
        runs = (run for hidden in self._hidden for _, run in hidden.runs)
        return sum(map(len, runs)) * self.page_bytes

    # -- physical memory -------------------------------------------------------------------------

    def take(self, count: int) -> list[Granule]:
        """Take granules with undefined content, mapped nowhere: kept ones first, then new ones.

        Raises: MemoryUnavailable where the device has too little even after a wait for all that is
        hidden; then none is taken.
        """
        self._insist(self._make_ready, count)
        return [self._ready.pop() for _ in range(count)]

    def _insist(self, have: Callable[[int], None], count: int) -> None:
        """Call ``have(count)``, and once more after a wait for all that is hidden.

        Raises: MemoryUnavailable; then some granules may be kept that were not there before.
        """
        try:
            have(count)
        except DriverError as error:
            if error.error != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
        else:
            return
        self.settle(wait=True)
        try:
            have(count)
        except DriverError as error:
            self.settle()  # so that the figures do not include what was just created
            raise MemoryUnavailable(self._refusal(count, error)) from error

    def _make_ready(self, count: int) -> None:
        """Have ``count`` granules that are mapped nowhere. Raises: DriverError."""
        self._unpark(max(0, count - len(self._ready)))
        while len(self._ready) < count:
            self._create()

    def _keep(self, count: int) -> None:
        """Have ``count`` kept granules, parked ones among them. Raises: DriverError."""
        while len(self._ready) + len(self._parked) < count:
            self._create()

    def _create(self) -> None:
        self._ready.append(Granule(self._driver.create(self.page_bytes)))
        self.num_created += 1

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

    def trim(self, keep_bytes: int) -> None:
        """Give kept granules back to the device until ``keep_bytes`` are left, or all are held.

        Raises: DriverError; what is left then is kept.
        """
        held_bytes = self.num_created * self.page_bytes
        spare_bytes = min(self.kept_bytes - keep_bytes, held_bytes - self.hold_bytes)
        spare = max(0, ceil_div(spare_bytes, self.page_bytes))
        self._unpark(max(0, spare - len(self._ready)))
        for _ in range(spare):
            self._driver.release(self._ready[-1].handle)
            self._ready.pop()
            self.num_created -= 1

    def prepare(self, nbytes: int) -> None:
        """Create granules until ``nbytes``, but no more than would stay, are kept.

        Raises: MemoryUnavailable; then no more are kept than before, or than may be.
        """
        in_use = self.num_created * self.page_bytes - self.kept_bytes
        most = max(self.keep_bytes, self.hold_bytes - in_use)
        self._insist(self._keep, min(nbytes, most) // self.page_bytes)

    # -- addresses -------------------------------------------------------------------------------

    def reserve(self, nbytes: int, *, parks: bool) -> PageTable:
        alignment = self.page_bytes & -self.page_bytes  # the power of two in it
        return PageTable(self._driver.reserve(nbytes, alignment), nbytes, parks=parks)

    def forsake(self, table: PageTable) -> None:
        """Note that no object refers to a table: the next call gives back its addresses and pages.

        For finalizers, which may run on any thread and in the middle of any call.
        """
        self._forsaken.append(table)

    def commit(self, table: PageTable, pages: Sequence[int]) -> None:
        """Show zeroed memory at pages where nothing is shown, in ascending order.

        Raises: MemoryUnavailable; then nothing is shown there.
        """
        self._wait_for(table, pages)
        for page in table.parked.keys() & set(pages):
            granule = table.parked.pop(page)
            del self._parked[granule]
            table.shown[page] = granule
        missing = [page for page in pages if page not in table.shown]
        try:
            self.show(table, missing, self.take(len(missing)))
            for run in _runs(pages):
                self._driver.zero(*self._extent(table, run))
        except MemoryUnavailable as error:
            self.hide([(table, page) for page in pages])
            self.settle()
            if isinstance(error, DriverError):
                raise self._not_shown(len(pages), error) from error
            raise

    def show(self, table: PageTable, pages: Sequence[int], granules: Sequence[Granule]) -> None:
        """Map granules at pages where nothing is shown, in ascending order.

        Where something hidden is still mapped, it waits for the fence. Granules that cannot be
        shown and are mapped nowhere else are kept.

        Raises: MemoryUnavailable; then nothing is shown there.
        """
        self._wait_for(table, pages)
        mapped: list[Place] = []
        try:
            for page, granule in zip(pages, granules, strict=True):
                address = table.start + page * self.page_bytes
                self._driver.map(address, self.page_bytes, granule.handle)
                table.shown[page] = granule
                granule.places.add((table, page))
                mapped.append((table, page))
            for run in _runs(pages):
                self._driver.allow(*self._extent(table, run))
            for granule in granules:
                granule.is_usable = True
        except DriverError as error:
            self.hide(mapped)
            self._ready += [granule for granule in granules if not granule.places]
            raise self._not_shown(len(pages), error) from error

    def _not_shown(self, num_pages: int, error: DriverError) -> MemoryUnavailable:
        return MemoryUnavailable(
            f"CUDA device {self._driver.device} could not show "
            f"{format_bytes(num_pages * self.page_bytes)} at their addresses ({error}). If it "
            f"was a kernel that failed before, only a new process helps"
        )

    def _wait_for(self, table: PageTable, pages: Iterable[int]) -> None:
        """Wait until nothing hidden is mapped at these pages."""
        while not table.hidden.keys().isdisjoint(pages):
            self._unmap_oldest(wait=True)

    def hide(self, places: Iterable[Place]) -> None:
        """Hide these places; they are unmapped once the device has done its work so far."""
        pages_of: dict[PageTable, list[int]] = {}
        for table, page in places:
            if page in table.shown:
                table.hidden[page] = table.shown.pop(page)
                pages_of.setdefault(table, []).append(page)
        # They are unmapped from the last on: a granule that is seen elsewhere too is not parked.
        tables = sorted(pages_of, key=lambda table: not table.parks)
        runs = [(table, run) for table in tables for run in _runs(sorted(pages_of[table]))]
        if runs:
            self._hidden.append(_Hidden(runs))
            self.fences.put_up(self._hidden[-1].fence)

    def retire(self, table: PageTable) -> None:
        """Hide a whole table, and keep nothing parked there."""
        table.parks = False
        self.hide([(table, page) for page in table.shown])
        with suppress(DriverError):  # then it goes when its addresses do
            self._unmap_parked(table, table.parked)

    def settle(self, *, wait: bool = False) -> None:
        """Unmap what was hidden, as far as its events have passed; with ``wait``, all of it."""
        try:
            while self._forsaken:
                table = self._forsaken.popleft()
                self._leaving.append(table)
                self.retire(table)
            while self._hidden and self._unmap_oldest(wait=wait):
                pass
            for table in [table for table in self._leaving if not table.hidden]:
                self._unmap_parked(table, table.parked)
                self._driver.free(table.start, table.nbytes)
                self._leaving.remove(table)
            self.trim(self.keep_bytes)
        except DriverError as error:
            # As text: a record that is kept would keep the error, its frames, and tensors in them.
            log.warning("memory is not given back yet; that is tried again: %s", str(error))

    def __del__(self) -> None:
        # No object has addresses here any more, so this is the last occasion. At the end of the
        # process, or in a forked one, the driver refuses, and does not need to be asked.
        with suppress(Exception):
            self.keep_bytes = self.hold_bytes = 0
            self.settle(wait=True)
            self.fences.close()

    def _unmap_oldest(self, *, wait: bool) -> bool:
        """Unmap the oldest hidden pages if their fence is passed; say whether it was.

        Raises: DriverError.
        """
        hidden = self._hidden[0]
        if not self.fences.is_passed(hidden.fence, wait=wait):
            return False
        while hidden.runs:
            table, run = hidden.runs[-1]
            run = self._park(table, run)
            hidden.runs[-1] = table, run
            if run:
                self._driver.unmap(*self._extent(table, run))
            hidden.runs.pop()
            for page in run:
                granule = table.hidden.pop(page)
                granule.places.remove((table, page))
                if not granule.places:
                    self._make_unused(granule)
        self._hidden.popleft()
        self.fences.take_down(hidden.fence)
        return True

    def _park(self, table: PageTable, run: range) -> range:
        """Keep as many of these where they are as may be kept; return the others."""
        room = len(run)
        if self.num_created * self.page_bytes > self.hold_bytes:
            room = (self.keep_bytes - self.kept_bytes) // self.page_bytes
        for number, page in enumerate(run):
            granule = table.hidden[page]
            may_stay = table.parks and granule.is_usable and len(granule.places) == 1
            if number >= room or not may_stay:
                return run[number:]
            table.parked[page] = table.hidden.pop(page)
            self._parked[granule] = table, page
        return run[:0]

    def _make_unused(self, granule: Granule) -> None:
        granule.is_usable = False
        self._ready.append(granule)

    def _unpark(self, count: int) -> None:
        """Unmap the ``count`` that have been parked longest. Raises: DriverError."""
        pages_of: dict[PageTable, list[int]] = {}
        for table, page in islice(self._parked.values(), count):
            pages_of.setdefault(table, []).append(page)
        for table, pages in pages_of.items():
            self._unmap_parked(table, pages)

    def _unmap_parked(self, table: PageTable, pages: Iterable[int]) -> None:
        """Unmap parked pages. Raises: DriverError."""
        for run in list(_runs(sorted(pages))):
            self._driver.unmap(*self._extent(table, run))
            for page in run:
                granule = table.parked.pop(page)
                del self._parked[granule]
                granule.places.clear()
                self._make_unused(granule)

    def _extent(self, table: PageTable, run: range) -> tuple[int, int]:
        return table.start + run.start * self.page_bytes, len(run) * self.page_bytes


def _runs(pages: Iterable[int]) -> Iterator[range]:
    """Yield the runs of neighbours in an ascending sequence."""
    start = stop = None
    for page in pages:
        if page != stop:
            if start is not None and stop is not None:
                yield range(start, stop)
            start = page
        stop = page + 1
    if start is not None and stop is not None:
        yield range(start, stop)
