"""Tiers beside the least that they could take: rates, bookkeeping, and what is kept.

Rates: records in random order, in batches of 16, by one thread; each beside a plain copy or a plain
read of the same bytes. Files are in the page cache. Bookkeeping: a million records in a process of
its own. What is kept: a recorded trace (``--traces FOLDER``; benchmarks/accounting/prefix_traces.py
names it) through the tiers, beside the policies of the pool and the optimum.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.accounting.prefix_traces import (
    BLOCK_TOKENS,
    PrefixTrace,
    TraceUnavailable,
    mooncake,
)
from benchmarks.accounting.replay import optimum, prompts, replay
from benchmarks.harness.quiet import Call, Ratio, Timing, in_turn, take_turns, times_as_fast
from benchmarks.harness.report import Output, Run, Table, WithClaims
from benchmarks.tiers.replay import file_hit_percent, hit_percent, memory_tier
from quire.kv import DEFAULT_POLICY
from quire.planner.hit_rates.optimum import Optimum
from quire.tiers import Deadline, Tier
from quire.tiers.files import FileTier
from quire.tiers.host_memory import HostMemoryTier
from quire.units import format_bytes

SIZES = (2**16, 2**19, 1_835_008)  # the last one: a block of the 0.45 B model
TOTAL_BYTES = 192 * 2**20  # of the records of a size: several times the last cache
BATCH = 16
NUM_RECORDS = 10**6  # of the bookkeeping
FILE_REQUESTS = 2500  # of a trace
GOAL_RATE, GOAL_BYTES, GOAL_KEPT = 0.7, 100, 0.95
_NAMESPACE = "0123456789abcdef"
_FOREVER_S = 1e6
_MOONCAKE_S = 3540.0  # its 59 minutes
_METADATA = """
import hashlib, sys
from quire.tiers import Deadline
from quire.tiers.host_memory import HostMemoryTier

def resident():
    with open("/proc/self/smaps_rollup") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("Rss"))

count, size, over = int(sys.argv[1]), 512, Deadline.after(1e6)
record = memoryview(bytes(size))

def fill(first, last):
    for start in range(first, last, 16):
        names = [hashlib.sha256(b"%d" % n).digest() for n in range(start, start + 16)]
        tier.store(names, [record] * 16, over)

