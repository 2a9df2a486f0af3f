"""What a report is made from, and what its sections are before they are a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.kv import STRATEGIES, Accounting, CacheConfig, Fits, build_accounting
from quire.planner.hit_rates.curve import HitRates
from quire.planner.sequence_memory import moments
from quire.planner.simulation.result import SimulationResult
from quire.spec import ModelSpec
from quire.units import format_bytes, format_count

# -- content ---------------------------------------------------------------------------------------


# -- content ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One simulation, by the name under which it is compared."""

    name: str
    result: SimulationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a strategy holds while tokens are generated."""

    strategy: str
    num_tokens: tuple[int, ...]  # ascending
    committed_bytes: tuple[int, ...]
    used_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Of one or several traces, each with the same variants."""

    model: str
    machine: str
    traces: tuple[str, ...]
    command: str  # that makes this report again
    version: str
    variants: tuple[Variant, ...]
    notes: tuple[str, ...] = ()
    one: tuple[Held, ...] = ()  # a sequence from its first token to the longest
    batch: tuple[Held, ...] = ()  # the trace's first requests, generating together
    num_batch: int = 0
    hit_rates: tuple[tuple[str, HitRates], ...] = ()  # of traces that say who begins alike
    bytes_per_token: int = 0

    @property
    def goals(self) -> dict[str, float | None]:
        """The same for all variants."""
        return self.variants[0].result.goals if self.variants else {}

    def colors(self) -> list[str]:
        """One a variant: its strategy's. Variants are told apart by name, never by color alone."""
        return [strategy_color(variant.result.cache) for variant in self.variants]


def strategy_color(strategy: str) -> str:
    """Return a strategy's own color, the same in every figure and every report."""
    own = STRATEGIES.own_names
    return f"var(--v{own.index(strategy)})" if strategy in own else "var(--other)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """Texts as they are shown. The first column says what a row is of."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hover:
    """What is said of the place on a plot that is pointed at: a title, and a text a series."""

    at: Sequence[float]  # ascending, as shares of the drawing's width
    titles: Sequence[str]
    series: Sequence[tuple[str, Sequence[str]]]  # name, texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot of several; or two, one below the other, that are read as one."""

    title: str
    color: str = ""  # of the title
    drawings: Sequence[str]  # SVG
    remark: str = ""
    hover: Hover | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPart:
    """A piece of a bar."""

    kind: str  # the CSS class that it looks by
    label: str
    share: float  # of the whole bar
    text: str  # how much it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A whole, and what it is made of."""

    name: str
    color: str
    remark: str
    parts: Sequence[ReportPart]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A question, what is drawn, and the numbers behind it."""

    name: str  # of the anchor
    title: str
    text: Sequence[str]  # paragraphs
    keys: Sequence[tuple[str, str]] = ()  # the CSS class of a swatch, and what it means
    panels: Sequence[Panel] = ()
    bars: Sequence[Bar] = ()
    table: ReportTable | None = None
    opens: bool = False  # the table is shown at once


# -- bytes held ------------------------------------------------------------------------------------

# Bytes held against tokens generated, by each strategy's own accounting.
#
# One sequence from its first token to the longest, and the first requests of a trace, each
# generating a token a step. Memory is ample, so that none waits: what is compared is what they ask
# for.


_NUM_POINTS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A request of the batch, in tokens."""

    input_tokens: int
    output_tokens: int


def held_by_one(spec: ModelSpec, sizes: Mapping[str, CacheConfig], request: Lengths) -> list[Held]:
    """By strategy. It begins with its prompt, and could go on to the longest."""
    found = []
    for strategy, own in sizes.items():
        longest = own.max_model_len - 1  # the last token is written down, never computed
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
    """By strategy. All begin at once with their prompts; each ends after its own last token."""
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
    """Tokens that are computed of it."""
    return each.input_tokens + max(each.output_tokens, 1) - 1


def _some(first: int, last: int) -> list[int]:
    """All of them, or so many that a line is smooth."""
    if last - first < _NUM_POINTS:
        return list(range(first, last + 1))
    return [int(each) for each in np.linspace(first, last, _NUM_POINTS).round()]


def _ample(strategy: str, spec: ModelSpec, sizes: CacheConfig, ends: Sequence[int]) -> CacheConfig:
    """Room for all of them at their ends, and for what lives twice while it is copied."""
    several = replace(sizes, max_num_seqs=len(ends), enable_prefix_caching=False)
    probe = build_accounting(strategy, spec, replace(several, max_num_seqs=1))
    counts = np.array(ends, np.int64)
    need_bytes = int(probe.bytes_alone(counts, counts + 1).sum())
    return replace(several, capacity_bytes=3 * need_bytes, max_capacity_bytes=None)


# -- how numbers are written -----------------------------------------------------------------------

# How numbers are written in a report: a unit once an axis, and cells of tables.


_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_CLOCK = ((86_400, "d"), (3600, "h"), (60, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_COUNTS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def axis_of_bytes(values: Sequence[float]) -> list[str]:
    """Labels of an axis: the unit only at its top."""
    size, unit = next((each for each in _BYTES if values[-1] >= each[0]), (1, "B"))
    return _labels(values, size, f" {unit}")


def axis_of_counts(values: Sequence[float]) -> list[str]:
    size, unit = next((each for each in _COUNTS if values[-1] >= 10 * each[0]), (1, ""))
    return [f"{value / size:,g}{unit if value else ''}" for value in values]


def axis_of_powers(values: Sequence[float]) -> list[str]:
    """Each with its own unit: 100k, 1M, 10M."""
    labels = []
    for value in values:
        least, unit = next((each for each in _COUNTS if value >= each[0]), (1, ""))
        labels.append(f"{value / least:,g}{unit}")
    return labels


def axis_of_shares(values: Sequence[float]) -> list[str]:
    return [f"{100 * value:g}%" for value in values]


def duration(seconds: float) -> str:
    """Three digits, in a unit that a person would use."""
    if seconds <= 0:
        return "0"
    for size, unit in _CLOCK:
        value = seconds / size
        if value >= (10 if unit == "min" else 0.9995):
            return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{seconds:.1e} s"


def rate(value: float) -> str:
    """A number a second: three digits, and never a power of ten where people read it."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.001 else f"{value:.1e}"


def share(value: float) -> str:
    return f"{value:.1%}"


def size(num_bytes: float) -> str:
    return format_bytes(round(num_bytes))


def file_name(source: str) -> str:
    """Without the folders or the address that it lies in."""
    return source.rstrip("/").rsplit("/", 1)[-1] or source


def count(number: float) -> str:
    return format_count(round(number))


def times(ratio: float) -> str:
    """How many times as much."""
    return f"{ratio:,.0f}\N{NO-BREAK SPACE}×" if ratio >= 100 else f"{ratio:.3g}\N{NO-BREAK SPACE}×"


def short(text: str, longest: int) -> str:
    """With an ellipsis where it is too long."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _labels(values: Sequence[float], size: float, unit: str) -> list[str]:
    last = len(values) - 1
    return [f"{value / size:,g}{unit if at == last else ''}" for at, value in enumerate(values)]
