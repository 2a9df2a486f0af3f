"""What a report is made from, and what its sections are before they are a page."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.planner.hit_rates.curve import HitRates
from quire.planner.simulation.result import SimulationResult

# A strategy has its own color, in every figure and every report; the page says what it is.
_OWN = ("contiguous", "growing", "paged", "virtual")


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
    return f"var(--v{_OWN.index(strategy)})" if strategy in _OWN else "var(--other)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
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
class Part:
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
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A question, what is drawn, and the numbers behind it."""

    name: str  # of the anchor
    title: str
    text: Sequence[str]  # paragraphs
    keys: Sequence[tuple[str, str]] = ()  # the CSS class of a swatch, and what it means
    panels: Sequence[Panel] = ()
    bars: Sequence[Bar] = ()
    table: Table | None = None
    opens: bool = False  # the table is shown at once
