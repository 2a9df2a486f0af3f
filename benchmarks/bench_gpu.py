"""All that is promised of a GPU, checked and timed within ten minutes: ``make bench-gpu``.

Each part runs in a process of its own, so that a kernel that faults takes only its part with it.
What is done is kept in a folder: run it again for what is missing; ``--only`` names parts. Where
there is no GPU it says so. ``--emulated`` runs every line, small, on the CPU: Triton's kernels in
its interpreter where Triton is installed (else torch's), FlashInfer pretended, the driver emulated.
Its times mean nothing.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import torch
import typer
from gpu_attention import bandwidth, decode, prefill
from gpu_engine import engine
from gpu_growing import growing
from gpu_memory import layouts, release, session
from gpu_setting import Found, Setting
from harness.report import show
from rich.console import Console

PARTS: Mapping[str, Callable[[Setting], Found]] = MappingProxyType(
    {
        "bandwidth": bandwidth,
        "decode": decode,
        "prefill": prefill,
        "session": session,
        "release": release,
        "growing": growing,
        "layouts": layouts,
        "engine": engine,
    }
)
LIMIT_S = 600

app = typer.Typer(add_completion=False)


@app.command()
def main(  # noqa: PLR0913 - each is a flag
    only: Annotated[
        str, typer.Option(help=f"Parts, with commas between them: {', '.join(PARTS)}.")
    ] = "",
    emulated: Annotated[
        bool, typer.Option("--emulated", help="Run all of it, small, without a GPU.")
    ] = False,
    with_claims: Annotated[
        bool, typer.Option("--claims", help="End with one JSON object a line for each claim.")
    ] = False,
    keep: Annotated[
        Path, typer.Option(help="Where the results of parts are kept, and found again.")
    ] = Path("build/bench-gpu"),
    again: Annotated[bool, typer.Option("--again", help="Do also what is there.")] = False,
    limit_s: Annotated[float, typer.Option(help="Seconds for all of it.")] = LIMIT_S,
    rounds: Annotated[int, typer.Option(help="Turns that the candidates take.")] = 7,
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 0,
    part: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Bandwidth, decode, prefill, sessions, grown buffers, layouts, and an engine, on a GPU."""
    setting = Setting(emulated=emulated, seed=seed, rounds=2 if emulated else rounds)
    if part:
        _alone(part, setting, keep)
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    names = [name.strip() for name in only.split(",")] if only else list(PARTS)
    if unknown := sorted({*names} - {*PARTS}):
        raise typer.BadParameter(f"{', '.join(unknown)}: known parts are {', '.join(PARTS)}")
    if emulated:
        console.print("No GPU is used: kernels and driver are emulated. The times mean nothing.")
    elif not torch.cuda.is_available():
        console.print(
            "There is no GPU that torch can use, so nothing was measured (--emulated runs without)."
        )
        return
    console.print(f"{_machine(emulated)}, torch {torch.__version__}, seed {seed}", markup=False)
    keep = keep / ("emulated" if emulated else "gpu")
    keep.mkdir(parents=True, exist_ok=True)
    begun, claims = time.monotonic(), []
    for name in names:
        left = limit_s - (time.monotonic() - begun)
        kept = keep / f"{name}.json"
        if again or only:
            kept.unlink(missing_ok=True)
        if not kept.exists():
            console.print(f"{name} … ({left:.0f} s left)", markup=False)
            failed = _in_a_process(name, setting, keep, left)
            if failed is not None:
                console.print(f"{name}: {failed}", markup=False)
                claims.append({"claim": f"{name} ran", "ours": 0, "goal": "== 1", "holds": False})
                continue
        found = Found.from_json(kept.read_text())
        show(found.tables, found.notes, console)
        claims += found.claims
    if with_claims:
        for claim in claims:
            timed = claim.pop("timed", False)
            if emulated:
                claim |= {"emulated": True} | ({"holds": None} if timed else {})
            print(json.dumps(claim))


def _in_a_process(name: str, setting: Setting, keep: Path, limit_s: float) -> str | None:
    """Run one part; why it failed, None if it did not."""
    if limit_s <= 0:
        return "no time is left; run the same again, for what is done is kept"
    command = [sys.executable, __file__, "--part", name, "--keep", str(keep)]
    command += ["--rounds", str(setting.rounds), "--seed", str(setting.seed)]
    environment = {**os.environ, "PYTHONPATH": _paths()}
    if setting.emulated:
        command.append("--emulated")
        environment["TRITON_INTERPRET"] = "1"
    try:
        code = subprocess.run(command, env=environment, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    return None if code == 0 else f"failed, with {code}: see above"


def _alone(name: str, setting: Setting, keep: Path) -> None:
    torch.manual_seed(setting.seed)
    begun = time.monotonic()
    found = PARTS[name](setting)
    found.notes.append(f"{name} took {time.monotonic() - begun:.0f} s")
    unfinished = keep / f"{name}.part"
    unfinished.write_text(found.as_json())
    unfinished.rename(keep / f"{name}.json")


def _paths() -> str:
    """Quire from this tree, wherever the Python is from."""
    own = str(Path(__file__).parents[1] / "src")
    return os.pathsep.join([own, *filter(None, [os.environ.get("PYTHONPATH")])])


def _machine(emulated: bool) -> str:
    if emulated:
        return "emulated"
    parts = [torch.cuda.get_device_name()]
    with contextlib.suppress(ImportError):
        import triton

        parts.append(f"Triton {triton.__version__}")
    return ", ".join(parts)


if __name__ == "__main__":
    app()
