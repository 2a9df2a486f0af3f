"""From when on memory that was given back is unused: an event on each stream that uses memory.

An event has passed when its stream has done all that it was given before. Events are used again.
"""

import logging
from typing import final

from quire.memory.cuda.driver import Driver, DriverError

log = logging.getLogger(__name__)


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
        """Record the events that it lacks: a later one than needed is only more careful."""
        for stream in {*self.streams} - fence.events.keys():
            event = None
            try:
                event = self._spare.pop() if self._spare else self._driver.create_event()
                self._driver.record(event, stream)
            except DriverError as error:
                log.warning("memory is given back later than it could be: %s", str(error))
                if event is not None:
                    self._spare.append(event)
                return
            fence.events[stream] = event

    def is_passed(self, fence: Fence, *, wait: bool) -> bool:
        """Whether all streams are past it; with ``wait`` they are. Raises: DriverError."""
        self.put_up(fence)
        if not fence.events.keys() >= {*self.streams}:
            raise DriverError("cuEventRecord", "no event could be recorded")
        if not wait:
            return all(map(self._driver.has_passed, fence.events.values()))
        for event in fence.events.values():
            self._driver.wait(event)
        return True

    def take_down(self, fence: Fence) -> None:
        """It has been passed."""
        self._spare += fence.events.values()
        fence.events.clear()

    def close(self) -> None:
        """Raises: DriverError."""
        for event in self._spare:
            self._driver.destroy_event(event)
