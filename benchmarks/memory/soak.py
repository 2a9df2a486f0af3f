"""A server in a box: random traffic, clients that leave, and a neighbour that breathes.

    python -m benchmarks.memory.soak --minutes 60 --report soak.json

It makes a memory control group (v1), runs ``quire serve`` in it on the demo model in float32, and
beside it a process that takes memory up to 95 % of the group and gives it back. Requests are drawn
from a pool whose texts were computed alone before; every answer is compared with them. A client
that is told that the queue is full asks again when it was told to, or after a minute. Memory, open
files and mappings are compared at rest, before and after. "Before" is after five minutes of the
same traffic. For about twenty minutes each new most of it still makes some buffers and pools of
malloc larger, which stay; so in a soak of 45 minutes or more what is not KV is also compared
between the second and the last third of the time that traffic comes, where it must not grow. The
last lines are the verdict: one JSON object for each claim; the exit status is 1 if one does not
hold. Take eight minutes more than ``--minutes``, and root where groups are root's.
"""

import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer

from benchmarks.harness.server import Answer, ServerProcess, ask, get, post, server, wire
from benchmarks.memory.bench_governor import WORKER, cgroup
from quire import LLM, SamplingParams
from quire.units import parse_bytes

SAMPLE_S = 5.0
REST_S = 30.0  # a cache that is idle for 20 s has given back what it only kept
LEAVES, STREAMS = 0.2, 0.6  # shares of the clients
LATE_S = 600.0  # that the last answers may take
MOST_WAIT_S = 60.0  # until a client that was told to wait asks again
WARM_S = 300.0
LONG_S = 2700.0
MODEL_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request, and the texts of its choices when nothing else runs."""

    fields: dict[str, Any]
    texts: tuple[str, ...]


@dataclass(slots=True)
class Soak:
    at_rest: list[dict[str, float]] = field(default_factory=list)  # before, and after
    samples: list[dict[str, float]] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)  # what was said, of answers that are none
    num_told_to_wait: int = 0
    longest_wait_s: int = 0  # that one was told
    kills: int = 0
    ended: bool = False  # the server, before it was told to


def main(
    minutes: Annotated[float, typer.Option(help="That traffic comes.")] = 3.0,
    rate: Annotated[float, typer.Option(help="Requests a second, on average.")] = 2.0,
    limit: Annotated[str, typer.Option(help="Of the group.")] = "2GiB",
    kv_cache_memory_bytes: Annotated[str, typer.Option()] = "1GiB",
    num_cases: Annotated[int, typer.Option(help="Different requests.")] = 120,
    seed: Annotated[int, typer.Option()] = 0,
    report: Annotated[Path | None, typer.Option(help="All samples, as JSON.")] = None,
    log: Annotated[Path | None, typer.Option(help="What the server says.")] = None,
) -> None:
    rng, soak = random.Random(seed), Soak()
    log = log or Path(tempfile.mkdtemp()) / "server.log"
    cases = alone(rng, num_cases)
    limit_bytes = parse_bytes(limit)
    with cgroup(limit_bytes) as group:
        if group is None:
            sys.exit("no memory control group (v1) can be made here")
        flags = ["--dtype", "float32", "--max-model-len", str(MODEL_LEN), "--max-num-seqs", "16",
                 "--kv-cache-memory-bytes", kv_cache_memory_bytes,
                 "--uvicorn-log-level", "warning"]  # fmt: skip
        with server(*flags, log=log, group=group) as own:
            asyncio.run(_run(own, soak, cases, rng, minutes * 60, rate, group, limit_bytes))
        text = (group / "memory.oom_control").read_text()
        soak.kills = int(dict(line.split() for line in text.splitlines()).get("oom_kill", "0"))
    found = claims(soak)
    if report is not None:
        told = {"answers": soak.answers, "wrong": soak.wrong, "refusals": soak.refusals}
        samples = {"at_rest": soak.at_rest, "samples": soak.samples}
        report.write_text(json.dumps({"claims": found, **told, **samples}))
    waits = f"told to wait {soak.num_told_to_wait} times, {soak.longest_wait_s} s at most"
    print(f"answers: {dict(soak.answers)}, {waits}; the server's log: {log}")
    for what in [*soak.wrong[:5], *dict.fromkeys(soak.refusals)]:
        print(what)
    for claim in found:
        print(json.dumps(claim))
    sys.exit(0 if all(claim["holds"] for claim in found) else 1)


def alone(rng: random.Random, count: int) -> list[Case]:
    """Requests whose beginnings are shared by some, each computed by itself, nothing cached."""
    beginnings = [[rng.randrange(20, 4000) for _ in range(400)] for _ in range(6)]
    cases = []
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": MODEL_LEN,
        "enable_prefix_caching": False,
    }
    with LLM(kv_cache_memory_bytes="256MiB", **options) as llm:
        for number in range(count):
            prompt = rng.choice(beginnings)[: rng.choice([0, 100, 400])]
            prompt = prompt + [rng.randrange(20, 4000) for _ in range(rng.randint(4, 900))]
            several = rng.random() < 0.2
            sampling: dict[str, Any] = {
                "max_tokens": rng.randint(1, 100),
                "temperature": 0.8 if several else 0.0,
                "n": rng.randint(2, 4) if several else 1,
                "seed": number,
                "ignore_eos": True,
            }
            (completion,) = llm.generate([prompt], SamplingParams(**sampling))
            texts = tuple(choice.text for choice in completion.choices)
            cases.append(Case(fields={"prompt": prompt, **sampling}, texts=texts))
    return cases


async def _run(
    own: ServerProcess,
    soak: Soak,
    cases: list[Case],
    rng: random.Random,
    seconds: float,
    rate: float,
    group: Path,
    limit_bytes: int,
) -> None:
    for case in cases[:20]:  # what is made once, is made
        await _visit(own, soak, case, rng, leaves=False)
    command = [*WORKER, "breather", str(group), str(limit_bytes), "0.95"]
    begin = perf_counter()
    for span_s in (WARM_S, seconds):
        with subprocess.Popen(command) as neighbour:
            sampling = asyncio.create_task(_sample(own, soak, group, begin))
            tasks = await _traffic(own, soak, cases, rng, span_s, rate)
            sampling.cancel()
            neighbour.terminate()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=LATE_S)
            soak.answers["no answer"] += len(late)
            for task in late:
                task.cancel()
        await _rest(own, soak, group)


async def _traffic(
    own: ServerProcess,
    soak: Soak,
    cases: list[Case],
    rng: random.Random,
    seconds: float,
    rate: float,
) -> set[asyncio.Task[None]]:
    """The visits that are still under way after so long."""
    until_s, tasks = perf_counter() + seconds, set[asyncio.Task[None]]()
    while perf_counter() < until_s and not soak.ended:
        await asyncio.sleep(rng.expovariate(rate))
        leaves = rng.random() < LEAVES
        task = asyncio.create_task(_visit(own, soak, rng.choice(cases), rng, leaves=leaves))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    return tasks


async def _visit(
    own: ServerProcess, soak: Soak, case: Case, rng: random.Random, *, leaves: bool
) -> None:
    streams = rng.random() < STREAMS
    data = post("/v1/completions", {**case.fields, "stream": streams})
    try:
        if leaves and not streams:
            async with wire(own.port) as connection:
                connection.writer.write(data)
                await asyncio.sleep(rng.random())
            soak.answers["left"] += 1
            return
        leave_after = rng.randrange(1, 10) if leaves else 0
        answer = await ask(own.port, data, keeps=True, leave_after=leave_after)
        while answer.status == 503 and answer.retry_after_s is not None:
            soak.num_told_to_wait += 1
            soak.longest_wait_s = max(soak.longest_wait_s, answer.retry_after_s)
            await asyncio.sleep(min(MOST_WAIT_S, answer.retry_after_s * rng.uniform(1, 1.5)))
            answer = await ask(own.port, data, keeps=True, leave_after=leave_after)
    except (OSError, asyncio.IncompleteReadError) as error:
        soak.answers[f"broken: {type(error).__name__}"] += 1
        soak.ended = soak.ended or not Path(f"/proc/{own.pid}/status").exists()
        return
    if leaves:
        soak.answers["left"] += 1
        return
    soak.answers[str(answer.status)] += 1
    if answer.status != 200:
        soak.refusals.append(f"{answer.status}: {answer.body.decode()}")
    else:
        got = _texts(answer, len(case.texts), streams=streams)
        if got != case.texts:
            soak.wrong.append(f"{case.fields['seed']}: {got!r} for {case.texts!r}")


def _texts(answer: Answer, count: int, *, streams: bool) -> tuple[str, ...]:
    if not streams:
        choices = json.loads(answer.body)["choices"]
        return tuple(c["text"] for c in sorted(choices, key=lambda c: int(c["index"])))
    texts, body = [""] * count, b""
    rest = answer.body
    while rest:  # HTTP's chunks: a length in hex, and so many bytes
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    for event in body.decode().split("\n\n"):
        if event.startswith("data: {"):
            for choice in json.loads(event[6:]).get("choices", []):
                texts[choice["index"]] += choice["text"]
    return tuple(texts)


async def _rest(own: ServerProcess, soak: Soak, group: Path) -> None:
    await asyncio.sleep(REST_S)
    with suppress(OSError):
        soak.at_rest.append(await _look(own, group))


async def _sample(own: ServerProcess, soak: Soak, group: Path, begin: float) -> None:
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            soak.samples.append({"at_s": perf_counter() - begin, **await _look(own, group)})
        await asyncio.sleep(SAMPLE_S)


async def _look(own: ServerProcess, group: Path) -> dict[str, float]:
    folder = Path(f"/proc/{own.pid}")
    status = (folder / "status").read_text()
    kilobytes = {k: int(v) for k, v in re.findall(r"^(Rss\w+):\s+(\d+) kB", status, re.M)}
    text = (await ask(own.port, get("/metrics"))).body.decode()
    kv = re.findall(r'^quire:kv_bytes\{[^}]*state="committed"[^}]*\} (\S+)$', text, re.M)
    return {
        "anon": 1024.0 * kilobytes["RssAnon"],
        "kv": sum(map(float, kv)),
        "fds": float(len(list((folder / "fd").iterdir()))),
        "maps": float((folder / "maps").read_text().count("\n")),
        "group": float((group / "memory.usage_in_bytes").read_text()),
    }


def claims(soak: Soak) -> list[dict[str, Any]]:
    rest = soak.at_rest

    def claim(name: str, ours: float, unit: str, goal: str, holds: bool) -> dict[str, Any]:
        return {"claim": f"soak in a box: {name}", "ours": ours, "peer": None, "unit": unit,
                "ratio": None, "goal": goal, "holds": holds}  # fmt: skip

    bad = sum(n for name, n in soak.answers.items() if name not in ("200", "left"))
    found = [
        claim("processes killed", soak.kills, "times", "0", soak.kills == 0 and not soak.ended),
        claim("answers that are none", bad, "requests", "0", bad == 0),
        claim("texts other than alone", len(soak.wrong), f"of {soak.answers['200']}", "0",
              not soak.wrong and soak.answers["200"] > 0),
    ]  # fmt: skip
    if len(rest) < 2:
        return [*found, claim("at rest afterwards", 0, "", "it answers", False)]
    third = len(soak.samples) // 3
    grown = {name: rest[1][name] / rest[0][name] for name in ("anon", "maps")}
    more_fds = rest[1]["fds"] - rest[0]["fds"]
    late = _typical(soak.samples[-third:]) / _typical(soak.samples[-2 * third : -third])
    return [
        *found,
        claim("anonymous memory at rest, after / before", grown["anon"], "", "≤ 1.1",
              grown["anon"] <= 1.1),
        *([claim("what is not KV, last third / second third", late, "", "≤ 1.02", late <= 1.02)]
          if soak.samples[-1]["at_s"] >= WARM_S + LONG_S else []),
        claim("mappings at rest, after / before", grown["maps"], "", "≤ 1.1", grown["maps"] <= 1.1),
        claim("open files at rest, more than before", more_fds, "files", "≤ 0", more_fds <= 0),
        claim("KV memory at rest", rest[1]["kv"], "bytes", "0", rest[1]["kv"] == 0),
    ]  # fmt: skip


def _typical(samples: list[dict[str, float]]) -> float:
    """Bytes of anonymous memory that is not KV: their median."""
    return median(each["anon"] - each["kv"] for each in samples)


if __name__ == "__main__":
    typer.run(main)
