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
_COLUMNS = ("running", "waiting", "queued", "KV", "streams", "ended", "lost", "predicted", "found")
_TIERS = ("host", "store")  # whose tokens are shown where some were found


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
        up = f"{num_up} of {len(replicas)} replicas up"
        title.append(f"  {self.fleet.model}, a fleet, {up}, {self.url}", style="dim")
        if not self.is_live:
            title.append("  no answer, reconnecting", style="bold red")
        yield title
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("replica", overflow="ellipsis", no_wrap=True)
        table.add_column("state")
        tiers = [tier for tier in _TIERS if any(each.found_tokens.get(tier) for each in replicas)]
        for name in (*_COLUMNS, *(f"from {tier}" for tier in tiers), "gaps"):
            table.add_column(name, justify="right")
        for each in replicas:
            state = Text(each.state, _STATE_STYLES.get(each.state, ""))
            name = f"{each.name} (prefill)" if each.is_prefill else each.name
            table.add_row(Text(name), state, *_figures(each, tiers))
        yield table
        for each in replicas:
            if each.why:
                yield Text(f"{each.name} is {each.state}: {each.why}", style="dim")
        if self.fleet.prefilled_prompts:
            several = sorted(self.fleet.prefilled_prompts.items())
            said = ", ".join(f"{what} {format_count(count)}" for what, count in several)
            yield Text(f"prompts computed by prefill replicas: {said}", style="dim")
        yield Text(
            f"{format_count(self.fleet.num_resumed_streams)} streams went on elsewhere. queued: "
            "prompt tokens to be computed; found: those that a replica had, of those predicted; "
            "gaps: events that were missed",
            style="dim",
        )


def _figures(replica: ReplicaStatus, tiers: list[str]) -> list[str]:
    load, ended = replica.load, dict(replica.requests)
    num_lost = ended.pop("lost", 0)
    said = (
        ("–",) * 4
        if load is None
        else (
            *map(format_count, (load.num_running, load.num_waiting, load.queued_tokens)),
            f"{100 * load.kv_usage:.0f} %",
        )
    )
    counted = (
        replica.num_streams,
        sum(ended.values()),
        num_lost,
        replica.predicted_found_tokens,
        replica.real_found_tokens,
        *(replica.found_tokens.get(tier, 0) for tier in tiers),
        replica.num_event_gaps,
    )
    return [*said, *map(format_count, counted)]
