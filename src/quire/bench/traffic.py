"""A whole run's traffic from the options that describe it, the same for every system asked."""

from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np

from quire.bench.trace import read_trace, replay
from quire.bench.workload import Query, RandomLengths, Vocabulary, arrivals, at_times
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Random lengths, or a trace's. Without ``request_rate`` a trace comes at its own times, and
    random prompts come all at once.

    Raises: ConfigError naming the option.
    """

    num_prompts: int
    seed: int
    lengths: RandomLengths
    request_rate: float | None = None
    burstiness: float = 1.0
    trace: str | Path | None = None
    trace_scale: float = 1.0
    trace_speed: float = 1.0
    trace_max_skipped: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ConfigError(f"--num-prompts {self.num_prompts} must be at least 1")
        if self.trace_max_skipped < 0:
            raise ConfigError(f"--trace-max-skipped {self.trace_max_skipped} must be at least 0")
        self.queries(Vocabulary(range(1)))  # what cannot be read is said before a model is loaded

    @property
    def has_own_times(self) -> bool:
        return self.trace is not None and self.request_rate is None

    @property
    def rate(self) -> float | str:
        """As results name it."""
        if self.has_own_times:
            return "trace"
        return "inf" if self.request_rate in (None, inf) else float(self.request_rate or 0)

    def queries(self, vocabulary: Vocabulary) -> list[Query]:
        """In order of time."""
        rng = np.random.default_rng(self.seed)
        if self.trace is None:
            queries = self.lengths.queries(self.num_prompts, vocabulary, rng)
        else:
            queries = replay(
                read_trace(self.trace, self.num_prompts, max_skipped=self.trace_max_skipped),
                vocabulary,
                seed=self.seed,
                scale=self.trace_scale,
                speed=self.trace_speed,
            )
        if self.has_own_times:
            return queries
        rate = inf if self.request_rate is None else self.request_rate
        return at_times(queries, arrivals(len(queries), rate, self.burstiness, rng))

    def warmups(self, num_prompts: int, vocabulary: Vocabulary) -> list[Query]:
        """Prompts of the first one's length, whose tokens no query has."""
        first = self.queries(vocabulary)[0]
        rng = np.random.default_rng((self.seed, 1))
        return [
            Query(token_ids=vocabulary.draw(rng, len(first.token_ids)), max_tokens=first.max_tokens)
            for _ in range(num_prompts)
        ]
