"""Estimate how long a step takes: with coefficients fitted on a machine, or a device's roofline.

Both take any ``StepWork``. What a cost model leaves out (contention, changing clock rates, a
network between ranks) it leaves out of every strategy alike.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from math import inf, log2
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, final

import numpy as np
import numpy.typing as npt

from quire.engine.step_plan import StepPlan
from quire.errors import ConfigError, RequestError
from quire.planner.simulation.simulated_door import DoorCosts
from quire.spec import ChunkedAttention, Group, KeptWhole, SlidingWindow

# -- the work of a step ----------------------------------------------------------------------------


class StepWork(NamedTuple):
    """Counts of what one forward pass computes and reads; those of attention are layer means."""

    num_tokens: int
    num_sequences: int
    num_sampled: int  # sequences whose next token is sampled
    num_read: float  # entries of keys and values that attention reads
    num_attended: float  # pairs of a token and an entry that it attends to
    num_prompts: int = 0  # chunks of several tokens, or behind tokens that come back from swap
    num_outlooks: int = 0  # how often planning worked out what all will need


@final
class Reach:
    """Counts the entries that attention reads, as a mean over layers weighted by their bytes."""

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
        """Count the work of a planned step."""
        read = attended = 0.0
        num_tokens = num_prompts = 0
        for chunk in plan.chunks:
            num_tokens += chunk.stop - chunk.start
            num_prompts += chunk.stop - chunk.start > 1 or chunk.num_restored > 0
            more_read, more_attended = self.of_range(chunk.start, chunk.stop)
            read, attended = read + more_read, attended + more_attended
        sampled = {draw.sequence.seq_id for draw in plan.draws}
        return StepWork(
            num_tokens,
            len(plan.chunks),
            len(sampled),
            read,
            attended,
            num_prompts,
            plan.num_outlooks,
        )

    def of_range(self, start: int, stop: int) -> tuple[float, float]:
        """Count the entries that tokens [start, stop) of a sequence read, and their pairs."""
        count = stop - start
        pairs = count * (start + stop + 1) / 2
        read, attended = self._full_share * stop, self._full_share * pairs
        for window, share in self._windows:
            read += share * min(stop, window + count - 1)
            attended += share * min(pairs, float(count * window))
        return read, attended


# -- costs -----------------------------------------------------------------------------------------


_TOO_LARGE = 1e300  # a coefficient of a file; a whole number may be larger than any float
# Sizes of a step at which the time per token changes. A step reads the weights once for all tokens.
FEW_TOKENS, SOME_TOKENS = 8, 64
# On a CPU a step of few tokens is played by the recorded pass of the next larger size, and takes as
# long as that; a step of more tokens runs the model's own Python.
RECORDED_SIZES: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, *range(16, 65, 8), 80, 96, 112, 128)
RECORDED_TOKENS = RECORDED_SIZES[-1]


def played(work: StepWork) -> StepWork:
    """Return the work of a step with the tokens of the recorded pass that plays it."""
    if work.num_tokens > RECORDED_TOKENS:
        return work
    size = RECORDED_SIZES[bisect_left(RECORDED_SIZES, work.num_tokens)]
    return work._replace(num_tokens=size)


class StepCosts(Protocol):
    """A cost model, in seconds of virtual time."""

    @property
    def copy_s(self) -> float:
        """Return the seconds per layer of a copy of entries (growing, a copied block)."""
        ...

    @property
    def copy_s_per_byte(self) -> float:
        """Return the seconds per byte of a copy."""
        ...

    @property
    def save_s(self) -> float:
        """Return the seconds per sequence of swapping out."""
        ...

    @property
    def save_s_per_byte(self) -> float:
        """Return the seconds per byte of swapping out."""
        ...

    @property
    def load_s(self) -> float:
        """Return the seconds per sequence of swapping in."""
        ...

    @property
    def load_s_per_byte(self) -> float:
        """Return the seconds per byte of swapping in."""
        ...

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step, with sampling and the engine's own time."""
        ...


