"""Each published form is known by what is in the file, and read as what it says."""

import json
import tarfile
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.traces import TraceRequest, form_names, open_trace
from traces import files


def read(path: Path, form: str, **options: object) -> list[TraceRequest]:
    trace = open_trace(path, **options)  # type: ignore[arg-type]
    assert trace.form == form
    found = list(trace)
    assert list(trace) == found, "a second reading begins anew"
    assert trace.counts.num_requests == len(found)
    assert found[0].at_s == 0
    assert all(a.at_s <= b.at_s for a, b in pairwise(found))
    return found


def test_azure(tmp_path: Path) -> None:
    found = read(files.written(tmp_path, "a.csv", files.AZURE), "azure")
    assert [each.at_s for each in found] == pytest.approx([0, 4.314579, 4.541877], abs=1e-6)
    assert [(each.input_tokens, each.output_tokens) for each in found] == [
        (374, 44),
        (396, 109),
        (879, 0),
    ]
    assert not any(each.hash_ids or each.id_tokens or each.session for each in found)


def test_azure_of_2024_and_line_ends_of_windows(tmp_path: Path) -> None:
    text = "\ufeff" + files.AZURE_2024.replace("\n", "\r\n")
    found = read(files.written(tmp_path, "a.txt", text), "azure")
    assert [each.at_s for each in found] == pytest.approx([0, 0.007405, 0.99007], abs=1e-6)
    assert [each.input_tokens for each in found] == [2162, 2399, 76]


def test_burstgpt(tmp_path: Path) -> None:
    path = files.written(tmp_path, "b.csv", files.BURSTGPT)
    found = read(path, "burstgpt")
    assert [(each.at_s, each.input_tokens, each.output_tokens) for each in found] == [
        (0, 472, 18),
        (40, 1087, 230),
        (113, 417, 0),
    ]
    trace = open_trace(path)
    list(trace)
    assert trace.counts.num_without_answer == 1
    third = read(files.written(tmp_path, "c.csv", files.BURSTGPT_3), "burstgpt")
    assert [each.session for each in third] == ["a-1", None]
    assert [each.at_s for each in third] == [0, 51.5]


def test_mooncake(tmp_path: Path) -> None:
    found = read(files.written(tmp_path, "m", files.rows(files.MOONCAKE)), "mooncake")
    assert [each.at_s for each in found] == [0, 0.5, 3]
    assert [each.hash_ids for each in found] == [(0, 1, 2), (0, 1, 3), (4, 5)]
    assert {each.id_tokens for each in found} == {512}


def test_mooncakes_rows_may_name_their_blocks(tmp_path: Path) -> None:
    text = files.rows({**row, "block_size": 400} for row in files.MOONCAKE[2:])
    (found,) = read(files.written(tmp_path, "m", text), "mooncake")
    assert found.id_tokens == 400


def test_bailian(tmp_path: Path) -> None:
    found = read(files.written(tmp_path, "q.jsonl", files.bailian()), "bailian")
    assert [each.session for each in found] == [55, 9, 55, 55]
    assert [each.at_s for each in found] == pytest.approx([0, 0.1, 9, 10.5])
    assert {each.id_tokens for each in found} == {16}
    assert found[0].hash_ids == (0, 1)


def test_a_conversation_has_its_subagents_in_between(tmp_path: Path) -> None:
    path = files.written(tmp_path, "trace_0001.json", json.dumps(files.CONVERSATION))
    found = read(path, "kv-cache-tester")
    assert [(each.at_s, each.session) for each in found] == [
        (0, "trace_0001"),
        (1, "trace_0001/agent_001"),
        (3, "trace_0001"),
        (3.5, "trace_0001/agent_001"),
    ]
    assert [each.hash_ids for each in found] == [(1, 2), (7,), (1, 2, 3), (7, 8)]
    assert [each.think_s for each in found] == [0, None, 1.5, None]
    assert {each.id_tokens for each in found} == {64}


def test_conversations_share_no_ids_and_come_one_after_another(tmp_path: Path) -> None:
    folder, archive = tmp_path / "folder", tmp_path / "several.tar"
    with tarfile.open(archive, "w") as tar:
        for number in range(20):
            text = json.dumps({**files.CONVERSATION, "id": f"c{number:02}"}, indent=1).encode()
            files.written(folder, f"deep/trace_{number:02}.json", text)
            member = tarfile.TarInfo(f"deep/trace_{number:02}.json")
            member.size = len(text)
            tar.addfile(member, BytesIO(text))
    found = read(folder, "kv-cache-tester", session_interval_s=2.0, seed=3)
    assert len(found) == 80
    assert read(archive, "kv-cache-tester", session_interval_s=2.0, seed=3) == found
    assert read(folder, "kv-cache-tester", session_interval_s=2.0, seed=4) != found
    owner: dict[int, str] = {}
    for each in found:
        session = str(each.session).partition("/")[0]
        assert all(owner.setdefault(hash_id, session) == session for hash_id in each.hash_ids)
    begins = {str(each.session): each.at_s for each in reversed(found)}
    main = [begins[f"c{number:02}"] for number in range(20)]
    assert main == sorted(main)
    assert 10 < main[-1] < 100, "twenty, two seconds apart on average"
    single = read(folder / "deep/trace_00.json", "kv-cache-tester")
    assert len(single) == 4


def test_servegen(tmp_path: Path) -> None:
    found = read(files.servegen(tmp_path), "servegen", seed=5)
    by_client: dict[object, list[TraceRequest]] = {}
    for each in found:
        by_client.setdefault(each.session, []).append(each)
    # Each window has as many as its rate says: 2 × 600 and 1 × 600; 0.5 × 600.
    assert {name: len(several) for name, several in by_client.items()} == {
        "client 0": 1800,
        "client 3": 300,
    }
    begin_s = by_client["client 0"][0].at_s
    early, late = by_client["client 0"][:1200], by_client["client 0"][1200:]
    assert all(each.at_s <= 600 for each in early)
    assert {each.input_tokens for each in early} == {17, 80}
    assert 0.65 < sum(each.input_tokens == 80 for each in early) / 1200 < 0.85
    assert all(each.at_s + 600 >= 1200 and each.at_s - begin_s <= 1800 for each in late)
    assert {(each.input_tokens, each.output_tokens) for each in late} == {(300, 1), (300, 2)}
    # In its second window client 3 was seen without lengths, so those of the first stand.
    assert {each.input_tokens for each in by_client["client 3"]} == {17, 80}
    assert read(tmp_path, "servegen", seed=6) != found


def test_a_form_can_be_said(tmp_path: Path) -> None:
    path = files.written(tmp_path, "m", files.rows(files.MOONCAKE))
    assert len(list(open_trace(path, "mooncake"))) == 3
    with pytest.raises(ConfigError, match="line 1: Object missing required field `chat_id`"):
        list(open_trace(path, "bailian"))
    with pytest.raises(ConfigError, match="'moon' is none of azure, burstgpt, quire, bailian"):
        open_trace(path, "moon")
    with pytest.raises(ConfigError, match="is a folder; Mooncake's"):
        open_trace(tmp_path, "mooncake")
    assert form_names()[-2:] == ("kv-cache-tester", "servegen")
