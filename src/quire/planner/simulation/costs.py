"""How long a step takes: a few coefficients, fitted on a machine, or a roofline of a named device.

Both answer for any ``Work``. What a cost model leaves out (contention, clocks that change, a
network between ranks) it leaves out of every strategy alike.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, final

from quire.errors import ConfigError
from quire.planner.simulation.work import Work

# Where the time of a token changes: until here the weights are read once for all of them anyway.
FEW_TOKENS, SOME_TOKENS = 8, 64
# Up to here the engine plays a recorded pass; beyond it runs the model's own Python.
RECORDED_TOKENS = 128


class StepCosts(Protocol):
    """Seconds of virtual time."""

    @property
    def copy_s(self) -> float:
        """Of moving entries into another buffer (growing, a copied block): for each layer …"""
        ...

    @property
    def copy_s_per_byte(self) -> float:
        """… and for what is moved."""
        ...

    @property
    def save_s_per_byte(self) -> float: ...

    @property
    def load_s_per_byte(self) -> float: ...

    def seconds(self, work: Work) -> float:
        """Of a step that does this work, sampling and the engine's own time included."""
        ...


def features(work: Work) -> tuple[float, ...]:
    """What a fitted step's time is a sum of, in the order of ``COEFFICIENTS``."""
    tokens = work.num_tokens
    return (
        1.0,
        float(tokens > RECORDED_TOKENS),
        float(work.num_sequences),
        float(work.num_sampled),
        float(work.num_prompts),
        float(min(tokens, FEW_TOKENS)),
        float(min(max(tokens - FEW_TOKENS, 0), SOME_TOKENS - FEW_TOKENS)),
        float(min(max(tokens - SOME_TOKENS, 0), RECORDED_TOKENS - SOME_TOKENS)),
        float(max(tokens - RECORDED_TOKENS, 0)),
        work.num_read,
        work.num_attended,
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCosts:
    """A sum of what was measured; ``quire bench --calibrate`` makes it."""

    step_s: float = 0.0
    long_step_s: float = 0.0  # more, of one beyond RECORDED_TOKENS
    sequence_s: float = 0.0
    sample_s: float = 0.0
    prompt_s: float = 0.0  # a chunk of several tokens
    token_s: float = 0.0  # of the first FEW_TOKENS of a step
    next_token_s: float = 0.0  # … of those up to SOME_TOKENS
    further_token_s: float = 0.0  # … up to RECORDED_TOKENS
    long_token_s: float = 0.0  # … of the rest
    read_s: float = 0.0  # an entry that attention reads
    attended_s: float = 0.0  # a pair
    copy_s: float = 0.0  # a copy in one layer
    copy_s_per_byte: float = 0.0
    save_s_per_byte: float = 0.0
    load_s_per_byte: float = 0.0
    about: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def seconds(self, work: Work) -> float:
        tokens = work.num_tokens
        return (
            self.step_s
            + self.long_step_s * (tokens > RECORDED_TOKENS)
            + self.sequence_s * work.num_sequences
            + self.sample_s * work.num_sampled
            + self.prompt_s * work.num_prompts
            + self.token_s * min(tokens, FEW_TOKENS)
            + self.next_token_s * min(max(tokens - FEW_TOKENS, 0), SOME_TOKENS - FEW_TOKENS)
            + self.further_token_s
            * min(max(tokens - SOME_TOKENS, 0), RECORDED_TOKENS - SOME_TOKENS)
            + self.long_token_s * max(tokens - RECORDED_TOKENS, 0)
            + self.read_s * work.num_read
            + self.attended_s * work.num_attended
        )

    def write(self, path: Path) -> None:
        """As JSON. Raises: ConfigError."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        text = json.dumps(said | {"about": dict(self.about)}, indent=1)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the calibration cannot be written to {path}: {error}") from error

    @classmethod
    def read(cls, path: Path) -> "FittedCosts":
        """Raises: ConfigError for what no calibration has written."""
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--calibration {path} cannot be read: {error}") from error
        known = {each.name for each in fields(cls)}
        if not isinstance(given, dict) or set(given) != known:
            raise ConfigError(
                f"--calibration {path} is none: make one with quire bench --calibrate {path}"
            )
        numbers = {name: value for name, value in given.items() if name != "about"}
        for name, value in numbers.items():
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ConfigError(f"--calibration {path}: {name}={value!r} must be a number ≥ 0")
        return cls(**numbers, about=MappingProxyType(dict(given["about"])))


# Of ``features``, in order.
COEFFICIENTS = (
    *("step_s", "long_step_s", "sequence_s", "sample_s", "prompt_s"),
    *("token_s", "next_token_s", "further_token_s", "long_token_s", "read_s", "attended_s"),
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCosts:
    """The longer of two times, computing and reading, and a constant for the engine's own.

    Nothing is measured here: it says what a device could do at the shares of its peaks that are
    given, and which strategy is better there rather than how fast it is.
    """

    flops_per_s: float  # that are reached
    bytes_per_s: float  # … of the device's memory
    host_bytes_per_s: float  # … between it and the host
    step_s: float  # the engine's own, and launching kernels
    weights_bytes: int  # read in every step
    flops_per_token: float  # of the linear layers
    flops_per_pair: float  # of attention
    entry_bytes: int  # of a token's keys and values in all layers

    def seconds(self, work: Work) -> float:
        flops = self.flops_per_token * work.num_tokens + self.flops_per_pair * work.num_attended
        moved = self.weights_bytes + self.entry_bytes * (work.num_read + work.num_tokens)
        return self.step_s + max(flops / self.flops_per_s, moved / self.bytes_per_s)

    @property
    def copy_s(self) -> float:
        return 0.0

    @property
    def copy_s_per_byte(self) -> float:
        return 2 / self.bytes_per_s  # read and written

    @property
    def save_s_per_byte(self) -> float:
        return 1 / self.host_bytes_per_s

    @property
    def load_s_per_byte(self) -> float:
        return 1 / self.host_bytes_per_s
