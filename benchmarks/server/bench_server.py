"""The server's own costs: to the first byte, for streams that idle, under overload, beside slow
readers, whether a clock tells one tenant what another one has asked, and what a hostile key costs.

The server is a process of its own with the demo model; this one asks it over loopback, on the same
processors. What is compared takes turns, with one side twice (A/A) for the noise.

    python -m benchmarks.server.bench_server --claims
    python -m benchmarks.server.bench_server --only first-byte --only tenants --scale 0.1
"""

import asyncio
import json
import os
from dataclasses import asdict, dataclass
from typing import Annotated

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness.report import WithClaims
from benchmarks.server.hostile import hostile_key
from benchmarks.server.load import idle_streams, overload, slow_readers
from benchmarks.server.times import chunk_cost, first_byte, tenants


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    claim: str
    ours: float
    peer: float | None
    unit: str
    ratio: float | None
    goal: str
    holds: bool | None
    notes: dict[str, object]


MEASUREMENTS = {
    "first-byte": first_byte,
    "idle-streams": idle_streams,
    "overload": overload,
    "slow-readers": slow_readers,
    "tenants": tenants,
    "hostile-key": hostile_key,
    "chunks": chunk_cost,
}


def main(
    with_claims: WithClaims = False,
    only: Annotated[list[str] | None, typer.Option(help=", ".join(MEASUREMENTS))] = None,
    scale: Annotated[float, typer.Option(help="Of how much is asked; 1 is what is claimed.")] = 1.0,
) -> None:
    unknown = set(only or ()) - set(MEASUREMENTS)
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: there is {', '.join(MEASUREMENTS)}")
    console, claims = Console(), []
    for name, measure in MEASUREMENTS.items():
        if only and name not in only:
            continue
        for found in asyncio.run(measure(scale)):
            claim = Claim(**found)
            claims.append(claim)
            table = Table(title=f"{claim.claim}: {claim.goal}", title_justify="left")
            shown = {"ours": claim.ours, "peer": claim.peer, "ratio": claim.ratio, **claim.notes}
            for column in shown:
                table.add_column(column)
            table.add_row(*(_text(value) for value in shown.values()))
            console.print(table)
    if with_claims:
        for claim in claims:
            print(json.dumps(asdict(claim)))


def _text(value: object) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    typer.run(main)
