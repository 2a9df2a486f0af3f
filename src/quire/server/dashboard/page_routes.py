"""The memory page's routes: its files, which need no key, and its feed, which does.

The files lie in the package as they are sent, and load nothing from anywhere else. They hold no
data.
"""

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

from starlette.responses import Response
from starlette.types import ASGIApp

from quire.server.dashboard.feed import Feed
from quire.server.request_context import RequestContext
from quire.server.routes import Endpoint
from quire.server.wire.streams import EventStream

# A browser loads from this server alone, and runs nothing written into the page itself.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

# path → file, media type. Paths in the page are relative, so that it works behind any prefix.
FILES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "/": ("index.html", "text/html"),
        "/memory/page.css": ("page.css", "text/css"),
        "/memory/page.js": ("page.js", "text/javascript"),
        "/memory/cells.js": ("cells.js", "text/javascript"),
        "/memory/charts.js": ("charts.js", "text/javascript"),
        "/memory/chat.js": ("chat.js", "text/javascript"),
        "/memory/feed.js": ("feed.js", "text/javascript"),
        "/memory/fleet.js": ("fleet.js", "text/javascript"),
        "/memory/words.js": ("words.js", "text/javascript"),
        "/memory/icon.svg": ("icon.svg", "image/svg+xml"),
        "/favicon.ico": ("icon.svg", "image/svg+xml"),  # browsers ask for it when they show JSON
    }
)


def page_file(path: str) -> Endpoint:
    """Return the endpoint of one of ``FILES``, which is read once."""
    name, media_type = FILES[path]
    content = files("quire.server.dashboard").joinpath("static", name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {
        "etag": tag,
        "cache-control": "no-cache",
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }

    async def page(context: RequestContext) -> ASGIApp:
        """Return a file of the memory page, or 304 where the browser has it."""
        if context.http.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return page


def memory_feed(feed: Feed) -> Endpoint:
    """Return the endpoint of the feed."""

    async def memory(context: RequestContext) -> ASGIApp:
        """Stream frames of the cache for as long as they are read."""
        return EventStream(
            await feed.open(None if context.caller.sees_all else context.caller.salt),
            send_timeout_s=context.service.config.send_timeout,
            headers=context.headers,
        )

    return memory
