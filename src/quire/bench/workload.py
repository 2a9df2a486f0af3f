"""Draw prompts of random lengths, and random times to send them.

All of it comes from one seed, so that two targets get the same requests.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, inf

import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One request of a workload."""

    token_ids: list[int]
    max_tokens: int
    at_s: float = 0.0  # since the start of the run


class Vocabulary:
    """The token ids of prompts, without special ones.

    The default are ids that stand for parts of words in every common vocabulary.
    """

    def __init__(self, token_ids: Iterable[int] = range(1000, 4000)) -> None:
        self._ids = np.array(sorted(token_ids), np.int64)

    def draw(self, rng: np.random.Generator, num_tokens: int) -> list[int]:
        """Draw a prompt."""
        drawn: list[int] = self._ids[rng.integers(0, len(self._ids), size=num_tokens)].tolist()
        return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Uniform lengths in [n × (1 − range_ratio), n × (1 + range_ratio)].

    Raises: ConfigError with the option.
    """

    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0
    prefix_len: int = 0  # further tokens that all prompts begin with

    def __post_init__(self) -> None:
        for name, least in (("input_len", 1), ("output_len", 1), ("prefix_len", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"--random-{name.replace('_', '-')} {getattr(self, name)} must be at least "
                    f"{least}"
                )
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(
                f"--random-range-ratio {self.range_ratio} must be at least 0 and below 1"
            )

    def queries(
        self, num_prompts: int, vocabulary: Vocabulary, rng: np.random.Generator
    ) -> list[Query]:
        """Draw ``num_prompts`` queries, which are all sent at 0."""
        inputs = self._draw(self.input_len, num_prompts, rng)
        outputs = self._draw(self.output_len, num_prompts, rng)
        prefix = vocabulary.draw(rng, self.prefix_len)
        return [
            Query(token_ids=prefix + vocabulary.draw(rng, num_input), max_tokens=num_output)
            for num_input, num_output in zip(inputs, outputs, strict=True)
        ]

    def _draw(self, around: int, num_prompts: int, rng: np.random.Generator) -> list[int]:
        low = max(1, floor(around * (1 - self.range_ratio)))
        high = ceil(around * (1 + self.range_ratio))
        lengths: list[int] = rng.integers(low, high + 1, size=num_prompts).tolist()
        return lengths


def arrivals(
    num_prompts: int, request_rate: float, burstiness: float, rng: np.random.Generator
) -> list[float]:
    """Draw the time of each request, in seconds since the start.

    Gaps are gamma distributed with shape ``burstiness``: 1 is a Poisson process, less is burstier,
    and inf gives equal gaps. As in vLLM, they are scaled so that the last request is sent at
    ``num_prompts / request_rate`` exactly.

    Raises: ConfigError.
    """
    if not request_rate > 0:
        raise ConfigError(f"--request-rate {request_rate} must be above 0; inf sends all at once")
    if not burstiness > 0:
        raise ConfigError(f"--burstiness {burstiness} must be above 0; 1 is a Poisson process")
    if request_rate == inf or not num_prompts:
        return [0.0] * num_prompts
    if burstiness == inf:
        gaps: Times = np.full(num_prompts, 1 / request_rate)
    else:
        gaps = rng.gamma(burstiness, 1 / (request_rate * burstiness), size=num_prompts)
    times = gaps.cumsum()
    if times[-1] > 0:
        times *= num_prompts / request_rate / times[-1]
    several: list[float] = times.tolist()
    return several
