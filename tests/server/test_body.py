"""Bodies: what is no JSON, or may be read in two ways, is refused before anything is done."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import ServerConfig
from quire.server.schemas.completion_request import CompletionRequest
from quire.server.wire.body import check, ignored, parse
from quire.server.wire.error_responses import Refused
from server.asking import nothing_runs, run, serving

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
BAD = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",  # a byte order mark
    b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt": "a", "stream_options": {"include_usage": 1, "include_usage": 2}}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": -Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": "a", "logit_bias": ' + b'{"a":' * 30_000 + b"1" + b"}" * 30_000 + b"}",
    b'{"prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    b'{"prompt": "a"} {}',
    b"prompt=a&max_tokens=3",
]


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_what_is_no_plain_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refused) as refused:
        check(parse(body), CompletionRequest)
    assert refused.value.status == 400
    assert len(refused.value.message) < 500


@given(JSON)
def test_json_is_read_as_json(value: Any) -> None:
    body = json.dumps({"a": value}).encode()
    try:
        assert parse(body) == json.loads(body)
    except Refused:
        assert "Infinity" in body.decode()


@given(st.dictionaries(st.sampled_from(CompletionRequest.__struct_fields__), JSON))
def test_whatever_the_fields_are_the_answer_is_a_struct_or_a_refusal(fields: Any) -> None:
    value: Any = None
    with suppress(Refused):
        value = check(fields, CompletionRequest)
    assert value is None or isinstance(value, CompletionRequest)


def test_names_that_mean_nothing_are_said_as_far_as_they_can_be() -> None:
    given = {"known": 1, "other": 2, "a\r\nset-cookie: x": 3, "x" * 100: 4, "é": 5}
    assert ignored(given, ["known"]) == ["other"]
    assert len(ignored([f"name{i}" for i in range(1000)], [])) == 16


def test_a_long_body_is_refused_declared_or_not() -> None:
    async def ask() -> None:
        async with serving(ServerConfig(max_request_bytes=1024)) as client:
            cases: list[tuple[int, dict[str, str]]] = [
                (2000, {}),
                (1, {"content_length": "2100"}),  # refused before it is read
                (1, {"content_length": "9" * 18}),
            ]
            for length, headers in cases:
                body = {"prompt": "a" * length}
                answer = await client.post("/v1/completions", body, **headers)
                assert answer.status == 413
                assert "max_request_bytes" in answer.error["message"]
            odd = await client.post("/v1/completions", {"prompt": "a"}, content_length="9" * 5000)
            assert odd.status == 200
            await nothing_runs(client)

    run(ask())


def test_a_whole_number_may_be_written_as_a_float() -> None:
    asked = check(parse(b'{"prompt": [5.0], "max_tokens": 1.6e1}'), CompletionRequest)
    assert (asked.prompt, asked.max_tokens) == ([5], 16)
    with pytest.raises(Refused, match="max_tokens"):
        check(parse(b'{"prompt": "x", "max_tokens": 1.5}'), CompletionRequest)
