"""Run ``quire top``: show a server's memory page in a terminal."""

import asyncio
import os
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from quire.cli.fleet_view import FleetView
from quire.cli.keyboard import unseen
from quire.cli.options import DEFAULT_URL, ApiKey, client
from quire.errors import ConfigError
from quire.fleet.fleet_status import FleetStatus
from quire.http import Http, RefusedByServer
from quire.server.dashboard.frames import (
    FEED,
    LETTERS,
    About,
    Cells,
    Counters,
    Frame,
    SequenceFrame,
    TierFrame,
)
from quire.units import ceil_div, format_bytes, format_count

# -- the view --------------------------------------------------------------------------------------

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_HUES = ("blue", "dark_orange", "green", "magenta", "yellow", "cyan", "red", "bright_blue")
# Letter of the feed → the sign that is drawn for a cell that no one sequence owns, and its name.
_SIGNS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "s": ("#", "shared"),
        "h": ("A", "held"),
        "r": ("/", "spare"),
        "c": ("o", "cached"),
        "e": ("_", "empty"),
        ".": ("·", "not committed"),
    }
)
_MOST_LINES = 14  # of the picture of one group of layers
_HEAD_LINES = 5  # before the pictures
_MOST_TIERS = 4  # a line each
_STATE_STYLES = MappingProxyType({"ok": "green", "broken": "dark_orange", "suspect": "bold red"})
_ENTRY_WIDTH, _GAP = 39, 2  # columns of a sequence's entry; between two entries
_WINDOW_S = 5.0  # rates are means over this time


