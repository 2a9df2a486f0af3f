"""How long a step takes: a few coefficients, fitted on a machine, or a roofline of a named device.

Both answer for any ``StepWork``. What a cost model leaves out (contention, clocks that change, a
network between ranks) it leaves out of every strategy alike.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import log2
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt

from quire.engine.step_plan import Chunk, StepPlan
from quire.errors import ConfigError, RequestError
from quire.spec import ChunkedAttention, Group, KeptWhole, SlidingWindow

# -- the work of a step ----------------------------------------------------------------------------

# What a step computes and moves, in counts: the question that a cost model answers in seconds.


@dataclass(frozen=True, slots=True)
class StepWork:
    """Of one forward pass. All are counts; what is read and attended is a mean over the layers."""

    num_tokens: int
    num_sequences: int
    num_sampled: int  # sequences whose next token is drawn
    num_read: float  # entries of keys and values that attention reads
    num_attended: float  # pairs of a token and an entry that it reads
    num_prompts: int = 0  # chunks of several tokens


@final
class Reach:
    """How many entries attention reads, in the mean over a model's layers by their bytes."""

    def __init__(self, groups: Iterable[Group]) -> None:
        sizes: dict[int | None, int] = {}
        for group in groups:
            if isinstance(group.spec, KeptWhole):
                continue
            window = None
            if isinstance(group.spec, SlidingWindow):
                window = group.spec.window
            elif isinstance(group.spec, ChunkedAttention):
                window = group.spec.chunk
            sizes[window] = sizes.get(window, 0) + group.bytes_per_token
        total = sum(sizes.values()) or 1
        self._windows = [
            (window, size / total) for window, size in sizes.items() if window is not None
        ]
        self._full_share = sizes.get(None, 0) / total
        self.is_full = not self._windows

    def of(self, plan: StepPlan) -> StepWork:
        read = attended = 0.0
        num_tokens = num_prompts = 0
        for chunk in plan.chunks:
            num_tokens += chunk.stop - chunk.start
            num_prompts += chunk.stop - chunk.start > 1
            more_read, more_attended = self._of_chunk(chunk)
            read, attended = read + more_read, attended + more_attended
        sampled = {draw.sequence.seq_id for draw in plan.draws}
        return StepWork(num_tokens, len(plan.chunks), len(sampled), read, attended, num_prompts)

    def _of_chunk(self, chunk: Chunk) -> tuple[float, float]:
        start, stop = chunk.start, chunk.stop
        count = stop - start
        pairs = count * (start + stop + 1) / 2
        read, attended = self._full_share * stop, self._full_share * pairs
        for window, share in self._windows:
            read += share * min(stop, window + count - 1)
            attended += share * min(pairs, float(count * window))
        return read, attended


# -- costs -----------------------------------------------------------------------------------------


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

    def seconds(self, work: StepWork) -> float:
        """Of a step that does this work, sampling and the engine's own time included."""
        ...


def features(work: StepWork) -> tuple[float, ...]:
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

    def seconds(self, work: StepWork) -> float:
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

    def seconds(self, work: StepWork) -> float:
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


# -- least squares ---------------------------------------------------------------------------------

# From measured steps to a cost model: least differences with no coefficient below zero.
#
# Of steps that are alike the median counts, so that what disturbed some of them does not. Errors
# count in proportion to a step's time, so that short steps are as right as long ones.


Array = npt.NDArray[np.float64]

_ROUNDS = 12
_NEAR = 0.1  # errors that count squared; what is farther off counts less
_MOST_COUNTED = 8  # steps of a kind
_ALIKE = 4.0  # classes of contexts for each doubling of their length


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Coefficients, and how far measured steps are from them."""

    costs: FittedCosts
    num_steps: int
    num_kinds: int  # of steps that are alike
    median_error: float  # of a kind's time, as a share of it
    p90_error: float
    total_error: float  # of all kinds together: below zero, the model is too quick
    spread: float  # of steps that are alike: half of them are within it, as a share


def fit(measured: Sequence[tuple[StepWork, float]]) -> Fit:
    """Raises: RequestError for fewer steps than coefficients."""
    if len(measured) < 2 * len(COEFFICIENTS):
        raise RequestError(
            f"{len(measured)} steps are too few to fit {len(COEFFICIENTS)} coefficients: make the "
            f"KV memory larger, so that the grid of steps fits in"
        )
    kinds: dict[tuple[int, ...], list[tuple[StepWork, float]]] = {}
    for work, seconds in measured:
        kinds.setdefault(_kind(work), []).append((work, seconds))
    rows = np.array(
        [np.mean([features(work) for work, _ in alike], axis=0) for alike in kinds.values()]
    )
    medians = np.array([np.median([each for _, each in alike]) for alike in kinds.values()])
    counts = np.minimum([len(alike) for alike in kinds.values()], _MOST_COUNTED)
    solution = _solve(rows, medians, medians)
    for _ in range(_ROUNDS):
        # Against what it should be, not what it was: else steps that were quick would count most.
        # And not squared: what is far off was something else, as a kernel that was compiled.
        fitted = rows @ solution
        far = np.maximum(np.abs(medians / fitted - 1), _NEAR)
        solution = _solve(rows, medians, fitted * np.sqrt(far / counts))
    errors = rows @ solution / medians - 1
    spreads = [
        abs(seconds / middle - 1)
        for middle, alike in zip(medians.tolist(), kinds.values(), strict=True)
        for _, seconds in alike
    ]
    return Fit(
        costs=FittedCosts(**dict(zip(COEFFICIENTS, solution.tolist(), strict=True))),
        num_steps=len(measured),
        num_kinds=len(kinds),
        median_error=float(np.median(np.abs(errors))),
        p90_error=float(np.percentile(np.abs(errors), 90)),
        total_error=float((rows @ solution).sum() / medians.sum() - 1),
        spread=float(np.median(spreads)),
    )


def _kind(work: StepWork) -> tuple[int, ...]:
    context = round(_ALIKE * log2(max(1.0, work.num_read)))
    return work.num_tokens, work.num_sequences, work.num_sampled, context


def _solve(rows: Array, seconds: Array, weights: Array) -> Array:
    relative = rows / weights[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    scaled: Array = nonnegative_least_squares(relative / scale, seconds / weights) / scale
    return scaled


def nonnegative_least_squares(matrix: Array, target: Array) -> Array:
    """x ≥ 0 with the least |matrix·x − target|.

    Source: Lawson and Hanson, Solving Least Squares Problems, algorithm NNLS.
    """
    count = matrix.shape[1]
    solution, passive = np.zeros(count), np.zeros(count, bool)
    for _ in range(3 * count):
        gradient = matrix.T @ (target - matrix @ solution)
        gradient[passive] = -np.inf
        if passive.all() or gradient.max() <= 1e-10:
            break
        passive[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
            falling = passive & (trial <= 0)
            if not falling.any():
                solution = trial
                break
            # Go towards it until the first one is zero, and leave that one there.
            steps = solution[falling] / (solution[falling] - trial[falling])
            solution = solution + min(1.0, float(steps.min())) * (trial - solution)
            passive &= solution > 1e-12
            solution[~passive] = 0.0
    return solution
