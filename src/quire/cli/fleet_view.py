"""A fleet's replicas as a table in a terminal: what ``quire top`` shows of a door."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from quire.fleet.fleet_status import FleetStatus, ReplicaStatus
from quire.units import format_count

_STATE_STYLES: Mapping[str, str] = MappingProxyType(
    {"up": "green", "draining": "dark_orange", "lost": "bold red", "refused": "bold red"}
)
_COLUMNS = ("running", "waiting", "queued tokens", "streams", "ended", "lost", "found", "predicted")


@dataclass(frozen=True, slots=True)
class FleetView:
    """What ``GET /fleet`` has said last."""

    url: str
    fleet: FleetStatus
    is_live: bool = True

    def lost(self) -> "FleetView":
        """Return the view of the last answer after the door has ended."""
        return replace(self, is_live=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        replicas = self.fleet.replicas
        num_up = sum(each.state == "up" for each in replicas)
        title = Text("quire top", style="bold", no_wrap=True, overflow="ellipsis")
        title.append(f"  a fleet, {num_up} of {len(replicas)} replicas up, {self.url}", style="dim")
        if not self.is_live:
            title.append("  no answer, reconnecting", style="bold red")
        yield title
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("replica", overflow="ellipsis", no_wrap=True)
        table.add_column("state")
        for name in _COLUMNS:
            table.add_column(name, justify="right")
        for each in replicas:
            state = Text(each.state, _STATE_STYLES.get(each.state, ""))
            table.add_row(Text(each.name), state, *_figures(each))
        yield table
        for each in replicas:
            if each.why:
                yield Text(f"{each.name} is {each.state}: {each.why}", style="dim")
        resumed, gaps = self.fleet.num_resumed_streams, sum(own.num_event_gaps for own in replicas)
        yield Text(
            f"{format_count(resumed)} streams went on elsewhere; {format_count(gaps)} gaps in "
            "events. found: tokens of prompts that a replica had, beside those predicted",
            style="dim",
        )


def _figures(replica: ReplicaStatus) -> list[str]:
    load, ended = replica.load, dict(replica.requests)
    num_lost = ended.pop("lost", 0)
    said = (
        ("–",) * 3
        if load is None
        else tuple(map(format_count, (load.num_running, load.num_waiting, load.queued_tokens)))
    )
    counted = (
        replica.num_streams,
        sum(ended.values()),
        num_lost,
        replica.real_found_tokens,
        replica.predicted_found_tokens,
    )
    return [*said, *map(format_count, counted)]
