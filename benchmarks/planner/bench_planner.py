"""What the planner says, against what is known and against a peer: hit rates of prefix caches; and
how fast it simulates.

hit_rates.py and speed.py say what is run; real.py, against a real engine, takes long and is run by
itself. The traces are not part of this repository; docs/reference/traces.md says where they are
from.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness.peers import PeerUnavailable
from benchmarks.harness.report import Output, Run, Table, WithClaims, skip_without_traces
from benchmarks.planner import hit_rates, speed
from quire.errors import QuireError

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
    with_claims: WithClaims = False,
    output: Output = None,
) -> None:
    """Hit rates on real traces: known figures, and kvcache-simulator's speed and answers.

    Times are whole processes', in turn; beside them two runs of ours that show the noise.
    """
    if traces is None:
        skip_without_traces(with_claims, output)
        return
    if only and only not in PARTS:
        raise typer.BadParameter(f"--only {only}: there is {', '.join(PARTS)}")
    run = Run("planner.bench_planner", width=180)
    shown: list[Table] = []
    claims: list[dict[str, Any]] = []
    with run.aside.status("") as status:
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
    flags = f" --traces …{f' --only {only}' if only else ''}{' --kv-tester' * kv_tester}"
    run.end(
        shown,
        run.setting(flags, also=[f"{pairs} pairs, {rounds} rounds"]),
        claims=claims if with_claims else (),
        output=output,
    )


if __name__ == "__main__":
    app()
