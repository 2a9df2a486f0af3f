"""``quire bench --calibrate``: what steps take on this machine, written for ``quire simulate``."""

import platform
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire.cli.options import load_llm, plain_table
from quire.planner.simulation.costs import COEFFICIENTS
from quire.planner.simulation.fitting import Fit


def write_calibration(model: str | None, engine: dict[str, Any], path: Path) -> None:
    """Raises: ConfigError, RequestError."""
    # A prompt that comes again is to be computed again.
    llm = load_llm(model, {**engine, "enable_prefix_caching": False})
    from torch import get_num_threads

    from quire.bench.calibrate import about, calibrate

    columns = (TextColumn("stepping"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with llm, Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")
        found = calibrate(
            llm, report=lambda done, total: progress.update(task, completed=done, total=total)
        )
        name, cache = llm.name, llm.config.cache
    found = about(
        found,
        machine=f"{platform.node()}, {platform.machine()}",
        model=model or name,
        cache=cache,
        num_threads=get_num_threads(),
    )
    found.costs.write(path)
    _print(found, path)


def _print(found: Fit, path: Path) -> None:
    console = Console(highlight=False)
    table = plain_table("What a step takes here", "", "µs", "of")
    for name, unit in zip(COEFFICIENTS, _UNITS, strict=True):
        seconds = getattr(found.costs, name)
        table.add_row(name.removesuffix("_s").replace("_", " "), f"{seconds * 1e6:,.4g}", unit)
    console.print(table)
    console.print(
        f"{found.num_steps:,} steps of {found.num_kinds:,} kinds. A kind's time is off by "
        f"{found.median_error:.1%} in the median, by {found.p90_error:.1%} at most in nine of ten, "
        f"all together by {found.total_error:+.1%}. Half of the steps of a kind lay within "
        f"{found.spread:.1%} of each other: what is off by less than that is the machine.",
        soft_wrap=True,
    )
    console.print(f"written to {path}: quire simulate … --calibration {path}", soft_wrap=True)


_UNITS = (
    *("a step", "more for one of over 128 tokens", "a sequence in it", "a token drawn"),
    *("a chunk of a prompt", "a token, of the first 8", "a token, up to 64", "a token, up to 128"),
    *("a token, beyond", "an entry read", "a token and an entry"),
)
