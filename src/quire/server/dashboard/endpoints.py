"""What the page is asked for: its files, by any client, and its feed, with a key."""

from starlette.types import ASGIApp

from quire.server.dashboard.feed import Feed
from quire.server.dashboard.files import PageFile
from quire.server.exchange import Exchange
from quire.server.operations import Endpoint
from quire.server.wire.streams import EventStream


def page_file(path: str) -> Endpoint:
    """One of ``FILES``."""
    own = PageFile(path)

    async def page(exchange: Exchange) -> ASGIApp:
        """A file of the memory page."""
        return own.answer(exchange.http.headers.get("if-none-match"))

    return page


def memory_feed(feed: Feed) -> Endpoint:
    """Frames of the cache, for as long as they are read."""

    async def memory(exchange: Exchange) -> ASGIApp:
        """Frames of the cache, for as long as they are read."""
        return EventStream(
            await feed.open(None if exchange.caller.sees_all else exchange.caller.salt),
            send_timeout_s=exchange.service.config.send_timeout,
            headers=exchange.headers,
        )

    return memory
