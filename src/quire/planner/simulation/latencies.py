"""How long simulated requests waited and took, and how many met their goals. Of bounded size."""

from dataclasses import dataclass
from typing import final

from quire.engine.sequence import Sequence
from quire.engine.statistics import Latencies
from quire.planner.simulation.quantiles import Quantiles

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """What a request must meet to be good. Seconds; None: no matter how long."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def are_met(self, ttft_s: float, tpot_s: float | None) -> bool:
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return False
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s


@final
class LatencyTally:
    """TTFT, TPOT and E2E of the requests that came to their end."""

    def __init__(self, goals: Goals) -> None:
        self.ttft_s, self.tpot_s, self.e2e_s = Quantiles(), Quantiles(), Quantiles()
        self.queue_s = Quantiles()
        self.num_good = 0
        self.num_input_tokens = self.num_output_tokens = 0
        self._goals = goals

    def note(self, sequence: Sequence) -> None:
        """It has ended; what ended for lack of room counts for nothing here."""
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
        """Means, percentiles and the longest, in seconds."""
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
