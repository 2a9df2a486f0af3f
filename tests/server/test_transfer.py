"""Two servers and a proxy: one computes a prompt, the other goes on with it."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.process import Process, body, events, running

WORDS = " ".join(f"word{number}" for number in range(120))
ASKED = {"model": "demo", "prompt": WORDS, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": WORDS + " and then?"}],
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
}


def flags(role: str, **extra: Any) -> list[str]:
    """Have a server wait for blocks as long as it takes: computing these prompts is quicker."""
    config = {
        "kv_connector": "QuireConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"wait_s": 60, **extra},
    }
    return [
        *("--kv-transfer-config", json.dumps(config)),
        *("--kv-cache-memory-bytes", "16MiB"),
        *("--shutdown-timeout", "60"),
    ]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"unix:{tmp_path_factory.mktemp('transfer')}/peer"


@pytest.fixture(scope="module")
def servers(where: str) -> Iterator[tuple[Process, Process]]:
    with (
        running(*flags("kv_producer", listen=where, size="8MiB")) as prefill,
        running(*flags("kv_consumer", peers=[where])) as decode,
    ):
        yield prefill, decode


def proxied(
    servers: tuple[Process, Process], path: str, body: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ask as vLLM's proxies do. Return the answers of both."""
    prefill, decode = servers
    limit = "max_output_tokens" if "input" in body else "max_tokens"
    first = {**body, limit: 1, "kv_transfer_params": {"do_remote_decode": True}}
    one = httpx.post(prefill.url + path, json=first, timeout=60).raise_for_status().json()
    second = {**body, "kv_transfer_params": one["kv_transfer_params"]}
    other = httpx.post(decode.url + path, json=second, timeout=60).raise_for_status().json()
    return one, other


def test_a_proxy_has_one_server_compute_a_prompt_and_another_go_on(
    servers: tuple[Process, Process],
) -> None:
    one, other = proxied(servers, "/v1/completions", ASKED)
    params = one["kv_transfer_params"]
    found = other["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found == params["remote_num_tokens"]
    assert found >= other["usage"]["prompt_tokens"] - 16
    assert other["choices"][0]["text"].startswith(one["choices"][0]["text"])
    prefill, _ = servers
    alone = httpx.post(prefill.url + "/v1/completions", json=ASKED, timeout=60).json()
    assert other["choices"][0]["text"] == alone["choices"][0]["text"]
    assert "kv_transfer_params" not in alone


def test_chats_and_responses_are_handed_over_too(servers: tuple[Process, Process]) -> None:
    one, other = proxied(servers, "/v1/chat/completions", CHAT)
    cached = other["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == one["kv_transfer_params"]["remote_num_tokens"] > 100
    body = {"model": "demo", "input": WORDS + " or else?", "max_output_tokens": 6, "temperature": 0}
    one, other = proxied(servers, "/v1/responses", body)
    cached = other["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == one["kv_transfer_params"]["remote_num_tokens"] > 100


def test_a_stream_says_at_its_end_what_was_left(servers: tuple[Process, Process]) -> None:
    body = {**ASKED, "stream": True, "kv_transfer_params": {"do_remote_decode": True}}
    answer = httpx.post(servers[0].url + "/v1/completions", json=body, timeout=60).text
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    assert [event for event in events if "kv_transfer_params" in event] == events[-1:]


def test_wrong_types_are_refused_and_unknown_fields_are_not(
    servers: tuple[Process, Process], tmp_path: Path
) -> None:
    for params, status in (
        ({"do_remote_decode": "yes"}, 400),
        ({"remote_port": 65_536}, 400),
        ([], 400),
        ({"tp_size": 2, "remote_block_ids": [[1, 2]]}, 200),
        (None, 200),
    ):
        body = {**ASKED, "prompt": "a", "kv_transfer_params": params}
        answer = httpx.post(servers[1].url + "/v1/completions", json=body, timeout=60)
        assert answer.status_code == status, answer.text
        assert status == 200 or "kv_transfer_params" in answer.json()["error"]["param"]


def test_a_server_that_is_told_to_stop_leaves_its_prompts_to_another(
    servers: tuple[Process, Process], where: str
) -> None:
    """By SIGTERM, with a stream under way, which goes on to its end."""
    asked = {**ASKED, "prompt": f"import os\n{WORDS}"}
    with (
        running(*flags("kv_consumer", peers=[where], drain_to=where)) as old,
        httpx.Client(base_url=old.url, timeout=60) as client,
    ):
        expected = client.post("/v1/completions", json=asked).raise_for_status().json()
        streamed = {**body(f"import sys\n{WORDS}", 300), "stream_options": {"include_usage": True}}
        with client.stream("POST", "/v1/completions", json=streamed) as response:
            pieces = events(response)
            next(pieces)
            old.child.send_signal(signal.SIGTERM)
            old.wait_for("told to stop")
            *_, last, usage, done = pieces
        assert last is not None
        assert last["choices"][0]["finish_reason"] == "length"
        assert usage is not None
        assert usage["usage"]["completion_tokens"] == 300
        assert done is None
        assert old.end() == 0
        found = re.search(r"(\d+) cached blocks are stored for those who come after", old.log)
        assert found is not None, old.log
        assert "Traceback" not in old.log
    heir = servers[0]
    answer = httpx.post(heir.url + "/v1/completions", json=asked, timeout=60).json()
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 16
    # The stream's prompt and what it was answered, too.
    longer = {**streamed, "stream": False, "max_tokens": 1}
    del longer["stream_options"]
    usage = httpx.post(heir.url + "/v1/completions", json=longer, timeout=60).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 16
    assert int(found[1]) >= 2 * (usage["prompt_tokens"] // 16)
