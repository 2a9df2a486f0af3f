"""How fast the tiers of some addresses take records and give them back.

    python -m benchmarks.tiers.bench_address 'file:/tmp/kv?size=4GiB' redis://127.0.0.1:6379

Any address of --kv-tier, so that a store of one's own can be measured. Addresses take turns within
a round; the first one has a second turn, which is the noise. Records have new names in each round,
and are dropped at its end. What an engine adds, checksums or seals and copies into the cache, is
not in these figures: benchmarks.tiers.bench_restart has the whole.
"""

import hashlib
import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Annotated

import typer

from benchmarks.harness.os_memory import machine
from benchmarks.harness.report import Output, Table, markdown, replace_section
from quire.tiers import TIERS, Deadline, Tier, TierAddress
from quire.units import format_bytes, parse_bytes

NAMESPACE = "0123456789abcdef"
WITHIN_S = 60.0  # of a call
FIGURES = ("store, MB/s", "load, MB/s", "find, µs")


def main(
    addresses: Annotated[list[str], typer.Argument(help="As --kv-tier takes them.")],
    sizes: Annotated[str, typer.Option(help="Of records, separated by commas.")] = "256KiB,1792KiB",
    records: Annotated[int, typer.Option(help="Of a call.")] = 16,
    rounds: int = 9,
    output: Output = None,
) -> None:
    """Print the median, least and greatest rate of each address, and of pairs with the first."""
    tables = []
    for size in map(parse_bytes, sizes.split(",")):
        found = measure(addresses, size, records, rounds)
        tables.append(_table(found, size, records))
    text = markdown(tables, [], f"{machine()}; {records} records a call, {rounds} rounds.")
    print(text)
    if output is not None:
        replace_section(output, "bench_address", text)


def measure(
    addresses: list[str], size: int, records: int, rounds: int
) -> dict[str, list[tuple[float, ...]]]:
    """Return ``FIGURES`` of each address, round by round; the first one's again at the end."""
    found: dict[str, list[tuple[float, ...]]] = {
        name: [] for name in (*addresses, f"{addresses[0]}, again")
    }
    with ExitStack() as opened:
        tiers = []
        for text in (*addresses, addresses[0]):
            address = TierAddress.parse(text)
            tier = TIERS.find(address.kind, "ADDRESS")(address, size, NAMESPACE)
            opened.callback(tier.close)
            tiers.append(tier)
        turns = list(zip(found, tiers, strict=True))
        for number in range(rounds):
            for name, tier in turns[number % len(turns) :] + turns[: number % len(turns)]:
                found[name].append(_sample(tier, f"{name} {number}", size, records))
    return found


def _sample(tier: Tier, salt: str, size: int, records: int) -> tuple[float, ...]:
    names = [hashlib.sha256(f"{salt} {number}".encode()).digest() for number in range(records)]
    data = [memoryview(os.urandom(size)) for _ in names]
    into = [memoryview(bytearray(os.urandom(1) * size)) for _ in names]  # pages that are there
    took_s = list[float]()
    calls: tuple[Callable[[], int], ...] = (
        lambda: tier.store(names, data, Deadline.after(WITHIN_S)),
        lambda: tier.load(names, into, Deadline.after(WITHIN_S)),
        lambda: tier.find(names, Deadline.after(WITHIN_S)),
    )
    for call in calls:
        begun_s = perf_counter()
        count = call()
        took_s.append(perf_counter() - begun_s)
        if count != records:
            raise RuntimeError(f"{salt}: {count} of {records} records: is there room for them?")
    if data != into:
        raise RuntimeError(f"{salt}: other bytes came back")
    tier.drop(names, Deadline.after(WITHIN_S))
    stored_s, loaded_s, found_s = took_s
    megabytes = records * size / 1e6
    return megabytes / stored_s, megabytes / loaded_s, found_s * 1e6


def _table(found: dict[str, list[tuple[float, ...]]], size: int, records: int) -> Table:
    base = next(iter(found.values()))
    rows = []
    for name, several in found.items():
        again = ", again" if name.endswith(", again") else ""
        row = [name.removesuffix(again).partition("?")[0] + again]
        for at in range(len(FIGURES)):
            row.append(_spread([each[at] for each in several], "{:,.0f}"))
        for at in range(2):
            pairs = zip(several, base, strict=True)
            row.append(_spread([one[at] / other[at] for one, other in pairs], "{:.2f}"))
        rows.append(row)
    columns = ("tier", *FIGURES, "store × the first", "load × the first")
    return Table(title=f"{records} records of {format_bytes(size)}", columns=columns, rows=rows)


def _spread(values: list[float], form: str) -> str:
    least, most = form.format(min(values)), form.format(max(values))
    return f"{form.format(statistics.median(values))} ({least} … {most})"


if __name__ == "__main__":
    typer.run(main)
