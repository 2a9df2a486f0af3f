"""A server under a trace's traffic for minutes or hours: does anything grow, leak or slow down?

    python -m benchmarks.server.soak --trace mooncake_conversation.jsonl --minutes 120 \\
        --report soak.md

The report is written anew every minute, so that what is known so far is always there. It ends with
one JSON object a line for each claim.
"""

import asyncio
import json
import math
import re
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, time
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness.report import Table, markdown
from benchmarks.harness.server import Answer, ServerProcess, ask, get, server
from benchmarks.server.traffic import KEYS, Shape, Visit, said, visit, visits

SAMPLE_S = 5.0
REPORT_S = 60.0
QUIET_S = 180.0  # that the server may take to finish what is left
PARTS = 10
_METRICS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "committed": 'quire:kv_bytes{[^}]*state="committed"',
    "used": 'quire:kv_bytes{[^}]*state="used"',
    "cached": 'quire:kv_bytes{[^}]*state="cached"',
    "wasted": 'quire:kv_bytes{[^}]*state="wasted"',
    "preemptions": "vllm:num_preemptions_total",
    "prompt tokens": "vllm:prompt_tokens_total",
    "cached tokens": "vllm:prompt_tokens_cached_total",
    "generated tokens": "vllm:generation_tokens_total",
}


@dataclass
class Soak:
    """What is known so far. Times are seconds from the beginning."""

    duration_s: float
    samples: list[dict[str, float]] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    first_s: "list[array[float]]" = field(
        default_factory=lambda: [array("f") for _ in range(PARTS)]
    )
    gaps_s: "list[array[float]]" = field(default_factory=lambda: _parts())
    num_late: int = 0  # that this client could not send in time
    end: dict[str, float] = field(default_factory=dict)

    def note(self, own: Visit, answer: Answer | None) -> None:
        self.kinds[own.kind] += 1
        if answer is None:
            self.statuses["not waited for"] += 1
            return
        code = "" if answer.status == 200 else f" {said(answer)}"
        self.statuses[f"{answer.status}{code}"] += 1
        if answer.status == 200 and answer.num_events:
            part = min(PARTS - 1, int(own.at_s / self.duration_s * PARTS))
            self.first_s[part].append(answer.first_s)
            self.gaps_s[part].extend(answer.gaps_s or ())


def _parts() -> "list[array[float]]":
    return [array("f") for _ in range(PARTS)]


def main(  # noqa: PLR0913 - each is a flag
    trace: Annotated[Path, typer.Option(help="Mooncake's .jsonl or Azure's .csv.")],
    minutes: Annotated[float, typer.Option(help="That traffic comes.")] = 3.0,
    rate: Annotated[float, typer.Option(help="Requests a second, on average.")] = 4.0,
    scale: Annotated[float, typer.Option(help="Of the trace's prompts.")] = 0.03,
    output_scale: Annotated[float, typer.Option(help="Of the trace's outputs.")] = 0.2,
    model: Annotated[str | None, typer.Option(help="As quire serve takes it.")] = None,
    max_model_len: Annotated[int, typer.Option()] = 2048,
    kv_cache_memory_bytes: Annotated[str, typer.Option()] = "256MB",
    max_num_seqs: Annotated[int, typer.Option()] = 32,
    seed: Annotated[int, typer.Option()] = 0,
    report: Annotated[Path | None, typer.Option(help="Written anew every minute.")] = None,
    log: Annotated[Path | None, typer.Option(help="What the server says.")] = None,
) -> None:
    flags = [*([model] if model else []), "--max-model-len", str(max_model_len),
             "--kv-cache-memory-bytes", kv_cache_memory_bytes, "--max-num-seqs", str(max_num_seqs),
             "--send-timeout", "20", "--read-timeout", "20", "--unguarded-metrics",
             "--uvicorn-log-level", "warning"]  # fmt: skip
    for key in KEYS:
        flags += ["--api-key", key]
    soak = Soak(duration_s=minutes * 60)
    setting = (
        f"{minutes:g} minutes of {trace.name} at {rate:g} requests/s, "
        f"prompts x {scale:g}, outputs x {output_scale:g}, "
        f"{model or 'the demo model'}, {max_num_seqs} sequences, {kv_cache_memory_bytes} of KV."
    )
    shape = Shape(rate=rate, scale=scale, output_scale=output_scale, max_model_len=max_model_len)
    coming = visits(trace, shape, seed)
    with server(*flags, log=log) as own:
        asyncio.run(_run(own, soak, coming, lambda: _write(soak, setting, report)))
    print(_write(soak, setting, report))
    for claim in claims(soak):
        print(json.dumps(claim))


async def _run(own: ServerProcess, soak: Soak, coming: Any, write: Any) -> None:
    begin = perf_counter()
    sampling = asyncio.create_task(_sample(own, soak, begin, write))
    tasks: set[asyncio.Task[None]] = set()

    async def one(each: Visit) -> None:
        try:
            soak.note(each, await visit(own.port, each))
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            soak.failures[f"{each.kind}: {type(error).__name__}"] += 1

    for each in coming:
        if each.at_s > soak.duration_s:
            break
        delay_s = begin + each.at_s - perf_counter()
        soak.num_late += delay_s < -1
        await asyncio.sleep(max(0.0, delay_s))
        task = asyncio.create_task(one(each))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    sampling.cancel()
    until = perf_counter() + QUIET_S
    while perf_counter() < until:
        soak.end = await _look(own, perf_counter() - begin)
        if not soak.end["running"] and not soak.end["waiting"]:
            break
        await asyncio.sleep(1)
    await asyncio.sleep(2)
    soak.end = await _look(own, perf_counter() - begin)


