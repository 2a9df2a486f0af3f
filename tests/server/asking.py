"""A client in the same process: every byte that an app sends, when it sends it, and no network.

It can read slowly, or not at all, and leave at any moment, as clients do.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.applications import Starlette

from engine.test_llm import demo
from quire import AsyncLLM
from quire.config import ServerConfig
from quire.server.app import make_app

T = TypeVar("T")


def run(awaitable: Awaitable[T], *, at_most_s: float = 120) -> T:
    """In an event loop of its own, and not for ever."""
    return asyncio.run(asyncio.wait_for(awaitable, at_most_s))  # type: ignore[arg-type]


@dataclass
class Answer:
    """As far as it has come."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The data of each server-sent event; [DONE] as a text."""
        lines = [line for line in self.body.decode().split("\n") if line.startswith("data: ")]
        data = [line.removeprefix("data: ") for line in lines]
        return [text if text == "[DONE]" else json.loads(text) for text in data]


class Call:
    """One request under way."""

    def __init__(
        self,
        app: Starlette,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        query: str = "",
    ) -> None:
        self.answer = Answer()
        self.reads = asyncio.Event()  # cleared: nothing is taken from the server
        self.reads.set()
        self._left = asyncio.Event()
        self._came = asyncio.Condition()
        self._parts = [body]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query.encode(),
            "server": ("test", 80),
            "client": ("test", 1),
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "state": {},
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    async def until(self, num_events: int) -> Answer:
        """When so many events have come, or the end."""
        async with self._came:
            await self._came.wait_for(
                lambda: self.answer.ended or self.answer.body.count(b"data: ") >= num_events
            )
        return self.answer

    async def whole(self) -> Answer:
        await self.task
        return self.answer

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            self.answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.answer.body += message.get("body", b"")
            self.answer.ended = not message.get("more_body", False)
        async with self._came:
            self._came.notify_all()


class Client:
    """Asks one app."""

    def __init__(self, app: Starlette, key: str | None = None) -> None:
        self.app = app
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    @property
    def service(self) -> Any:
        return self.app.state.service

    def call(
        self, path: str, body: Any = None, *, method: str = "POST", query: str = "", **headers: str
    ) -> Call:
        data = body if isinstance(body, bytes) else b"" if body is None else encoded(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Call(self.app, method, path, data, {**self._headers, **named}, query)

    async def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return await self.call(path, body, **headers).whole()

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.call(path, method="GET", **headers).whole()

    def with_key(self, key: str | None) -> "Client":
        return Client(self.app, key)


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


def saying(client: Client, text: str, pieces: int = 7, reason: str = "stop") -> None:
    """Let the model say this, whatever it is asked, and end for this reason."""
    own = client.service.engine.generate

    async def generate(request: Any) -> AsyncGenerator[Any, None]:
        said = 0
        async with aclosing(own(request)) as deltas:
            async for delta in deltas:
                last = delta.finish_reason is not None
                until = len(text) if last else min(said + pieces, len(text))
                yield replace(delta, text=text[said:until], finish_reason=reason if last else None)
                said = until

    client.service.engine.generate = generate


class Slowly:
    """Observes steps: each takes long enough to be seen, until what was to be seen has been."""

    def __init__(self, pause_s: float = 0.02) -> None:
        self.pause_s, self.has_been_seen = pause_s, False

    def __call__(self, _: object) -> None:
        if not self.has_been_seen:
            time.sleep(self.pause_s)


def engine(model: Any = None, **options: Any) -> AsyncLLM:
    """Of the demo model, unless there is another."""
    defaults: dict[str, Any] = dict(max_model_len=256, kv_cache_memory_bytes="64MB", max_num_seqs=8)
    return AsyncLLM(demo() if model is None else model, **{**defaults, **options})


@asynccontextmanager
async def serving(
    config: ServerConfig | None = None,
    model: Any = None,
    *,
    llm: AsyncLLM | None = None,
    **options: Any,
) -> AsyncIterator[Client]:
    """A server in this process, over an ``engine`` of its own or over ``llm``; nothing is left.

    ``llm`` is found with nothing cached, and what it was told to be ``saying`` ends here.
    """
    async with AsyncExitStack() as stack:
        if llm is None:
            llm = await stack.enter_async_context(engine(model, **options))
        else:
            assert await llm.reset_prefix_cache()
            stack.callback(vars(llm).pop, "generate", None)
            stack.push_async_callback(llm.abort, None)
        app = make_app(llm, config or ServerConfig())
        yield Client(app)
        app.state.service.close()


async def leave_while_it_runs(client: Client, path: str, body: Any, *, events: int) -> Answer:
    """Ask, and leave: a stream after so many events, else when the engine has begun.

    What is asked for between two steps comes after the end of the request that left: so the caller
    that asks next sees that nothing is left of it.
    """
    call = client.call(path, body)
    if body["stream"]:
        await call.until(events)
    else:
        async with asyncio.timeout(20):
            while not (await client.service.engine.usage()).num_sequences:
                await asyncio.sleep(0.001)
    call.leave()
    await call.task
    assert (await client.service.engine.usage()).num_sequences == 0
    assert client.service.admission.num_under_way == 0
    return call.answer


async def nothing_runs(client: Client) -> None:
    """Until the engine has ended what it is to end. Raises: TimeoutError."""
    async with asyncio.timeout(30):
        while (
            client.service.admission.num_under_way
            or (await client.service.engine.usage()).num_sequences
        ):
            await asyncio.sleep(0.005)
