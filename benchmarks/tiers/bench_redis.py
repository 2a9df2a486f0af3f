"""Redis as a tier: Quire's own client beside redis-py and beside a socket that is told everything.

One server, one connection each, one thread. A call loads 16 records into buffers that are there, or
stores them. The bare socket knows each length beforehand and parses nothing: what is left is the
server and the kernel. Candidates take turns (harness/quiet.py); the server runs on the same cores,
so no sample counts as undisturbed, and the pairs' spread is what says how far to trust a ratio.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import typer

from benchmarks.harness.peers import PeerUnavailable
from benchmarks.harness.quiet import Call, Ratio, Timing, take_turns, times_as_fast
from benchmarks.harness.report import Output, Run, Table, WithClaims
from quire.tiers import TIERS, Deadline, Name, Tier, TierAddress
from quire.units import format_bytes

KIB = 1024
BLOCK_BYTES = 1_835_264  # of the 0.45 B model: 16 tokens of 114,688 bytes, and a header
SIZES = (256 * KIB, 1024 * KIB, BLOCK_BYTES, 4096 * KIB)
RECORDS = 16
NAMES_FOUND = 128
WITHIN_S = 60.0
AT_LEAST = 3.0  # times as fast as redis-py
HEAD_BYTES = 16  # "$4194304\r\n" and its like
OURS, AGAIN = "ours", "ours again"

Address: TypeAlias = tuple[str, int] | str

app = typer.Typer(rich_markup_mode="markdown", add_completion=False)


@app.command()
def main(
    rounds: Annotated[int, typer.Option(help="Samples of each candidate.", min=5)] = 9,
    seed: Annotated[int, typer.Option(help="Of the records' bytes.")] = 0,
    with_claims: WithClaims = False,
    output: Output = None,
) -> None:
    """Load, store and find records in a Redis server that this starts: about three minutes."""
    run = Run("tiers.bench_redis", width=150)
    claims: list[dict[str, Any]] = []
    try:
        _require_peer()
        with _server() as addresses:
            loads, stores = _table("Loading 16 records, MB/s"), _table("Storing 16 records, MB/s")
            for transport, where in addresses.items():
                for size in SIZES:
                    run.say(f"{transport}, {format_bytes(size)}")
                    cell = _Cell(transport, where, size, np.random.default_rng(seed))
                    with closing(cell):
                        cell.fill()
                        timings = take_turns(cell.loads(), num_rounds=rounds)
                        _row(loads, cell, timings, claims, "load")
                        timings = take_turns(cell.stores(), num_rounds=rounds)
                        _row(stores, cell, timings, claims, "store")
            found = _found(addresses, rounds)
    except PeerUnavailable as error:
        print(f"SKIPPED: {error}")
        return
    run.end(
        [loads, stores, found],
        run.setting(f" --rounds {rounds} --seed {seed}", packages=["redis"], also=[_version()]),
        claims=claims if with_claims else (),
        output=output,
    )


class _Cell:
    """One size over one transport: the records, the buffers, and a connection a candidate."""

    def __init__(
        self, transport: str, where: Address, size: int, random: np.random.Generator
    ) -> None:
        """``size``: bytes of a record."""
        self.transport, self.size = transport, size
        self.names: list[Name] = [bytes([i]) * 32 for i in range(RECORDS)]
        self.records = [memoryview(random.bytes(size)) for _ in self.names]
        self.into = [memoryview(bytearray(size)) for _ in self.names]
        self.keys = [f"quire:{'0' * 16}:{name.hex()}".encode() for name in self.names]
        self.tier, self.peer, self.bare = _tier(where, size), _peer(where), _connected(where)

    def close(self) -> None:
        self.tier.close()
        self.peer.close()
        self.bare.close()

    def fill(self) -> None:
        assert self.tier.store(self.names, self.records, _soon()) == RECORDS
        for load in self.loads().values():
            for view in self.into:
                view[:] = bytes(self.size)
            load()
            assert self.into == self.records

    def loads(self) -> dict[str, Call]:
        def ours() -> None:
            assert self.tier.load(self.names, self.into, _soon()) == RECORDS

        def get() -> None:
            for key, view in zip(self.keys, self.into, strict=True):
                view[:] = self.peer.get(key)

        def mget() -> None:
            for view, value in zip(self.into, self.peer.mget(self.keys), strict=True):
                view[:] = value

        def bare() -> None:
            head = memoryview(bytearray(HEAD_BYTES))[: len(b"$%d\r\n" % self.size)]
            for key, view in zip(self.keys, self.into, strict=True):
                self.bare.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
                for part in (head, view, head[:2]):
                    _receive(self.bare, part)

        return {
            OURS: ours,
            "redis-py, GET": get,
            "redis-py, MGET": mget,
            "bare socket": bare,
            AGAIN: ours,
        }

    def stores(self) -> dict[str, Call]:
        def emptied(store: Callable[[], None]) -> Call:
            def call() -> None:
                self.tier.drop(self.names, _soon())  # ours leaves what is there
                store()

            return call

        def ours() -> None:
            assert self.tier.store(self.names, self.records, _soon()) == RECORDS

        def set_() -> None:
            for key, record in zip(self.keys, self.records, strict=True):
                self.peer.set(key, record)

        def pipeline() -> None:
            with self.peer.pipeline(transaction=False) as batch:
                for key, record in zip(self.keys, self.records, strict=True):
                    batch.set(key, record)
                batch.execute()

        def bare() -> None:
            for key, record in zip(self.keys, self.records, strict=True):
                words = (len(key), key, self.size)
                self.bare.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % words)
                self.bare.sendall(record)
                self.bare.sendall(b"\r\n")
                _receive(self.bare, memoryview(bytearray(5)))

        calls = {
            OURS: ours,
            "redis-py, SET": set_,
            "redis-py, pipeline": pipeline,
            "bare socket": bare,
            AGAIN: ours,
        }
        return {name: emptied(call) for name, call in calls.items()}


def _found(addresses: dict[str, Address], rounds: int) -> Table:
    columns: tuple[str, ...] = (
        "transport",
        OURS,
        "redis-py, pipeline",
        "ours again",
        "ours ×",
        "A/A",
    )
    table = Table(title=f"Finding {NAMES_FOUND} records, µs", columns=columns, rows=[])
    names = [bytes([i]) * 32 for i in range(NAMES_FOUND)]
    keys = [f"quire:{'0' * 16}:{name.hex()}" for name in names]
    for transport, where in addresses.items():
        tier = _tier(where, 1)
        peer = _peer(where)
        with closing(tier), closing(peer):
            tier.store(names, [memoryview(b"a")] * NAMES_FOUND, _soon())
            timings = take_turns(
                {
                    OURS: partial(_find, tier, names),
                    "redis-py, pipeline": partial(_exist, peer, keys),
                    AGAIN: partial(_find, tier, names),
                },
                num_rounds=rounds,
            )
            peer.flushall()
        took = [f"{timing.median_s * 1e6:,.0f}" for timing in timings.values()]
        against = times_as_fast(timings[OURS], timings["redis-py, pipeline"])
        noise = times_as_fast(timings[OURS], timings[AGAIN])
        table.rows.append([transport, *took, _shown(against), _shown(noise)])
    return table


def _find(tier: Tier, names: Sequence[Name]) -> None:
    assert tier.find(names, _soon()) == len(names)


def _exist(peer: Any, keys: Sequence[str]) -> None:
    with peer.pipeline(transaction=False) as batch:
        for key in keys:
            batch.exists(key)
        assert sum(batch.execute()) == len(keys)


# -- rows ------------------------------------------------------------------------------------------


def _table(title: str) -> Table:
    single, several = ("GET", "MGET") if "Loading" in title else ("SET", "pipeline")
    columns: tuple[str, ...] = (
        "transport",
        "record",
        OURS,
        f"redis-py, {single}",
        f"redis-py, {several}",
    )
    columns += ("bare socket", AGAIN, "ours × the faster redis-py", "ours × bare", "A/A")
    return Table(title=title, columns=columns, rows=[])


def _row(
    table: Table, cell: _Cell, timings: dict[str, Timing], claims: list[dict[str, Any]], verb: str
) -> None:
    num_bytes = RECORDS * cell.size
    rates = [
        f"{num_bytes / timing.median_s / 1e6:,.0f} "
        f"({num_bytes / max(timing.counted) / 1e6:,.0f} … {num_bytes / timing.best_s / 1e6:,.0f})"
        for timing in timings.values()
    ]
    peers = [timing for name, timing in timings.items() if name.startswith("redis-py")]
    peer = min(peers, key=lambda timing: timing.median_s)
    against = times_as_fast(timings[OURS], peer)
    bare = times_as_fast(timings[OURS], timings["bare socket"])
    noise = times_as_fast(timings[OURS], timings[AGAIN])
    size = format_bytes(cell.size)
    table.rows.append([cell.transport, size, *rates, _shown(against), _shown(bare), _shown(noise)])
    if verb == "load":
        claims.append(
            {
                "claim": f"Redis over {cell.transport}, loading records of {size}",
                "ours": round(num_bytes / timings[OURS].median_s / 1e6),
                "peer": round(num_bytes / peer.median_s / 1e6),
                "unit": "MB/s",
                "ratio": round(against.median, 2),
                "goal": f"at least {AT_LEAST:g} times redis-py",
                "holds": against.median >= AT_LEAST,
            }
        )


def _shown(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} ({ratio.least:.2f} … {ratio.greatest:.2f})"


# -- a server --------------------------------------------------------------------------------------


@contextmanager
def _server() -> Iterator[dict[str, Address]]:
    program = shutil.which("redis-server")
    if program is None:
        raise PeerUnavailable("redis-server is not on PATH: apt-get install redis-server")
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        path = str(folder / "redis.sock")
        options = ["--port", str(port), "--bind", "127.0.0.1", "--unixsocket", path]
        options += ["--save", "", "--appendonly", "no", "--dir", str(folder)]
        process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        opened.callback(process.wait)
        opened.callback(process.terminate)
        until = time.monotonic() + WITHIN_S
        while not os.path.exists(path):
            if process.poll() is not None or time.monotonic() > until:
                raise PeerUnavailable("redis-server does not start")
            time.sleep(0.01)
        yield {"TCP": ("127.0.0.1", port), "a Unix socket": path}


def _require_peer() -> None:
    try:
        import redis  # noqa: F401
    except ImportError:
        raise PeerUnavailable("the peer is not installed: pip install redis") from None


def _version() -> str:
    told = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True)
    return " ".join(told.stdout.split()[:3])


def _tier(where: Address, size: int) -> Tier:
    text = f"redis:{where}" if isinstance(where, str) else f"redis://{where[0]}:{where[1]}"
    address = TierAddress.parse(f"{text}?connections=1")
    return TIERS[address.kind](address, size, "0" * 16)


def _peer(where: Address) -> Any:
    import redis

    if isinstance(where, str):
        return redis.Redis(unix_socket_path=where)
    return redis.Redis(*where)


def _connected(where: Address) -> socket.socket:
    if isinstance(where, str):
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(where)
        return stream
    stream = socket.create_connection(where)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def _receive(stream: socket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        done += stream.recv_into(into[done:])


def _soon() -> Deadline:
    return Deadline.after(WITHIN_S)


if __name__ == "__main__":
    app()
