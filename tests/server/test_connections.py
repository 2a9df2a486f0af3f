"""Connections that end badly, or not at all: what each of them holds is given back in time."""

import asyncio
import json
import logging
import os
import resource
import socket
from contextlib import AsyncExitStack
from typing import Any

import pytest

from quire.config import ServerConfig
from quire.server.connections import STEP_BYTES, LoopErrors, StallTimer
from quire.server.logs import WithoutCutOffs
from server.asking import encoded, nothing_runs, run
from server.sockets import Listening, Peer, listening, posting, until

LONG: dict[str, Any] = {"prompt": [7] * 20, "max_tokens": 220, "temperature": 0, "ignore_eos": True}
EVENTS = {**LONG, "stream": True}
BRIEF: dict[str, Any] = {"prompt": [7], "max_tokens": 1}
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def running(server: Listening) -> int:
    return (await server.client.service.engine.usage()).num_sequences


async def until_running(server: Listening, number: int = 1) -> None:
    async with asyncio.timeout(20):
        while await running(server) < number:
            await asyncio.sleep(0.001)


def test_a_reader_who_takes_nothing_loses_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Closing waits until what is under way has been taken, so for ever: it must be cut off."""

    async def ask() -> None:
        config = ServerConfig(send_timeout=0.2)
        big = {**EVENTS, "max_tokens": 60, "n": 4, "logprobs": 20, "prompt": [7]}
        async with listening(config, send_bytes=4096) as server:
            for body in (big, {**big, "stream": False}):
                peer = await server.connect(receive_bytes=4096)
                await peer.send(posting(body))
                await until(lambda: server.num_connections, "it is connected")
                await until(lambda: not server.num_connections, "it is cut off")
                peer.close()
            await nothing_runs(server.client)

    with caplog.at_level(logging.WARNING):
        run(ask())
    # A client that does not read is no reason for an alarm.
    assert not list(filter(WithoutCutOffs().filter, caplog.records))


def test_whoever_sends_nothing_more_loses_the_connection() -> None:
    part = posting({"prompt": "a" * 200_000})
    beginnings = {
        "nothing": b"",
        "half a header": b"POST /v1/completions HT",
        "a header": part[:80],
        "half a body": part[:100_000],
        "an answer, and half a request": HEALTH + b"GET /health",
        "a body that was refused": posting(b"x" * 9000).replace(b"9000", b"99999999999"),
    }

    async def ask() -> None:
        async with listening(ServerConfig(read_timeout=0.3)) as server:
            peers = dict[str, Peer]()
            for what, data in beginnings.items():
                peers[what] = await server.connect()
                await peers[what].send(data)
            patient = await server.connect()
            await patient.send(posting(EVENTS))
            answers = {what: await peer.rest() for what, peer in peers.items()}
            assert answers["an answer, and half a request"].startswith(b"HTTP/1.1 200")
            assert answers["a body that was refused"].startswith(b"HTTP/1.1 413")
            # Who has sent all of it waits as long as it likes.
            assert b"[DONE]" in await patient.until(b"[DONE]")
            for peer in (patient, *peers.values()):
                peer.close()

    run(ask())


def test_who_is_slow_but_does_not_stand_still_is_not_cut_off() -> None:
    """On a clock of the test's own: a step of bytes in each time is enough, one byte is not."""
    steady, drip = StallTimer(60), StallTimer(60)
    for second in range(0, 600, 10):
        received = second * STEP_BYTES // 50
        assert not steady.is_over(second, waits=True, mark=received // STEP_BYTES)
    cut_off = [drip.is_over(s, waits=True, mark=s // STEP_BYTES) for s in range(0, 70, 10)]
    assert cut_off == [False] * 6 + [True]
    idle = StallTimer(60)
    assert not any(idle.is_over(s, waits=False, mark=0) for s in range(0, 600, 10))


def test_leaving_in_any_way_and_at_any_point_leaves_nothing() -> None:
    body = posting(LONG)

    def close(peer: Peer) -> None:
        peer.close()

    def half_close(peer: Peer) -> None:
        peer.socket.shutdown(socket.SHUT_WR)

    async def ask() -> None:
        async with listening(max_num_seqs=2) as server:
            admission = server.client.service.admission
            for leave in (close, half_close, Peer.reset):
                for num_sent in (1, 30, len(body) - 1):
                    peer = await server.connect()
                    await peer.send(body[:num_sent])
                    await until(lambda: server.num_connections)
                    leave(peer)
                    await until(lambda: not server.num_connections, f"{leave} after {num_sent}")
                    peer.close()
                for stream in (True, False):
                    # Two that run and one that waits behind them.
                    peers = [await server.connect() for _ in range(3)]
                    for peer in peers:
                        await peer.send(posting({**LONG, "stream": stream}))
                    await until(lambda: admission.num_under_way == 3)
                    await until_running(server, 2)
                    for peer in peers:
                        leave(peer)
                    await until(lambda: not admission.num_under_way, f"{leave} ends it")
                    # Asked between two steps, after those who left: no step later than the next.
                    assert await running(server) == 0
                    for peer in peers:
                        peer.close()
                    await until(lambda: not server.num_connections)

    run(ask())


def test_a_connection_serves_one_request_after_another() -> None:
    """Errors too, and requests sent before the answers to earlier ones have come."""

    async def ask() -> None:
        async with listening() as server:
            peer = await server.connect()
            for data, status in (
                (HEALTH, 200),
                (posting(BRIEF), 200),
                (posting(b"{"), 400),
                (posting({**BRIEF, "n": 10**6}), 400),
                (posting(BRIEF, "/v1/none"), 404),
                (posting(BRIEF, "/health"), 405),
                (b"OPTIONS /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n", 405),
                (posting(BRIEF), 200),
            ):
                await peer.send(data)
                assert (await peer.answer())[0] == status, data
            for path in ("health", "v1/completions"):
                await peer.send(f"HEAD /{path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
                head = await peer.until(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200" if path == "health" else b"HTTP/1.1 405")
                assert head.endswith(b"\r\n\r\n")  # and nothing behind it
            await peer.send(posting({**EVENTS, "max_tokens": 5}) + posting(BRIEF) + HEALTH)
            several = await peer.until(b"content-length: 0")
            assert several.count(b"HTTP/1.1 200") == 3
            assert several.index(b"[DONE]") < several.index(b"usage")
            peer.close()

    run(ask())


def test_bytes_that_are_no_http_are_refused_and_the_rest_is_served() -> None:
    hostile = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200,  # https
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n" * 20_000,
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 50_000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nx: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nx: a\0b\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ]

    async def ask() -> None:
        async with listening(ServerConfig(read_timeout=0.5)) as server:
            for data in hostile:
                peer = await server.connect()
                try:
                    await peer.send(data)
                    answer = await peer.rest()
                except ConnectionError:  # it was refused before all was sent
                    answer = b""
                assert not answer or answer.split(b" ")[1] in (b"400", b"404"), (data[:80], answer)
                peer.close()
            await until(lambda: not server.num_connections)
            assert (await server.client.get("/health")).status == 200

    run(ask())


def test_a_length_and_chunks_at_once_are_not_read_in_two_ways() -> None:
    """Whatever is made of them, what follows is not taken for a request of its own."""
    smuggled = posting(BRIEF, "/tokenize")
    data = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(smuggled))
    )

    async def ask() -> None:
        async with listening(ServerConfig(read_timeout=0.5)) as server:
            peer = await server.connect()
            await peer.send(data + smuggled)
            answers = await peer.rest()
            assert b" 200 " not in answers
            peer.close()

    run(ask())


def test_who_asks_before_sending_a_body_is_told_to_go_on_or_why_not() -> None:
    body = encoded(BRIEF)
    header = posting(body, expect="100-continue").removesuffix(body)

    async def ask() -> None:
        async with listening(ServerConfig(api_key=("key",))) as server:
            peer = await server.connect()
            await peer.send(header)
            assert (await peer.read()).startswith(b"HTTP/1.1 401")
            peer.close()
            peer = await server.connect()
            await peer.send(header.replace(b"expect", b"authorization: Bearer key\r\nexpect"))
            assert (await peer.read()).startswith(b"HTTP/1.1 100")
            await peer.send(body)
            assert b" 200 " in await peer.until(b"usage")
            peer.close()

    run(ask())


def test_slow_readers_are_sent_fewer_pieces_and_all_of_the_text() -> None:
    """What waits for each is what the transport holds, whatever it has asked for."""

    async def ask() -> None:
        async with listening(send_bytes=4096, max_num_seqs=8) as server:
            body = {**EVENTS, "logprobs": 20, "max_tokens": 230}
            whole = (await server.client.post("/v1/completions", LONG | {"max_tokens": 230})).json
            peers = [await server.connect(receive_bytes=4096) for _ in range(6)]
            for peer in peers:
                await peer.send(posting(body))
            # No client reads, and all of it is computed.
            await until(lambda: server.client.service.admission.num_under_way == 6)
            await until_running(server)
            async with asyncio.timeout(60):
                while await running(server):
                    await asyncio.sleep(0.01)
            waiting = [c.transport.get_write_buffer_size() for c in _connections(server)]
            assert max(waiting) < 2**20
            answers = await asyncio.gather(*(peer.until(b"[DONE]") for peer in peers))
            for answer in answers:
                lines = answer.decode().split("\n")
                events = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
                text = "".join(event["choices"][0]["text"] for event in events)
                assert text == whole["choices"][0]["text"]
                assert len(events) < 200
            for peer in peers:
                peer.close()

    run(ask())


def _connections(server: Listening) -> list[Any]:
    return list(server.server.server_state.connections)


def test_without_files_left_it_is_said_once_and_served_when_there_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Idle clients take all that there are; when they have gone, others are let in."""

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        async with listening() as server, AsyncExitStack() as stack:
            loop.set_exception_handler(LoopErrors())
            idle = [await server.connect() for _ in range(20)]
            await until(lambda: server.num_connections == 20)
            late = [Peer(stack.enter_context(socket.socket())) for _ in range(20)]
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            highest = max(peer.socket.fileno() for peer in (*idle, *late))
            while (own := os.dup(0)) < highest:  # holes in between
                stack.callback(os.close, own)
            os.close(own)
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
            try:
                for peer in late:
                    peer.socket.setblocking(False)
                    await loop.sock_connect(peer.socket, ("127.0.0.1", server.port))
                await until(lambda: "no client can connect" in caplog.text)
                for peer in late:
                    await peer.send(HEALTH)
                for peer in idle:
                    peer.close()
                for peer in late:
                    assert (await peer.answer())[0] == 200
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            loop.call_exception_handler(
                {"message": "Exception in callback say('secret')", "exception": OSError("secret")}
            )

    with caplog.at_level(logging.WARNING):
        run(ask())
    assert caplog.text.count("no client can connect") == 1
    assert "Exception in callback say: OSError" in caplog.text
    assert "secret" not in caplog.text
