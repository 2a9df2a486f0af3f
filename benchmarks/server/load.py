"""What many clients cost: streams that idle, more requests than can be served, slow readers."""

import asyncio
import random
import re
import statistics
from bisect import bisect_right
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness.server import Answer, ServerProcess, apart, ask, get, post, server, wire
from benchmarks.server.times import completion, drawn

_QUIET = ("--uvicorn-log-level", "warning", "--disable-log-stats")
_MB = 1e6


async def idle_streams(scale: float) -> list[dict[str, Any]]:
    """Streams that are open, and wait for their first token behind one that runs."""
    num, rng = max(50, round(1000 * scale)), random.Random(4)
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "5000", "--kv-cache-memory-bytes",
             "64MB", *_QUIET)  # fmt: skip
    with server(*flags) as own:
        # What is kept for ever is there after the first few.
        for _ in range(20):
            await ask(own.port, post("/v1/completions", completion(drawn(rng, 16), 2)))
        async with AsyncExitStack() as stack:
            before = own.memory()
            for _ in range(num):
                connection = await stack.enter_async_context(wire(own.port, limit=2**12))
                data = post("/v1/completions", completion(drawn(rng, 64), 1900))
                connection.writer.write(data)
            await asyncio.sleep(3)
            waiting = await _gauge(own, "vllm:num_requests_waiting")
            after = own.memory()
    resident, private = ((now - then) / _MB for now, then in zip(after, before, strict=True))
    return [
        {
            "claim": f"server: memory of {num:,} idle streams",
            "ours": max(resident, private),
            "peer": None,
            "unit": "MB",
            "ratio": None,
            "goal": f"≤ {100 * num / 1000:g} MB",
            "holds": max(resident, private) <= 100 * num / 1000,
            "notes": {"resident MB": resident, "private MB": private, "waiting": waiting},
        }
    ]


async def overload(scale: float) -> list[dict[str, Any]]:
    """Ten times what can be served, open loop; before and after it, as much as can be."""
    seconds, rng = max(6.0, 40 * scale), random.Random(5)
    num_seqs, num_queued, max_tokens = 16, 64, 64
    flags = ("--max-num-seqs", str(num_seqs), "--max-num-queued-reqs", str(num_queued),
             "--kv-cache-memory-bytes", "256MB", *_QUIET)  # fmt: skip
    with apart() as processors, server(*flags, processors=processors) as own:

        def body() -> bytes:
            return post("/v1/completions", completion(drawn(rng, 64), max_tokens))

        async def peak() -> float:
            """Requests a second with the queue never empty, and never full."""
            done, until_s = 0, perf_counter() + seconds / 2

            async def one() -> None:
                nonlocal done
                async with wire(own.port) as connection:
                    while perf_counter() < until_s:
                        await connection.ask(body())
                        done += perf_counter() < until_s

            await asyncio.gather(*(one() for _ in range(2 * num_seqs)))
            return done / (seconds / 2)

        await peak()
        before = await peak()
        answers, window = await _open_loop(own.port, body, 10 * before, seconds)
        after = await peak()
    served = [a for a in answers if a.status == 200]
    refused = [a for a in answers if a.status != 200]
    ended = [a for a in served if a.began_s + a.last_s <= window[1]]
    # From when the queue is full on: before that the server has yet to be loaded.
    goodput = len(ended) / (window[1] - window[0])
    refused_ms = np.quantile([a.last_s for a in refused], [0.5, 0.99]) * 1e3
    first_s = np.quantile([a.first_s for a in served], [0.5, 0.99])
    said = _said_of_real(refused, served)
    within = sum(0.5 <= ratio <= 1.5 for ratio in said) / max(1, len(said))
    statuses = sorted({a.status for a in answers})
    most = max(before, after)
    return [
        {
            "claim": "server: goodput at ten times what can be served",
            "ours": goodput,
            "peer": most,
            "unit": "requests/s",
            "ratio": goodput / most,
            "goal": "≥ 0.95 of the peak",
            "holds": goodput >= 0.95 * most,
            "notes": {"A/A": after / before, "TTFT p50 s": first_s[0], "TTFT p99 s": first_s[1],
                      "served": len(served), "refused": len(refused), "statuses": statuses},
        },
        {
            "claim": "server: time to a refusal, p99",
            "ours": float(refused_ms[1]),
            "peer": None,
            "unit": "ms",
            "ratio": None,
            "goal": "< 50 ms",
            "holds": bool(refused_ms[1] < 50),
            "notes": {"p50 ms": float(refused_ms[0]), "n": len(refused)},
        },
        {
            "claim": "server: Retry-After of what the queue really took, median",
            "ours": statistics.median(said) if said else 0.0,
            "peer": None,
            "unit": "x",
            "ratio": None,
            "goal": "0.5 to 1.5",
            "holds": bool(said) and 0.5 <= statistics.median(said) <= 1.5,
            "notes": {"share within": within, "n": len(said)},
        },
    ]  # fmt: skip


