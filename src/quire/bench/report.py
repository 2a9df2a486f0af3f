"""The table that ``vllm bench serve`` prints, line for line, and what the KV cache took."""

from collections.abc import Iterator, Mapping
from typing import Any

from quire.bench.metrics import percentile_word
from quire.units import format_bytes

_WIDTH = 50
_SECTIONS = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)


def table(result: Mapping[str, Any], percentiles: tuple[float, ...]) -> str:
    """All figures of ``metrics.figures``, and of ``kv`` if it is there."""
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
    sections = [*_SECTIONS]
    if result["max_concurrency"] is not None:
        sections.append(("client_queue_time", "Client Queue Time", "Client-side Queueing"))
    for key, name, header in sections:
        yield _rule(header, "-")
        yield _line(f"Mean {name} (ms):", result[f"mean_{key}_ms"])
        yield _line(f"Median {name} (ms):", result[f"median_{key}_ms"])
        for percentile in map(percentile_word, percentiles):
            yield _line(f"P{percentile} {name} (ms):", result[f"p{percentile}_{key}_ms"])
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
