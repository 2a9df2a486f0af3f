"""Define what a report is made from, and the parts of its sections."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.kv import STRATEGIES, Accounting, CacheConfig, Fits, build_accounting
from quire.planner.hit_rates.curve import HitRates
from quire.planner.sequence_memory import moments
from quire.planner.simulation.result import SimulationResult
from quire.spec import ModelSpec
from quire.units import format_bytes, format_count

# Each strategy has its own color in every figure; page.css has the colors.


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A simulation, and the name under which it is compared."""

    name: str
    result: SimulationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The memory that a strategy holds while tokens are generated."""

    strategy: str
    num_tokens: tuple[int, ...]  # ascending
    committed_bytes: tuple[int, ...]
    used_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The content of a report on one or several traces, each with the same variants."""

    model: str
    machine: str
    traces: tuple[str, ...]
    command: str  # makes this report again
    version: str
    variants: tuple[Variant, ...]
    notes: tuple[str, ...] = ()
    one: tuple[Held, ...] = ()  # a sequence that goes on to the full context
    batch: tuple[Held, ...] = ()  # the trace's first requests, side by side
    num_batch: int = 0
    hit_rates: tuple[tuple[str, HitRates], ...] = ()  # of traces with hash ids
    bytes_per_token: int = 0

    @property
    def goals(self) -> dict[str, float | None]:
        """Return the latency goals, which all variants share."""
        return self.variants[0].result.goals if self.variants else {}

    def colors(self) -> list[str]:
        """Return each variant's color, its strategy's; names tell variants of one color apart."""
        return [strategy_color(variant.result.cache) for variant in self.variants]


def strategy_color(strategy: str) -> str:
    """Return a strategy's color, as a variable of page.css."""
    own = STRATEGIES.own_names
    return f"var(--v{own.index(strategy)})" if strategy in own else "var(--other)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A table of texts, whose first column names the row."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hover:
    """Texts to show at a place on a plot under the pointer: a title, and one per series."""

    at: Sequence[float]  # ascending, as shares of the drawing's width
    titles: Sequence[str]
    series: Sequence[tuple[str, Sequence[str]]]  # name, texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A plot, or two with one below the other."""

    title: str
    color: str = ""  # of the title
    drawings: Sequence[str]  # SVG
    remark: str = ""
    hover: Hover | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPart:
    """A part of a bar."""

    kind: str  # the CSS class
    label: str
    share: float  # of the whole bar
    text: str  # its size


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of parts."""

    name: str
    color: str
    remark: str
    parts: Sequence[ReportPart]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of the page: text, plots or bars, and the table with their numbers."""

    name: str  # of the anchor
    title: str
    text: Sequence[str]  # paragraphs
    keys: Sequence[tuple[str, str]] = ()  # the CSS class of a swatch, and its meaning
    panels: Sequence[Panel] = ()
    bars: Sequence[Bar] = ()
    table: ReportTable | None = None
    opens: bool = False  # show the table at once


# -- bytes held ------------------------------------------------------------------------------------

