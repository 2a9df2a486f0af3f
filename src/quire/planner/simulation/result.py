"""Hold what a simulation found: plain data for a table, a report or another program."""

from dataclasses import asdict, dataclass
from math import ceil, exp, log
from typing import Any, final

from quire.engine.sequence import Sequence
from quire.engine.statistics import Latencies
from quire.planner.simulation.timeline import FIGURES, TimelinePoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFigures:
    """What one tier did: a sum over all replicas, unless they share it."""

    name: str
    kind: str
    capacity_bytes: int | None  # of each replica's; None: no limit
    speed: str
    speed_source: str
    num_records: int  # at the end
    num_evicted: int
    used_bytes: int  # at the end
    read_bytes: int
    written_bytes: int
    hit_tokens: int  # that were inserted into the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTotals:
    """What became of blocks outside the pool. Sums over all replicas."""

    tiers: tuple[TierFigures, ...]  # the nearest first
    queried_tokens: int  # of prompts, that tiers were asked for
    hit_tokens: int  # … that were inserted into the cache
    num_late: int  # loads that a sequence did not wait for
    late_tokens: int  # loaded, and not inserted
    evicted_tokens: int  # inserted, and evicted before a sequence had them
    saved_s: float  # of computing, less the copies into the cache
    stored_blocks: int  # copied out
    dropped_blocks: int  # that were to go out, and were evicted first

    @property
    def wasted_tokens(self) -> int:
        """Return the tokens that were loaded for nothing."""
        return self.late_tokens + self.evicted_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFigures:
    """What the prefill replicas of a fleet did for the others."""

    num_replicas: int
    num_prompts: dict[str, int]  # by what computed them: "apart", "here"; "failed": no room for it
    moved_bytes: int  # that others loaded from them
    moved_tokens: int  # … and inserted into their caches
    busy_fraction: float  # of the time: steps ran; in the mean of these replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Figures of one fleet on one trace. Counts are sums over all replicas."""

    cache: str  # the strategy
    memory_bytes: int  # for keys and values, of each replica
    num_replicas: int  # without those of ``prefill``
    routing: str

    num_requests: int
    num_finished: dict[str, int]  # by reason
    num_refused: int  # longer than max_model_len, or than the memory
    duration_s: float  # from the first request to the end of the last
    num_steps: int

    num_scheduled_tokens: int
    num_input_tokens: int  # of requests that finished
    num_output_tokens: int
    prefix_query_tokens: int  # of prompts that were looked up in the prefix cache
    prefix_hit_tokens: int
    prefix_missed_tokens: dict[str, int]  # by reason
    num_preemptions: int
    num_swaps: int
    num_recomputed_tokens: int
    saved_bytes: int
    loaded_bytes: int
    copied_bytes: int

    # Means over time.
    used_bytes: float  # entries that a later token can still read
    committed_bytes: float
    cached_bytes: float  # committed, and held by no sequence
    num_running: float
    num_waiting: float
    peak_committed_bytes: int  # of one replica
    peak_used_bytes: int  # at the moment of the committed peak
    most_running: int  # of one replica

    # Means over time; None: not measured, or nothing to have a share of.
    later_fraction: float | None = None  # of empty memory: a later token fills it
    pieces_fraction: float | None = None  # of free memory: enough of it, but in pieces too small

    latencies: dict[str, dict[str, float]]
    goals: dict[str, float | None]
    num_good: int  # requests that met all goals
    busy_fraction: float  # of the time: steps ran; in the mean of the replicas
    prefill: PrefillFigures | None = None  # None: there are no prefill replicas
    tiers: TierTotals | None = None  # None: there are none

    timelines: tuple[tuple[TimelinePoint, ...], ...]  # of each replica

    @property
    def utilization(self) -> float:
        """Return the used share of the bytes that sequences hold; cached blocks do not count."""
        held = self.committed_bytes - self.cached_bytes
        return self.used_bytes / held if held else 0.0

    @property
    def hit_rate(self) -> float:
        if not self.prefix_query_tokens:
            return 0.0
        return self.prefix_hit_tokens / self.prefix_query_tokens

    @property
    def num_ended(self) -> int:
        """Return how many requests generated all of their tokens."""
        return self.num_finished.get("length", 0) + self.num_finished.get("stop", 0)

    @property
    def fleet_bytes(self) -> int:
        """Return the KV memory of all replicas."""
        further = 0 if self.prefill is None else self.prefill.num_replicas
        return self.memory_bytes * (self.num_replicas + further)

    @property
    def requests_per_s(self) -> float:
        return self._a_second(self.num_ended)

    @property
    def good_requests_per_s(self) -> float:
        return self._a_second(self.num_good)

    @property
    def output_tokens_per_s(self) -> float:
        return self._a_second(self.num_output_tokens)

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        plain = asdict(self)
        plain["timelines"] = [
            [
                {
                    "start_s": point.start_s,
                    "stop_s": point.stop_s,
                    **dict(zip(FIGURES, point.means, strict=True)),
                    "peak_committed_bytes": point.peak_committed_bytes,
                }
                for point in points
            ]
            for points in self.timelines
        ]
        for name in (
            *("utilization", "hit_rate", "requests_per_s", "good_requests_per_s"),
            "output_tokens_per_s",
        ):
            plain[name] = getattr(self, name)
        return plain

    def _a_second(self, count: int) -> float:
        return count / self.duration_s if self.duration_s else 0.0