tier = HostMemoryTier(4096 * size, size)
fill(0, 8192)  # what code takes that runs for the first time is no bookkeeping
before = resident()
tier = HostMemoryTier(count * size, size)
fill(0, count)
filled = resident()
fill(count, count * 5 // 4)
print((filled - before) / count - size, (resident() - before) / count - size)
"""


@dataclass(slots=True)
class Rates:
    """One size of records."""

    num_bytes: int
    timings: dict[str, Timing] = field(default_factory=dict)

    def rate(self, name: str) -> str:
        timing, batch_bytes = self.timings[name], BATCH * self.num_bytes
        return (
            f"{batch_bytes / timing.best_s / 1e6:,.0f} / {batch_bytes / timing.median_s / 1e6:,.0f}"
        )

    def ratio(self, name: str, beside: str) -> Ratio:
        return times_as_fast(self.timings[name], self.timings[beside])


# Each beside what it is compared with.
COMPARED = (
    ("memory: load", "copy"),
    ("memory: store, evicting", "copy"),
    ("file: load", "read of a file a record"),
    ("file: load", "read of one file"),
    ("file: store, then drop", "write, then removal, of a file a record"),
    ("copy, again", "copy"),
)


# -- rates -----------------------------------------------------------------------------------------


@contextmanager
def folder(where: Path | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir=where))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def rates(num_bytes: int, where: Path | None, *, seed: int, num_rounds: int) -> Rates:
    count = TOTAL_BYTES // num_bytes // BATCH * BATCH
    draw = np.random.default_rng(seed)
    data = draw.integers(0, 256, (count, num_bytes), np.uint8)
    views = [row.data for row in data]
    into = [np.ones(num_bytes, np.uint8).data for _ in range(count)]
    names = [draw.bytes(32) for _ in range(count)]
    order = draw.permutation(count)
    batches = [order[start : start + BATCH] for start in range(0, count, BATCH)]
    with folder(where) as path:
        memory = HostMemoryTier(count * num_bytes, num_bytes)
        small = HostMemoryTier(count * num_bytes // 2, num_bytes)
        files = FileTier(path / "kv", _NAMESPACE, size_bytes=2 * TOTAL_BYTES, reserve_bytes=0)
        for tier in (memory, files):
            assert tier.store(names, views, _over()) == count
        small.store(names[: count // 2], views[: count // 2], _over())  # its pages are backed now
        one, several = _plain_files(path, views)
        calls: dict[str, Call] = {
            "copy": in_turn([_copying(into, views, batch) for batch in batches]),
            "copy, again": in_turn([_copying(into, views, batch) for batch in batches]),
            "memory: load": in_turn([_loading(memory, names, into, batch) for batch in batches]),
            "memory: store, evicting": in_turn(
                [_storing(small, names, views, batch) for batch in batches]
            ),
            "read of one file": in_turn([_reading(one, into, batch) for batch in batches]),
            "read of a file a record": in_turn(
                [_opening(several, into, batch) for batch in batches]
            ),
            "file: load": in_turn([_loading(files, names, into, batch) for batch in batches]),
            "write, then removal, of a file a record": in_turn(
                [_writing(path / "plain", views, batch) for batch in batches]
            ),
            "file: store, then drop": in_turn(
                [_replacing(files, names, views, batch) for batch in batches]
            ),
        }
        found = Rates(num_bytes, take_turns(calls, num_rounds=num_rounds, budget_s=40))
        os.close(one)
        for tier in (memory, small, files):
            tier.close()
    return found


def _over() -> Deadline:
    return Deadline.after(_FOREVER_S)


def _plain_files(path: Path, views: list[memoryview]) -> tuple[int, list[str]]:
    (path / "plain").mkdir()
    paths = [str(path / "plain" / str(number)) for number in range(len(views))]
    for name, view in zip(paths, views, strict=True):
        Path(name).write_bytes(view)
    with (path / "one").open("wb") as file:
        file.writelines(views)
    return os.open(path / "one", os.O_RDONLY), paths


def _copying(into: list[memoryview], views: list[memoryview], batch: Any) -> Call:
    pairs = [(np.asarray(into[number]), np.asarray(views[number])) for number in batch]

    def copy() -> None:
        for buffer, view in pairs:
            np.copyto(buffer, view)

    return copy


def _reading(descriptor: int, into: list[memoryview], batch: Any) -> Call:
    pairs = [(into[number], int(number) * len(into[number])) for number in batch]

    def read() -> None:
        for buffer, start in pairs:
            assert os.preadv(descriptor, [buffer], start) == len(buffer)

    return read


def _opening(paths: list[str], into: list[memoryview], batch: Any) -> Call:
    pairs = [(paths[number], into[number]) for number in batch]

    def read() -> None:
        for path, buffer in pairs:
            descriptor = os.open(path, os.O_RDONLY)
            assert os.preadv(descriptor, [buffer], 0) == len(buffer)
            os.close(descriptor)

    return read


def _writing(path: Path, views: list[memoryview], batch: Any) -> Call:
    several = [(f"{path}/new-{number}", f"{path}/kept-{number}", views[number]) for number in batch]

    def write() -> None:
        for tmp, name, view in several:
            descriptor = os.open(tmp, os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(descriptor, view)
            os.close(descriptor)
            os.rename(tmp, name)
        for _, name, _ in several:  # as the tier's records are dropped before the next ones
            os.unlink(name)

    return write


def _loading(tier: Tier, names: list[bytes], into: list[memoryview], batch: Any) -> Call:
    some, buffers = [names[number] for number in batch], [into[number] for number in batch]

    def load() -> None:
        assert tier.load(some, buffers, _over()) == BATCH

    return load


def _storing(tier: Tier, names: list[bytes], views: list[memoryview], batch: Any) -> Call:
    some, records = [names[number] for number in batch], [views[number] for number in batch]

    def store() -> None:
        assert tier.store(some, records, _over()) == BATCH

    return store


def _replacing(tier: Tier, names: list[bytes], views: list[memoryview], batch: Any) -> Call:
    others = [bytes(reversed(name)) for name in (names[number] for number in batch)]
    records = [views[number] for number in batch]

    def store() -> None:
        assert tier.store(others, records, _over()) == BATCH
        tier.drop(others, _over())

    return store


def rate_tables(several: list[Rates]) -> Iterator[Table]:
    names = list(several[0].timings)
    yield Table(
        title="MB a second, best / median of the clean samples",
        columns=("what", *(format_bytes(each.num_bytes) for each in several)),
        rows=[[name, *(each.rate(name) for each in several)] for name in names],
    )
    yield Table(
        title="Times as fast as the plain one, median (least … greatest) of the pairs",
        columns=("what", "plain", *(format_bytes(each.num_bytes) for each in several)),
        rows=[
            [name, plain, *(_said(each.ratio(name, plain)) for each in several)]
            for name, plain in COMPARED
        ],
    )


def _said(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} ({ratio.least:.2f} … {ratio.greatest:.2f})"


# -- bookkeeping -----------------------------------------------------------------------------------


def metadata_bytes() -> tuple[float, float]:
    """Bytes a record besides its own: when the tier is full, and after a quarter was evicted."""
    done = subprocess.run(
        [sys.executable, "-c", _METADATA, str(NUM_RECORDS)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    full, evicting = map(float, done.stdout.split())
    return full, evicting


# -- what is kept ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Percent of the prompts' tokens that were found, by who keeps the blocks."""

    millions: int  # of tokens that are kept
    percent: dict[str, float]


def kept(trace: PrefixTrace, sizes: list[int], say: Callable[[str], None]) -> Iterator[Kept]:
    future = Optimum(prompts(trace))
    for millions in sizes:
        num_blocks = millions * 10**6 // BLOCK_TOKENS
        say(f"{trace.name}, {millions} M tokens")

        def share(found: Any) -> float:
            return 100 * float(found.hit_tokens) / trace.num_tokens

        def nothing(_: int) -> None:
            pass

        yield Kept(
            millions=millions,
            percent={
                "lru": share(replay(trace, num_blocks, "lru", nothing)),
                "memory": hit_percent(trace, partial(memory_tier, num_blocks), _MOONCAKE_S),
                DEFAULT_POLICY: share(replay(trace, num_blocks, DEFAULT_POLICY, nothing)),
                "optimum": share(optimum(trace, future, num_blocks, nothing)),
            },
        )


def kept_in_files(trace: PrefixTrace, millions: int) -> Table:
    """Replay the first requests: each file takes a fraction of a millisecond, and they are many."""
    part = PrefixTrace(
        name=trace.name,
        chains=trace.chains[:FILE_REQUESTS],
        prompt_tokens=trace.prompt_tokens[:FILE_REQUESTS],
    )
    seconds = _MOONCAKE_S * len(part.chains) / len(trace.chains)
    num_blocks = millions * 10**6 // BLOCK_TOKENS
    lru = replay(part, num_blocks, "lru", lambda _: None)
    rows = [
        ["the pool, LRU", f"{100 * lru.hit_tokens / part.num_tokens:.2f}"],
        ["memory", f"{hit_percent(part, partial(memory_tier, num_blocks), seconds):.2f}"],
        ["file", f"{file_hit_percent(part, num_blocks, seconds):.2f}"],
    ]
    title = f"… of its first {FILE_REQUESTS:,} requests"
    return Table(title=title, columns=("who keeps", f"{millions} M tokens"), rows=rows)


def kept_table(several: list[Kept]) -> Table:
    names = {"lru": "the pool, LRU", DEFAULT_POLICY: f"the pool, `{DEFAULT_POLICY}` (default)"}
    rows = [
        [names.get(name, name), *(f"{each.percent[name]:.2f}" for each in several)]
        for name in several[0].percent
    ]
    columns = ("who keeps", *(f"{each.millions} M tokens" for each in several))
    return Table(title="Hits in percent of prompt tokens, Mooncake", columns=columns, rows=rows)


# -- the command -----------------------------------------------------------------------------------


def bench_tiers(
    *,
    traces: Annotated[
        Path | None, typer.Option(help="Folder of the traces; without it nothing is replayed.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Millions of tokens that are kept.")] = "1,4,16",
    where: Annotated[
        Path | None,
        typer.Option(help="Folder for the files. Default: the system's, for temporary ones."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Samples of each.")] = 15,
    seed: Annotated[int, typer.Option(help="Of the order and the bytes.")] = 0,
    claims: WithClaims = False,
    output: Output = None,
) -> None:
    """Measure the tiers in host memory and in files."""
    run = Run("tiers.bench_tiers", width=180)
    several = []
    for num_bytes in SIZES:
        run.say(f"records of {format_bytes(num_bytes)}")
        several.append(rates(num_bytes, where, seed=seed, num_rounds=rounds))
    run.say("bookkeeping of a million records")
    full, evicting = metadata_bytes()
    tables, found = list(rate_tables(several)), list[Kept]()
    if traces is not None:
        try:
            trace = mooncake(traces)
        except TraceUnavailable as error:
            raise typer.BadParameter(f"--traces: {error}") from error
        millions = [int(size) for size in sizes.split(",")]
        found = list(kept(trace, millions, run.say))
        run.say("files")
        tables += [kept_table(found), kept_in_files(trace, millions[0])]
    notes = [
        f"Bookkeeping of {NUM_RECORDS:,} records in memory, in a process of its own: "
        f"{full:.1f} bytes each, {evicting:.1f} after a quarter more was stored."
    ]
    flags = " --traces …" if traces else ""
    run.end(
        tables,
        run.setting(f"{flags} --seed {seed}", packages=["numpy"], also=["one thread"]),
        notes=notes,
        claims=_claims(several, full, found) if claims else (),
        output=output,
    )


def _claims(several: list[Rates], full: float, found: list[Kept]) -> Iterator[dict[str, Any]]:
    for each in several:
        ratio = each.ratio("file: load", "read of a file a record").median
        yield {
            "claim": f"file tier, records of {each.num_bytes} B, over a plain cached read",
            "ours": round(ratio, 3),
            "peer": 1,
            "unit": "times",
            "ratio": round(ratio, 3),
            "goal": GOAL_RATE,
            "holds": ratio >= GOAL_RATE,
        }
    yield {
        "claim": f"bookkeeping of {NUM_RECORDS} records in memory",
        "ours": round(full, 1),
        "peer": None,
        "unit": "bytes a record",
        "ratio": None,
        "goal": GOAL_BYTES,
        "holds": full <= GOAL_BYTES,
    }
    for size in found:
        ours, pool = size.percent["memory"], size.percent[DEFAULT_POLICY]
        ratio = ours / pool
        yield {
            "claim": f"Mooncake, {size.millions} M tokens: hits of the memory tier over the pool's",
            "ours": round(ours, 2),
            "peer": round(pool, 2),
            "unit": "% of tokens",
            "ratio": round(ratio, 3),
            "goal": GOAL_KEPT,
            "holds": ratio >= GOAL_KEPT,
        }


if __name__ == "__main__":
    typer.run(bench_tiers)
