"""The HTTP client of all commands: httpx, with events taken apart and errors in words."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quire.errors import ConfigError

if TYPE_CHECKING:
    import httpx

_CONNECT_S = 10.0
_END_S = 1.0  # from a stream's [DONE] to its end
_MOST_BYTES = 2**24  # of an answer that is no stream
# A proxy on another machine cannot reach this machine's loopback.
_OWN = ("all://localhost", "all://127.0.0.1", "all://[::1]")


class RefusedByServer(ValueError):
    """The server has answered with another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status, self.text = status, text

    @property
    def reason(self) -> str:
        """Return OpenAI's message if there is one; else the beginning of the answer."""
        try:
            said = str(json.loads(self.text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            said = self.text[:300] or f"HTTP {self.status}"
        return f"{said}: give its key with --api-key" if self.status == 401 else said


class Http:
    """A client of a server at ``http://host:port/prefix``, https, or a Unix socket, ``unix:/path``.

    Inside ``async with`` requests share connections; outside each of them opens its own. An answer
    that is silent for ``timeout_s`` seconds has failed.

    Raises: ConfigError for another kind of address.
    """

    def __init__(
        self, url: str, headers: dict[str, str] | None = None, *, timeout_s: float
    ) -> None:
        self._uds = url.removeprefix("unix:") if url.startswith("unix:") else None
        parts = urlsplit(_where(url))
        try:
            parts.port  # noqa: B018 - it is looked at now
        except ValueError as error:
            raise ConfigError(f"--url {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or self._uds == "":
            raise ConfigError(f"--url {url!r} is not an address: write e.g. http://localhost:8000")
        plain = parts._replace(netloc=parts.netloc.rpartition("@")[2])  # without a password
        self.url = plain.geturl() if self._uds is None else url
        self._root = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self.headers = headers or {}
        self._timeout_s = timeout_s
        self._shared: httpx.AsyncClient | None = None

    async def __aenter__(self) -> "Http":
        self._shared = self._client()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._shared is not None:
            await self._shared.aclose()
            self._shared = None

    async def get(self, path: str) -> Any:
        """Return a JSON answer. Raises: OSError; ValueError, RefusedByServer among them."""
        async with self._answer("GET", path) as answer:
            return json.loads(await _whole(answer))

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[str, None]:
        """Yield the data of each server-sent event, up to [DONE].

        A caller that leaves early closes it (``contextlib.aclosing``). Raises: OSError, ValueError.
        """
        async with aclosing(self._events("POST", path, body)) as events:
            async for _, data in events:
                if data != "[DONE]":
                    yield data
                    continue
                # A connection can be used again when all of its answer has been read.
                with suppress(TimeoutError):
                    async with asyncio.timeout(_END_S):
                        async for _ in events:
                            pass
                return
        raise ValueError("the stream ended before its [DONE]")

    def follow(self, path: str) -> AsyncGenerator[tuple[str, str], None]:
        """Yield name and data of a GET's server-sent events until the server ends them.

        A caller that leaves early closes it. Raises: OSError, ValueError.
        """
        return self._events("GET", path, None)

    async def _events(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AsyncGenerator[tuple[str, str], None]:
        name = "message"
        async with self._answer(method, path, body) as answer, aclosing(_lines(answer)) as lines:
            async for line in lines:
                if line.startswith(b"event:"):
                    name = line[6:].strip().decode()
                elif line.startswith(b"data:"):
                    yield name, line[5:].strip().decode()
                    name = "message"

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> "AsyncIterator[httpx.Response]":
        """Give an answer of status 200, to be read inside the block. Raises: OSError, also while it
        is read; RefusedByServer.
        """
        import httpx  # takes 0.1 s, and most commands ask no server

        try:
            async with AsyncExitStack() as stack:
                client = self._shared
                if client is None:
                    client = await stack.enter_async_context(self._client())
                answer = await stack.enter_async_context(
                    client.stream(method, self._root + path, json=body)
                )
                if answer.status_code != 200:
                    text = (await _whole(answer)).decode(errors="replace")
                    raise RefusedByServer(answer.status_code, text)
                yield answer
        except httpx.TimeoutException as error:
            connects = isinstance(error, httpx.ConnectTimeout)
            silent_s = _CONNECT_S if connects else self._timeout_s
            raise TimeoutError(f"{self.url} said nothing for {silent_s:g} s") from error
        except httpx.RequestError as error:
            raise ConnectionError(f"{self.url}: {str(error) or type(error).__name__}") from error

    def _client(self) -> "httpx.AsyncClient":
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=self._uds, limits=limits) if self._uds else None,
            headers={
                "Accept": "text/event-stream, application/json",
                "Accept-Encoding": "identity",  # a compressed stream comes late
                **self.headers,
            },
            timeout=httpx.Timeout(self._timeout_s, connect=_CONNECT_S, pool=None),
            limits=limits,
            mounts=dict.fromkeys(_OWN),
            verify=ssl.create_default_context(),  # the system's certificates
        )


def _where(url: str) -> str:
    """Return an address that ``urlsplit`` can read; for a Unix socket, the name by which it is
    asked.
    """
    if url.startswith("unix:"):
        return "http://localhost"
    return url if "//" in url else f"http://{url}"


async def _lines(answer: "httpx.Response") -> AsyncGenerator[bytes, None]:
    """Yield the parts between newlines, as server-sent events have them."""
    rest = b""
    async for part in answer.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
    yield rest


async def _whole(answer: "httpx.Response") -> bytes:
    """Return all bytes. Raises: ValueError if they are too many to be what was asked for."""
    parts, num_bytes = [], 0
    async for part in answer.aiter_bytes():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > _MOST_BYTES:
            raise ValueError(f"the answer is longer than {_MOST_BYTES:,} bytes")
    return b"".join(parts)
