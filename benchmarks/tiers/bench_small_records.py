"""What a file tier adds to reading small files: the first time that each is used, and again.

    python -m benchmarks.tiers.bench_small_records --rounds 6

New files each round, 1,536 records of 64 KiB in random order, in batches of 16, all in the page
cache. Beside each batch a plain read of as many other files of that age, twice. A first use writes
the file's time; a second one in ten seconds does not.
"""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from quire.tiers import Deadline
from quire.tiers.files import FileTier

BATCH = 16
_FOREVER_S = 1e6


def main(
    rounds: int = 6,
    kib: Annotated[int, typer.Option(help="Of a record.")] = 64,
    records: Annotated[int, typer.Option(help="In a round.")] = 1536,
    seed: int = 0,
) -> None:
    """Print microseconds a record, and how many times as fast as a plain read."""
    taken: dict[str, list[float]] = {}
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            _round(Path(folder), kib * 1024, records // BATCH * BATCH, seed + number, taken)
    for name, own in taken.items():
        plain = taken["plain, again" if "again" in name else "plain"]
        ratios = sorted(a / b for a, b in zip(plain, own, strict=True))
        low, high = (ratios[int(share * len(ratios))] for share in (0.25, 0.75))
        print(
            f"{name:18} best {min(own) * 1e6:6.2f} µs, median {statistics.median(own) * 1e6:6.2f}; "
            f"× plain {statistics.median(ratios):.3f} ({low:.3f} … {high:.3f}), {len(own)} batches"
        )


def _round(
    folder: Path, num_bytes: int, count: int, seed: int, taken: dict[str, list[float]]
) -> None:
    draw, over = np.random.default_rng(seed), Deadline.after(_FOREVER_S)
    views = [row.data for row in draw.integers(0, 256, (count, num_bytes), np.uint8)]
    into = [np.ones(num_bytes, np.uint8).data for _ in range(count)]
    names = [draw.bytes(32) for _ in range(count)]
    tier = FileTier(folder / "kv", "0" * 16, size_bytes=2 * count * num_bytes, reserve_bytes=0)
    assert tier.store(names, views, over) == count
    several: dict[str, Callable[[Sequence[int]], None]] = {}
    for name in ("plain", "plain twin"):
        (folder / name).mkdir()
        for at, view in enumerate(views):
            (folder / name / str(at)).write_bytes(view)
        several[name] = _plain([f"{folder}/{name}/{at}" for at in range(count)], into)

    def load(batch: Sequence[int]) -> None:
        found = tier.load([names[at] for at in batch], [into[at] for at in batch], over)
        assert found == len(batch)

    several["tier"] = load
    rng, order = random.Random(seed), draw.permutation(count).tolist()
    for suffix in ("", ", again"):
        for start in range(0, count, BATCH):
            batch, turns = order[start : start + BATCH], list(several)
            rng.shuffle(turns)
            for name in turns:
                begun_s = time.perf_counter()
                several[name](batch)
                took_s = time.perf_counter() - begun_s
                taken.setdefault(name + suffix, []).append(took_s / BATCH)
    tier.close()


def _plain(paths: list[str], into: list[memoryview]) -> Callable[[Sequence[int]], None]:
    def read(batch: Sequence[int]) -> None:
        for at in batch:
            descriptor = os.open(paths[at], os.O_RDONLY)
            assert os.preadv(descriptor, [into[at]], 0) == len(into[at])
            os.close(descriptor)

    return read


if __name__ == "__main__":
    typer.run(main)
