"""A full queue refuses from a request's bytes alone, as it does when it reads them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import ServerConfig
from quire.server.wire.plain import plain_post
from server.asking import run
from server.sockets import Listening, listening, posting

ASKED: dict[str, Any] = {"prompt": [5], "max_tokens": 3}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")


@asynccontextmanager
async def full(**fields: Any) -> AsyncIterator[Listening]:
    """A server whose queue has no room."""
    async with listening(ServerConfig(max_num_queued_reqs=1, **fields)) as server:
        gate = server.client.app.state.service.gate
        with gate.arrive(server.client.app.state.service.keys.caller({"x-api-key": "one"})):
            yield server


async def said(server: Listening, data: bytes) -> tuple[bytes, dict[str, str], Any]:
    """First line, headers, body."""
    peer = await server.connect()
    await peer.send(data)
    head = await peer.until(b"\r\n\r\n")
    head, _, body = head.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
    while len(body) < int(headers["content-length"]):
        body += await peer.read()
    peer.socket.close()
    return first.encode(), headers, json.loads(body)


def paths_read(server: Listening, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of requests that the app has seen, from now on."""
    seen: list[str] = []
    app = server.client.app
    stack = app.build_middleware_stack()

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await stack(scope, receive, send)

    monkeypatch.setattr(app, "middleware_stack", counting)
    return seen


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["one", "two"])
def test_it_says_what_a_request_that_is_read_is_told(
    path: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        async with full(api_key=("one", "two"), max_num_reqs_per_key=1) as server:
            seen = paths_read(server, monkeypatch)
            plain = posting(ASKED, path, x_api_key=key, x_request_id="mine")
            first, headers, body = await said(server, plain)
            assert seen == []
            # The same with a header that makes it odd, so that it is read.
            odd = posting(ASKED, path, x_api_key=key, x_request_id="mine", te="trailers")
            first_read, headers_read, body_read = await said(server, odd)
            assert seen == [path]
            assert first == first_read == b"HTTP/1.1 503 Service Unavailable"
            assert headers.pop("date")
            assert headers_read.pop("date")
            assert (headers, body) == (headers_read, body_read)
            assert headers["x-request-id"] == "mine"
            assert int(headers["retry-after"]) > 0

    run(ask())


def test_who_may_not_ask_is_told_that_and_not_that_it_is_full() -> None:
    async def ask() -> None:
        async with full(api_key=("one",)) as server:
            assert b" 401 " in (await said(server, posting(ASKED)))[0]
            strange = posting(ASKED, x_api_key="one", origin="http://elsewhere.example")
            assert b" 403 " in (await said(server, strange))[0]
        async with full(api_key=("one",), allowed_origins=("http://elsewhere.example",)) as server:
            strange = posting(ASKED, x_api_key="one", origin="http://elsewhere.example")
            first, headers, _ = await said(server, strange)
            assert b" 503 " in first
            assert headers["access-control-allow-origin"] == "http://elsewhere.example"

    run(ask())


def test_it_is_counted_and_logged_as_any_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        async with full(uvicorn_log_level="info") as server:
            with caplog.at_level("INFO", "uvicorn.access"):
                for _ in range(3):
                    await said(server, posting(ASKED))
            text = (await server.client.get("/metrics")).body.decode()
            (answers,) = (x for x in text.splitlines() if 'status="503"' in x)
            assert '"/v1/completions"' in answers
            assert answers.endswith(" 3.0")
            rejected = [x for x in text.splitlines() if 'reason="max_num_queued_reqs"' in x]
            assert any(x.endswith(" 3.0") for x in rejected)
        lines = [x.getMessage() for x in caplog.records if x.name == "uvicorn.access"]
        assert sum('"POST /v1/completions HTTP/1.1" 503' in x for x in lines) == 3

    run(ask())


def test_a_connection_that_was_turned_away_is_served_when_there_is_room() -> None:
    async def ask() -> None:
        async with listening(ServerConfig(max_num_queued_reqs=1, read_timeout=0.4)) as server:
            service = server.client.app.state.service
            peer = await server.connect()
            with service.gate.arrive(service.keys.caller({})):
                for _ in range(5):  # longer than it may be silent
                    await asyncio.sleep(0.15)
                    await peer.send(posting(ASKED))
                    assert (await peer.answer())[0] == 503
            await peer.send(posting(ASKED))
            assert (await peer.answer())[0] == 200
            with service.gate.arrive(service.keys.caller({})):
                await peer.send(posting(ASKED))
                assert (await peer.answer())[0] == 503
                await peer.send(posting({}, "/tokenize"))
                assert (await peer.answer())[0] == 400  # other paths do not join the queue

    run(ask())


def test_a_request_in_pieces_or_two_at_once_are_read() -> None:
    async def ask() -> None:
        async with full() as server:
            whole = posting(ASKED)
            for cut in (1, 20, whole.index(b"\r\n\r\n") + 2, len(whole) - 1):
                peer = await server.connect()
                await peer.send(whole[:cut])
                await asyncio.sleep(0.02)
                await peer.send(whole[cut:])
                assert (await peer.answer())[0] == 503
            peer = await server.connect()
            await peer.send(whole + whole)
            data = b""
            while data.count(b"HTTP/1.1 503") < 2:
                data += await peer.read()

    run(ask())


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        HEAD,
        HEAD + b"\r\n",
        HEAD + b"\r\n{} ",
        HEAD + b"transfer-encoding: chunked\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n{}",
        HEAD + b"content-length: 2\r\n\r\n{}",
        HEAD + b"Content-Length: 3\r\n\r\n{}",
        HEAD + b"connection: close\r\n\r\n{}",
        HEAD + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n{}",
        HEAD + b"expect: 100-continue\r\n\r\n{}",
        HEAD + b"x : y\r\n\r\n{}",
        HEAD + b"x\r\n\r\n{}",
        HEAD + b"x: a\r\n b\r\n\r\n{}",
        HEAD + b"x: a\nhost: y\r\n\r\n{}",
        HEAD + b"x: \xff\r\n\r\n{}",
        HEAD + b"x: \0\r\n\r\n{}",
        HEAD.replace(b"\r\n", b"\n") + b"\n{}",
        HEAD.replace(b"POST", b"GET") + b"\r\n{}",
        HEAD.replace(b"1.1", b"1.0") + b"\r\n{}",
        HEAD.replace(b"host: x\r\n", b"") + b"\r\n{}",
        HEAD.replace(b"length: 2", b"length: +2") + b"\r\n{}",
        HEAD.replace(b"length: 2", b"length: 2, 2") + b"\r\n{}",
        HEAD + b"x: " + b"y" * 5000 + b"\r\n\r\n{}",
    ],
)
def test_what_is_odd_is_for_the_parser(data: bytes) -> None:
    assert plain_post(data) is None