def first_token_s(
    costs: StepCosts, reach: Reach, input_tokens: int, chunk_tokens: int, *, found_tokens: int = 0
) -> float:
    """Return the seconds to the first token of a prompt that is alone, in chunks of so many.

    ``found_tokens`` of it are in the cache.
    """
    seconds = 0.0
    for start in range(found_tokens, input_tokens, chunk_tokens):
        stop = min(start + chunk_tokens, input_tokens)
        read, attended = reach.of_range(start, stop)
        is_last = int(stop == input_tokens)
        seconds += costs.seconds(StepWork(stop - start, 1, is_last, read, attended, 1))
    return seconds


def features(work: StepWork) -> tuple[float, ...]:
    """Return the factors of a step's coefficients, in the order of ``COEFFICIENTS``."""
    tokens = work.num_tokens
    return (
        1.0,
        float(tokens > RECORDED_TOKENS),
        float(work.num_sequences),
        float(work.num_sampled),
        float(work.num_prompts),
        float(work.num_outlooks),
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
    """A linear model of measured steps, which ``quire bench --calibrate`` fits."""

    step_s: float = 0.0
    long_step_s: float = 0.0  # extra for a step of more than RECORDED_TOKENS
    sequence_s: float = 0.0
    sample_s: float = 0.0
    prompt_s: float = 0.0  # a chunk of several tokens
    outlook_s: float = 0.0  # planning works out what all will need, as one waits for memory
    token_s: float = 0.0  # of the first FEW_TOKENS of a step
    next_token_s: float = 0.0  # of those up to SOME_TOKENS
    further_token_s: float = 0.0  # of those up to RECORDED_TOKENS
    long_token_s: float = 0.0  # of all others
    read_s: float = 0.0  # per entry that attention reads
    attended_s: float = 0.0  # per pair of a token and an entry
    copy_s: float = 0.0  # per layer of a copy
    copy_s_per_byte: float = 0.0
    save_s: float = 0.0  # per sequence that is swapped out
    save_s_per_byte: float = 0.0
    load_s: float = 0.0  # per sequence that is swapped in
    load_s_per_byte: float = 0.0
    door_s: float = 0.0  # of a request in a fleet, beside steps; and so are the next two
    door_token_s: float = 0.0  # of its prompt
    door_busy_s: float = 0.0  # of a request, in which the door takes no other
    is_recorded: bool = False  # a step takes as long as the recorded pass that plays it
    # What recorded passes of each of RECORDED_SIZES take beyond that, below zero less; or nothing.
    beyond_s: tuple[float, ...] = ()
    about: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def seconds(self, work: StepWork) -> float:
        tokens = work.num_tokens
        beyond_s = 0.0
        if self.is_recorded and tokens <= RECORDED_TOKENS:
            number = bisect_left(RECORDED_SIZES, tokens)
            tokens = RECORDED_SIZES[number]
            beyond_s = self.beyond_s[number] if self.beyond_s else 0.0
        return (
            self.step_s
            + beyond_s
            + self.long_step_s * (tokens > RECORDED_TOKENS)
            + self.sequence_s * work.num_sequences
            + self.sample_s * work.num_sampled
            + self.prompt_s * work.num_prompts
            + self.outlook_s * work.num_outlooks
            + self.token_s * min(tokens, FEW_TOKENS)
            + self.next_token_s * min(max(tokens - FEW_TOKENS, 0), SOME_TOKENS - FEW_TOKENS)
            + self.further_token_s
            * min(max(tokens - SOME_TOKENS, 0), RECORDED_TOKENS - SOME_TOKENS)
            + self.long_token_s * max(tokens - RECORDED_TOKENS, 0)
            + self.read_s * work.num_read
            + self.attended_s * work.num_attended
        )

    @property
    def door(self) -> DoorCosts:
        """Return what requests take beside steps, where a fleet was measured."""
        return DoorCosts(request_s=self.door_s, token_s=self.door_token_s, busy_s=self.door_busy_s)

    def write(self, path: Path) -> None:
        """Write the coefficients as JSON. Raises: ConfigError."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        text = json.dumps(said | {"about": dict(self.about)}, indent=1)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the calibration cannot be written to {path}: {error}") from error

    @classmethod
    def read(cls, path: Path) -> "FittedCosts":
        """Read a file that ``write`` has written. Raises: ConfigError for any other."""
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--calibration {path} cannot be read: {error}") from error
        known = {each.name for each in fields(cls)}
        if not isinstance(given, dict) or set(given) != known:
            raise ConfigError(
                f"--calibration {path} is not a calibration: quire bench --calibrate {path} "
                f"makes one"
            )
        numbers = {k: v for k, v in given.items() if k not in ("about", "is_recorded", "beyond_s")}
        for name, value in numbers.items():
            if not isinstance(value, int | float) or not 0 <= value < _TOO_LARGE:
                raise ConfigError(f"--calibration {path}: {name}={value!r} must be a number ≥ 0")
        beyond_s = given["beyond_s"]
        if not isinstance(beyond_s, list) or len(beyond_s) not in (0, len(RECORDED_SIZES)):
            raise ConfigError(
                f"--calibration {path}: beyond_s must be a list of no or {len(RECORDED_SIZES)} "
                f"numbers"
            )
        for value in beyond_s:
            if not isinstance(value, int | float) or not abs(value) < _TOO_LARGE:
                raise ConfigError(f"--calibration {path}: beyond_s has {value!r}, not a number")
        if not isinstance(given["is_recorded"], bool) or not isinstance(given["about"], dict):
            raise ConfigError(
                f"--calibration {path}: is_recorded must be true or false, and about an object"
            )
        numbers |= {"is_recorded": given["is_recorded"], "beyond_s": tuple(beyond_s)}
        found = cls(**numbers, about=MappingProxyType(dict(given["about"])))
        for size in (*RECORDED_SIZES, RECORDED_TOKENS + 1):
            took_s = found.seconds(StepWork(size, 1, 1, float(size), float(size), 1))
            if not 0 < took_s < inf:
                raise ConfigError(
                    f"--calibration {path}: a step of {size} tokens would take {took_s} seconds"
                )
        return found


def measured_for(path: Path, model: str, strategies: Set[str]) -> tuple[FittedCosts, list[str]]:
    """Read a calibration for a model. Return it, and sentences on whose it is.

    ``strategies``: those whose steps it is to give. One that was measured with another strategy is
    taken, and a sentence says so.

    Raises: ConfigError for what is none, or is another model's.
    """
    found = FittedCosts.read(path)
    machine, known, cache = (str(found.about.get(of, "")) for of in ("machine", "model", "cache"))
    if known and _last_part(known) != _last_part(model):
        raise ConfigError(
            f"--calibration {path} was measured with {known}, and this is {model}: quire bench "
            f"{model} --calibrate FILE measures it on this machine"
        )
    told = [f"measured on {machine or '?'} with {known or '?'}, {path}"]
    if others := ", ".join(sorted(strategies - {cache})):
        told.append(f"measured with --cache {cache or '?'} and assumed for {others} too")
    return found, told


def _last_part(model: str) -> str:
    """Return a model's name without its organisation, or its folder's without those above."""
    return model.rstrip("/").rpartition("/")[2].lower()


# The order of ``features``.
COEFFICIENTS = (
    *("step_s", "long_step_s", "sequence_s", "sample_s", "prompt_s", "outlook_s"),
    *("token_s", "next_token_s", "further_token_s", "long_token_s", "read_s", "attended_s"),
)


@final
class Mixture:
    """The experts of a layer, of which a step reads those that its tokens choose.

    Each token chooses ``num_chosen`` different ones, the n-th in proportion to n to the power of
    minus ``skew``, up to always; at 0 all are chosen alike. Tokens choose independently.
    """

    def __init__(self, num_experts: int, num_chosen: int, skew: float = 0.0) -> None:
        if not 0 <= skew < float("inf"):
            raise ConfigError(f"--expert-skew {skew} must be a number of at least 0")
        self.num_experts = num_experts
        self._misses = 1.0 - _chances(num_experts, min(num_chosen, num_experts), skew)
        self._touched: dict[int, float] = {}

    def touched(self, num_tokens: int) -> float:
        """Return how many different experts a step of so many tokens reads, in the mean."""
        found = self._touched.get(num_tokens)
        if found is None:
            found = self.num_experts - float((self._misses**num_tokens).sum())
            self._touched[num_tokens] = found
        return found


def _chances(num_experts: int, num_chosen: int, skew: float) -> "Array":
    """Return each expert's chance to be chosen by a token. Shape: [E]; the sum is num_chosen."""
    shares = np.arange(1, num_experts + 1, dtype=np.float64) ** -skew
    chances = np.zeros(num_experts)
    # Those that come out above 1 are chosen always, and the others share what is left.
    always = np.zeros(num_experts, bool)
    while True:
        left = num_chosen - int(always.sum())
        rest = shares[~always].sum()
        chances[always] = 1.0
        chances[~always] = left * shares[~always] / rest if rest else 0.0
        above = chances > 1.0
        if not above.any():
            return chances
        always |= above


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Weights by which a step multiplies its tokens: read once for all of them."""

    num_bytes: float
    flops_per_token: float
    flops_per_s: float  # of products in this precision, that serving reaches

    def seconds(self, num_tokens: float, bytes_per_s: float, fraction: float = 1.0) -> float:
        """Return the longer of computing and of reading ``fraction`` of the weights."""
        computing_s = num_tokens * self.flops_per_token / self.flops_per_s
        return max(computing_s, fraction * self.num_bytes / bytes_per_s)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCosts:
    """The longer of computing and reading for each part of a step, plus a constant for the engine.

    The parts follow each other: products of all tokens, experts, attention, logits, what lies
    between products, and what ranks exchange. It is no measurement: it tells what a device could do
    at given shares of its peaks.
    """

    flops_per_s: float  # of attention, that serving reaches
    bytes_per_s: float  # of the device's memory
    host_bytes_per_s: float  # between the device and the host
    step_s: float  # the engine's own time, with kernel launches, and latencies between ranks
    products: tuple[Product, ...]  # that each token passes
    head: Product  # for the tokens whose logits are needed
    experts: Product | None = None  # all experts; flops of those that a token chooses
    mixture: Mixture | None = None
    flops_per_pair: float  # of attention, per token and entry
    entry_bytes: int  # of a token's keys and values in all layers
    activation_bytes: float = 0.0  # of a token, read and written between products
    state_bytes: int = 0  # of a sequence's recurrent states, which each step reads and writes
    exchange_s_per_token: float = 0.0  # between ranks

    def seconds(self, work: StepWork) -> float:
        tokens, rate = work.num_tokens, self.bytes_per_s
        seconds = self.step_s + self.exchange_s_per_token * tokens
        for each in self.products:
            seconds += each.seconds(tokens, rate)
        if work.num_sampled:
            seconds += self.head.seconds(work.num_sampled, rate)
        if self.experts is not None and self.mixture is not None:
            touched = self.mixture.touched(tokens) / self.mixture.num_experts
            seconds += self.experts.seconds(tokens, rate, touched)
        seconds += self.activation_bytes * tokens / rate
        moved = self.entry_bytes * (work.num_read + tokens)
        moved += 2 * self.state_bytes * work.num_sequences
        attending_s = self.flops_per_pair * work.num_attended / self.flops_per_s
        return seconds + max(attending_s, moved / rate)

    @property
    def copy_s(self) -> float:
        return 0.0

    @property
    def copy_s_per_byte(self) -> float:
        return 2 / self.bytes_per_s  # a copy reads and writes

    @property
    def save_s(self) -> float:
        return 0.0

    @property
    def save_s_per_byte(self) -> float:
        return 1 / self.host_bytes_per_s

    @property
    def load_s(self) -> float:
        return 0.0

    @property
    def load_s_per_byte(self) -> float:
        return 1 / self.host_bytes_per_s


# -- the fit ---------------------------------------------------------------------------------------

Array = npt.NDArray[np.float64]

_ROUNDS = 12
_NEAR = 0.1  # relative errors up to here count squared, larger ones less
_MOST_COUNTED = 8  # most steps of a kind that add to its weight
_LEAST_KINDS = 2  # kinds of steps of a recorded size that tell what is special about it
_ALIKE = 4.0  # classes of context lengths per doubling


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted cost model, and its errors."""

    costs: FittedCosts
    num_steps: int
    num_kinds: int  # of similar steps
    median_error: float  # of a kind's time, relative
    p90_error: float
    total_error: float  # of all kinds together; below 0 the model is too fast
    spread: float  # half of the steps of a kind are within this share of its median


def fit(measured: Sequence[tuple[StepWork, float]]) -> Fit:
    """Fit a cost model to steps and their seconds, by least squares without negative coefficients.

    The median of similar steps counts, so that a disturbed step does not. Errors count relative to
    a step's time, so that short steps fit as well as long ones. Of two models the better one is
    taken: steps take as long as the recorded passes that play them, or as their own tokens do, as
    where nothing is recorded.

    Raises: RequestError for too few steps.
    """
    if len(measured) < 2 * len(COEFFICIENTS):
        raise RequestError(
            f"{len(measured)} steps are too few to fit {len(COEFFICIENTS)} coefficients: raise "
            "--kv-cache-memory-bytes, so that larger steps fit"
        )
    both = (_fit(measured, is_recorded=is_recorded) for is_recorded in (True, False))
    return min(both, key=lambda each: each.median_error)


def _fit(measured: Sequence[tuple[StepWork, float]], *, is_recorded: bool) -> Fit:
    if is_recorded:
        measured = [(played(work), seconds) for work, seconds in measured]
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
        # Errors are relative to the fitted time, since fast outliers would else count most. Large
        # errors do not count squared: they have another cause, such as the compilation of a kernel.
        fitted = rows @ solution
        far = np.maximum(np.abs(medians / fitted - 1), _NEAR)
        solution = _solve(rows, medians, fitted * np.sqrt(far / counts))
    fitted = rows @ solution
    beyond_s: tuple[float, ...] = ()
    if is_recorded:
        tokens = np.array([kind[0] for kind in kinds])
        beyond_s = _beyond(tokens, medians - fitted)
        fitted = fitted + [
            beyond_s[RECORDED_SIZES.index(n)] if n <= RECORDED_TOKENS else 0.0 for n in tokens
        ]
    errors = fitted / medians - 1
    spreads = [
        abs(seconds / middle - 1)
        for middle, alike in zip(medians.tolist(), kinds.values(), strict=True)
        for _, seconds in alike
    ]
    return Fit(
        costs=FittedCosts(
            **dict(zip(COEFFICIENTS, solution.tolist(), strict=True)),
            is_recorded=is_recorded,
            beyond_s=beyond_s,
        ),
        num_steps=len(measured),
        num_kinds=len(kinds),
        median_error=float(np.median(np.abs(errors))),
        p90_error=float(np.percentile(np.abs(errors), 90)),
        total_error=float(fitted.sum() / medians.sum() - 1),
        spread=float(np.median(spreads)),
    )


def _beyond(tokens: Array, rest_s: Array) -> tuple[float, ...]:
    """Return what passes of each recorded size take beyond a fit's lines, of what it leaves over.

    Kernels take rows in groups, so that a pass of four may take less time than one of three. A size
    has few kinds of steps, and one disturbed minute is in all of them: so it counts what three
    quarters of its kinds have in common. Sizes of too few kinds lie between their neighbours.
    """
    known = [size for size in RECORDED_SIZES if (tokens == size).sum() >= _LEAST_KINDS]
    if not known:
        return (0.0,) * len(RECORDED_SIZES)
    quarters = [np.percentile(rest_s[tokens == size], (25, 75)) for size in known]
    common = [float(max(low, 0.0) + min(high, 0.0)) for low, high in quarters]
    return tuple(np.interp(RECORDED_SIZES, known, common).tolist())


def _kind(work: StepWork) -> tuple[int, ...]:
    context = round(_ALIKE * log2(max(1.0, work.num_read)))
    return work.num_tokens, work.num_sequences, work.num_sampled, work.num_outlooks, context


def _solve(rows: Array, seconds: Array, weights: Array) -> Array:
    relative = rows / weights[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    scaled: Array = nonnegative_least_squares(relative / scale, seconds / weights) / scale
    return scaled


def nonnegative_least_squares(matrix: Array, target: Array) -> Array:
    """Find x ≥ 0 with the least |matrix·x − target|. Shapes: matrix [N, K], target [N], x [K].

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
            # Move towards the trial until the first coefficient is zero, and fix that one.
            steps = solution[falling] / (solution[falling] - trial[falling])
            solution = solution + min(1.0, float(steps.min())) * (trial - solution)
            passive &= solution > 1e-12
            solution[~passive] = 0.0
    return solution
