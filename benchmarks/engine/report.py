"""The engine benchmark's tables, and whether each goal is met. It measures nothing itself."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.profile import INPUTS, SCHEDULING
from benchmarks.engine.samples import AGAIN, FIGURES, OURS, Figure, Record, Samples
from benchmarks.harness.report import Table
from quire.units import format_bytes

PACKED_GOAL = 1.0  # × the best peer, in eight and four bits
MOST_CONTROL = 0.03  # of a step, for everything but computing
MOST_OTHERS = (
    0.05  # share of the processors that others may take before a sample is called disturbed
)
CONTROL = (SCHEDULING, INPUTS)
_MEMORY_OF = ("single-128", "single-8192", "mixed-16", "mixed-32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Rates of two engines in the same rounds, one divided by the other."""

    median: float
    least: float
    greatest: float
    num_pairs: int

    @property
    def spread(self) -> float:
        """How far a pair was from 1: the noise, where both sides are the same."""
        return max(self.greatest - 1, 1 - self.least)


def paired(samples: Samples, figure: Figure, engine: str, other: str) -> Paired | None:
    ours, theirs = samples.rates(figure, engine), samples.rates(figure, other)
    ratios = [ours[turn] / theirs[turn] for turn in ours if turn in theirs]
    if not ratios:
        return None
    return Paired(
        median=statistics.median(ratios),
        least=min(ratios),
        greatest=max(ratios),
        num_pairs=len(ratios),
    )


# -- what is shown -------------------------------------------------------------------------------


def tables(samples: Samples) -> list[Table]:
    shown = [_speed_table(samples), _ratio_table(samples), _memory_table(samples), _about(samples)]
    if profile := samples.of("profile").get(OURS):
        shown.append(_profile_table(profile))
    return [table for table in shown if table.rows]


def _speed_table(samples: Samples) -> Table:
    rows = [
        [engine, *(_rates(samples, figure, engine) for figure in FIGURES.values())]
        for engine in samples.engines()
    ]
    title = "A. Tokens a second: median (least … greatest; rounds where fewer than ours)"
    return Table(title=title, columns=("engine", *FIGURES), rows=rows)


def _rates(samples: Samples, figure: Figure, engine: str) -> str:
    whole = samples.rates(figure, engine)
    rates = sorted((whole or samples.rates(figure, engine, cut=True)).values())
    if not rates:
        return "–"
    median = _digits(statistics.median(rates))
    notes = [f"{_digits(rates[0])} … {_digits(rates[-1])}"] * (len(rates) > 1)
    if len(rates) < len(samples.rates(figure, OURS)):
        notes.append(f"{len(rates)} round" + "s" * (len(rates) > 1))
    notes += ["cut"] * (not whole)
    return f"{median} ({'; '.join(notes)})" if notes else median


def _ratio_table(samples: Samples) -> Table:
    columns = ("what", "best peer", "ours is … × as fast", "ours again / ours", "pairs")
    rows = []
    for figure in FIGURES.values():
        peer = samples.best_peer(figure)
        ratio = paired(samples, figure, OURS, peer) if peer else None
        noise = paired(samples, figure, AGAIN, OURS)
        pairs = str(ratio.num_pairs) if ratio else "–"
        rows.append([figure.name, peer or "–", _spread(ratio), _spread(noise), pairs])
    return Table(title="B. Against the best peer, round by round", columns=columns, rows=rows)


def _spread(ratio: Paired | None) -> str:
    return f"{ratio.median:.2f} ({ratio.least:.2f} … {ratio.greatest:.2f})" if ratio else "–"


def _memory_table(samples: Samples) -> Table:
    rows = []
    for engine in samples.engines():
        if engine == AGAIN:
            continue
        peaks = {
            name: [
                record["peak_bytes"]
                for record in samples.samples()
                if (record["engine"], record["workload"]) == (engine, name)
                and "peak_bytes" in record
            ]
            for name in _MEMORY_OF
        }
        cells = [format_bytes(max(some)) if some else "–" for some in peaks.values()]
        idle = samples.of("idle").get(engine)
        rows.append([engine, *cells, format_bytes(idle["bytes"]) if idle else "–"])
    columns = ("engine", *(f"peak in {name}" for name in _MEMORY_OF), "after 30 s idle")
    return Table(title="C. Resident memory of all its processes", columns=columns, rows=rows)


