"""A cache that breathes with the machine: what it gives back, how soon, and beside whom.

    python -m benchmarks.memory.bench_governor [--claims] [--only PART]

Seven parts, each in processes of its own on the demo model: a neighbour that takes half of a
machine of 8 GiB (a control group), a capacity that is lowered under running sequences, half a
minute of idleness, two engines that take all they may of 6 GiB, work at 95 % of a control group's
limit, budgets stated in bytes in a group of 2 GiB with no neighbour, and a server in a group of
1 GiB that a neighbour holds at 95 %. About eight minutes.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness.server import ask, post, server
from quire.memory.machine.readings import HostGauge

WORKER = (sys.executable, "-m", "benchmarks.memory.governor_worker")
CGROUPS = Path("/sys/fs/cgroup/memory")
GIB = 1 << 30
SMALL_BYTES = 6 * GIB  # the machine that two engines share
ALONE_S, BOTH_S, SOAK_S, STATED_S = 15, 60, 60, 10
LOG = Path(tempfile.gettempdir()) / f"quire-pressed-{os.getpid()}.log"
PRESSED: dict[str, tuple[str, ...]] = {
    "the demo model": ("--kv-cache-memory-bytes", "512MiB", "--dtype", "float32"),
}
STATED = ((2 * GIB, GIB), (2 * GIB, 1280 << 20), (2 * GIB, 1400 << 20))  # the limit, the budget


def main(
    claims: Annotated[bool, typer.Option(help="End with a JSON object for each claim.")] = False,
    only: Annotated[str, typer.Option(help="One of the parts.")] = "",
    model: Annotated[str | None, typer.Option(help="Pressed as well: a folder.")] = None,
) -> None:
    if model is not None:
        PRESSED[Path(model).name] = (model, "--kv-cache-memory-bytes", "96MiB")
    console = Console()
    found: list[dict[str, Any]] = []
    for name, part in PARTS.items():
        if only in ("", name):
            console.print(f"{name} …")
            found += part()
    table = Table("claim", "ours", "goal", "holds", "beside")
    for one in found:
        beside = ", ".join(f"{key} {_short(value)}" for key, value in one["beside"].items())
        ours = f"{_short(one['ours'])} {one['unit']}"
        table.add_row(one["claim"], ours, one["goal"], "yes" if one["holds"] else "no", beside)
    console.print(table)
    for one in found if claims else ():
        beside = one.pop("beside")
        print(json.dumps({**one, **beside}))


def neighbour() -> Iterator[dict[str, Any]]:
    with cgroup(8 * GIB) as folder:
        if folder is None:
            yield claim("neighbour: no control group can be made here", None, "", "", False)
            return
        result = run("neighbour", str(folder), str(8 * GIB))
    returned = result.pop("returned_fraction")
    yield claim(
        "cached-only bytes returned in 1 s when a neighbour takes half of the machine",
        *(returned, "fraction", "≥ 0.90", returned >= 0.9, result),
    )
    same = result["same_tokens"]
    yield claim("… sequences in flight give the same tokens", int(same), "", "1", same)
    swapped = result["swapped_pages"]
    yield claim("… pages swapped out", swapped, "pages", "0", swapped == 0)
    back_s = result["recovered_after_s"]
    yield claim("… 90 % of the ceiling is back", back_s, "s", "≤ 60", back_s <= 60)


def lowered() -> Iterator[dict[str, Any]]:
    result = run("lowered")
    slowest, same = result.pop("slowest_s"), result["same_tokens"]
    met = slowest <= 2 and same
    yield claim("a capacity lowered at run time is met", slowest, "s", "≤ 2", met, result)


def idle() -> Iterator[dict[str, Any]]:
    result = run("idle")
    ratio = result["idle_bytes"] / result["built_bytes"]
    yield claim(
        "resident after 30 s idle / right after loading",
        *(ratio, "", "≤ 1.05", ratio <= 1.05, result),
    )


def two() -> Iterator[dict[str, Any]]:
    """The second comes when the first has all it may have."""
    withheld = HostGauge().read().available_bytes - SMALL_BYTES * 5 // 6
    if withheld < 0:
        yield claim("two engines: not run, too little memory", None, "", "", False)
        return
    common = ["greedy", str(SMALL_BYTES), str(withheld)]
    first = start(*common, str(ALONE_S + BOTH_S + 20))
    with suppress(subprocess.TimeoutExpired):
        first.wait(ALONE_S)
    second = start(*common, str(BOTH_S))
    seen = [json.loads(each.communicate()[0].splitlines()[-1])["seen"] for each in (first, second)]
    begin, end = seen[1][0][0], seen[1][-1][0]
    settled_s, swings, shares = 0.0, 0.0, []
    for held in ([(at - begin, size) for at, size in each if begin <= at <= end] for each in seen):
        last = statistics.median(size for at, size in held if at > held[-1][0] - 15)
        unsettled = [at for at, size in held if abs(size - last) > 0.1 * last]
        settled_s = max(settled_s, *unsettled)
        quiet = [size for at, size in held if at > held[-1][0] - 15]
        swings = max(swings, (max(quiet) - min(quiet)) / last)
        shares.append(last)
    fair = max(shares) / min(shares)
    beside = {"first_bytes": shares[0], "second_bytes": shares[1], "swing_fraction": swings}
    yield claim("two engines settle within 10 %", settled_s, "s", "≤ 45", settled_s <= 45, beside)
    yield claim("… their shares", fair, "", "≤ 1.25", fair <= 1.25)
    yield claim("… and then swing by", swings, "fraction", "≤ 0.10", swings <= 0.1)


def soak() -> Iterator[dict[str, Any]]:
    with cgroup(4 * GIB) as folder:
        if folder is None:
            yield claim("soak: no control group can be made here", None, "", "", False)
            return
        process = start("soak", str(folder), str(4 * GIB), str(SOAK_S))
        output = process.communicate()[0].splitlines()
        killed = process.returncode != 0
        result = json.loads(output[-1]) if output and not killed else {}
        text = (folder / "memory.oom_control").read_text()
        kills = dict(line.split() for line in text.splitlines()).get("oom_kill", "0")
    yield claim(
        f"killed in {SOAK_S} s at 95 % of a control group's limit",
        *(int(killed) + int(kills), "times", "0", not killed and kills == "0", result),
    )


def stated() -> Iterator[dict[str, Any]]:
    """How much of a budget in bytes is used where no other process wants memory."""
    for limit, size in STATED:
        with cgroup(limit) as folder:
            if folder is None:
                yield claim("stated: no control group can be made here", None, "", "", False)
                return
            result = run("stated", str(folder), str(size), str(STATED_S), group=folder)
        used = result["last_kv_bytes"] / size
        words = f"used of {size >> 20} MiB stated, in a group of {limit >> 20} MiB"
        yield claim(words, used, "fraction", "≥ 0.95", used >= 0.95, result)


def pressed() -> Iterator[dict[str, Any]]:
    """A neighbour holds a group of 1 GiB at 95 % while a server in it has requests."""
    for name, flags in PRESSED.items():
        with cgroup(GIB) as folder:
            if folder is None:
                yield claim("pressed: no control group can be made here", None, "", "", False)
                return
            found = asyncio.run(_pressed(folder, flags))
        yield claim(
            f"ends without a word, {name} beside a neighbour that holds 1 GiB at 95 %",
            *(found["kills"] + found["silent"], "times", "0"),
            not (found["kills"] or found["silent"]),
            found,
        )


async def _pressed(folder: Path, flags: tuple[str, ...]) -> dict[str, Any]:
    def ask_for(number: int, max_tokens: int) -> bytes:
        prompt = [20 + (number * 7919 + place) % 4000 for place in range(500)]
        fields = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "prompt_logprobs": 1,
        }  # for which the logits of a whole prompt are needed
        return post("/v1/completions", fields)

    async def answer(number: int) -> str:
        try:
            found = await ask(own.port, ask_for(number, 8))
        except (OSError, asyncio.IncompleteReadError):
            return "broken"
        return str(found.status) if found.status != 200 else choice(found.body)

    with server(*flags, log=LOG, group=folder) as own:
        numbers = range(4)
        want = [await answer(number) for number in numbers]  # alone, one after another
        begin_s = time.monotonic()
        await asyncio.gather(*map(answer, range(100, 104)))
        before_s, begin_s = time.monotonic() - begin_s, time.monotonic()
        command = [*WORKER, "holder", str(folder), str(GIB), "0.95"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            await asyncio.to_thread(other.stdout.readline)
            begin_s = time.monotonic()
            got = list(await asyncio.gather(*map(answer, numbers)))
            pressed_s = time.monotonic() - begin_s
            used = int((folder / "memory.usage_in_bytes").read_text())
            other.terminate()
        alive = Path(f"/proc/{own.pid}").exists() and "broken" not in got
        await asyncio.sleep(12)
        after = list(await asyncio.gather(*map(answer, numbers))) if alive else []
        text = (folder / "memory.oom_control").read_text()
    log = LOG.read_text()
    return {
        "kills": int(dict(line.split() for line in text.splitlines()).get("oom_kill", "0")),
        "alive": alive,
        "silent": int(not alive and "the system would end this process" not in log),
        "texts_as_alone": sum(a == b for a, b in zip(got, want, strict=True)),
        "texts_as_alone_afterwards": sum(a == b for a, b in zip(after, want, strict=False)),
        "used_fraction": used / GIB,
        "s_before": before_s,
        "s_pressed": pressed_s,
        "small_steps": log.count("steps are of up to"),
    }


def choice(body: bytes) -> str:
    return str(json.loads(body)["choices"][0]["text"])


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    part.__name__: part for part in (neighbour, lowered, idle, two, soak, stated, pressed)
}


def start(*arguments: str, group: Path | None = None) -> "subprocess.Popen[str]":
    """``group``: the control group that it is in from its first page on."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    command = [*WORKER, *arguments]
    join = None if group is None else partial((group / "cgroup.procs").write_text, "0")
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=join
    )


def run(*arguments: str, group: Path | None = None) -> dict[str, Any]:
    with start(*arguments, group=group) as process:
        output = process.communicate()[0]
    if process.returncode:
        sys.exit(f"{arguments[0]} failed")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


@contextmanager
def cgroup(limit_bytes: int) -> Iterator[Path | None]:
    """A control group (v1) of our own; None where that is not allowed."""
    folder = CGROUPS / f"quire-bench-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        folder.rmdir()


def claim(
    name: str,
    ours: float | None,
    unit: str,
    goal: str,
    holds: bool,
    beside: dict[str, Any] | None = None,
) -> dict[str, Any]:
    ours = None if ours is None else round(ours, 4)
    line = {"claim": name, "ours": ours, "peer": None, "unit": unit, "ratio": None}
    return {**line, "goal": goal, "holds": holds, "beside": beside or {}}


def _short(value: Any) -> str:
    if isinstance(value, float) and value >= 1e6:
        value = int(value)
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    typer.run(main)
