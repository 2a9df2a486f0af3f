"""The log to plan with: a line for each continuation, and no word of what was said."""

from pathlib import Path
from typing import Any

import pytest

from quire.config import ServerConfig
from quire.errors import ConfigError
from quire.server.logs import RequestWriter
from quire.traces import open_trace
from server.asking import leave_while_it_runs, nothing_runs, run, serving

WORD = "canary"
PROMPT = f"{WORD} and a prompt of more than sixteen tokens, so that there is a whole block of it. "


def asked(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, **fields}


def test_what_the_server_is_asked_is_a_trace_without_texts(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"

    async def ask() -> None:
        async with serving(ServerConfig(request_log=str(path))) as client:
            for body in (asked(), asked(n=2, temperature=1), asked(cache_salt="other"), {"n": -1}):
                await client.post("/v1/completions", body)
            chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}
            await client.post("/v1/chat/completions", {**chat, "ignore_eos": True})
            long = asked(max_tokens=100, stream=True)
            await leave_while_it_runs(client, "/v1/completions", long, events=2)
            await nothing_runs(client)

    run(ask())
    found = list(open_trace(path))
    outputs = [each.output_tokens for each in found]
    assert outputs[:5] == [5, 5, 5, 5, 3]
    assert 1 <= outputs[5] < 100, "who leaves has had a part"
    first, second, third, salted = (each.hash_ids for each in found[:4])
    assert len(first) > 1
    assert first == second == third == found[5].hash_ids
    assert not set(first) & set(salted)
    assert all(each.problem() is None for each in found)
    assert WORD.encode() not in path.read_bytes()


def test_without_the_option_nothing_is_written(tmp_path: Path) -> None:
    async def ask() -> None:
        async with serving() as client:
            assert client.service.request_log is None
            assert (await client.post("/v1/completions", asked())).status == 200

    run(ask())


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists already: name another file"):
        RequestWriter(str(path))
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        RequestWriter(str(tmp_path / "no" / "x"))
    assert path.read_text() == "mine"
