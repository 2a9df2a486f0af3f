"""``quire top``: the memory page in a terminal, from the same feed."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from quire.cli.client import DEFAULT_URL, ApiKey, client
from quire.cli.keyboard import unseen
from quire.cli.top_view import View
from quire.errors import ConfigError
from quire.http import Http, RefusedByServer
from quire.server.dashboard.frames import FEED, About, Frame

_AGAIN_S = 2.0  # after the feed has ended
_SILENCE_S = 60.0  # a server whose memory does not change says so every ten


def top(
    *,
    url: Annotated[
        str, typer.Option(envvar="QUIRE_URL", help="A server that quire serve has started.")
    ] = DEFAULT_URL,
    api_key: ApiKey = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture and end. Needs no terminal.")
    ] = False,
) -> None:
    """Watch a server's memory: who holds which cells, what is shared and cached, how fast it goes.

    It ends with q.

    \b
    quire top
    quire top --url http://10.0.0.5:8000 --once
    """
    http = client(url, api_key, _SILENCE_S)
    console = Console(highlight=False)
    try:
        if once or not sys.stdout.isatty():
            asyncio.run(_print_one(http, url, console))
        else:
            asyncio.run(_watch(http, url, console))
    except KeyboardInterrupt:
        pass
    except RefusedByServer as error:
        raise ConfigError(f"{url} refuses: {error.reason}") from error
    except (OSError, ValueError) as error:
        said = str(error).removeprefix(f"{url}: ")
        raise ConfigError(
            f"no memory feed at {url} ({said}): start a server with quire serve, or say with "
            f"--url where one is"
        ) from error


async def _print_one(http: Http, url: str, console: Console) -> None:
    """Raises: OSError, ValueError."""
    async with aclosing(_views(http, url)) as views:
        async for view in views:
            console.print(view)
            return
    raise ValueError("it ended before it had begun")


async def _watch(http: Http, url: str, console: Console) -> None:
    """Until q or Ctrl-C. Raises: OSError, ValueError if nothing was there at first."""
    ended = asyncio.Event()
    with (
        unseen(key_by_key=True) as keyboard,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        if keyboard is not None:
            asyncio.get_running_loop().add_reader(keyboard, _take_key, keyboard, ended)
        showing = asyncio.create_task(_show(http, url, live))
        asking = asyncio.create_task(ended.wait())
        try:
            await asyncio.wait((showing, asking), return_when=asyncio.FIRST_COMPLETED)
            if showing.done():
                showing.result()
        finally:
            showing.cancel()
            asking.cancel()


def _take_key(keyboard: int, ended: asyncio.Event) -> None:
    keys = os.read(keyboard, 64)
    if not keys or b"q" in keys.lower():  # none: the terminal is gone
        ended.set()


async def _show(http: Http, url: str, live: Live) -> None:
    view: View | None = None
    while True:
        try:
            async with aclosing(_views(http, url, view)) as views:
                async for view in views:
                    live.update(view, refresh=True)
        except (OSError, ValueError):
            if view is None:
                raise
        if view is not None:
            view = view.lost()
            live.update(view, refresh=True)
        await asyncio.sleep(_AGAIN_S)


async def _views(http: Http, url: str, view: View | None = None) -> AsyncGenerator[View, None]:
    """One for each frame. ``view``: what was seen before, if anything."""
    about: About | None = None
    async with aclosing(http.follow(FEED)) as events:
        async for name, data in events:
            if name == "about":
                about = msgspec.json.decode(data, type=About)
                if view is None or view.about != about:
                    view = None
            elif name == "frame" and about is not None:
                frame, now_s = msgspec.json.decode(data, type=Frame), time.monotonic()
                view = View(url, about, frame, now_s) if view is None else view.then(frame, now_s)
                yield view
