"""Real sockets: uvicorn as the server runs it, in this process, and clients that write bytes.

The engine is within reach, so what an ill-mannered client costs is counted and not timed.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from quire.config import ServerConfig
from quire.server.loop import _Server, uvicorn_config
from server.asking import Client, encoded, serving


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A server at a port of this machine."""

    port: int
    client: Client  # asks the same app without a network
    server: _Server
    _sockets: ExitStack  # of clients, closed with the server

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    async def connect(self, *, receive_bytes: int | None = None) -> "Peer":
        """``receive_bytes`` bounds what the system takes for a client that does not read."""
        own = self._sockets.enter_context(socket.socket())
        if receive_bytes is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        own.setblocking(False)
        await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", self.port))
        return Peer(own)


@dataclass(slots=True)
class Peer:
    """The client's end of one connection. It reads only when it is told to."""

    socket: socket.socket

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def read(self, num_bytes: int = 65_536) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.socket, num_bytes)

    async def until(self, text: bytes) -> bytes:
        """What has come when ``text`` has, or the end."""
        data = b""
        while text not in data and (part := await self.read()):
            data += part
        return data

    async def answer(self) -> tuple[int, bytes]:
        """One that has a content-length: its status and body."""
        data = await self.until(b"\r\n\r\n")
        head, _, body = data.partition(b"\r\n\r\n")
        _, _, length = head.lower().partition(b"content-length: ")
        num_bytes = int(length.partition(b"\r\n")[0] or 0)
        while len(body) < num_bytes and (part := await self.read(num_bytes - len(body))):
            body += part
        return int(head.split(b" ")[1]), body

    async def rest(self) -> bytes:
        """All until the server closes; a connection that it cuts off ends too."""
        data = b""
        with suppress(ConnectionError):
            while part := await self.read():
                data += part
        return data

    def reset(self) -> None:
        """Go without a word: RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()

    def close(self) -> None:
        self.socket.close()


def posting(body: Any, path: str = "/v1/completions", **headers: str) -> bytes:
    """A request's bytes."""
    data = body if isinstance(body, bytes) else encoded(body)
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


async def until(holds: Callable[[], object], what: str = "it holds") -> None:
    """Raises: TimeoutError."""
    try:
        async with asyncio.timeout(30):
            while not holds():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise TimeoutError(f"never: {what}") from None


@asynccontextmanager
async def listening(
    config: ServerConfig | None = None, model: Any = None, *, send_bytes: int = 0, **options: Any
) -> AsyncIterator[Listening]:
    """As ``serving``, at a port. ``send_bytes`` bounds what the system takes from the server."""
    config = config or ServerConfig()
    async with serving(config, model, **options) as client:
        with socket.socket() as own, ExitStack() as sockets:
            own.bind(("127.0.0.1", 0))
            if send_bytes:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
            own.listen(2048)
            server = _Server(uvicorn_config(client.app, config))
            running = asyncio.create_task(server.serve([own]))
            await until(lambda: server.started)
            try:
                yield Listening(
                    port=own.getsockname()[1], client=client, server=server, _sockets=sockets
                )
            finally:
                server.should_exit = True
                await running
