"""Make synthetic traffic: random arrival times and lengths, and a common prefix.

All of it comes from one seed. The stream has no end unless ``num_requests`` is set. Lengths and
times have separate generators, so that another rate gives the same requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from math import inf, log
from typing import ClassVar, Final, TypeAlias, assert_never, final

import numpy as np

from quire.errors import ConfigError
from quire.traces.trace import MAX_TOKENS, TraceRequest

_BATCH: Final = 1024  # random numbers per call


@dataclass(frozen=True, slots=True, kw_only=True)
class Gamma:
    """Gamma distributed gaps, with ``cv`` their coefficient of variation.

    cv 1 is a Poisson process, more is burstier, 0 gives equal gaps. Raises: ConfigError.
    """

    rate: float  # requests a second
    cv: float = 1.0

    def __post_init__(self) -> None:
        _above("rate", self.rate)
        if not 0 <= self.cv < inf:
            raise ConfigError(
                f"cv {self.cv} must be a number of at least 0; 1 is a Poisson process"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """``size`` requests at one moment, every ``every_s`` seconds. Raises: ConfigError."""

    size: int
    every_s: float

    def __post_init__(self) -> None:
        _above("every_s", self.every_s)
        if self.size < 1:
            raise ConfigError(f"size {self.size} of a burst must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """``users`` that each send a request after their last answer and a think time.

    Only a user's first request has a time; the others have ``think_s``. A user is a session.
    Raises: ConfigError.
    """

    users: int
    think_s: float = 0.0  # mean of an exponential distribution

    def __post_init__(self) -> None:
        if self.users < 1:
            raise ConfigError(f"users {self.users} must be at least 1")
        if not 0 <= self.think_s < inf:
            raise ConfigError(f"think_s {self.think_s} must be a number of at least 0")


Arrivals: TypeAlias = Gamma | Bursts | ClosedLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Log-normal lengths with a given mean; with ``sigma`` 0 all are equal. Raises: ConfigError."""

    mean_tokens: float
    sigma: float = 0.0
    max_tokens: int = MAX_TOKENS

    def __post_init__(self) -> None:
        if not 1 <= self.mean_tokens <= self.max_tokens <= MAX_TOKENS:
            raise ConfigError(
                f"mean_tokens={self.mean_tokens:g} must be from 1 to max_tokens="
                f"{self.max_tokens:,}, which must be at most {MAX_TOKENS:,}"
            )
        if not 0 <= self.sigma <= 5:
            raise ConfigError(f"sigma {self.sigma} must be from 0 to 5")

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draw ``count`` lengths in tokens."""
        if not self.sigma:
            return [round(self.mean_tokens)] * count
        middle = log(self.mean_tokens) - self.sigma**2 / 2
        drawn = rng.lognormal(middle, self.sigma, count).round().clip(1, self.max_tokens)
        lengths: list[int] = drawn.astype(np.int64).tolist()
        return lengths


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Synthetic requests; each iteration gives the same ones. Raises: ConfigError."""

    ID_TOKENS: ClassVar[int] = 16

    arrivals: Arrivals
    input_tokens: LogNormal
    output_tokens: LogNormal
    num_requests: int | None = None  # None: without end
    prefix_tokens: int = 0  # further tokens that all prompts begin with, shared in blocks of 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError(f"num_requests {self.num_requests} must be at least 1")
        if not 0 <= self.prefix_tokens <= MAX_TOKENS:
            raise ConfigError(f"prefix_tokens {self.prefix_tokens} must be at least 0")

    def __iter__(self) -> Iterator[TraceRequest]:
        return islice(self._requests(), self.num_requests)

    def _requests(self) -> Iterator[TraceRequest]:
        num_ids = self.prefix_tokens // self.ID_TOKENS
        prefix = tuple(range(num_ids))
        lengths = _lengths(self.input_tokens, self.output_tokens, self.seed)
        for (at_s, user, think_s), (asked, made) in zip(
            _times(self.arrivals, self.seed), lengths, strict=False
        ):
            yield TraceRequest(
                at_s=at_s,
                input_tokens=min(self.prefix_tokens + asked, MAX_TOKENS),
                output_tokens=made,
                hash_ids=prefix,
                id_tokens=self.ID_TOKENS if prefix else 0,
                session=user,
                think_s=think_s,
            )


def _lengths(inputs: LogNormal, outputs: LogNormal, seed: int) -> Iterator[tuple[int, int]]:
    rng = np.random.default_rng((seed, 1))
    while True:
        yield from zip(inputs.draw(rng, _BATCH), outputs.draw(rng, _BATCH), strict=True)


def _times(arrivals: Arrivals, seed: int) -> Iterator[tuple[float, int | None, float | None]]:
    """Yield the time, the user and the think time of each request."""
    rng = np.random.default_rng((seed, 0))
    match arrivals:
        case Gamma(rate=rate, cv=cv):
            now_s = 0.0
            while True:
                for gap in _gaps(rng, rate, cv):
                    yield now_s, None, None
                    now_s += gap
        case Bursts(size=size, every_s=every_s):
            number = 0
            while True:
                yield from [(number * every_s, None, None)] * size
                number += 1
        case ClosedLoop(users=users, think_s=think_s):
            yield from ((0.0, user, None) for user in range(users))
            turns = cycle(range(users))
            while True:
                for thought in (rng.standard_exponential(_BATCH) * think_s).tolist():
                    yield 0.0, next(turns), thought
        case _:
            assert_never(arrivals)


def _gaps(rng: np.random.Generator, rate: float, cv: float) -> list[float]:
    if not cv:
        return [1 / rate] * _BATCH
    shape = cv**-2
    gaps: list[float] = rng.gamma(shape, 1 / (rate * shape), _BATCH).tolist()
    return gaps


def _above(name: str, value: float) -> None:
    if not 0 < value < inf:
        raise ConfigError(f"{name} {value} must be a number above 0")
