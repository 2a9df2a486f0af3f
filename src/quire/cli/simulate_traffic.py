"""The traffic that ``quire simulate`` plays: of traces, or drawn where none is given."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from quire.errors import ConfigError
from quire.traces import Trace, TraceRequest, open_trace
from quire.traces.synthetic import Gamma, LogNormal, Synthetic

OnProgress: TypeAlias = Callable[[int, int | None], None]

DRAWN = "drawn traffic"
NUM_DRAWN = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What is drawn, as flags say it; None where nothing was said. Units as in quire bench."""

    request_rate: float | None = None
    burstiness: float | None = None
    input_len: int | None = None
    output_len: int | None = None
    prefix_len: int | None = None
    seed: int = 0

    @property
    def is_asked(self) -> bool:
        return any(
            given is not None
            for given in (
                *(self.request_rate, self.burstiness),
                *(self.input_len, self.output_len, self.prefix_len),
            )
        )

    def requests(self, count: int) -> Synthetic:
        """Raises: ConfigError."""
        burstiness = 1.0 if self.burstiness is None else self.burstiness
        if not burstiness > 0:
            raise ConfigError(f"--burstiness {burstiness} must be above 0; 1 is a Poisson process")
        return Synthetic(
            arrivals=Gamma(rate=_given(self.request_rate, 4.0), cv=burstiness**-0.5),
            input_tokens=LogNormal(mean_tokens=_given(self.input_len, 1024)),
            output_tokens=LogNormal(mean_tokens=_given(self.output_len, 128)),
            num_requests=count,
            prefix_tokens=self.prefix_len or 0,
            seed=self.seed,
        )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Raises: ConfigError for what cannot be played."""

    traces: Sequence[str]
    trace_format: str | None
    max_skipped: int
    num_requests: int | None  # of each, the first ones
    rate: float  # times as fast
    drawing: Drawing

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise ConfigError(f"--rate {self.rate} must be a number above 0")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError(f"--num-requests {self.num_requests} must be at least 1")
        if self.traces and self.drawing.is_asked:
            raise ConfigError(
                "--request-rate, --burstiness and --random-… are of traffic that is drawn: leave "
                "them out with a trace, which --rate plays faster, or leave out the trace"
            )

    @property
    def sources(self) -> Sequence[str]:
        return self.traces or (DRAWN,)

    def open(self, source: str, on_progress: OnProgress | None = None) -> Iterable[TraceRequest]:
        """From its first request, at its own pace."""
        if source == DRAWN and not self.traces:
            return self.drawing.requests(self.num_requests or NUM_DRAWN)
        trace = open_trace(
            source, self.trace_format, max_skipped=self.max_skipped, on_progress=on_progress
        )
        return _First(trace, self.num_requests)

    def paced(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """As fast as was asked for."""
        for request in requests:
            yield request if self.rate == 1 else replace(request, at_s=request.at_s / self.rate)


@dataclass(frozen=True, slots=True)
class _First:
    """A trace's first requests; each iteration reads it anew."""

    trace: Trace
    count: int | None

    def __iter__(self) -> Iterator[TraceRequest]:
        return islice(iter(self.trace), self.count)


def num_skipped(requests: Iterable[TraceRequest]) -> int:
    """Rows that were no requests, of what ``Traffic.open`` gave and was read."""
    return requests.trace.counts.num_skipped if isinstance(requests, _First) else 0
