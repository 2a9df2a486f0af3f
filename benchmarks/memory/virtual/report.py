"""What bench_virtual measured, as tables and as claims. It measures nothing itself."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.quiet import Ratio, Sample, Timing, times_as_fast
from benchmarks.harness.report import Table
from benchmarks.memory.virtual.costs import NEW_TOKENS, NUM_PROMPTS, Seconds, StepCost
from benchmarks.memory.virtual.sharing import COMMON, FORKED, LENGTH, NUM_FORKS, Mappings
from quire.units import format_bytes

BASE, AGAIN, PRIVATE = "contiguous", "contiguous again", "virtual, private"
Claims = list[dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class Report:
    """Tables, and the claims that come of them."""

    tables: list[Table] = field(default_factory=list)
    claims: Claims = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def micros(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:,.0f} µs" if value >= 100 else f"{value:.3g} µs"


def spread(values: Sequence[float], write: Callable[[float], str] = micros) -> str:
    """The median, the least and the greatest."""
    return f"{write(statistics.median(values))} ({write(min(values))} … {write(max(values))})"


# -- layouts -------------------------------------------------------------------------------------


def layouts(
    report: Report, title: str, cases: Mapping[str, Mapping[str, Timing]], *, claims: bool = False
) -> None:
    """``cases``: of each, the forms that took turns, contiguous and contiguous again among them."""
    columns = "case", "form", "median", "best", f"speed, {BASE} = 1", "clean + dirty samples"
    rows = []
    for case, timings in cases.items():
        for name, timing in timings.items():
            ratio = times_as_fast(timing, timings[BASE])
            rows.append([
                case, name, micros(timing.median_s), micros(timing.best_s),
                "1" if name == BASE else _shown(ratio),
                f"{timing.num_clean} + {timing.num_dirty}",
            ])  # fmt: skip
        if claims:
            report.claims.append(_no_slower(case, timings))
    report.tables.append(Table(title=title, columns=columns, rows=rows))


def _no_slower(case: str, timings: Mapping[str, Timing]) -> dict[str, Any]:
    ours, peer = (_of_both(timings[name], timings[f"{name} again"]) for name in (PRIVATE, BASE))
    ratio = times_as_fast(ours, peer)
    noise = times_as_fast(timings[AGAIN], timings[BASE])
    beside = {
        name: round(times_as_fast(timing, timings[BASE]).median, 3)
        for name, timing in timings.items()
        if name.startswith("virtual, shared")
    }
    return claim(
        f"{case}: virtual's speed of contiguous's, unmodified SDPA",
        1e6 * ours.median_s, 1e6 * peer.median_s, "µs a layer",
        ">= 0.97 x", ratio.median >= 0.97, ratio=ratio.median,
        pairs=[round(ratio.least, 3), round(ratio.greatest, 3)], num_pairs=ratio.num_pairs,
        ratio_of_best=round(peer.best_s / ours.best_s, 3),
        contiguous_again=[round(x, 3) for x in (noise.median, noise.least, noise.greatest)],
        all_clean=ratio.all_clean, shared=beside,
    )  # fmt: skip


def _of_both(one: Timing, again: Timing) -> Timing:
    """Round by round, the mean of the two turns."""
    return Timing(
        [
            Sample(seconds=(a.seconds + b.seconds) / 2, is_clean=a.is_clean and b.is_clean)
            for a, b in zip(one.samples, again.samples, strict=True)
        ]
    )


def _shown(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} ({ratio.least:.2f} … {ratio.greatest:.2f})"


def texts(report: Report, found: Mapping[str, tuple[Seconds, bool]]) -> None:
    """By backend: seconds of a round in each form, and whether all forms wrote the same."""
    columns = "attention", "form", "tokens/s", f"speed, {BASE} = 1"
    rows, tokens = [], NUM_PROMPTS * NEW_TOKENS
    for backend, (seconds, equal) in found.items():
        timings = {
            name: Timing([Sample(seconds=one, is_clean=False) for one in some])
            for name, some in seconds.items()
        }
        for name, some in seconds.items():
            rates = [tokens / one for one in some]
            ratio = times_as_fast(timings[name], timings[BASE])
            rows.append([
                backend, name, spread(rates, "{:,.0f}".format),
                "1" if name == BASE else _shown(ratio),
            ])  # fmt: skip
        report.claims.append(
            claim(f"texts by {backend}: equal in all forms", int(equal), 1, "", "equal", equal)
        )
    title = f"D. {NUM_PROMPTS} texts of {NEW_TOKENS} tokens by the demo model"
    report.tables.append(Table(title=title, columns=columns, rows=rows))


# -- sharing -------------------------------------------------------------------------------------


def sharing(report: Report, prefix: dict[str, Any], forks: dict[str, Any]) -> None:
    one, forked, block = forks["one_bytes"], forks["forked_bytes"], forks["block_bytes"]
    rows = [
        [f"two sequences, {COMMON:,} tokens in common", format_bytes(prefix["heap_bytes"])],
        ["… by our counter", format_bytes(prefix["committed_bytes"])],
        ["… if nothing were shared", format_bytes(prefix["two_copies_bytes"])],
        [f"one sequence of {FORKED:,} tokens", format_bytes(one)],
        [f"… and {NUM_FORKS} forks of it", format_bytes(forked)],
        ["… each diverged: more for each", format_bytes(int(forks["more_each_bytes"]))],
        ["… a block", format_bytes(block)],
        ["a fork takes", micros(forks["fork_s"])],
        ["a fork's first token (copy-on-write) takes", micros(forks["diverge_s"])],
    ]
    title = "E. One copy: pages of the heaps' files, as Linux counts them"
    report.tables.append(Table(title=title, columns=("what", "figure"), rows=rows))
    mib = 2**20
    report.claims += [
        claim(
            f"{COMMON:,} tokens in common, read by unmodified SDPA: equal bits",
            int(prefix["equal_entries"]) + int(prefix["equal_outputs"]), 2,
            "entries and outputs", "equal", prefix["equal_entries"] and prefix["equal_outputs"],
        ),
        claim(
            f"{COMMON:,} tokens in common: one copy",
            prefix["heap_bytes"] / mib, prefix["two_copies_bytes"] / mib, "MiB",
            "the blocks of one, and our counter's",
            prefix["heap_bytes"] == prefix["one_copy_bytes"] == prefix["committed_bytes"],
        ),
        claim(
            f"1 + {NUM_FORKS} forks of {FORKED:,} tokens, against one",
            forked / mib, one / mib, "MiB", "<= 1.02 x", forked <= 1.02 * one,
        ),
        claim(
            "each fork that has diverged, against a block",
            forks["more_each_bytes"] / mib, block / mib, "MiB", "one block each, equal entries",
            forks["more_each_bytes"] == block and forks["equal_entries"] and forks["counted"],
        ),
    ]  # fmt: skip


def mappings(report: Report, found: Iterable[Mappings]) -> None:
    columns = (
        f"sequences of {LENGTH:,} tokens", "begun", "live", "mappings, ours (at most)",
        "mappings, the system's", "limit", "a map call", "accounting, a map call",
        "left when all end", "refused for",
    )  # fmt: skip
    rows = []
    for one in found:
        maps = max(1, one.num_maps)
        rows.append([
            one.how, f"{one.num_seqs:,}", f"{one.num_living:,}", f"{one.counted:,}",
            f"{one.by_system:,}", f"{one.limit:,}" if one.limit else "–",
            micros(one.apply_s / maps), micros(one.account_s / maps), str(one.left),
            one.refused_for or "–",
        ])  # fmt: skip
        report.claims.append(_within(one))
    report.tables.append(Table(title="F. Mappings", columns=columns, rows=rows))


def _within(one: Mappings) -> dict[str, Any]:
    """All live, or those that wait are told why; and our count is never below the system's."""
    all_live = one.num_living == one.num_seqs
    within = one.limit is None or one.by_system <= one.counted <= one.limit
    return claim(
        f"{one.num_seqs:,} x {LENGTH:,} tokens, {one.how}: mappings, against the system's",
        one.counted, one.by_system, "mappings", "within the limit, all live or told",
        within and (all_live or one.refused_for == "vm.max_map_count"),
        limit=one.limit, live=one.num_living,
    )  # fmt: skip