def test_a_plain_request_is_read_as_the_parser_reads_it() -> None:
    found = plain_post(HEAD + b"Authorization:  Bearer a b \r\nEmpty:\r\n\r\n{}")
    assert found is not None
    assert found.target == "/v1/completions"
    assert found.headers == {
        "host": "x",
        "content-length": "2",
        "authorization": "Bearer a b",
        "empty": "",
    }


@given(st.lists(st.sampled_from([
    HEAD[:-2], b"\r\n", b"\n", b"\r", b" ", b"{}", b"x: y", b"content-length: 2", b"\t", b":",
    b"\0", b"transfer-encoding: chunked",
])))  # fmt: skip
def test_it_never_sees_a_request_where_the_parser_sees_another(parts: list[bytes]) -> None:
    import h11

    data = b"".join(parts)
    found = plain_post(data)
    if found is None:
        return
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(data)
    events = []
    while (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
        events.append(event)
    first, *between, last = events
    assert isinstance(first, h11.Request)
    assert first.target.decode() == found.target
    assert dict(first.headers) == {k.encode(): v.encode() for k, v in found.headers.items()}
    assert isinstance(last, h11.EndOfMessage)
    assert all(isinstance(event, h11.Data) for event in between)
    assert parser.trailing_data == (b"", False)
