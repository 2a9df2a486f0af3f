"""What the planner says, against what is known and against a peer: hit rates of prefix caches.

planner_hit_rates.py says what is run. The traces are not part of this repository; docs/reference/
traces.md says where they are from.
"""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import os_memory
import planner_hit_rates
import typer
from peer_kvcache_simulator import PeerUnavailable
from report import markdown, replace_section, show
from rich.console import Console

from quire.errors import QuireError
from quire.units import format_seconds

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
    pairs: Annotated[int, typer.Option(help="Turns of the peer, ours and ours again.", min=5)] = 5,
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
    begun = time.monotonic()
    console, aside = Console(width=None if sys.stdout.isatty() else 180), Console(stderr=True)
    with aside.status("installing the peer …") as status:
        try:
            results = planner_hit_rates.measure(
                traces, pairs, with_kv_tester=kv_tester, say=lambda line: status.update(line)
            )
        except (PeerUnavailable, QuireError) as error:
            raise typer.BadParameter(str(error)) from error
    setting = (
        f"`python benchmarks/bench_planner.py --traces …{' --kv-tester' * kv_tester}`, {pairs} "
        f"pairs, {format_seconds(time.monotonic() - begun)}; {os_memory.machine()}; "
        f"Python {sys.version.split()[0]}."
    )
    shown = planner_hit_rates.tables(results)
    show(shown, [setting], console)
    if output:
        replace_section(output, "bench_planner", markdown(shown, [], setting))
    if with_claims:
        for claim in planner_hit_rates.claims(results):
            print(json.dumps(claim))


if __name__ == "__main__":
    app()