# -- latencies -------------------------------------------------------------------------------------

ACCURACY = 0.005
_LOG_GAMMA = log((1 + ACCURACY) / (1 - ACCURACY))
_LEAST = 1e-9  # smaller values count as 0


@final
class Quantiles:
    """Percentiles of a stream of values ≥ 0, each within half a percent, in bounded memory.

    Source: DDSketch (Masson, Rim, Lee 2019), logarithmic buckets, without merging the smallest.
    """

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.max = 0.0
        self._counts: dict[int, int] = {}  # by the logarithm of the upper bound
        self._num_zeros = 0

    def note(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        self.sum += value
        self.max = max(self.max, value)
        if value < _LEAST:
            self._num_zeros += 1
            return
        bucket = ceil(log(value) / _LOG_GAMMA)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    def percentile(self, percentile: float) -> float:
        """Return the value that this percentage of all values does not exceed; 0 without values."""
        rank = max(1, ceil(self.count * percentile / 100))
        seen = self._num_zeros
        if rank <= seen or not self.count:
            return 0.0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                upper = exp(bucket * _LOG_GAMMA)
                return min(self.max, upper * (1 - ACCURACY))
        return self.max


PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Latency goals of a request, in seconds; None: no goal."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def are_met(self, ttft_s: float, tpot_s: float | None) -> bool:
        """Return whether a request with these latencies meets all goals."""
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return False
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s


@final
class LatencyTally:
    """Collects the latencies of requests that finish."""

    def __init__(self, goals: Goals) -> None:
        self.ttft_s, self.tpot_s, self.e2e_s = Quantiles(), Quantiles(), Quantiles()
        self.queue_s = Quantiles()
        self.num_good = 0
        self.num_input_tokens = self.num_output_tokens = 0
        self._goals = goals

    def note(self, sequence: Sequence) -> None:
        """Add a sequence that has ended; one that ended for lack of memory does not count."""
        if sequence.finish_reason not in ("stop", "length"):
            return
        took, num_output = Latencies.of(sequence), sequence.num_output_tokens
        assert took.first_token_s is not None
        assert took.decode_s is not None
        tpot_s = took.decode_s / (num_output - 1) if num_output > 1 else None
        self.ttft_s.note(took.first_token_s)
        self.e2e_s.note(took.e2e_s)
        self.queue_s.note(took.queue_s)
        if tpot_s is not None:
            self.tpot_s.note(tpot_s)
        self.num_good += self._goals.are_met(took.first_token_s, tpot_s)
        self.num_input_tokens += sequence.num_prompt_tokens
        self.num_output_tokens += num_output

    def figures(self) -> dict[str, dict[str, float]]:
        """Return mean, percentiles and maximum of each latency, in seconds."""
        return {
            name: {
                "mean": each.mean,
                **{f"p{p}": each.percentile(p) for p in PERCENTILES},
                "max": each.max,
            }
            for name, each in (
                ("ttft_s", self.ttft_s),
                ("tpot_s", self.tpot_s),
                ("e2e_s", self.e2e_s),
                ("queue_s", self.queue_s),
            )
        }
