"""What a simulation found: plain data, for a table, a report or another program."""

from dataclasses import asdict, dataclass
from typing import Any

from quire.planner.simulation.timeline import FIGURES, Point


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Of one fleet and one trace. Counts are of all replicas together."""

    cache: str  # the strategy
    memory_bytes: int  # for keys and values, of each replica
    num_replicas: int
    routing: str

    num_requests: int  # that came
    num_finished: dict[str, int]  # by reason
    num_refused: int  # longer than max_model_len, or than the memory
    duration_s: float  # from the first request to the end of the last
    num_steps: int

    num_scheduled_tokens: int  # computed, in whatever step
    num_input_tokens: int  # of requests that came to their end
    num_output_tokens: int
    prefix_query_tokens: int  # of prompts that were looked up
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
    cached_bytes: float  # … that no sequence holds
    num_running: float
    num_waiting: float
    peak_committed_bytes: int  # of one replica
    peak_used_bytes: int  # … at that moment
    most_running: int  # of one replica

    # Means over time, where it was looked at; None: it was not, or there was none.
    later_fraction: float | None = None  # of what is held and empty: filled later, not wasted
    pieces_fraction: float | None = None  # of what is not committed: enough, and in several pieces

    latencies: dict[str, dict[str, float]]
    goals: dict[str, float | None]
    num_good: int  # that met all of them

    timelines: tuple[tuple[Point, ...], ...]  # of each replica

    @property
    def utilization(self) -> float:
        """Used bytes of those that are held; what is only cached can be taken at any moment."""
        held = self.committed_bytes - self.cached_bytes
        return self.used_bytes / held if held else 0.0

    @property
    def hit_rate(self) -> float:
        if not self.prefix_query_tokens:
            return 0.0
        return self.prefix_hit_tokens / self.prefix_query_tokens

    @property
    def requests_per_s(self) -> float:
        done = self.num_finished.get("length", 0) + self.num_finished.get("stop", 0)
        return self._a_second(done)

    @property
    def good_requests_per_s(self) -> float:
        return self._a_second(self.num_good)

    @property
    def output_tokens_per_s(self) -> float:
        return self._a_second(self.num_output_tokens)

    def to_json(self) -> dict[str, Any]:
        """Nothing but numbers, strings, lists and objects."""
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