async def _open_loop(
    port: int, body: Any, rate: float, seconds: float
) -> tuple[list[Answer], tuple[float, float]]:
    """Each at its time, whatever became of the others; counted from a third of the time on."""
    tasks, begin = [], perf_counter()
    rng = random.Random(6)
    at_s = 0.0
    while at_s < seconds:
        await asyncio.sleep(begin + at_s - perf_counter())
        tasks.append(asyncio.create_task(ask(port, body())))
        at_s += rng.expovariate(rate)
    stop = perf_counter()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    answers = [each for each in found if isinstance(each, Answer)]
    if len(answers) < len(found):
        raise next(each for each in found if isinstance(each, BaseException))
    start = begin + seconds / 3
    counted = [a for a in answers if a.status != 200 or a.began_s + a.last_s >= start]
    return counted, (start, stop)


def _said_of_real(refused: list[Answer], served: list[Answer]) -> list[float]:
    """Retry-After over the time until all that waited then had begun."""
    arrived = sorted((a.began_s, a.began_s + a.first_s) for a in served)
    starts = [began for began, _ in arrived]
    begun_by = np.maximum.accumulate([first for _, first in arrived])
    ratios = []
    for each in refused:
        place = bisect_right(starts, each.began_s)
        real_s = begun_by[place - 1] - each.began_s if place else 0.0
        if each.retry_after_s is not None and real_s > 0.5:
            ratios.append(each.retry_after_s / float(real_s))
    return ratios


async def slow_readers(scale: float) -> list[dict[str, Any]]:
    """Time between a stream's pieces beside clients who have stopped to read long answers."""
    num, rounds = max(20, round(200 * scale)), max(3, round(7 * scale))
    rng = random.Random(7)
    flags = ("--max-num-seqs", "64", "--max-num-queued-reqs", "1000", "--send-timeout", "3600",
             "--kv-cache-memory-bytes", "256MB", *_QUIET)  # fmt: skip
    medians_ms: dict[str, list[float]] = {"alone": [], "beside": [], "again": []}
    with server(*flags) as own:

        async def step_ms() -> float:
            answer = await ask(own.port, post("/v1/completions", completion(drawn(rng, 16), 400)))
            return statistics.median(answer.gaps_s or [0.0]) * 1e3

        await step_ms()
        for _ in range(rounds):
            medians_ms["alone"].append(await step_ms())
            async with AsyncExitStack() as stack:
                for _ in range(num):
                    slow = await stack.enter_async_context(
                        wire(own.port, receive_bytes=4096, limit=1024)
                    )
                    long = completion(drawn(rng, 16), 300, logprobs=20)
                    slow.writer.write(post("/v1/completions", long))
                await asyncio.sleep(1)
                while await _gauge(own, "vllm:num_requests_running"):
                    await asyncio.sleep(0.2)
                medians_ms["beside"].append(await step_ms())
            await asyncio.sleep(0.5)
            medians_ms["again"].append(await step_ms())
    ratios = {
        turn: statistics.median(
            now / then for now, then in zip(times, medians_ms["alone"], strict=True)
        )
        for turn, times in medians_ms.items()
    }
    return [
        {
            "claim": f"server: a step beside {num} readers who take nothing",
            "ours": statistics.median(medians_ms["beside"]),
            "peer": statistics.median(medians_ms["alone"]),
            "unit": "ms",
            "ratio": ratios["beside"],
            "goal": "≤ 1.05 of what it is alone",
            "holds": ratios["beside"] <= 1.05,
            "notes": {"A/A": ratios["again"], "rounds": rounds},
        }
    ]


async def _gauge(own: ServerProcess, name: str) -> float:
    """Of /metrics; summed over labels."""
    text = (await ask(own.port, get("/metrics"))).body.decode()
    return sum(float(v) for v in re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.M))
