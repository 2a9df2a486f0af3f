"""What ``plan``, ``simulate`` and ``hit-rates`` share: options of planned tiers, and tables."""

from typing import Annotated, TypeAlias

from quire.cli.options import in_panel
from quire.config.engine_config import TIERS_PANEL
from quire.planner.planned_tiers import TIER_SPEEDS

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
