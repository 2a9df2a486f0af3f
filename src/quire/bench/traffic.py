"""Make the requests of a run from its options; they are the same for every target."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from pathlib import Path

import numpy as np

from quire.bench.load import Outcome
from quire.bench.workload import Query, RandomLengths, Vocabulary, arrivals
from quire.errors import ConfigError
from quire.traces import RequestLog, TraceRequest, open_trace


def write_trace(path: Path, queries: Iterable[Query], outcomes: Iterable[Outcome]) -> None:
    """Write the requests that succeeded as Quire's own trace. Raises: ConfigError."""
    sent = [pair for pair in zip(queries, outcomes, strict=True) if pair[1].succeeded]
    sent.sort(key=lambda pair: pair[1].start_s)
    try:
        with path.open("wb") as file:
            log = RequestLog(file)
            for query, outcome in sent:
                at_s = outcome.start_s - sent[0][1].start_s
                log.write(at_s, query.token_ids, outcome.output_tokens)
    except OSError as error:
        raise ConfigError(f"--save-trace {path} cannot be written: {error.strerror}") from error


def replay(
    requests: Iterable[TraceRequest],
    vocabulary: Vocabulary,
    *,
    seed: int,
    scale: float = 1.0,
    speed: float = 1.0,
) -> list[Query]:
    """Make prompts with a trace's lengths × ``scale``, sent ``speed`` times as fast.

    Prompts share prefixes as in the trace, up to the same share of their length.

    Raises: ConfigError.
    """
    for name, value in (("--trace-scale", scale), ("--trace-speed", speed)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name} {value} must be a number above 0")
    return [
        Query(
            token_ids=_prompt(request, place, vocabulary, seed, scale),
            max_tokens=max(1, round(request.output_tokens * scale)),
            at_s=request.at_s / speed,
        )
        for place, request in enumerate(requests)
    ]


def _prompt(
    request: TraceRequest, place: int, vocabulary: Vocabulary, seed: int, scale: float
) -> list[int]:
    num_tokens = max(1, round(request.input_tokens * scale))
    if not request.hash_ids:
        return vocabulary.draw(np.random.default_rng((seed, 0, place)), num_tokens)
    num_each = max(1, round(request.id_tokens * scale))
    token_ids: list[int] = []
    for hash_id in request.hash_ids:
        token_ids += vocabulary.draw(np.random.default_rng((seed, 1, hash_id)), num_each)
    # Rounding may leave a few tokens, which are this request's own.
    missing = max(0, num_tokens - len(token_ids))
    token_ids += vocabulary.draw(np.random.default_rng((seed, 0, place)), missing)
    return token_ids[:num_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTraffic:
    """The requests of a run: with random lengths, or of a trace.

    Without ``request_rate`` a trace keeps its own times, and random prompts are sent all at once.
    Raises: ConfigError with the option.
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
        self.queries(Vocabulary(range(1)))  # a bad trace fails before a model is loaded

    @property
    def has_own_times(self) -> bool:
        return self.trace is not None and self.request_rate is None

    @property
    def rate(self) -> float | str:
        """Return the rate as vLLM's results name it."""
        if self.has_own_times:
            return "trace"
        return "inf" if self.request_rate in (None, inf) else float(self.request_rate or 0)

    def queries(self, vocabulary: Vocabulary) -> list[Query]:
        """Make all queries, in order of time. Raises: ConfigError."""
        rng = np.random.default_rng(self.seed)
        if self.trace is None:
            queries = self.lengths.queries(self.num_prompts, vocabulary, rng)
        else:
            trace = open_trace(self.trace, max_skipped=self.trace_max_skipped)
            queries = replay(
                islice(trace, self.num_prompts),
                vocabulary,
                seed=self.seed,
                scale=self.trace_scale,
                speed=self.trace_speed,
            )
        if self.has_own_times:
            return queries
        rate = inf if self.request_rate is None else self.request_rate
        times = arrivals(len(queries), rate, self.burstiness, rng)
        return [replace(query, at_s=at_s) for query, at_s in zip(queries, times, strict=True)]

    def warmups(self, num_prompts: int, vocabulary: Vocabulary) -> list[Query]:
        """Make prompts of the first one's length, with other tokens than any query."""
        first = self.queries(vocabulary)[0]
        rng = np.random.default_rng((self.seed, 1))
        return [
            Query(token_ids=vocabulary.draw(rng, len(first.token_ids)), max_tokens=first.max_tokens)
            for _ in range(num_prompts)
        ]
