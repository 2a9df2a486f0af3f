"""What bench_memory measured, as tables and as claims. It measures nothing itself."""

import re
import statistics
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

from benchmarks.harness.report import Table
from quire.kv import STRATEGIES
from quire.units import format_bytes, format_seconds

MIB = 2**20
Sample = dict[str, Any]
Samples = dict[str, list[Sample]]  # by "case: label"
_FEWER = re.compile(r"(\d+) x [\d,]+$")  # in a label: sequences and tokens, where fewer than 64
_NEEDED = (  # by the claims
    *(f"A: {cache}" for cache in (*STRATEGIES, "DynamicCache")),
    *(f"B: {cache}" for cache in ("paged", "virtual", "DynamicCache")),
)


# -- what is shown -------------------------------------------------------------------------------


def held_bytes(sample: Sample) -> int:
    """What a cache holds: of its mappings if they are ours, else of the process."""
    held = sample["held"]
    return int(held["mapped"]["Pss"] if "mapped" in held else held["private_bytes"])


def spread(values: Iterable[float], write: Callable[[float], str] = format_bytes) -> str:
    """The median; with it the least and the greatest where they are more than 1 % apart."""
    some = sorted(values)
    middle = statistics.median(some)
    if some[-1] - some[0] <= 0.01 * max(abs(middle), 64 * 1024 * (write is format_bytes)):
        return write(middle)
    return f"{write(middle)} ({write(some[0])} … {write(some[-1])})"


def tables(samples: Samples) -> list[Table]:
    windows = "E. Windows: one sequence of 8,192 tokens, 29 of 34 layers read the last 1,024"
    shown = [
        _held_table(samples, "A", "A. 64 sequences of 100 tokens (contiguous, StaticCache: fewer)"),
        _held_table(samples, "B", "B. One sequence of 100 tokens in a cache built for 64"),
        _growth_table(samples),
        _left_table(samples),
        _held_table(samples, "E", windows),
        _step_table(samples),
        _time_table(samples),
    ]
    return [table for table in shown if table.rows]


def _rows(samples: Samples, case: str) -> Iterable[tuple[str, list[Sample]]]:
    for key, some in samples.items():
        which, _, label = key.partition(": ")
        if which == case:
            yield label, some


def _held_table(samples: Samples, case: str, title: str) -> Table:
    columns = (
        "cache", "runs", "ideal", "built (process)", "own counter", "mappings (Pss)",
        "process (private)", "× ideal", "page tables", "peak (process)",
    )  # fmt: skip
    rows = []
    for label, some in _rows(samples, case):
        held = [sample["held"] for sample in some]
        ours = "mapped" in held[0]
        rows.append([
            label,
            str(len(some)),
            format_bytes(some[0]["ideal_bytes"]),
            spread(s["built"]["private_bytes"] for s in some),
            spread(h["own_bytes"] for h in held) if ours else "–",
            spread(h["mapped"]["Pss"] for h in held) if ours else "–",
            spread(h["private_bytes"] for h in held),
            spread((held_bytes(s) / s["ideal_bytes"] for s in some), "{:.3f}".format),
            spread(h["page_table_bytes"] for h in held),
            spread(s["peak_bytes"] for s in some),
        ])  # fmt: skip
    return Table(title=title, columns=columns, rows=rows)


def _growth_table(samples: Samples) -> Table:
    columns = (
        "what grows from 100 to 1,124 tokens, one at a time", "runs", "ideal at the end",
        "held at the end", "own peak", "peak (process)", "peak × ideal", "page tables",
    )  # fmt: skip
    rows = []
    for label, some in _rows(samples, "C"):
        held = [sample["held"] for sample in some]
        rows.append([
            label,
            str(len(some)),
            format_bytes(some[0]["ideal_bytes"]),
            spread(map(held_bytes, some)),
            spread(h["own_peak_bytes"] for h in held) if "mapped" in held[0] else "–",
            spread(s["peak_bytes"] for s in some),
            spread((s["peak_bytes"] / s["ideal_bytes"] for s in some), "{:.3f}".format),
            spread(h["page_table_bytes"] for h in held),
        ])  # fmt: skip
    return Table(title="C. Peaks of growth", columns=columns, rows=rows)


def _step_table(samples: Samples) -> Table:
    columns = (
        "cache",
        "runs",
        "the eighth token's step",
        "peak over what is held",
        "held",
        "× ideal",
    )
    rows = [
        [
            label,
            str(len(some)),
            spread((s["step_s"] for s in some), format_seconds),
            spread(s["peak_bytes"] - s["held"]["private_bytes"] for s in some),
            spread(map(held_bytes, some)),
            spread((held_bytes(s) / s["ideal_bytes"] for s in some), "{:.3f}".format),
        ]
        for label, some in _rows(samples, "F")
    ]
    return Table(title="F. Eight more tokens for the 64, one at a time", columns=columns, rows=rows)


def _time_table(samples: Samples) -> Table:
    columns = ("cache", "runs", "take", "of it room", "room, a sequence", "give back")
    rows = []
    for case, num_seqs in (("A", 64), ("B", 1), ("E", 1)):
        for label, some in _rows(samples, case):
            count = int(found[1]) if (found := _FEWER.search(label)) else num_seqs
            ours = "mapped" in some[0]["held"]
            rows.append([
                f"{case}: {label}",
                str(len(some)),
                spread((s["take_s"] for s in some), format_seconds),
                spread((s["room_s"] for s in some), format_seconds) if ours else "–",
                spread((s["room_s"] / count for s in some), format_seconds) if ours else "–",
                spread((s["give_back_s"] for s in some), format_seconds),
            ])  # fmt: skip
    return Table(title="Time to take and to give back", columns=columns, rows=rows)


