"""The planner's benchmark, its part on hit rates: figures that are known, and a peer's speed.

Figures are exact: neither noise nor repetition changes them. Times are of whole processes, from
their start to their answer about one trace at eight sizes of cache, taken in turn: the peer, ours,
and ours again, which shows the run's own noise. Processor time is beside the clock's, as others use
the machine too.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.peers import PeerUnavailable
from benchmarks.harness.report import Table
from benchmarks.planner import kvcache_simulator as peer
from quire.planner.hit_rates import HitRates, hit_rate_curve, prompts_of
from quire.traces import open_trace

MOONCAKE = "mooncake_conversation.jsonl"
KV_TESTER = "kv-cache-tester.tar.zst"
MILLION = 10**6
SIZES = (1, 4, 16, 50)  # millions of tokens
GOLDEN_LRU = dict(zip(SIZES, (5.4, 17.8, 33.6, 37.1), strict=True))  # percent, to 0.1
GOLDEN_INFINITE = 37.4
GOLDEN_KV_TESTER = 96.3
GIB = "32,64,128,256,512,1024,2048,4096"  # of the peer's budgets: no prompt is larger
QUESTIONS = (["lru"], ["lru", "optimum"])
WARMUP_FRACTION = 0.5  # what the peer leaves out
WORKER = (sys.executable, "-m", "benchmarks.planner.hit_rate_worker")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    wall_s: float
    cpu_s: float


@dataclass(slots=True, kw_only=True)
class Duel:
    """One question, put to both again and again."""

    policies: list[str]
    ours: peer.Answer
    theirs: peer.Answer
    spent: dict[str, list[Spent]] = field(default_factory=dict)  # "ours", "again", "peer"

    def ratios(self, one: str, other: str, figure: str) -> list[float]:
        pairs = zip(self.spent[one], self.spent[other], strict=True)
        return [getattr(a, figure) / getattr(b, figure) for a, b in pairs]

    def noise(self, figure: str) -> float:
        """How far two runs of ours are from each other: the farthest of all pairs from 1."""
        return max(abs(ratio - 1) for ratio in self.ratios("again", "ours", figure))


@dataclass(slots=True, kw_only=True)
class Results:
    mooncake: HitRates
    kv_tester: HitRates | None
    duels: list[Duel]


def measure(traces: Path, num_pairs: int, *, with_kv_tester: bool, say: Say) -> Results:
    """Raises: PeerUnavailable; QuireError for a trace that is not there."""
    duels = []
    peer.program()
    for policies in QUESTIONS:
        duels.append(_duel(traces / MOONCAKE, policies, num_pairs, say))
    sizes = [size * MILLION for size in SIZES]
    say("Mooncake, every policy")
    found = hit_rate_curve(open_trace(traces / MOONCAKE), sizes)
    ours = None
    if with_kv_tester:
        say("kv-cache-tester, LRU and the optimum")
        prompts = prompts_of(open_trace(traces / KV_TESTER))
        ours = hit_rate_curve(prompts, sizes, ["lru", "optimum"])
    return Results(mooncake=found, kv_tester=ours, duels=duels)


def _duel(trace: Path, policies: list[str], num_pairs: int, say: Say) -> Duel:
    with TemporaryDirectory() as folder:
        output = Path(folder) / "peer.json"
        theirs = peer.command(trace, 512, GIB, policies, output)
        _run(theirs)  # it compiles its core
        answer = peer.answer(output, policies)
        blocks = ",".join(map(str, answer.blocks))
        ours = [*WORKER, str(trace), blocks, ",".join(policies)]
        ours.append(str(WARMUP_FRACTION))
        said = subprocess.run(ours, check=True, capture_output=True, text=True).stdout
        duel = Duel(policies=policies, ours=_answer(said, answer.blocks), theirs=answer)
        for turn in range(num_pairs):
            say(f"{' and '.join(policies)}: pair {turn + 1} of {num_pairs}")
            for name, command in (("peer", theirs), ("ours", ours), ("again", ours)):
                duel.spent.setdefault(name, []).append(_run(command))
    return duel


def _answer(text: str, blocks: list[int]) -> peer.Answer:
    found = json.loads(text)
    return peer.Answer(
        blocks=blocks, hits=found["hits"], ceiling=found["ceiling"], tokens=found["tokens"]
    )


def _run(command: list[str]) -> Spent:
    """With all that the process starts."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise PeerUnavailable(f"{command[0]} ends with {process.returncode}")
    return Spent(wall_s=wall_s, cpu_s=used.ru_utime + used.ru_stime)


# -- what is shown -------------------------------------------------------------------------------


def tables(results: Results) -> list[Table]:
    shown = [_rates("Mooncake conversation", results.mooncake)]
    if results.kv_tester is not None:
        shown.append(_rates("kv-cache-tester", results.kv_tester))
    return [*shown, _times(results.duels), *map(_answers, results.duels)]