# Each strategy's own accounting counts them, in a cache so large that no sequence waits.
_NUM_POINTS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A request of the batch, in tokens."""

    input_tokens: int
    output_tokens: int


def held_by_one(spec: ModelSpec, sizes: Mapping[str, CacheConfig], request: Lengths) -> list[Held]:
    """Compute what one sequence holds from its prompt to the full context, by strategy."""
    found = []
    for strategy, own in sizes.items():
        longest = own.max_model_len - 1  # the last token is never computed
        first = min(request.input_tokens, longest)
        each = _some(first, longest)
        ample = _ample(strategy, spec, own, [longest])
        several = list(moments(strategy, spec, ample, each, longest + 1))
        found.append(
            Held(
                strategy=strategy,
                num_tokens=tuple(moment.num_tokens - first for moment in several),
                committed_bytes=tuple(moment.committed_bytes for moment in several),
                used_bytes=tuple(moment.used_bytes for moment in several),
            )
        )
    return found


def held_by_batch(
    spec: ModelSpec, sizes: Mapping[str, CacheConfig], batch: Sequence[Lengths]
) -> list[Held]:
    """Compute what sequences hold that start together, by strategy and step."""
    found = []
    for strategy, own in sizes.items():
        fitting = [each for each in batch if _last(each) < own.max_model_len]
        if fitting:
            found.append(_of_batch(strategy, spec, own, fitting))
    return found


def _of_batch(strategy: str, spec: ModelSpec, sizes: CacheConfig, batch: Sequence[Lengths]) -> Held:
    ends = [_last(each) for each in batch]
    ample = _ample(strategy, spec, sizes, ends)
    accounting = build_accounting(strategy, spec, ample)
    for number, end in enumerate(ends):
        accounting.add(number, max_tokens=end + 1)
    longest = max(each.output_tokens for each in batch)
    steps = _some(0, max(longest, 1))
    running = dict(enumerate(batch))
    committed, used = [], []
    for step in steps:
        for number, each in list(running.items()):
            if step > each.output_tokens:
                accounting.free(number)
                del running[number]
                continue
            _extend(accounting, number, min(each.input_tokens + step, ends[number]))
        accounting.drain()
        usage = accounting.usage()
        committed.append(usage.committed_bytes - usage.cached_bytes)
        used.append(usage.used_bytes)
    return Held(
        strategy=strategy,
        num_tokens=tuple(steps),
        committed_bytes=tuple(committed),
        used_bytes=tuple(used),
    )


def _extend(accounting: Accounting, number: int, num_tokens: int) -> None:
    verdict = accounting.try_extend(number, num_tokens)
    assert isinstance(verdict, Fits), f"memory is not ample: {verdict}"


def _last(each: Lengths) -> int:
    """Return how many tokens of a request are computed."""
    return each.input_tokens + max(each.output_tokens, 1) - 1


def _some(first: int, last: int) -> list[int]:
    """Return all numbers of [first, last], or enough for a smooth line."""
    if last - first < _NUM_POINTS:
        return list(range(first, last + 1))
    return [int(each) for each in np.linspace(first, last, _NUM_POINTS).round()]


def _ample(strategy: str, spec: ModelSpec, sizes: CacheConfig, ends: Sequence[int]) -> CacheConfig:
    """Return sizes with room for all sequences at their ends, and for copies."""
    several = replace(sizes, max_num_seqs=len(ends), enable_prefix_caching=False)
    probe = build_accounting(strategy, spec, replace(several, max_num_seqs=1))
    counts = np.array(ends, np.int64)
    need_bytes = int(probe.bytes_alone(counts, counts + 1).sum())
    return replace(several, capacity_bytes=3 * need_bytes, max_capacity_bytes=None)


# -- numbers as texts ------------------------------------------------------------------------------

_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_CLOCK = ((86_400, "d"), (3600, "h"), (60, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_COUNTS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def axis_of_bytes(values: Sequence[float]) -> list[str]:
    """Return labels of an axis in bytes, with the unit at its top only."""
    size, unit = next((each for each in _BYTES if values[-1] >= each[0]), (1, "B"))
    return _labels(values, size, f" {unit}")


def axis_of_counts(values: Sequence[float]) -> list[str]:
    """Return labels of an axis of counts, all with one suffix."""
    size, unit = next((each for each in _COUNTS if values[-1] >= 10 * each[0]), (1, ""))
    return [f"{value / size:,g}{unit if value else ''}" for value in values]


def axis_of_powers(values: Sequence[float]) -> list[str]:
    """Return labels with a suffix each: 100k, 1M, 10M."""
    labels = []
    for value in values:
        least, unit = next((each for each in _COUNTS if value >= each[0]), (1, ""))
        labels.append(f"{value / least:,g}{unit}")
    return labels


def axis_of_shares(values: Sequence[float]) -> list[str]:
    """Return labels in percent."""
    return [f"{100 * value:g}%" for value in values]


def duration(seconds: float) -> str:
    """Write seconds with three digits in a fitting unit."""
    if seconds <= 0:
        return "0"
    for size, unit in _CLOCK:
        value = seconds / size
        if value >= (10 if unit == "min" else 0.9995):
            return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{seconds:.1e} s"


def rate(value: float) -> str:
    """Write a rate with three digits; only very small ones have an exponent."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.001 else f"{value:.1e}"


def share(value: float) -> str:
    """Write a share in percent."""
    return f"{value:.1%}"


def size(num_bytes: float) -> str:
    """Write a size in bytes."""
    return format_bytes(round(num_bytes))


def file_name(source: str) -> str:
    """Return the last part of a path or an address."""
    return source.rstrip("/").rsplit("/", 1)[-1] or source


def count(number: float) -> str:
    """Write a count with thousands separators."""
    return format_count(round(number))


def times(ratio: float) -> str:
    """Write a ratio as a factor."""
    return f"{ratio:,.0f}\N{NO-BREAK SPACE}×" if ratio >= 100 else f"{ratio:.3g}\N{NO-BREAK SPACE}×"


def short(text: str, longest: int) -> str:
    """Cut a text to ``longest`` characters, with an ellipsis."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _labels(values: Sequence[float], size: float, unit: str) -> list[str]:
    last = len(values) - 1
    return [f"{value / size:,g}{unit if at == last else ''}" for at, value in enumerate(values)]
