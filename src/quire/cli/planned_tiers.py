"""What ``plan``, ``simulate`` and ``hit-rates`` share: options of planned tiers, and tables."""

from collections.abc import Sequence
from typing import Annotated, TypeAlias

from rich.table import Table

from quire.cli.options import in_panel, plain_table
from quire.config.engine_config import TIERS_PANEL
from quire.planner.planned_tiers import TIER_SPEEDS, PlannedTier
from quire.units import format_bytes, format_count

TierSpeeds: TypeAlias = Annotated[
    list[str] | None,
    in_panel(
        TIERS_PANEL,
        "Speed of a kind of tier, as one server sees it: KIND=READ,WRITE[,LATENCY] in gigabytes "
        "(10⁹ bytes) a second and milliseconds a call, e.g. file=6,3 or redis=1,1,0.5. May be "
        f"given once for each kind. Known: {', '.join(TIER_SPEEDS)}; other kinds need one.",
    ),
]
TierSizes: TypeAlias = Annotated[
    list[str] | None,
    in_panel(
        TIERS_PANEL,
        "Size of a kind of tier whose address has none: KIND=SIZE, e.g. redis=100GiB. May be given "
        "once for each kind. Default: no limit; a folder's own default.",
    ),
]


def size_of(tier: PlannedTier) -> str:
    """Say how large a tier is."""
    return "no limit" if tier.capacity_bytes is None else format_bytes(tier.capacity_bytes)


def tiers_table(tiers: Sequence[PlannedTier], title: str) -> Table:
    """Make a table of what each tier holds, and of its speed. Tokens: of whole blocks."""
    table = plain_table(title, "tier", "size", "tokens", "GB/s read", "written", "ms a call")
    table.add_column("speed from", overflow="fold")
    for tier in tiers:
        table.add_row(
            tier.name,
            size_of(tier),
            "" if tier.num_tokens is None else format_count(tier.num_tokens),
            f"{tier.speed.read_bytes_per_s / 1e9:,.3g}",
            f"{tier.speed.write_bytes_per_s / 1e9:,.3g}",
            f"{tier.speed.call_s * 1e3:,.3g}",
            tier.speed.source,
        )
    return table
