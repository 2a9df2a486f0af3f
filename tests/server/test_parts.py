"""What the parser of HTTP is given: whole small heads, a few chunks, and in the end every byte."""

import json
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz_http import send_bytes
from quire.config import ServerConfig
from quire.server.connections import MOST_HEAD_BYTES, MOST_HEAD_LINES, Malformed, Parts
from server.asking import run
from server.sockets import listening, posting

HEAD = b"POST / HTTP/1.1\r\nhost: a\r\n"
BRIEF: dict[str, Any] = {"prompt": [7], "max_tokens": 1}


def read(parts: Parts, parser: h11.Connection) -> list[bytes]:
    """All parts that there are now, each read by h11 as a connection would have it."""
    given: list[bytes] = []
    while True:
        if parser.their_state is h11.IDLE:
            part = parts.head()
        elif parser.their_state is h11.SEND_BODY:
            part = parts.of_body()
        else:
            return given
        if not part:
            return given
        given.append(part)
        parser.receive_data(part)
        while (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Request):
                headers = dict(event.headers)
                length = int(headers.get(b"content-length", 0))
                parts.body(None if b"transfer-encoding" in headers else length)


bodies = st.binary(max_size=300)
chunks = st.lists(st.binary(min_size=1, max_size=90), max_size=40)
exts = st.sampled_from([b"", b";a", b";a=b", b" ", b"\t"])
cuts = st.lists(st.integers(1, 60), max_size=20)


def cut(data: bytes, lengths: list[int]) -> list[bytes]:
    pieces = []
    for length in lengths:
        pieces.append(data[:length])
        data = data[length:]
    return [*pieces, data]


@given(body=bodies, behind=bodies, lengths=cuts)
def test_all_of_a_body_of_known_length_is_read_and_no_more(
    body: bytes, behind: bytes, lengths: list[int]
) -> None:
    parts, parser = Parts(), h11.Connection(h11.SERVER)
    given: list[bytes] = []
    head = HEAD + b"content-length: %d\r\n\r\n" % len(body)
    for piece in cut(head + body + behind, lengths):
        parts.add(piece)
        given += read(parts, parser)
    assert b"".join(given) == head + body
    assert len(parts) == len(behind)
    assert parser.their_state is h11.DONE


@given(several=chunks, ext=exts, behind=bodies, lengths=cuts)
def test_all_chunks_are_read_and_no_more(
    several: list[bytes], ext: bytes, behind: bytes, lengths: list[int]
) -> None:
    parts, parser = Parts(), h11.Connection(h11.SERVER)
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    body = b"".join(b"%x%s\r\n%s\r\n" % (len(each), ext, each) for each in several) + b"0\r\n\r\n"
    given: list[bytes] = []
    for piece in cut(head + body + behind, lengths):
        parts.add(piece)
        given += read(parts, parser)
    assert b"".join(given) == head + body
    assert len(parts) == len(behind)
    assert parser.their_state is h11.DONE
    assert max(part.count(ext + b"\r\n") for part in given) <= 2 * 16 + 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (HEAD + b"a:\r\n" * MOST_HEAD_LINES + b"\r\n", "100 lines"),
        (HEAD + b"a: " + b"b" * MOST_HEAD_BYTES, "16,384 bytes"),
        (b"GET /" + b"b" * 8000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", "8,000 bytes"),
        (HEAD + b"a: " + b"b" * MOST_HEAD_BYTES + b"\r\n\r\n", "16,384 bytes"),
        (HEAD + b"a: " + b" " * 9000 + b"\0\r\n\r\n", "control character"),
        (HEAD + b"a: " + b" " * 9000 + b"\r \r\n\r\n", "control character"),
        (HEAD + b"a: " + b" " * 9000 + b"\x0b\r\n\r\n", "control character"),
        (HEAD + b"connection: " + b"," * 1001 + b"\r\n\r\n", "1,000 commas"),
        (HEAD + b"a: " + b"b " * 2001 + b"\r\n\r\n", "2,000 blanks"),
        (HEAD + b"a: " + b"b\t" * 1001 + b"\r\n\r\n", "1,000 tabs"),
        (b"GET /" + b"%41" * 1001 + b" HTTP/1.1\r\nhost: a\r\n\r\n", "1,000 percent signs"),
        (b"\x16\x03\x01", "Invalid HTTP"),
        (b" GET", "Invalid HTTP"),
    ],
)
def test_a_head_is_refused_before_it_is_parsed(data: bytes, message: str) -> None:
    parts = Parts()
    parts.add(data)
    with pytest.raises(Malformed, match=message):
        parts.head()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"1;" + b" " * 9000 + b"\nx\r\n", "64 bytes"),
        (b"1;" + b"a" * 64, "64 bytes"),
        (b"-5\r\n", "no size"),
        (b"0x5\r\n", "no size"),
        (b"\r\n", "no size"),
        (b"1_0\r\n", "no size"),
        (b"0\r\na: b\r\n\r\n", "Trailers"),
        (b"1\r\na\r\n0\r\n\n", "Trailers"),
    ],
)
def test_chunks_are_refused_before_they_are_parsed(body: bytes, message: str) -> None:
    parts = Parts()
    parts.body(None)
    parts.add(body + b"\r\n" * 40)
    with pytest.raises(Malformed, match=message):
        parts.of_body()


def test_a_chunk_that_does_not_end_where_it_says_is_for_the_parser_to_refuse() -> None:
    parts, parser = Parts(), h11.Connection(h11.SERVER)
    parts.add(HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nabc5\r\nabcde\r\n0\r\n\r\n")
    with pytest.raises(h11.RemoteProtocolError, match="chunk footer"):
        read(parts, parser)


def test_what_comes_in_chunks_or_pieces_or_two_at_once_is_answered() -> None:
    body = json.dumps({**BRIEF, "user": "a" * 100_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"

    async def ask() -> None:
        async with listening() as server:
            peer = await server.connect()
            for size in (3, 1000, 70_000):
                cuts = [body[place : place + size] for place in range(0, len(body), size)]
                chunked = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in cuts)
                await peer.send(head + chunked + b"0\r\n\r\n")
                assert (await peer.answer())[0] == 200
            await peer.send(posting(body) * 2 + head + b"0\r\n\r\n")
            answers = await peer.until(b"bad_json")
            assert answers.count(b"HTTP/1.1 200") == 2
            peer.close()

    run(ask())


def test_two_requests_on_one_connection_may_have_a_minute_between_them() -> None:
    """``timeout_keep_alive`` counts then, and not ``read_timeout``."""

    async def ask() -> None:
        config = ServerConfig(read_timeout=0.2, timeout_keep_alive=2)
        async with listening(config) as server:
            peer = await server.connect()
            await peer.send(posting(BRIEF))
            assert (await peer.answer())[0] == 200
            (connection,) = server.server.server_state.connections
            kept: Any = connection
            begun_s = kept.loop.time()
            assert await peer.rest() == b""
            assert kept.loop.time() - begun_s > 1  # five times as long as a head may take

    run(ask())


def test_no_bytes_hold_the_event_loop_for_long(capsys: pytest.CaptureFixture[str]) -> None:
    """What is known to have held it for seconds or for ever, and some more."""
    send_bytes(10, seed=1)
    assert "ms: " in capsys.readouterr().out
