"""A Quire server in a process of its own, and a client that costs little: for benchmarks.

The client writes ready-made bytes and looks for events in what comes back; it parses nothing that
is not asked for.
"""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_COMMAND = "from quire.cli import main; main()"


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """What runs, and what the system says of it."""

    port: int
    pid: int

    def memory(self) -> tuple[int, int]:
        """(resident, private) bytes."""
        rollup = (Path("/proc") / str(self.pid) / "smaps_rollup").read_text()
        kilobytes = {k: int(v) for k, v in re.findall(r"^(\w+): +(\d+) kB", rollup, re.M)}
        private = kilobytes["Private_Dirty"] + kilobytes["Private_Clean"]
        return 1024 * kilobytes["Rss"], 1024 * private

    def cpu_s(self) -> float:
        """Seconds on any processor so far."""
        return parent_and_cpu_s(self.pid)[1]


def parent_and_cpu_s(pid: int) -> tuple[int, float]:
    """A process's parent, and its seconds on any processor so far. Raises: OSError."""
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), (int(fields[11]) + int(fields[12])) * _TICK_S


@contextmanager
def apart() -> Iterator[set[int]]:
    """The processors that are left while this thread keeps to one of them: for ``server``.

    Who asks a lot takes a processor's time, and must not take the server's. With only one there is
    nothing to part.
    """
    all_of_them = os.sched_getaffinity(0)
    own, *others = sorted(all_of_them, reverse=True)
    os.sched_setaffinity(0, {own} if others else all_of_them)
    try:
        yield set(others) or all_of_them
    finally:
        os.sched_setaffinity(0, all_of_them)


@contextmanager
def server(
    *flags: str,
    log: Path | None = None,
    processors: set[int] | None = None,
    group: Path | None = None,
    command: str = "serve",
) -> Iterator[ServerProcess]:
    """Started with flags of ``quire serve``, until the end of the block; in a control group.

    ``command``: of quire's, that serves at ``--port`` too.
    """
    threads = {} if processors is None else {"OMP_NUM_THREADS": str(len(processors))}

    def begin() -> None:
        if processors is not None:
            os.sched_setaffinity(0, processors)
        if group is not None:
            (group / "cgroup.procs").write_text("0")

    port = free_port()
    said = subprocess.DEVNULL if log is None else log.open("wb")
    child = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, command, "--port", str(port), *flags],
        stdout=said,
        stderr=said,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **threads},
        preexec_fn=begin,
    )
    try:
        _wait_until_open(child, port)
        yield ServerProcess(port, child.pid)
    finally:
        child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def free_port() -> int:
    """A port of loopback that was free just now."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port: int = own.getsockname()[1]
    return port


def _wait_until_open(child: "subprocess.Popen[bytes]", port: int) -> None:
    until_s = monotonic() + 600
    while monotonic() < until_s:
        if child.poll() is not None:
            raise RuntimeError(f"the server ended with {child.returncode}")
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as peer:
                peer.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                if b" 200 " in peer.recv(100):
                    return
        except OSError:
            pass
        sleep(0.05)
    raise TimeoutError("the server does not open")


def post(path: str, body: dict[str, Any], key: str | None = None) -> bytes:
    """A request's bytes."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"content-length: {len(data)}"]
    lines += [] if key is None else [f"authorization: Bearer {key}"]
    return "\r\n".join([*lines, "", ""]).encode() + data


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


@dataclass(slots=True)
class Answer:
    """Times are seconds from the first byte sent."""

    status: int = 0
    retry_after_s: int | None = None
    began_s: float = 0.0  # by the clock of ``perf_counter``
    first_s: float = 0.0  # to the first event, or the first byte of what is no stream
    last_s: float = 0.0
    num_events: int = 0
    gaps_s: list[float] | None = None  # between pieces as they came
    body: bytes = b""


@dataclass(slots=True)
class Wire:
    """One connection, used for one request after another."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, data: bytes, *, keeps: bool = False, leave_after: int = 0) -> Answer:
        """The answer, its body kept on demand. ``leave_after``: events, then nothing is read."""
        answer = Answer(began_s=perf_counter(), gaps_s=[])
        self.writer.write(data)
        head = await self.reader.readuntil(b"\r\n\r\n")
        answer.status = int(head[9:12])
        lower = head.lower()
        found = re.search(rb"retry-after: (\d+)", lower)
        answer.retry_after_s = int(found[1]) if found else None
        if b"transfer-encoding: chunked" not in lower:
            length = re.search(rb"content-length: (\d+)", lower)
            answer.body = await self.reader.readexactly(int(length[1]) if length else 0)
            answer.first_s = answer.last_s = perf_counter() - answer.began_s
            return answer
        await self._events(answer, keeps, leave_after)
        return answer

    async def _events(self, answer: Answer, keeps: bool, leave_after: int) -> None:
        tail, parts = b"", []
        assert answer.gaps_s is not None
        while not tail.endswith(b"0\r\n\r\n"):
            part = await self.reader.read(2**16)
            if not part:
                raise ConnectionError("the stream broke off")
            now_s = perf_counter() - answer.began_s
            num_new = part.count(b"data: ")
            if num_new:
                if answer.num_events:
                    answer.gaps_s.append(now_s - answer.last_s)
                else:
                    answer.first_s = now_s
                answer.num_events += num_new
                answer.last_s = now_s
            if keeps:
                parts.append(part)
            if leave_after and answer.num_events >= leave_after:
                break
            tail = (tail + part)[-5:]
        answer.body = b"".join(parts)

    def close(self) -> None:
        self.writer.close()


@asynccontextmanager
async def wire(
    port: int, *, receive_bytes: int | None = None, limit: int = 2**24
) -> AsyncIterator[Wire]:
    """``receive_bytes``: of the system's buffer, for a client that is to read slowly."""
    own = socket.socket()
    if receive_bytes is not None:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    own.setblocking(False)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=own, limit=limit)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


async def ask(port: int, data: bytes, **options: Any) -> Answer:
    """On a connection of its own."""
    async with wire(port) as own:
        return await own.ask(data, **options)