# -- costs ---------------------------------------------------------------------------------------


def calls(report: Report, found: Mapping[str, Seconds]) -> None:
    columns = ("change", *(f"block of {name}" for name in found))
    names = next(iter(found.values()))
    rows = [[name, *(spread(seconds[name]) for seconds in found.values())] for name in names]
    title = "G. A change carried out, from Python"
    report.tables.append(Table(title=title, columns=columns, rows=rows))


def hits(report: Report, found: Seconds) -> None:
    rows = [[name, spread(some)] for name, some in found.items()]
    title = "H. A prompt with 1,024 cached tokens of Qwen3-4B"
    report.tables.append(Table(title=title, columns=("what", "time"), rows=rows))


def steps(report: Report, found: Iterable[StepCost]) -> None:
    columns = "sequences", "form", "all", "room", "drain", "apply"
    rows = [
        [
            str(cost.num_seqs), cost.form, micros(cost.median_s()),
            *(micros(cost.median_s(part)) for part in ("room", "drain", "apply")),
        ]
        for cost in found
    ]  # fmt: skip
    title = "I. Memory's part of a decode step, a sequence and token"
    report.tables.append(Table(title=title, columns=columns, rows=rows))


def claim(
    text: str,
    ours: float,
    peer: float,
    unit: str,
    goal: str,
    holds: bool,
    **beside: Any,
) -> dict[str, Any]:
    ratio = beside.pop("ratio", ours / peer if peer else None)
    return {
        "claim": text, "ours": round(ours, 3), "peer": round(peer, 3), "unit": unit,
        "ratio": None if ratio is None else round(ratio, 4), "goal": goal, "holds": holds, **beside,
    }  # fmt: skip
