"""What the planner says, against what is known and against a peer: hit rates of prefix caches; and
how fast it simulates.

hit_rates.py and speed.py say what is run; real.py, against a real engine,
takes long and is run by itself. The traces are not part of this repository; docs/reference/
traces.md says where they are from.
"""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.harness import os_memory
from benchmarks.harness.peers import PeerUnavailable
from benchmarks.harness.report import Table, markdown, replace_section, show
from benchmarks.planner import hit_rates, speed
from quire.errors import QuireError
from quire.units import format_seconds

PARTS = ("hit-rates", "speed")

app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


@app.command()
def main(
    traces: Annotated[
        Path | None,
        typer.Option(help="Folder with mooncake_conversation.jsonl (and kv-cache-tester.tar.zst)."),
    ] = None,
    kv_tester: Annotated[
        bool, typer.Option("--kv-tester", help="kv-cache-tester too: some minutes.")
    ] = False,
    only: Annotated[str, typer.Option(help=f"One part: {', '.join(PARTS)}.")] = "",
    pairs: Annotated[int, typer.Option(help="Turns of the peer, ours and ours again.", min=5)] = 5,
    rounds: Annotated[int, typer.Option(help="Of simulating a whole trace.", min=1)] = 3,
    with_claims: Annotated[
        bool, typer.Option("--claims", help="End with one JSON object a line for each claim.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write the tables into this Markdown file's section.")
    ] = None,
) -> None:
    """Hit rates on real traces: known figures, and kvcache-simulator's speed and answers.

    Times are whole processes', in turn; beside them two runs of ours that show the noise.
    """
    if traces is None:
        if with_claims or output:
            raise typer.BadParameter("nothing to claim or to write without --traces FOLDER")
        print("SKIPPED: nothing is measured without --traces FOLDER.")
        return
    if only and only not in PARTS:
        raise typer.BadParameter(f"--only {only}: there is {', '.join(PARTS)}")
    begun = time.monotonic()
    console, aside = Console(width=None if sys.stdout.isatty() else 180), Console(stderr=True)
    shown: list[Table] = []
    claims: list[dict[str, Any]] = []
    with aside.status("") as status:
        if only in ("", "hit-rates"):
            status.update("installing the peer …")
            try:
                results = hit_rates.measure(
                    traces, pairs, with_kv_tester=kv_tester, say=lambda line: status.update(line)
                )
            except (PeerUnavailable, QuireError) as error:
                raise typer.BadParameter(str(error)) from error
            shown += hit_rates.tables(results)
            claims += hit_rates.claims(results)
        if only in ("", "speed"):
            status.update("simulating …")
            speeds = speed.measure(traces, rounds)
            shown += speed.tables(speeds)
            claims += speed.claims(speeds)
    setting = (
        f"`python -m benchmarks.planner.bench_planner --traces …{f' --only {only}' if only else ''}"
        f"{' --kv-tester' * kv_tester}`, {pairs} pairs, {rounds} rounds, "
        f"{format_seconds(time.monotonic() - begun)}; {os_memory.machine()}; "
        f"Python {sys.version.split()[0]}."
    )
    show(shown, [setting], console)
    if output:
        replace_section(output, "bench_planner", markdown(shown, [], setting))
    if with_claims:
        for claim in claims:
            print(json.dumps(claim))


if __name__ == "__main__":
    app()
