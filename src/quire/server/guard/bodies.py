"""How much of requests is in memory before they are in the queue, over all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from quire.server.wire.errors import Refused
from quire.units import format_bytes

_RETRY_AFTER_S = 1


@final
class Bodies:
    """Counts bytes of bodies, from the moment they are read until nobody needs them."""

    def __init__(self, most_bytes: int) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes

    @contextmanager
    def one(self) -> Iterator[Callable[[int], None]]:
        """A body inside the block grows by what is given to this. It raises: Refused (503)."""
        own = 0

        def take(num_bytes: int) -> None:
            nonlocal own
            if self.num_bytes + num_bytes > self._most_bytes:
                raise Refused(
                    503,
                    f"the requests that are being read have {format_bytes(self.num_bytes)} "
                    f"together, and may have {format_bytes(self._most_bytes)} (16 times "
                    "max_request_bytes): try again",
                    code="bodies_full",
                    retry_after_s=_RETRY_AFTER_S,
                )
            own += num_bytes
            self.num_bytes += num_bytes

        try:
            yield take
        finally:
            self.num_bytes -= own