def _about(samples: Samples) -> Table:
    ids: dict[str, dict[str, list[int]]] = {}
    for record in samples.samples():
        if record.get("ids"):
            ids.setdefault(record["workload"], {}).setdefault(record["engine"], record["ids"])
    rows = []
    for engine, about in samples.of("about").items():
        same = [
            both[engine][0] == both[OURS][0]
            for both in ids.values()
            if engine in both and OURS in both
        ]
        rows.append([
            engine, about["version"], about["precision"], about["settings"],
            f"{sum(same)} of {len(same)}" if same else "–",
        ])  # fmt: skip
    columns = ("engine", "version", "weights / compute / KV", "settings", "first token as ours")
    return Table(title="D. Who ran, and how", columns=columns, rows=rows)


def _profile_table(profile: Record) -> Table:
    whole = sum(profile["parts_s"].values())
    bounds = {
        f"bound: {format_bytes(profile['weight_bytes'])} of weights read once, "
        f"at {profile['stream_bytes_s'] / 1e9:.1f} GB/s (STREAM)": profile["reading_s"],
        f"bound: {format_bytes(profile['kv_bytes'])} of keys and values, too": profile[
            "kv_reading_s"
        ],
        "bound: the weights' products, at the rate of torch.matmul": profile["multiplying_s"],
    }
    unrecorded = profile["unrecorded_parts_s"]
    lines = (
        {part: seconds for part, seconds in profile["parts_s"].items() if seconds}
        | {"sum": whole}
        | bounds
        | {f"not recorded: {part}": seconds for part, seconds in unrecorded.items()}
        | {"not recorded: sum": sum(unrecorded.values())}
    )
    rows = [
        [part, f"{1e3 * seconds:.2f}", f"{seconds / whole:.1%}"] for part, seconds in lines.items()
    ]
    title = f"E. A step of ours that decodes 32 sequences: medians of {profile['steps']} steps"
    return Table(title=title, columns=("part", "ms", "of the step"), rows=rows)


def notes(samples: Samples) -> list[str]:
    shares = [record["others"] for record in samples.samples() if "others" in record]
    disturbed = sum(share > MOST_OTHERS for share in shares)
    found = [
        f"Other processes took more than {MOST_OTHERS:.0%} of the processors in {disturbed} of "
        f"{len(shares)} samples, {max(shares, default=0):.0%} at most."
    ]
    found += [
        f"LEFT OUT: {name}: {record['reason']}" for name, record in samples.of("refused").items()
    ]
    found += [
        f"NOT MEASURED: {record['engine']}, {record['workload']}: {record['error']}"
        for record in samples.samples()
        if "error" in record
    ]
    return found


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# -- what is claimed -----------------------------------------------------------------------------


def claims(samples: Samples, weights: str) -> Iterable[dict[str, Any]]:
    for figure in FIGURES.values():
        if samples.rates(figure, OURS):
            yield _claim(samples, figure, figure.goal if weights == "bf16" else PACKED_GOAL)
    if profile := samples.of("profile").get(OURS):
        share = sum(profile["parts_s"][part] for part in CONTROL) / sum(profile["parts_s"].values())
        yield {
            "claim": "scheduling, accounting and input building, of a step at 32 sequences",
            "ours": _rounded(share),
            "peer": None,
            "unit": "fraction",
            "ratio": None,
            "goal": f"<= {MOST_CONTROL}",
            "holds": share <= MOST_CONTROL,
            "steps": profile["steps"],
        }


def _claim(samples: Samples, figure: Figure, goal: float) -> dict[str, Any]:
    peer = samples.best_peer(figure)
    ratio = paired(samples, figure, OURS, peer) if peer else None
    noise = paired(samples, figure, AGAIN, OURS)
    found: dict[str, Any] = {
        "claim": f"{figure.name}, against {peer or 'no peer'}",
        "ours": None,
        "peer": None,
        "unit": "tokens/s",
        "ratio": None,
        "goal": f">= {goal} x the best peer",
        "holds": False,
    }
    if ratio is None or peer is None:
        return found
    # "Not below" means by more than the same engine differs from itself; "1.25 x" means that.
    slack = noise.spread if noise and goal == 1.0 else 0.0
    return found | {
        "ours": _rounded(statistics.median(samples.rates(figure, OURS).values())),
        "peer": _rounded(statistics.median(samples.rates(figure, peer).values())),
        "ratio": _rounded(ratio.median),
        "holds": ratio.median >= goal - slack,
        "pairs": [_rounded(ratio.least), _rounded(ratio.greatest)],
        "num_pairs": ratio.num_pairs,
        "ours_to_ours": noise and [_rounded(noise.least), _rounded(noise.greatest)],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