async def _sample(own: ServerProcess, soak: Soak, begin: float, write: Any) -> None:
    written = perf_counter()
    while True:
        soak.samples.append(await _look(own, perf_counter() - begin))
        if perf_counter() - written > REPORT_S:
            written = perf_counter()
            write()
        await asyncio.sleep(SAMPLE_S)


async def _look(own: ServerProcess, at_s: float) -> dict[str, float]:
    text = (await ask(own.port, get("/metrics"))).body.decode()
    resident, private = own.memory()
    found = {"at_s": at_s, "resident": float(resident), "private": float(private)}
    for name, pattern in _METRICS.items():
        labels = "" if "{" in pattern else r"{[^}]*"
        values = re.findall(rf"^{pattern}{labels}[^}}]*}} (\S+)$", text, re.M)
        found[name] = sum(map(float, values))
    return found


def slope(soak: Soak) -> tuple[float, float]:
    """Of private memory besides KV, from a quarter of the time on: % an hour, 95 % interval.

    Neighbouring samples are alike, so the interval is from as many as are independent.
    """
    later = [s for s in soak.samples if s["at_s"] > soak.duration_s / 4]
    if len(later) < 8:
        return math.nan, math.nan
    at_h = np.array([s["at_s"] for s in later]) / 3600
    size = np.array([s["private"] - s["committed"] for s in later])
    per_h, start = np.polyfit(at_h, size, 1)
    rest = size - (per_h * at_h + start)
    alike = float(np.clip(np.corrcoef(rest[:-1], rest[1:])[0, 1], 0, 0.99))
    independent = max(3.0, len(later) * (1 - alike) / (1 + alike))
    error = math.sqrt(float((rest**2).sum()) / (independent - 2)) / (
        math.sqrt(independent) * float(at_h.std())
    )
    return 100 * float(per_h) / float(size.mean()), 196 * error / float(size.mean())


def claims(soak: Soak) -> list[dict[str, Any]]:
    end = soak.end
    per_h, within = slope(soak)
    first, last = (
        float(np.quantile(np.concatenate([[0.0], *soak.first_s[begin:end]]), 0.99))
        for begin, end in ((1, 4), (PARTS - 3, PARTS))
    )
    leaked = end["used"] + end["wasted"] + end["committed"] - end["cached"]
    bad = sum(count for status, count in soak.statuses.items() if status.startswith("5")
              and not status.startswith("503"))  # fmt: skip
    common = {"peer": None, "ratio": None}
    return [
        {"claim": "soak: bytes held at the end, cached ones apart", "ours": leaked, **common,
         "unit": "bytes", "goal": "0", "holds": leaked == 0},
        {"claim": "soak: slope of private memory besides KV", "ours": per_h, **common,
         "unit": "%/h",
         "goal": f"< 0.1, or 0 within its interval of ± {within:.2f}",
         "holds": bool(per_h - within <= 0 or per_h < 0.1)},
        {"claim": "soak: p99 of the first byte, the last three tenths of the first",
         "ours": last * 1e3,
         "peer": first * 1e3, "unit": "ms", "ratio": last / first if first else math.nan,
         "goal": "flat: ≤ 1.5", "holds": bool(last <= 1.5 * first)},
        {"claim": "soak: answers of 5xx but 503, and connections that broke",
         "ours": bad + sum(soak.failures.values()), **common, "unit": "requests", "goal": "0",
         "holds": bad + sum(soak.failures.values()) == 0},
    ]  # fmt: skip


def _write(soak: Soak, setting: str, path: Path | None) -> str:
    text = markdown(_tables(soak), _notes(soak), setting)
    if path is not None:
        beside = path.with_suffix(".part")
        beside.write_text(text)
        beside.replace(path)
    return text


def _tables(soak: Soak) -> list[Table]:
    rows = []
    for part in range(PARTS):
        first, gaps = soak.first_s[part], soak.gaps_s[part]
        begin, end = (soak.duration_s * n / PARTS for n in (part, part + 1))
        within = [s for s in soak.samples if begin <= s["at_s"] < end]
        if not first or not within:
            continue
        quantiles = [*np.quantile(first, [0.5, 0.99]), *np.quantile(gaps or [0.0], [0.5, 0.99])]
        rows.append(
            [f"{begin / 60:.1f}-{end / 60:.1f}", f"{len(first):,}"]
            + [f"{1e3 * each:.1f}" for each in quantiles]
            + [f"{np.mean([s[name] for s in within]) / 2**20:.1f}"
               for name in ("resident", "private", "committed", "cached")]
            + [f"{max(s[name] for s in within):.0f}" for name in ("running", "waiting")]
        )  # fmt: skip
    columns = ("minutes", "streams", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "RSS MiB",
               "private MiB", "KV MiB", "cached MiB", "most running", "waiting")  # fmt: skip
    counts = [
        Table(title=title, columns=("", "requests"),
              rows=[[name, f"{count:,}"] for name, count in counter.most_common()])
        for title, counter in (("Answers", soak.statuses), ("Clients", soak.kinds),
                               ("Connections that broke", soak.failures))
        if counter
    ]  # fmt: skip
    return [Table(title="By tenth", columns=columns, rows=rows), *counts]


def _notes(soak: Soak) -> list[str]:
    notes = [f"written {int(time())}; requests sent more than a second late: {soak.num_late:,}"]
    per_h, within = slope(soak)
    if not math.isnan(per_h):
        notes.append(
            f"private memory besides KV, from a quarter of the time on: {per_h:+.2f} ± "
            f"{within:.2f} % an hour"
        )
    if soak.end:
        shown = {k: v for k, v in soak.end.items() if k not in ("at_s", "resident", "private")}
        notes.append("at the end: " + ", ".join(f"{k} {v:,.0f}" for k, v in shown.items()))
    return notes


if __name__ == "__main__":
    typer.run(main)
