"""A server is replaced while clients are served: no stream breaks, and no text is another one."""

import re
import signal
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from server.process import PATIENT, Process, body, events, running

LONG = [" ".join(f"{name}{number}" for number in range(260)) for name in ("red", "green", "blue")]


def answer(
    url: str, prompt: str, max_tokens: int, begun: threading.Barrier | None = None
) -> dict[str, Any]:
    """Read a stream to its end. ``begun`` waits for its first piece."""
    asked = {**body(prompt, max_tokens), "stream_options": {"include_usage": True}}
    text, found = "", dict[str, Any]()
    with (
        httpx.Client(base_url=url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=asked) as response,
    ):
        assert response.status_code == 200, response.read()
        *pieces, done = each_of(events(response), begun)
    assert done is None
    for piece in pieces:
        for choice in piece["choices"]:
            text += choice["text"]
            found["finish_reason"] = choice["finish_reason"]
        found |= piece.get("usage") or {}
    cached = (found["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    assert found["finish_reason"] == "length"
    return {"text": text, "prompt": found["prompt_tokens"], "cached": cached}


def each_of(pieces: Iterable[Any], begun: threading.Barrier | None) -> list[Any]:
    several = []
    for piece in pieces:
        if begun is not None and not several:
            begun.wait(60)
        several.append(piece)
    return several


def found_share(answers: list[dict[str, Any]]) -> float:
    return sum(each["cached"] for each in answers) / sum(each["prompt"] for each in answers)


def ask_all(server: Process) -> list[dict[str, Any]]:
    return [answer(server.url, prompt, 30) for prompt in LONG]


def test_a_server_that_is_rolled_or_killed_breaks_no_text_and_leaves_its_blocks(
    tmp_path: Path,
) -> None:
    flags = ["--kv-tier", f"file:{tmp_path}/kv", "--kv-cache-memory-bytes", "48MiB"]
    flags += ["--dtype", "float32"]  # in which other batches choose the same tokens
    begun, server = threading.Barrier(len(LONG) + 1), partial(running, *flags, script=PATIENT)
    with server() as second, ThreadPoolExecutor(len(LONG)) as clients:
        with server() as first, httpx.Client(base_url=first.url, timeout=60) as late:
            assert late.get("/health").status_code == 200  # connected, so that it asks at once
            streams = [clients.submit(answer, first.url, prompt, 120, begun) for prompt in LONG]
            begun.wait(60)
            assert re.search(r"^ *tiers +file:/", first.log, re.MULTILINE)
            first.child.send_signal(signal.SIGTERM)
            first.wait_for("told to stop")
            refused = late.post("/v1/completions", json=body("a", 1))
            assert refused.status_code == 503
            whole = [stream.result() for stream in streams]
            assert first.end() == 0
            assert "are stored for those who come after" in first.log
        rolled = ask_all(second)
    with server() as third:  # "second" was killed
        killed = ask_all(third)
    for after in (rolled, killed):
        for short, long in zip(after, whole, strict=True):
            assert long["text"].startswith(short["text"])
        assert found_share(after) > 0.5
