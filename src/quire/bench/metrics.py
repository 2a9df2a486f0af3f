"""Compute the figures of ``vllm bench serve`` from the outcomes, with vLLM's keys and meanings.

Source: vLLM, vllm/benchmarks/serve.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from quire.bench.load import Outcome
from quire.errors import ConfigError
from quire.units import format_bytes

GOALS = ("ttft", "tpot", "e2el")


def figures(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    percentiles: Sequence[float] = (99,),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Compute all figures of a run of ``duration_s``; latencies are of requests that succeeded.

    TPOT is a request's time per token after its first; ITL is the time between two pieces, over all
    requests together. ``goodput`` maps names of ``GOALS`` to milliseconds, and counts the requests
    per second that meet all goals.
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
    """Return lists with the figures of each request, in seconds and tokens."""
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
    """Return the seconds per token after the first; 0 without such tokens."""
    after_first = outcome.latency_s - outcome.ttft_s
    return after_first / (outcome.output_tokens - 1) if outcome.output_tokens > 1 else 0.0


def meets(outcome: Outcome, goals_ms: Mapping[str, float]) -> bool:
    """Return whether a request meets all goals."""
    times_s = {"ttft": outcome.ttft_s, "tpot": tpot_s(outcome), "e2el": outcome.latency_s}
    return all(times_s[name] * 1e3 <= goal_ms for name, goal_ms in goals_ms.items())


def peak_tokens_per_s(outcomes: Sequence[Outcome]) -> float:
    """Return the most pieces in one second, of whole seconds from the first request on."""
    times: list[float] = []
    for outcome in outcomes:
        first = outcome.start_s + outcome.ttft_s
        times += [first, *(first + np.cumsum(outcome.itls_s)).tolist()]
    if not times:
        return 0.0
    seconds = np.array(times) - min(outcome.start_s for outcome in outcomes)
    return float(np.bincount(seconds.astype(np.int64)).max())


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Return the most requests at one time; one that ends comes before one that then begins."""
    events = [(outcome.start_s, 1) for outcome in outcomes]
    events += [(outcome.start_s + outcome.latency_s, -1) for outcome in outcomes]
    changes = [change for _, change in sorted(events)]
    return int(np.cumsum(changes).max(initial=0))


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """Parse goals as ``ttft:500``, in milliseconds, separated by blanks or commas.

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
                "e.g. ttft:500"
            )
    return goals


def parse_percentiles(given: str) -> tuple[float, ...]:
    """Parse percentiles as ``50,90,99``. Raises: ConfigError."""
    try:
        several = tuple(float(text) for text in given.split(","))
    except ValueError:
        several = (-1.0,)
    if not all(0 <= percentile <= 100 for percentile in several):
        raise ConfigError(f"--metric-percentiles {given!r} must be from 0 to 100, e.g. 50,90,99")
    return several


def percentile_word(percentile: float) -> str:
    """Write a percentile as vLLM's keys do: 99, 99.9."""
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


# -- the table -------------------------------------------------------------------------------------

_WIDTH = 50
LATENCIES = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)


def statistics_of(key: str, name: str, percentiles: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Yield the statistics of a latency in a result, with what they are called."""
    yield f"mean_{key}_ms", f"Mean {name} (ms)"
    yield f"median_{key}_ms", f"Median {name} (ms)"
    for percentile in map(percentile_word, percentiles):
        yield f"p{percentile}_{key}_ms", f"P{percentile} {name} (ms)"


def table(result: Mapping[str, Any], percentiles: tuple[float, ...]) -> str:
    """Return the table of all figures, with those of the KV cache if the result has them."""
    return "\n".join(_lines(result, percentiles))


def _lines(result: Mapping[str, Any], percentiles: tuple[float, ...]) -> Iterator[str]:
    yield _rule(" Serving Benchmark Result ", "=")
    yield _line("Successful requests:", result["completed"])
    yield _line("Failed requests:", result["failed"])
    if result["max_concurrency"] is not None:
        yield _line("Maximum request concurrency:", result["max_concurrency"])
    if result["request_rate"] != "inf":
        yield _line("Request rate configured (RPS):", result["request_rate"])
    yield _line("Benchmark duration (s):", result["duration"])
    yield _line("Total input tokens:", result["total_input_tokens"])
    yield _line("Total generated tokens:", result["total_output_tokens"])
    yield _line("Request throughput (req/s):", result["request_throughput"])
    if result["request_goodput"] is not None:
        yield _line("Request goodput (req/s):", result["request_goodput"])
    yield _line("Output token throughput (tok/s):", result["output_throughput"])
    yield _line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield _line("Peak concurrent requests:", float(result["max_concurrent_requests"]))
    yield _line("Total token throughput (tok/s):", result["total_token_throughput"])
    sections = [*LATENCIES]
    if result["max_concurrency"] is not None:
        sections.append(("client_queue_time", "Client Queue Time", "Client-side Queueing"))
    for key, name, header in sections:
        yield _rule(header, "-")
        for each, label in statistics_of(key, name, percentiles):
            yield _line(f"{label}:", result[each])
    if "kv" in result:
        yield from _kv_lines(result["kv"])
    yield "=" * _WIDTH


def _kv_lines(kv: Mapping[str, Any]) -> Iterator[str]:
    yield _rule(f"KV Cache ({kv['strategy']})", "-")
    yield _line("Committed at peak:", format_bytes(kv["peak_committed_bytes"]))
    yield _line("  of it used:", format_bytes(kv["used_bytes"]))
    yield _line("  of it cached:", format_bytes(kv["cached_bytes"]))
    yield _line("  of it wasted:", format_bytes(kv["wasted_bytes"]))
    yield _line("Utilization, mean over steps (%):", 100 * kv["mean_utilization"])
    yield _line("Preemptions:", kv["num_preemptions"])
    yield _line("  of them by swap:", kv["num_swaps"])
    yield _line("Recomputed tokens:", kv["num_recomputed_tokens"])
    yield _line("Prefix hits (tokens):", kv["num_cached_tokens"])
    yield _line("Prefix hits (% of input):", 100 * kv["prefix_hit_rate"])


def _rule(title: str, character: str) -> str:
    return f"{title:{character}^{_WIDTH}}"


def _line(label: str, value: Any) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {text:<10}".rstrip()