def _left_table(samples: Samples) -> Table:
    columns = (
        "cache", "runs", "freed: mappings (Pss)", "freed: process (private)", "freed: page tables",
        "closed: process (private)", "closed: page tables", "gone: all of these",
    )  # fmt: skip
    rows = []
    for case in ("A", "B"):
        for label, some in _rows(samples, case):
            freed = [sample["freed"] for sample in some]
            closed = [sample["closed"] for sample in some]
            gone = [s["gone"]["private_bytes"] + s["gone"]["page_table_bytes"] for s in some]
            rows.append([
                f"{case}: {label}",
                str(len(some)),
                spread(f["mapped"]["Pss"] for f in freed) if "mapped" in freed[0] else "–",
                spread(f["private_bytes"] for f in freed),
                spread(f["page_table_bytes"] for f in freed),
                spread(c["private_bytes"] for c in closed),
                spread(c["page_table_bytes"] for c in closed),
                spread(gone),
            ])  # fmt: skip
    return Table(
        title="D. Left after release, against before construction", columns=columns, rows=rows
    )


def extrapolated(samples: Samples) -> list[str]:
    """What 64 sequences would take of the caches that were measured with fewer; not measured."""
    lines = []
    for label, some in _rows(samples, "A"):
        if found := _FEWER.search(label):
            each = statistics.median(map(held_bytes, some)) / int(found[1])
            lines.append(
                f"EXTRAPOLATED, not measured: {label} holds {format_bytes(each)} a sequence, so 64 "
                f"of them would hold {format_bytes(64 * each)} "
                f"({64 * each / (64 * 100 * 147_456):,.0f} × ideal)."
            )
    return lines


# -- what is claimed -----------------------------------------------------------------------------


def claims(samples: Samples) -> list[dict[str, Any]]:
    """One object for each goal. Beyond the goals, each is also asked with page tables counted.

    Raises: ValueError if a case that a claim needs was skipped.
    """
    missing = [need for need in _NEEDED if not any(key.startswith(need) for key in samples)]
    if missing:
        raise ValueError(f"nothing to claim: not measured here: {', '.join(missing)}")
    return [*_held_claims(samples), *_released_claims(samples), *_reconciled(samples)]


def _held_claims(samples: Samples) -> Iterable[dict[str, Any]]:
    for cache, with_tables in product(("paged", "virtual"), (False, True)):
        some = samples[f"A: {cache}"]
        ours = statistics.median(_bytes(s["held"], with_tables) for s in some) / MIB
        ideal = some[0]["ideal_bytes"] / MIB
        text = f"64 x 100 tokens, {cache}: held, against the ideal" + _also(with_tables)
        yield _claim(text, ours, ideal, "MiB", "<= 1.15 x", ours <= 1.15 * ideal)
    for cache, with_tables in product(("paged", "virtual"), (False, True)):
        ours, peer = (
            statistics.median(_bytes(s["held"], with_tables) for s in samples[f"B: {name}"]) / MIB
            for name in (cache, "DynamicCache")
        )
        text = f"1 x 100 tokens, {cache}: held, against DynamicCache" + _also(with_tables)
        yield _claim(text, ours, peer, "MiB", "<= 18 MiB", ours <= 18)


def _released_claims(samples: Samples) -> Iterable[dict[str, Any]]:
    """Sequences freed, cache still open: the worst sample of all lengths and variants."""
    for cache, with_tables in product(STRATEGIES, (False, True)):
        ours, peer = (
            max(
                _bytes(sample["freed"], with_tables)
                for key, some in samples.items()
                if re.match(f"[AB]: {name}", key)
                for sample in some
            )
            / 1e6
            for name in (cache, "DynamicCache")
        )
        text = f"{cache}: left after release, against DynamicCache" + _also(with_tables)
        yield _claim(text, ours, peer, "MB", "<= 20 MB", ours <= 20)


def _reconciled(samples: Samples) -> Iterable[dict[str, Any]]:
    """The sample where our counter is furthest from each of the system's figures."""
    ours = [s for some in samples.values() for s in some if "mapped" in s["held"]]
    held = [s["held"] for s in ours]
    mapped = [(h["own_bytes"], h["mapped"]["Pss"]) for h in held]
    private = [(h["own_bytes"], h["private_bytes"]) for h in held]
    peaks = [(s["held"]["own_peak_bytes"], s["peak_bytes"]) for s in ours]
    for what, tolerance, pairs in (
        ("Pss of the mappings", 0, mapped),
        ("private pages of the process", MIB, private),
        ("peak of the process (VmHWM)", MIB, peaks),
    ):
        counted, said = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
        yield _claim(
            f"own counter against {what}: the furthest of {len(pairs)} samples",
            counted / MIB,
            said / MIB,
            "MiB",
            f"within {tolerance // MIB} MiB",
            abs(counted - said) <= tolerance,
        )


def _bytes(figures: dict[str, Any], with_tables: bool) -> int:
    """The larger of what the mappings and what the process say."""
    held = max(figures["private_bytes"], figures.get("mapped", {}).get("Pss", 0))
    return int(held + with_tables * figures["page_table_bytes"])


def _also(with_tables: bool) -> str:
    return ", page tables counted too" if with_tables else ""


def _claim(
    claim: str, ours: float, peer: float, unit: str, goal: str, holds: bool
) -> dict[str, Any]:
    ratio = round(ours / peer, 4) if peer > 0 else None
    return {
        "claim": claim, "ours": round(ours, 3), "peer": round(peer, 3), "unit": unit,
        "ratio": ratio, "goal": goal, "holds": holds,
    }  # fmt: skip
