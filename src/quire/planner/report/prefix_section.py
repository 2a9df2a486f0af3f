"""Make the section on hit rates by cache size, with the optimum and an infinite cache."""

from collections.abc import Sequence
from itertools import chain
from types import MappingProxyType

from quire.figures import Plot, Scale, spread, ticks, ticks_of_powers
from quire.kv import DEFAULT_POLICY
from quire.planner.hit_rates.curve import HitRate, HitRates
from quire.planner.report.content import (
    Hover,
    Panel,
    Report,
    ReportTable,
    Section,
    axis_of_powers,
    axis_of_shares,
    count,
    file_name,
    share,
    short,
    size,
)

_WIDTH, _HEIGHT, _LEFT, _RIGHT = 360, 280, 44, 92
_BOTTOM, _TOP = _HEIGHT - 48, 14
# The default policy stands out; the others are grey.
_LOOKS = MappingProxyType({DEFAULT_POLICY: ("var(--v2)", ""), "optimum": ("var(--ink)", "5 3")})


def prefix_section(report: Report) -> Section | None:
    """Make the section, or None if no trace has hash ids."""
    if not report.hit_rates:
        return None
    rows = [
        [
            source,
            each.policy,
            count(each.cache_tokens),
            share(each.hit_fraction),
            share(each.cold_tokens / each.prompt_tokens),
            share(each.evicted_tokens / each.prompt_tokens),
            share(each.partial_tokens / each.prompt_tokens),
        ]
        for source, rates in report.hit_rates
        for each in (*chain.from_iterable(rates.by_policy.values()), rates.infinite)
    ]
    return Section(
        name="prefixes",
        title="Hit rate of a prefix cache, by its size",
        text=[
            f"The share of all prompt tokens. {DEFAULT_POLICY} is the default policy; lru evicts "
            "the least recently used block; the optimum knows the future. A request takes no time "
            "here and only prompts are cached. So an engine hits a little less of prompts that "
            "arrive together, and more of answers that are sent again.",
        ],
        panels=[_panel(source, rates, report) for source, rates in report.hit_rates],
        table=ReportTable(
            head=("", "policy", "cache, tokens", "hit", "cold", "evicted", "in no whole block"),
            rows=rows,
        ),
    )


def _panel(source: str, rates: HitRates, report: Report) -> Panel:
    sizes = [each.cache_tokens for several in rates.by_policy.values() for each in several]
    low, high = max(1, min(sizes)), max(*sizes, 2)
    levels = ticks(rates.infinite.hit_fraction)
    plot = Plot(
        width=_WIDTH,
        height=_HEIGHT,
        x=Scale(low=low, high=high, start=_LEFT, stop=_WIDTH - _RIGHT, logarithmic=True),
        y=Scale(low=0, high=levels[-1], start=_BOTTOM, stop=_TOP),
    )
    plot.y_axis(levels, axis_of_shares(levels))
    marks = _marks(low, high)
    plot.x_axis(marks, axis_of_powers(marks), "tokens that the cache holds")
    _memories(plot, report, low, high)
    best = rates.infinite.hit_fraction
    plot.line([(low, best), (high, best)], "var(--muted)", dashes="2 4")
    drawn: list[list[tuple[int, float]]] = []
    names, tails = [("infinite", "var(--muted)")], [best]
    # Labels of lines with the same end are in the order of the lines.
    by_height = sorted(rates.by_policy.items(), key=lambda item: -_height(item[1]))
    for policy, several in by_height:
        color, dashes = _LOOKS.get(policy, ("var(--muted)", ""))
        points = [(each.cache_tokens, each.hit_fraction) for each in several]
        if points in drawn:  # dashes show both lines
            dashes = "4 5"
        drawn.append(points)
        plot.line(points, color, dashes=dashes)
        names.append((policy, color))
        tails.append(points[-1][1])
    for (name, color), y in zip(
        names, spread([plot.y(tail) for tail in tails], 15, _BOTTOM), strict=True
    ):
        plot.text(_WIDTH - _RIGHT + 6, y + 4, short(name, 14), color=color)
    return Panel(
        title=file_name(source),
        drawings=[plot.svg(f"Hit rate against cache size, {source}: {share(best)} at most")],
        remark=f"{rates.num_requests:,} requests in blocks of {rates.block_tokens:,} tokens; the "
        f"longest prompt has {rates.longest_tokens:,}, and a smaller cache refuses it",
        hover=_hover(rates, plot),
    )


def _height(several: Sequence[HitRate]) -> float:
    return sum(each.hit_fraction for each in several)


def _marks(low: float, high: float) -> list[float]:
    """Return powers of ten; if they are few, with twos and fives."""
    powers = ticks_of_powers(low, high)
    for parts in ((1,), (1, 2, 5)):
        marks = [part * power for power in powers for part in parts if low <= part * power <= high]
        if len(marks) >= 3:
            break
    return marks


def _memories(plot: Plot, report: Report, low: float, high: float) -> None:
    """Mark the sizes of the simulated memories, in tokens."""
    if not report.bytes_per_token:
        return
    known = dict.fromkeys(variant.result.memory_bytes for variant in report.variants)
    for number, memory in enumerate(known):
        tokens = memory / report.bytes_per_token
        if not low <= tokens <= high:
            continue
        at = plot.x(tokens)
        plot.parts.append(f'<path class="mark" d="M{at:.1f} {_TOP}V{_BOTTOM}"/>')
        anchor = "end" if at > (_LEFT + _WIDTH - _RIGHT) / 2 else "start"
        shift = -4 if anchor == "end" else 4
        y = _BOTTOM - 6 - 14 * (number % 4)
        plot.text(at + shift, y, size(memory).replace(".00 ", " "), anchor=anchor, kind="tick")


def _hover(rates: HitRates, plot: Plot) -> Hover:
    sizes = [each.cache_tokens for each in next(iter(rates.by_policy.values()))]
    return Hover(
        at=[plot.x(each) / _WIDTH for each in sizes],
        titles=[f"{count(each)} tokens" for each in sizes],
        series=[
            *(
                (policy, [share(each.hit_fraction) for each in several])
                for policy, several in rates.by_policy.items()
            ),
            ("infinite", [share(rates.infinite.hit_fraction)] * len(sizes)),
        ],
    )
