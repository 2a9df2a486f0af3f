"""Quire's own trace: what is written is read again, and says nothing of what was asked."""

import json
from io import BytesIO
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from quire.traces import RequestLog, open_trace
from traces import files


def logged(requests: list[list[int]], id_tokens: int = 4) -> bytes:
    file = BytesIO()
    log = RequestLog(file, id_tokens=id_tokens)
    for number, token_ids in enumerate(requests):
        log.write(number / 4, token_ids, 5 + number, f"s{number}" if number % 2 else None)
    return file.getvalue()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = files.written(tmp_path, "own.jsonl", logged([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]))
    trace = open_trace(path)
    first, second = trace
    assert trace.form == "quire"
    assert (first.at_s, first.input_tokens, first.output_tokens) == (0, 5, 5)
    assert (second.at_s, second.output_tokens, second.session) == (0.25, 6, "s1")
    assert first.session is None
    assert first.id_tokens == 4
    assert first.hash_ids[0] == second.hash_ids[0]
    assert first.hash_ids[1] != second.hash_ids[1]


@given(
    requests=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)
)
def test_ids_are_equal_where_all_before_is(requests: list[list[int]], tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    path = files.written(tmp_path_factory.mktemp("log"), "x", logged(requests))
    seen: dict[int, tuple[int, ...]] = {}
    for asked, found in zip(requests, open_trace(path), strict=True):
        assert len(found.hash_ids) == -(-len(asked) // 4)
        for number, hash_id in enumerate(found.hash_ids):
            prefix = tuple(asked[: 4 * number + 4])
            assert seen.setdefault(hash_id, prefix) == prefix
    assert len(seen) == len(set(seen.values()))


def test_lines_are_in_order_of_arrival_whichever_ends_first() -> None:
    file = BytesIO()
    log = RequestLog(file, id_tokens=4)
    head = file.getvalue()
    first, second, third = (log.begin(number, [7, 7, 7, 7]) for number in range(3))
    log.end(second, 5)
    assert file.getvalue() == head, "the first has not ended"
    log.end(first, 3)
    rows = [json.loads(line) for line in file.getvalue().splitlines()[1:]]
    assert [(row["at_s"], row["output_tokens"]) for row in rows] == [(0, 3), (1, 5)]
    log.end(third, 0)
    assert len(file.getvalue().splitlines()) == 4


def test_prompts_that_are_apart_have_no_ids_in_common() -> None:
    file = BytesIO()
    log = RequestLog(file, id_tokens=2)
    for apart in ("", "a", "b", "a"):
        log.end(log.begin(0, [1, 2, 3], apart=apart), 1)
    ids = [json.loads(line)["hash_ids"] for line in file.getvalue().splitlines()[1:]]
    assert ids[1] == ids[3]
    assert len({number for row in ids for number in row}) == 6


def test_two_files_cannot_be_compared() -> None:
    assert logged([[1, 2, 3, 4]]) != logged([[1, 2, 3, 4]])
