"""What is refused before it is read: while nobody can join the queue, whoever asks is told so from
the bytes that have come, at a fraction of what it costs to read a request.

A flood is when the engine needs its processor most. Who is refused, why and in which words is the
entrance's to say; what is not in the plainest form is read, and refused like any other request.
"""

from collections.abc import Iterable
from typing import final

from starlette.responses import Response

from quire.server.entrance import Entrance
from quire.server.guard.gate import Gate
from quire.server.wire.plain import plain_post


@final
class Turnstile:
    """In front of the entrances to a queue."""

    def __init__(self, gate: Gate, entrances: Iterable[Entrance]) -> None:
        joining = [each for each in entrances if each.operation.joins_queue]
        self._gate, self._by_path = gate, {each.operation.path: each for each in joining}

    def turned_away(self, data: bytes) -> Response | None:
        """The whole answer to these bytes, a whole request; None: they are to be read."""
        if not self._gate.is_shut:
            return None
        found = plain_post(data)
        entrance = None if found is None else self._by_path.get(found.target)
        if found is None or entrance is None:
            return None
        return entrance.turned_away(found.headers)