def _rates(name: str, rates: HitRates) -> Table:
    rows = [
        [policy, *(f"{100 * each.hit_fraction:.2f}" for each in several)]
        for policy, several in rates.by_policy.items()
    ]
    several = rates.by_policy["lru"]
    parts = (("LRU: asked for the first time", "cold_tokens"), ("LRU: evicted", "evicted_tokens"))
    for label, part in parts:
        shares = [getattr(each, part) / each.prompt_tokens for each in several]
        rows.append([label, *(f"{100 * share:.2f}" for share in shares)])
    return Table(
        title=f"{name}: {rates.num_requests:,} requests, {rates.prompt_tokens / MILLION:,.0f} M "
        f"prompt tokens, blocks of {rates.block_tokens}; found in percent of them (without end: "
        f"{100 * rates.infinite.hit_fraction:.2f})",
        columns=("policy", *(f"{each.cache_tokens / MILLION:g} M tokens" for each in several)),
        rows=rows,
    )


def _times(duels: Iterable[Duel]) -> Table:
    rows = []
    for duel in duels:
        for figure, name in (("cpu_s", "processor"), ("wall_s", "clock")):
            ratios = duel.ratios("ours", "peer", figure)
            medians = [
                statistics.median(getattr(each, figure) for each in duel.spent[who])
                for who in ("ours", "peer")
            ]
            rows.append([
                f"{' and '.join(duel.policies)}, {name}",
                *(f"{median:.2f}" for median in medians),
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})",
                f"{duel.noise(figure):.2f}",
            ])  # fmt: skip
    return Table(
        title="A trace at eight sizes of cache, seconds from start to answer",
        columns=("question", "ours", f"kvcache-simulator {peer.VERSION}", "ours / peer", "A/A"),
        rows=rows,
    )


def _answers(duel: Duel) -> Table:
    rows = [
        [
            f"{policy}, {who}",
            *(f"{100 * hits / answer.tokens:.3f}" for hits in answer.hits[policy]),
        ]
        for policy in duel.policies
        for who, answer in (("ours", duel.ours), ("peer", duel.theirs))
    ]
    return Table(
        title=f"What was answered to {' and '.join(duel.policies)}: the second half, percent",
        columns=("policy", *(f"{size:,} blocks" for size in duel.ours.blocks)),
        rows=rows,
    )


# -- what is claimed -----------------------------------------------------------------------------


def claims(results: Results) -> Iterable[dict[str, Any]]:
    rates = results.mooncake
    yield _golden("Mooncake, a cache without end", rates.infinite.hit_fraction, GOLDEN_INFINITE)
    for size, golden in GOLDEN_LRU.items():
        found = rates.at("lru", size * MILLION).hit_fraction
        yield _golden(f"Mooncake, LRU at {size} M tokens", found, golden)
    if results.kv_tester is not None:
        found = results.kv_tester.infinite.hit_fraction
        yield _golden("kv-cache-tester, within a conversation", found, GOLDEN_KV_TESTER)
    for duel in results.duels:
        ratio = statistics.median(duel.ratios("ours", "peer", "cpu_s"))
        noise = duel.noise("cpu_s")
        ours, theirs = (
            statistics.median(each.cpu_s for each in duel.spent[who]) for who in ("ours", "peer")
        )
        yield _claim(
            f"Hit rates of {' and '.join(duel.policies)} at eight sizes, against "
            f"kvcache-simulator: processor time, no slower",
            (ours, theirs, "s", ratio, f"<= 1 x, within the noise of {noise:.2f}"),
            holds=ratio <= 1 + noise,
        )
    alike = [duel.ours.hits["lru"] == duel.theirs.hits["lru"] for duel in results.duels]
    alike += [duel.ours.ceiling == duel.theirs.ceiling for duel in results.duels]
    yield _claim(
        "LRU and the cache without end: the same tokens found as kvcache-simulator's, to the token",
        (sum(alike), len(alike), "answers", sum(alike) / len(alike), "all"),
        holds=all(alike),
    )


def _golden(claim: str, fraction: float, golden: float) -> dict[str, Any]:
    percent = 100 * fraction
    return _claim(
        f"{claim}: found in percent of tokens",
        (percent, golden, "%", percent / golden, "to 0.1 points"),
        holds=round(percent, 1) == golden,
    )


def _claim(
    claim: str, figures: tuple[float, float, str, float, str], *, holds: bool
) -> dict[str, Any]:
    ours, other, unit, ratio, goal = figures
    return {
        "claim": claim, "ours": round(ours, 3), "peer": round(other, 3), "unit": unit,
        "ratio": round(ratio, 4), "goal": goal, "holds": holds,
    }  # fmt: skip
