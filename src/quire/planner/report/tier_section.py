"""Make the section on tiers: where the tokens of prompts came from, and what each tier did."""

from collections.abc import Iterator

from quire.planner.report.content import (
    Bar,
    Report,
    ReportPart,
    ReportTable,
    Section,
    Variant,
    count,
    duration,
    share,
    size,
)
from quire.planner.simulation.result import TierTotals

_NUM_SHADES = 5


def tier_section(report: Report) -> Section | None:
    """Make the section, or None if no variant has tiers."""
    known = [
        (variant, color, variant.result.tiers)
        for variant, color in zip(report.variants, report.colors(), strict=True)
        if variant.result.tiers is not None
    ]
    if not known:
        return None
    names = [tier.name for tier in known[0][2].tiers]
    shades = {name: f"m{number % _NUM_SHADES}" for number, name in enumerate(names)}
    speeds = dict.fromkeys(
        f"{tier.name}: {tier.speed} ({tier.speed_source})."
        for _, _, totals in known
        for tier in totals.tiers
    )
    return Section(
        name="tiers",
        title="Tiers: blocks outside the KV memory",
        text=[
            "A bar is all prompt tokens that were looked up: those that were found in the KV "
            "memory, those that tiers brought there in time, and those that were computed. "
            "Seconds saved are those of computing what tiers brought, less the time that "
            "copying it in took. Tokens loaded for nothing came too late, or were evicted "
            "before a request had them.",
            " ".join(speeds),
        ],
        keys=[("used", "in the KV memory"), *((shades[name], name) for name in names)],
        bars=[_bar(variant, color, totals, shades) for variant, color, totals in known],
        table=ReportTable(
            head=(
                *("", "tier", "size", "holds", "records evicted", "found", "read", "written"),
                *("seconds saved", "loads too late", "loaded for nothing", "stored", "not stored"),
            ),
            rows=[row for variant, _, totals in known for row in _rows(variant, totals)],
        ),
        opens=True,
    )


def _bar(variant: Variant, color: str, totals: TierTotals, shades: dict[str, str]) -> Bar:
    asked = variant.result.prefix_query_tokens
    found = variant.result.prefix_hit_tokens

    def part(kind: str, label: str, num_tokens: int) -> ReportPart:
        of_all = num_tokens / asked if asked else 0.0
        return ReportPart(
            kind=kind, label=label, share=of_all, text=f"{count(num_tokens)}, {share(of_all)}"
        )

    # What was brought and evicted again before its use is no part of what was found.
    read = max(0, totals.hit_tokens - totals.evicted_tokens)
    brought = min(1.0, found / read) if read else 0.0
    scale = brought * read / totals.hit_tokens if totals.hit_tokens else 0.0
    parts = [(tier.name, round(scale * tier.hit_tokens)) for tier in totals.tiers]
    pool = found - sum(num_tokens for _, num_tokens in parts)
    return Bar(
        name=variant.name,
        color=color,
        remark=f"{share(variant.result.hit_rate)} found, {duration(max(0.0, totals.saved_s))} of "
        f"computing saved",
        parts=[
            part("used", "in the KV memory", max(0, pool)),
            *(part(shades[name], name, num_tokens) for name, num_tokens in parts if num_tokens),
        ],
    )


def _rows(variant: Variant, totals: TierTotals) -> Iterator[list[str]]:
    asked = max(1, variant.result.prefix_query_tokens)
    for number, tier in enumerate(totals.tiers):
        yield [
            *(variant.name, tier.name),
            "no limit" if tier.capacity_bytes is None else size(tier.capacity_bytes),
            *(size(tier.used_bytes), count(tier.num_evicted), share(tier.hit_tokens / asked)),
            *(size(tier.read_bytes), size(tier.written_bytes)),
            *(_of_all(totals) if number == 0 else [""] * 5),
        ]


def _of_all(totals: TierTotals) -> list[str]:
    """Return the figures of all tiers together."""
    return [
        f"{totals.saved_s:,.1f} s",
        count(totals.num_late),
        f"{count(totals.wasted_tokens)} tokens",
        f"{count(totals.stored_blocks)} blocks",
        f"{count(totals.dropped_blocks)} blocks",
    ]
