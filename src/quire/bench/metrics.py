"""``vllm bench serve``'s figures out of what became of each request. Keys and meanings are vLLM's.

Source: vLLM, vllm/benchmarks/serve.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from quire.bench.load import Outcome
from quire.errors import ConfigError

GOALS = ("ttft", "tpot", "e2el")


def figures(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    percentiles: Sequence[float] = (99,),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """All figures of a run. Those of latency are over requests that succeeded.

    TPOT is a request's time after its first token, a token; ITL is between two pieces, over all
    requests together. ``goodput`` has goals in milliseconds, of ``GOALS``: the share of requests
    that meet all of them, a second.
    """
    done = [outcome for outcome in outcomes if outcome.succeeded]
    num_input = sum(outcome.prompt_tokens for outcome in done)
    num_output = sum(outcome.output_tokens for outcome in done)
    good = sum(meets(outcome, goodput) for outcome in done) if goodput else None
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": None if good is None else good / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": peak_tokens_per_s(done),
        "max_concurrent_requests": peak_concurrency(done),
    }
    latencies = {
        "ttft": [outcome.ttft_s for outcome in done],
        "tpot": [tpot_s(outcome) for outcome in done if outcome.output_tokens > 1],
        "itl": [itl_s for outcome in done for itl_s in outcome.itls_s],
        "e2el": [outcome.latency_s for outcome in done],
        "client_queue_time": [outcome.queue_s for outcome in done],
    }
    for name, values_s in latencies.items():
        result.update(_statistics(name, values_s, percentiles))
    return result


def details(several: Sequence[Outcome]) -> dict[str, list[Any]]:
    """What is kept of each request, in order. Times in seconds."""
    return {
        "input_lens": [outcome.prompt_tokens for outcome in several],
        "output_lens": [each.output_tokens if each.succeeded else 0 for each in several],
        "ttfts": [outcome.ttft_s for outcome in several],
        "itls": [outcome.itls_s for outcome in several],
        "latencies": [outcome.latency_s for outcome in several],
        "start_times": [outcome.start_s for outcome in several],
        "queue_times": [outcome.queue_s for outcome in several],
        "generated_texts": [outcome.text for outcome in several],
        "errors": [outcome.error for outcome in several],
    }


def tpot_s(outcome: Outcome) -> float:
    """Seconds a token after the first one; 0 if there is none."""
    after_first = outcome.latency_s - outcome.ttft_s
    return after_first / (outcome.output_tokens - 1) if outcome.output_tokens > 1 else 0.0


def meets(outcome: Outcome, goals_ms: Mapping[str, float]) -> bool:
    """Whether a request was as quick as all the goals ask for."""
    times_s = {"ttft": outcome.ttft_s, "tpot": tpot_s(outcome), "e2el": outcome.latency_s}
    return all(times_s[name] * 1e3 <= goal_ms for name, goal_ms in goals_ms.items())


def peak_tokens_per_s(outcomes: Sequence[Outcome]) -> float:
    """The most pieces that came within one second, of seconds counted from the first request on."""
    times: list[float] = []
    for outcome in outcomes:
        first = outcome.start_s + outcome.ttft_s
        times += [first, *(first + np.cumsum(outcome.itls_s)).tolist()]
    if not times:
        return 0.0
    seconds = np.array(times) - min(outcome.start_s for outcome in outcomes)
    return float(np.bincount(seconds.astype(np.int64)).max())


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """The most requests under way at a time; one that ends makes room for one that begins then."""
    events = [(outcome.start_s, 1) for outcome in outcomes]
    events += [(outcome.start_s + outcome.latency_s, -1) for outcome in outcomes]
    changes = [change for _, change in sorted(events)]
    return int(np.cumsum(changes).max(initial=0))


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """Goals in milliseconds from ``ttft:500``; several in one text are parted by blanks or commas.

    Raises: ConfigError.
    """
    goals: dict[str, float] = {}
    for pair in " ".join(given).replace(",", " ").split():
        name, _, text = pair.partition(":")
        try:
            goals[name] = float(text)
        except ValueError:
            goals[name] = -1.0
        if name not in GOALS or not goals[name] >= 0:
            raise ConfigError(
                f"--goodput {pair!r} must be one of {', '.join(GOALS)}, a colon and milliseconds, "
                f"as in ttft:500"
            )
    return goals


def parse_percentiles(given: str) -> tuple[float, ...]:
    """Percentiles from ``50,90,99``. Raises: ConfigError."""
    try:
        several = tuple(float(text) for text in given.split(","))
    except ValueError:
        several = (-1.0,)
    if not all(0 <= percentile <= 100 for percentile in several):
        raise ConfigError(f"--metric-percentiles {given!r} must be numbers from 0 to 100: 50,90,99")
    return several


def percentile_word(percentile: float) -> str:
    return f"{percentile:g}"


def _statistics(
    name: str, values_s: Sequence[float], percentiles: Iterable[float]
) -> dict[str, float]:
    """In milliseconds; of nothing they are 0, as vLLM's are."""
    values_ms = np.array(values_s or [0.0]) * 1e3
    result = {
        f"mean_{name}_ms": float(values_ms.mean()),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(values_ms.std()),
    }
    for percentile in percentiles:
        key = f"p{percentile_word(percentile)}_{name}_ms"
        result[key] = float(np.percentile(values_ms, percentile))
    return result
