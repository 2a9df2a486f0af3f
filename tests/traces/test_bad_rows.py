"""What is no request is refused with its file and line, or skipped and counted."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance.covering import examples
from quire.errors import ConfigError
from quire.traces import open_trace
from traces import files

GOOD = {"timestamp": 1, "input_length": 3, "output_length": 4}


def row(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes}) + "\n"


def message_of(folder: Path, text: str | bytes, name: str = "x") -> str:
    with pytest.raises(ConfigError) as caught:
        list(open_trace(files.written(folder, name, text)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{\n", "line 2: .*truncated"),
        ("[1]\n", "line 2: Expected `object`"),
        ('{"timestamp": 1}\n', "line 2: Object missing required field `input_length`"),
        (row(input_length="3"), "line 2: Expected `int`, got `str`"),
        (row(input_length=0), "line 2: a prompt of 0 tokens is not from 1 to 2,147,483,647"),
        (row(input_length=-5), "line 2: a prompt of -5 tokens"),
        (row(input_length=2**31), "line 2: a prompt of 2,147,483,648 tokens"),
        (row(input_length=10**30), "line 2: .*out of range|line 2: .*1e30|line 2: "),
        (row(input_length=3.5), "line 2: Expected `int`, got `float`"),
        (row(output_length=-1), "line 2: an answer of -1 tokens"),
        (row(timestamp=None), "line 2: Expected `float`, got `null`"),
        (row(timestamp=0), "line 2: the clock runs backwards, by 0.001 s"),
        (row(timestamp=1e308), r"line 2: a time of|line 3: the clock runs backwards"),
        (row(hash_ids=[1, 2]), "line 2: 2 hash ids of 512 tokens for a prompt of 3"),
        (row(hash_ids=[-1]), "line 2: a hash id that is not from 0 to"),
        (row(hash_ids=[2**63]), "line 2: a hash id that is not from 0 to"),
        (row(hash_ids=["a"]), "line 2: Expected `int`, got `str`"),
        (row(hash_ids=[1], block_size=0), "line 2: hash ids of 0 tokens"),
        ("\xff\xfe\n", "line 2: "),
    ],
)
def test_json_rows(bad: str, message: str, tmp_path: Path) -> None:
    text = (row() + bad + row(timestamp=2)).encode("latin-1")
    path = files.written(tmp_path, "x.jsonl", text)
    with pytest.raises(ConfigError, match=message):
        list(open_trace(path))
    if "|" not in message:
        trace = open_trace(path, max_skipped=1)
        assert [each.at_s for each in trace] == [0, 0.001]
        assert trace.counts.num_skipped == 1
        assert trace.counts.first_skipped.startswith("line 2: ")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("yesterday,1,2\n", "line 5: 'yesterday' is not a time"),
        ("2023-11-16 18:15:52,-4,2\n", "line 5: a prompt of -4 tokens"),
        ("2023-11-16 18:15:52,0,2\n", "line 5: a prompt of 0 tokens"),
        ("2023-11-16 18:15:52,4\n", "line 5: 2 columns; the header has 3"),
        ("2023-11-16 18:15:52,4,nan\n", "line 5: 'nan' is not a whole number"),
        ("2023-11-16 18:15:52,4,x\n", "line 5: 'x' is not a number"),
        ("2023-11-16 18:15:52,4,1e999\n", "line 5: '1e999' is not a whole number"),
        ("2023-11-16 18:15:40,4,2\n", "line 5: the clock runs backwards, by 11.2225 s"),
        ('"2023\n', "line 5: "),
    ],
)
def test_comma_separated_rows(bad: str, message: str, tmp_path: Path) -> None:
    said = message_of(tmp_path, files.AZURE + bad, "a.csv")
    assert message.removeprefix("line") in said
    assert "a.csv" in said
    assert "Wanted: TIMESTAMP, ContextTokens, GeneratedTokens" in said
    assert "--trace-max-skipped" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests: it is empty"),
        ("\n\n \n", "has no requests: it is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("TIMESTAMP,Tokens\n1,2\n", "'TIMESTAMP,Tokens' is of no known format"),
        ("{}\n", "line 1: '{}' is of no known format"),
        ("hello\n", "Azure's LLM inference trace"),
        (b"\x00\x01\x02" * 99, "is of no known format"),
        ('{"quire_trace": 2, "id_tokens": 16}\n', "line 1: quire_trace 2 is unknown; known: 1"),
        ('{"quire_trace": 1, "id_tokens": 0}\n', "line 1: id_tokens 0 must be at least 1"),
        ('{"quire_trace": 1}\n', "line 1: Object missing required field `id_tokens`"),
        ('{"quire_trace": 1, "id_tokens": 16}\n', "has no requests"),
        ('{"block_size": 64, "requests": []}', "missing required field `id`"),
        ('{"id": "x", "block_size": 64, "requests": []}', "has no requests"),
    ],
)
def test_files_that_are_no_traces(text: str | bytes, message: str, tmp_path: Path) -> None:
    assert message in message_of(tmp_path, text)


def test_so_many_may_be_skipped_and_no_more(tmp_path: Path) -> None:
    text = row() + "x\n" + row(timestamp=3) + "y\n" + "z\n"
    path = files.written(tmp_path, "x.jsonl", text)
    for most in (3, 4, None):
        trace = open_trace(path, max_skipped=most)
        assert len(list(trace)) == 2
        assert trace.counts.num_skipped == 3
    with pytest.raises(ConfigError, match=r"line 5: .* \(3 invalid rows; the first is line 2: "):
        list(open_trace(path, max_skipped=2))


def test_where_everything_is_skipped_nothing_is_left(tmp_path: Path) -> None:
    path = files.written(tmp_path, "x.jsonl", row(input_length=0))
    with pytest.raises(ConfigError, match=r"has no requests \(1 invalid rows; the first is line"):
        list(open_trace(path, max_skipped=None))


def test_the_first_request_sets_the_clock_not_a_skipped_row(tmp_path: Path) -> None:
    text = row(timestamp=9000, input_length=0) + row(timestamp=2000) + row(timestamp=2500)
    path = files.written(tmp_path, "x.jsonl", text)
    assert [each.at_s for each in open_trace(path, max_skipped=1)] == [0, 0.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"requests": [{"t": 0, "in": 5, "out": 1, "hash_ids": [1.5]}]},
            "hash_ids: Expected `int`",
        ),
        (
            {"requests": [{"t": 0, "in": 64, "out": 1, "hash_ids": [2**40]}]},
            "a hash id that is not",
        ),
        ({"requests": [{"t": 0, "in": 0, "out": 1}]}, "a prompt of 0 tokens"),
        ({"requests": [{"t": "now", "in": 1}]}, "Expected `float`"),
        ({"requests": 5}, "Expected `array`"),
        ({"block_size": 0}, "hash ids of 0 tokens"),
    ],
)
def test_conversations_name_their_file(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    files.written(tmp_path, "a/one.json", json.dumps(files.CONVERSATION))
    files.written(tmp_path, "a/two.json", json.dumps({**files.CONVERSATION, **change}))
    with pytest.raises(ConfigError, match=f"a, two.json: {message}"):
        list(open_trace(tmp_path / "a"))
    trace = open_trace(tmp_path / "a", max_skipped=None)
    assert len(list(trace)) == 4
    assert trace.counts.num_skipped >= 1


def test_folders_without_traces(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder without kv"):
        open_trace(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("chunk-0-trace.csv", "0,2\n", "chunk-0-trace.csv, line 1: not enough values"),
        ("chunk-0-trace.csv", "\n0,1,1,Gauss,1,1\n", "line 2: gaps of a distribution 'Gauss'"),
        ("chunk-0-trace.csv", "0,1,1,Gamma,0,1\n", "line 1: a shape of 0"),
        (
            "chunk-0-trace.csv",
            "0,1e9,1,Gamma,1,1\n",
            "1e.09 requests per second for 600 s",
        ),
        ("chunk-0-trace.csv", "0,-1,1,Gamma,1,1\n", "line 1: a rate of -1"),
        ("chunk-0-trace.csv", "9,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n", "line 2: the clock runs"),
        ("chunk-0-trace.csv", "0,0,0,,0,0\n", "has no requests|client 3"),
        ("chunk-0-dataset.json", "[]", "chunk-0-dataset.json: "),
        ("chunk-0-dataset.json", '{"0": {"input_tokens": "{1: 1}"}}', "no 'output_tokens'"),
        (
            "chunk-0-dataset.json",
            '{"0": {"input_tokens": "__import__(1)"}}',
            "is not a dictionary",
        ),
        ("chunk-0-dataset.json", '{"0": {"input_tokens": "{1: -1}"}}', "must be at least 0"),
    ],
)
def test_servegens_files_name_their_lines(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    files.written(files.servegen(tmp_path), name, text)
    if "|" in message:
        assert {each.session for each in open_trace(tmp_path)} == {"client 3"}
        return
    with pytest.raises(ConfigError, match=message):
        list(open_trace(tmp_path))


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x" * 200_000, "is of no known format"),
        (f'{{"a": {DEEP}', "is of no known format"),
        (f'{row()}{{"a": {DEEP}', "line 2: "),
        (row() + row(hash_ids=[])[:-3] + DEEP, "line 2: "),
        (f'{{"block_size": 1, "requests": {DEEP}', "x: "),
        ('{"id": "x", "block_size": 1, "requests":' + '[{"t":0,"requests":' * 3000, "x: "),
        (f'{{"quire_trace": 1, "id_tokens": 16, "x": {DEEP}', "is of no known format"),
        (f'{files.AZURE}"{"x" * 300_000}', "line 5: field larger than field limit"),
    ],
)
def test_lines_that_are_long_or_deep(text: str, message: str, tmp_path: Path) -> None:
    assert message in message_of(tmp_path, text)


def test_a_first_line_may_be_long(tmp_path: Path) -> None:
    text = row(input_length=512 * 60_000, hash_ids=[*range(60_000)])
    assert len(text) > 2**18
    (found,) = open_trace(files.written(tmp_path, "x", text))
    assert len(found.hash_ids) == 60_000


def test_forms_that_are_no_such_thing(tmp_path: Path) -> None:
    path = files.written(tmp_path, "x.csv", files.AZURE)
    with pytest.raises(ConfigError, match=r"x\.csv is not a folder; a ServeGen trace is a folder"):
        open_trace(path, "servegen")
    with pytest.raises(ConfigError, match="/dev/null is not a regular file"):
        open_trace("/dev/null")
    with pytest.raises(ConfigError, match="session_interval_s 0 must be"):
        open_trace(path, session_interval_s=0)
    for address in ("http://", "http://[", "http://a b/c", "https://x:port/"):
        with pytest.raises(ConfigError, match=r"is not a valid address|cannot be read"):
            open_trace(address)


def test_servegen_without_a_file(tmp_path: Path) -> None:
    (files.servegen(tmp_path) / "chunk-3-dataset.json").unlink()
    with pytest.raises(ConfigError, match=r"chunk-3-dataset\.json cannot be read"):
        list(open_trace(tmp_path))


@given(
    text=st.binary(max_size=200),
    head=st.sampled_from(
        [
            b"",
            *map(
                str.encode,
                (
                    files.AZURE,
                    files.BURSTGPT,
                    row(),
                    files.bailian(),
                    '{"quire_trace":1,"id_tokens":16}\n',
                    '{"id":"a","block_size":2,"requests":[',
                ),
            ),
        ]
    ),
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(50, of=150)
)
def test_no_bytes_give_anything_but_requests_or_our_error(
    text: bytes, head: bytes, tmp_path: Path
) -> None:
    path = files.written(tmp_path, "x", head + text)
    for most in (0, None):
        try:
            for each in open_trace(path, max_skipped=most):
                assert each.problem() is None
        except ConfigError:
            continue
