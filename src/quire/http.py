"""As much of HTTP/1.1 as a client of OpenAI's API needs.

One request a connection, answers read as they come.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from quire.errors import ConfigError

Reader: TypeAlias = asyncio.StreamReader


class RefusedByServer(ValueError):
    """It answered, with another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status, self.text = status, text

    @property
    def reason(self) -> str:
        """OpenAI's message, if it is in there; else the beginning of what came."""
        try:
            return str(json.loads(self.text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return self.text[:300] or f"HTTP {self.status}"


class Http:
    """A server at ``http://host:port/prefix``, or https.

    Raises: ConfigError for another kind of address.
    """

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--url {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url!r} is no address: write e.g. http://localhost:8000")
        self.url = url
        self._secure = parts.scheme == "https"
        self._authority = parts.netloc.rpartition("@")[2]
        self._host, self._port = parts.hostname, port or (443 if self._secure else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = headers or {}

    async def get(self, path: str) -> Any:
        """A JSON answer. Raises: OSError, ValueError; of these RefusedByServer, as do all."""
        lines = [line async for line in self._lines("GET", path, None)]
        return json.loads(b"".join(lines))

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[str]:
        """The data of each server-sent event, up to [DONE]. Raises: OSError, ValueError."""
        async with aclosing(self._lines("POST", path, body)) as lines:
            async for line in lines:
                if line.startswith(b"data:"):
                    data = line[5:].strip().decode()
                    if data == "[DONE]":
                        return
                    yield data
        raise ValueError("the stream ended before its [DONE]")

    async def follow(self, path: str) -> AsyncIterator[tuple[str, str]]:
        """Server-sent events of a GET, (name, data), until the server ends them.

        Raises: OSError, ValueError.
        """
        name = "message"
        async with aclosing(self._lines("GET", path, None)) as lines:
            async for line in lines:
                if line.startswith(b"event:"):
                    name = line[6:].strip().decode()
                elif line.startswith(b"data:"):
                    yield name, line[5:].strip().decode()
                    name = "message"

    async def _lines(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AsyncGenerator[bytes, None]:
        """The answer's lines. Raises: OSError, ValueError for an answer that is none."""
        reader, writer = await asyncio.open_connection(
            self._host,
            self._port,
            ssl=ssl.create_default_context() if self._secure else None,
        )
        try:
            writer.write(self._request(method, path, body))
            await writer.drain()
            status, headers = await _head(reader)
            chunked = headers.get("transfer-encoding", "").lower() == "chunked"
            length = None if chunked else headers.get("content-length")
            parts = _chunks(reader) if chunked else _body(reader, length)
            if status != 200:
                text = b"".join([part async for part in parts]).decode(errors="replace")
                raise RefusedByServer(status, text)
            rest = b""
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    yield line
            yield rest
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        data = b"" if body is None else json.dumps(body).encode()
        headers = {
            "Host": self._authority,
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            "Accept": "text/event-stream, application/json",
            "Connection": "close",
            **self._headers,
        }
        lines = [f"{method} {self._prefix}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + data


async def _head(reader: Reader) -> tuple[int, dict[str, str]]:
    """Status and headers, their names in lower case."""
    first = (await reader.readline()).decode("latin-1")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/") or not rest[:3].isdigit():
        raise ValueError(f"this is no HTTP answer: {first[:80]!r}")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(rest[:3]), headers


async def _chunks(reader: Reader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\n")).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)  # the line's end after a chunk


async def _body(reader: Reader, length: str | None) -> AsyncIterator[bytes]:
    """As it comes, up to its length, or to the end of the connection."""
    left = int(length) if length is not None else None
    while left is None or left > 0:
        part = await reader.read(2**16 if left is None else min(left, 2**16))
        if not part:
            if left:
                raise ValueError(f"the answer breaks off, {left:,} bytes before its end")
            return
        left = left if left is None else left - len(part)
        yield part
