"""Server-sent events as each interface writes them: with names or without, and how they end."""

from dataclasses import dataclass
from typing import Any

import msgspec

from quire.server.wire.errors import Dialect, Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class EventForm:
    """``named``: an event has a line with its name, which is its JSON's ``type``."""

    dialect: Dialect
    named: bool
    ping: bytes = b""  # what says that something may still come
    end: bytes = b""  # what says that nothing comes any more, where no event does

    def event(self, chunk: Any) -> bytes:
        data = b"data: " + msgspec.json.encode(chunk) + b"\n\n"
        return b"event: %b\n%b" % (chunk.type.encode(), data) if self.named else data

    def error(self, refused: Refused) -> bytes:
        data = b"data: " + msgspec.json.encode(refused.body(self.dialect)) + b"\n\n"
        return b"event: error\n" + data if self.named else data


COMPLETIONS = EventForm(dialect="openai", named=False, end=b"data: [DONE]\n\n")
RESPONSES = EventForm(dialect="openai", named=True)
MESSAGES = EventForm(
    dialect="anthropic", named=True, ping=b'event: ping\ndata: {"type":"ping"}\n\n'
)
