"""The planner's benchmark, its part on speed: how fast a trace is simulated, and in what memory.

Each run is a process of its own, timed from the first request on, by its own processor time. The
first tenth of the trace beside the whole shows what memory its length takes.

The trace does not tell which prompts begin alike, so it is simulated without a prefix cache, as
`quire simulate` does. With one, whose index takes in blocks that no other prompt finds, stands
beside it.

    python -m benchmarks.planner.speed TRACE NUM_REQUESTS [cached]
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.harness.report import Table
from quire.cli.plan import place_of
from quire.config import EngineConfig
from quire.planner.hardware import roofline
from quire.planner.simulation.simulator import fleet_for, simulate
from quire.planner.subject import find_subject
from quire.traces import open_trace

AZURE = "AzureLLMInferenceTrace_conv.csv"
MODEL, DEVICE, KV_BYTES = "meta-llama/Llama-3.1-8B", "h100", "40GiB"
GOAL_TOKENS_PER_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    num_requests: int
    num_prompt_tokens: int  # computed in chunks of prompts
    num_decoded_tokens: int
    cpu_s: float
    peak_mib: float  # resident, of the whole process
    is_cached: bool  # with a prefix cache

    @property
    def tokens_per_s(self) -> float:
        return (self.num_prompt_tokens + self.num_decoded_tokens) / self.cpu_s


def run(trace: Path, num_requests: int | None, *, is_cached: bool = False) -> dict[str, Any]:
    """One simulation, in this process."""
    config = EngineConfig.from_options(
        cache="paged",
        max_model_len=16_384,
        max_num_seqs=256,
        kv_cache_memory_bytes=KV_BYTES,
        enable_prefix_caching=is_cached,
    )
    subject = find_subject(MODEL, dtype="auto")
    fleet = fleet_for(
        subject, config, place_of(None, DEVICE), roofline(subject, subject.spec, DEVICE, 1)
    )
    begun_s = time.process_time()
    found = simulate(islice(open_trace(trace), num_requests), fleet)
    return {
        "num_requests": found.num_requests,
        "num_prompt_tokens": found.num_scheduled_tokens - found.num_output_tokens,
        "num_decoded_tokens": found.num_output_tokens,
        "cpu_s": time.process_time() - begun_s,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "is_cached": is_cached,
    }


def measure(traces: Path, num_rounds: int) -> list[tuple[Speed, Speed, Speed]]:
    """(a tenth of the trace, all of it; a tenth with a prefix cache), in turn."""
    path = traces / AZURE
    count = sum(1 for _ in open_trace(path))
    return [
        (_apart(path, count // 10), _apart(path, count), _apart(path, count // 10, "cached"))
        for _ in range(num_rounds)
    ]


def _apart(path: Path, num_requests: int, *cached: str) -> Speed:
    command = [sys.executable, "-m", __name__, str(path), str(num_requests), *cached]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Speed(**json.loads(done.stdout))


def tables(rounds: list[tuple[Speed, Speed, Speed]]) -> list[Table]:
    counts = ("requests", "prefix cache", "prompt tokens", "decoded")
    columns = (*counts, "CPU s", "tokens/s", "peak RSS MiB")
    rows = [
        [
            f"{each.num_requests:,}",
            "yes" if each.is_cached else "no",
            f"{each.num_prompt_tokens:,}",
            f"{each.num_decoded_tokens:,}",
            f"{each.cpu_s:.1f}",
            f"{each.tokens_per_s:,.0f}",
            f"{each.peak_mib:.0f}",
        ]
        for several in rounds
        for each in several
    ]
    title = f"Simulating {AZURE}: {MODEL} on {DEVICE}, {KV_BYTES} of KV, paged"
    return [Table(title=title, columns=columns, rows=rows)]


def claims(rounds: list[tuple[Speed, Speed, Speed]]) -> Iterable[dict[str, Any]]:
    speed = statistics.median(whole.tokens_per_s for _, whole, _ in rounds)
    grown = statistics.median(whole.peak_mib / part.peak_mib for part, whole, _ in rounds)
    common = {"peer": None, "ratio": None}
    yield {
        "claim": "planner: scheduled tokens simulated a second of one core",
        "ours": speed,
        **common,
        "unit": "tokens/s",
        "goal": f"≥ {GOAL_TOKENS_PER_S:,.0f}",
        "holds": speed >= GOAL_TOKENS_PER_S,
    }
    yield {
        "claim": "planner: memory of a whole trace over that of a tenth of it",
        "ours": grown,
        **common,
        "unit": "x",
        "goal": "≤ 1.05",
        "holds": grown <= 1.05,
    }


if __name__ == "__main__":
    found = run(Path(sys.argv[1]), int(sys.argv[2]), is_cached="cached" in sys.argv[3:])
    print(json.dumps(found))
