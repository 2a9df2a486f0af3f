"""vLLM's router, unmodified, before a server that computes prompts and one that goes on with them.

Its environment is made as the other clients' are: ``python tests/clients/environments.py``.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from clients.environments import python_of
from ports import held_port
from server.process import Process, events, running
from server.test_transfer import ASKED, CHAT, WORDS, flags

ROUTER = python_of("vllm-router").with_name("vllm-router")
UP_S = 60.0
MOST_PROMPTS = 20  # until one was loaded: a machine that is busy computes sooner than it loads


@contextmanager
def routed(prefill: Process, decode: Process) -> Iterator[httpx.Client]:
    with held_port() as port, held_port() as metrics_port:
        command = [
            *(str(ROUTER), "--vllm-pd-disaggregation", "--host", "127.0.0.1", "--port", str(port)),
            *("--prefill", prefill.url, "--decode", decode.url),
            *("--prometheus-port", str(metrics_port)),
        ]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=environ
        ) as process:
            try:
                with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                    _wait_for(client, process)
                    yield client
            finally:
                process.terminate()
                process.wait(10)


def _wait_for(client: httpx.Client, process: "subprocess.Popen[bytes]") -> None:
    stop_s = time.monotonic() + UP_S
    while time.monotonic() < stop_s and process.poll() is None:
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail("the router does not come up")


def _loaded_tokens(decode: Process) -> int:
    [peer] = httpx.get(decode.url + "/tiers", timeout=60).json()["data"]
    return int(peer["hit_tokens"])


@pytest.mark.skipif(not ROUTER.exists(), reason="python tests/clients/environments.py vllm-router")
def test_vllms_router_has_one_server_compute_prompts_and_another_go_on(tmp_path: Path) -> None:
    where = f"unix:{tmp_path}/peer"
    with (
        running(*flags("kv_producer", listen=where, size="8MiB")) as prefill,
        running(*flags("kv_consumer", peers=[where])) as decode,
        routed(prefill, decode) as client,
    ):
        asked: dict[str, Any]
        for path, made in (
            ("/v1/completions", lambda words: {**ASKED, "prompt": words}),
            ("/v1/chat/completions",
             lambda words: {**CHAT, "messages": [{"role": "user", "content": words}]}),
        ):  # fmt: skip
            before = _loaded_tokens(decode)
            for number in range(MOST_PROMPTS):
                asked = made(f"{number} of {path}: {WORDS}")
                answer = client.post(path, json=asked).raise_for_status().json()
                alone = httpx.post(prefill.url + path, json=asked, timeout=60).json()
                assert _said(answer) == _said(alone)
                if (loaded := _loaded_tokens(decode) - before) > 0:
                    break
            assert loaded >= answer["usage"]["prompt_tokens"] - 16
            streamed = {**made(f"as a stream, {path}: {WORDS}"), "stream": True}
            with client.stream("POST", path, json=streamed) as response:
                *pieces, done = events(response)
            assert done is None
            alone = httpx.post(
                prefill.url + path, json={**streamed, "stream": False}, timeout=60
            ).json()
            assert "".join(_said(piece) for piece in pieces if piece) == _said(alone)
        assert client.post("/v1/completions", json={**ASKED, "prompt": ""}).status_code == 400
        assert f"tier peer {where}" not in decode.log, "no failure of the peer"


def _said(answer: dict[str, Any]) -> str:
    """The text of an answer, or of a piece of one."""
    said = ""
    for choice in answer["choices"]:
        message = choice.get("message") or choice.get("delta") or {}
        said += choice.get("text") or message.get("content") or ""
    return said