@dataclass(frozen=True, slots=True)
class View:
    """One frame of the feed with what came before it, drawn as text as wide as the terminal."""

    url: str
    about: About
    frame: Frame
    now_s: float
    is_live: bool = True
    slots: dict[int, int] = field(default_factory=dict)  # sequence id → number of its letter
    past: tuple[tuple[float, Counters], ...] = ()

    def __post_init__(self) -> None:
        there = [sequence.id for sequence in self.frame.sequences]
        kept = {seq_id: self.slots[seq_id] for seq_id in there if seq_id in self.slots}
        free = deque(n for n in range(len(there)) if n not in kept.values())
        for seq_id in there:
            if seq_id not in kept:
                kept[seq_id] = free.popleft()
        object.__setattr__(self, "slots", kept)
        counted = self.frame.counters
        moments = [*self.past] if counted is None else [*self.past, (self.now_s, counted)]
        while len(moments) > 2 and moments[0][0] < self.now_s - _WINDOW_S:
            moments.pop(0)
        object.__setattr__(self, "past", tuple(moments))

    def then(self, frame: Frame, now_s: float) -> "View":
        """Return the view of the next frame."""
        return replace(self, frame=frame, now_s=now_s, is_live=True)

    def lost(self) -> "View":
        """Return the view of the last frame after the feed has ended."""
        return replace(self, is_live=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, groups = options.max_width, self.about.groups
        yield self._title()
        yield from self._bytes(width)
        yield self._rates()
        told = list(self._tiers())
        yield from told
        # Sequences get up to half of the remaining lines.
        left = options.max_height - _HEAD_LINES - 2 * len(groups)
        left -= len(told) + (self.frame.others_percent is not None)
        entries = [self._entry(sequence) for sequence in self.frame.sequences]
        in_line = max(1, (width + _GAP) // (_ENTRY_WIDTH + _GAP))
        wanted = 1 + ceil_div(len(entries), in_line) + (self.frame.num_more > 0)
        most = _MOST_LINES
        if console.is_terminal and groups:
            most = max(1, min(most, (left - min(wanted, left // 2)) // len(groups)))
        for about, cells in zip(groups, self.frame.cells, strict=True):
            picture = list(self._picture(cells, width, most))
            scale = self._scale(cells, about.cell_tokens, width, most)
            yield Text(f"{about.label}: {scale}", style="dim", no_wrap=True, overflow="ellipsis")
            yield from picture
            yield self._counts(cells)
            left -= len(picture)
        room = max(1, left - 1) if console.is_terminal else len(entries)
        yield from self._listed(entries, in_line, room)

    def _title(self) -> Text:
        about, title = self.about, Text("quire top", style="bold")
        title.append(f"  {about.model}, {about.strategy}, {self.url}", style="dim")
        if not self.is_live:
            title.append("  no answer, reconnecting", style="bold red")
        title.no_wrap, title.overflow = True, "ellipsis"
        return title

    def _bytes(self, width: int) -> Iterator[Text]:
        memory, others_percent = self.frame.memory, self.frame.others_percent
        wasted = memory.committed - memory.used - memory.cached
        words = f"{format_bytes(memory.committed)} committed of {format_bytes(memory.ceiling)}"
        more, more_word = memory.cached, f"{format_bytes(memory.cached)} cached"
        if others_percent is not None:
            words += " for this key"
            more = memory.capacity * others_percent // 100
            more_word = f"others about {others_percent} %"
        elif memory.ceiling < memory.capacity:
            words += f" (ceiling now; capacity {format_bytes(memory.capacity)})"
        yield Text(words, style="bold")
        bar, done = Text(), 0
        for count, sign, style in (
            (memory.used, "█", "blue"),
            (more, "▒", ""),
            (wasted, "░", "dark_orange"),
        ):
            cells = min(width - done, round(width * count / max(1, memory.capacity)))
            bar.append(sign * cells, style=style)
            done += cells
        bar.append("·" * (width - done), style="dim")
        yield bar
        yield Text.assemble(
            ("█ ", "blue"),
            f"{format_bytes(memory.used)} used   ▒ {more_word}   ",
            ("░ ", "dark_orange"),
            f"{format_bytes(wasted)} wasted",
        )

    def _rates(self) -> Text:
        frame, now = self.frame, self.frame.counters
        sequences = f"{frame.num_running} running, {frame.num_waiting} waiting"
        if now is None:
            return Text(f"{sequences}, of this key")
        then_s, before = self.past[0]
        took_s, queries = self.now_s - then_s, now.queries - before.queries
        rate = f"{(now.generated - before.generated) / took_s:,.0f}" if took_s else "–"
        hits = f"{100 * (now.hits - before.hits) / queries:.0f} %" if queries else "–"
        return Text(
            f"{sequences}   {rate} tokens/s   hit rate {hits}   "
            f"{format_count(now.preemptions)} preemptions"
        )

    def _tiers(self) -> Iterator[Text]:
        """Yield a line for each tier: what it holds, what it had of prompts, and its state."""
        tiers = self.frame.tiers
        for tier in tiers[:_MOST_TIERS]:
            words = f"{tier.name}: {_held(tier)}, {format_count(tier.hits)} tokens hit, "
            line = Text(words, no_wrap=True, overflow="ellipsis")
            yield line.append(tier.state, style=_STATE_STYLES[tier.state])
        if len(tiers) > _MOST_TIERS:
            more = tiers[_MOST_TIERS:]
            wrong = sum(tier.state != "ok" for tier in more)
            yield Text(f"and {len(more)} tiers more, {wrong} of them broken or suspect")

    def _scale(self, cells: Cells, cell_tokens: int, width: int, most: int) -> str:
        each = cells.each * _thinned(cells, width, most)[0]
        one = f"{cell_tokens} token{'s' if cell_tokens > 1 else ''} a cell"
        return one if each == 1 else f"{one}, {format_count(each)} cells a sign"

    def _picture(self, cells: Cells, width: int, most: int) -> Iterator[Text]:
        each, columns = _thinned(cells, width, most)
        owners = [-1] * len(cells.states)
        at = 0
        for holder, count in zip(cells.holders[::2], cells.holders[1::2], strict=True):
            owners[at : at + count] = [holder] * count
            at += count
        signs = [
            self._sign(cells.states[i : i + each], owners[i : i + each])
            for start in range(0, len(cells.states), cells.row_cells or len(cells.states) or 1)
            for i in _row(start, cells, each)
        ]
        for first in range(0, len(signs), columns):
            yield Text.assemble(*signs[first : first + columns], no_wrap=True, overflow="crop")

    def _sign(self, states: str, owners: list[int]) -> tuple[str, str]:
        """Return the sign and style of the commonest state among the committed cells."""
        backed = states.replace(".", "")
        if not backed:
            return _SIGNS["."][0], "dim"
        state = Counter(backed).most_common(1)[0][0]
        holder = next((o for s, o in zip(states, owners, strict=True) if s == state), -1)
        slot = self.slots.get(holder)
        hue = "" if slot is None or state in "ce" else _HUES[slot % len(_HUES)]
        if state == "h":
            return (_LETTERS[slot % len(_LETTERS)] if slot is not None else "+"), hue
        return _SIGNS[state][0], hue

    def _counts(self, cells: Cells) -> Text:
        counts = dict(zip(LETTERS, cells.counts, strict=True))
        parts = (
            f"{sign} {format_count(counts[state])} {word}"
            for state, (sign, word) in _SIGNS.items()
            if counts[state]
        )
        return Text("   ".join(parts), style="dim", no_wrap=True, overflow="ellipsis")

    def _entry(self, sequence: SequenceFrame) -> Text:
        """Return a sequence's entry, ``_ENTRY_WIDTH`` wide."""
        slot = self.slots[sequence.id]
        tokens = f"{format_count(sequence.computed)}/{format_count(sequence.max_tokens)}"
        state = f"{sequence.state[:3]} {sequence.preemptions}×" if sequence.preemptions else ""
        entry = Text(_LETTERS[slot % len(_LETTERS)], style=_HUES[slot % len(_HUES)])
        entry.append(f" {sequence.id:<6}", style="default")
        entry.append(f" {state or sequence.state:<9.9}", style="default")
        entry.append(f" {tokens:>13} {format_count(sequence.cached):>6}", style="default")
        return entry

    def _listed(self, entries: list[Text], in_line: int, room: int) -> Iterator[Text]:
        """Yield as many entries as there is room for, and the number of the others."""
        num_all = len(entries) + self.frame.num_more
        if num_all > min(room, ceil_div(len(entries), in_line)) * in_line:
            entries = entries[: max(1, room - 1) * in_line]
        heading = f"{'  sequence state':<19}{'tokens of':>12} {'cached':>6}"
        yield Text((heading + " " * _GAP) * min(in_line, max(1, len(entries))), style="dim")
        for first in range(0, len(entries), in_line):
            line = Text(" " * _GAP).join(entries[first : first + in_line])
            line.no_wrap, line.overflow = True, "crop"
            yield line
        if more := num_all - len(entries):
            yield Text(f"  and {format_count(more)} more", style="dim")
        if self.frame.others_percent is not None:
            yield Text(f"  others hold about {self.frame.others_percent} %", style="dim")


def _held(tier: TierFrame) -> str:
    """Say what a tier holds, as far as it does."""
    used = "bytes unknown" if tier.used is None else format_bytes(tier.used)
    most = "" if tier.capacity is None else f" of {format_bytes(tier.capacity)}"
    count = "" if tier.records is None else f" in {format_count(tier.records)} records"
    return used + most + count


def _thinned(cells: Cells, width: int, most: int) -> tuple[int, int]:
    """Return how many of the feed's cells make one sign, and how many signs make a line."""
    if cells.row_cells:
        each = ceil_div(cells.row_cells, width)
        return each, ceil_div(cells.row_cells, each)
    return max(1, ceil_div(len(cells.states), width * most)), width


def _row(start: int, cells: Cells, each: int) -> range:
    return range(start, start + (cells.row_cells or len(cells.states)), each)


# -- the command -----------------------------------------------------------------------------------

_AGAIN_S = 2.0  # between two attempts to connect
_FLEET_S = 1.0  # between two looks at a fleet
_NO_ENGINE_HERE = 501  # a fleet's door has no cache to show
_SILENCE_S = 60.0  # a server sends something every ten seconds, even if its memory does not change


def top(
    *,
    url: Annotated[
        str, typer.Option(envvar="QUIRE_URL", help="Address of a server of quire serve.")
    ] = DEFAULT_URL,
    api_key: ApiKey = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture and exit; needs no terminal.")
    ] = False,
) -> None:
    """Watch a server's KV memory: its sequences, their blocks, and tokens per second.

    Of a fleet's door it shows the replicas: their state, load, and what they find of prompts.

    q ends it.

    \b
    quire top
    quire top --url http://10.0.0.5:8000 --once

    Raises: ConfigError if the server does not answer or refuses.
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
            f"no memory feed at {url} ({said}): start a server with quire serve, or name another "
            "with --url"
        ) from error


async def _print_one(http: Http, url: str, console: Console) -> None:
    """Print the first frame. Raises: OSError, ValueError."""
    async with aclosing(_pictures(http, url)) as views:
        async for view in views:
            console.print(view)
            return
    raise ValueError("the feed ended before its first frame")


async def _watch(http: Http, url: str, console: Console) -> None:
    """Show frames until q or Ctrl-C. Raises: OSError, ValueError if the first try fails."""
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
    if not keys or b"q" in keys.lower():  # no bytes: the terminal has gone
        ended.set()


async def _show(http: Http, url: str, live: Live) -> None:
    view: View | FleetView | None = None
    while True:
        try:
            async with aclosing(_pictures(http, url, view)) as views:
                async for view in views:
                    live.update(view, refresh=True)
        except (OSError, ValueError):
            if view is None:
                raise
        if view is not None:
            view = view.lost()
            live.update(view, refresh=True)
        await asyncio.sleep(_AGAIN_S)


async def _pictures(
    http: Http, url: str, last: View | FleetView | None = None
) -> AsyncGenerator[View | FleetView, None]:
    """Yield what there is to see: of an engine its cache, of a fleet's door its replicas."""
    if not isinstance(last, FleetView):
        try:
            async with aclosing(_views(http, url, last)) as views:
                async for view in views:
                    yield view
            return
        except RefusedByServer as error:
            if error.status != _NO_ENGINE_HERE:
                raise
    while True:
        yield FleetView(url, msgspec.convert(await http.get("/fleet"), FleetStatus))
        await asyncio.sleep(_FLEET_S)


async def _views(http: Http, url: str, view: View | None = None) -> AsyncGenerator[View, None]:
    """Yield a view for each frame, the first of them after ``view``."""
    about: About | None = None
    async with aclosing(http.follow(FEED)) as events:
        async for name, data in events:
            if name == "about":
                about = msgspec.json.decode(data, type=About)
                if view is not None and view.about != about:
                    view = None
            elif name == "frame" and about is not None:
                frame, now_s = msgspec.json.decode(data, type=Frame), time.monotonic()
                view = View(url, about, frame, now_s) if view is None else view.then(frame, now_s)
                yield view
