"""``quire chat``: one question or many, at any server of OpenAI's API."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import signal
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

import pytest
from rich.console import Console

from bench.sse_server import Behaviour, serving
from cli.test_commands import quire
from quire.cli.chat import Conversation, Figures, Talk, described
from quire.cli.keyboard import unseen
from quire.http import Http, RefusedByServer


@pytest.fixture
def server() -> Iterator[tuple[str, Behaviour]]:
    with serving() as found:
        yield found


def talk_to(url: str) -> tuple[Talk, Conversation, io.StringIO]:
    said = io.StringIO()
    conversation = Conversation(http=Http(url, timeout_s=30), model="tiny")
    return Talk(conversation, Console(file=said, width=200)), conversation, said


def test_one_question_is_answered_on_standard_output(
    server: tuple[str, Behaviour],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, behaviour = server
    monkeypatch.setenv("QUIRE_API_KEY", "from-the-environment")
    monkeypatch.setenv("OPENAI_API_KEY", "of another server")
    flags = ("--prompt", "Hello?", "--system", "Be brief.", "--max-tokens", "4", "--top-k", "3")
    assert quire(monkeypatch, "chat", "--url", url, *flags) == 0
    captured = capsys.readouterr()
    assert captured.out == " t0 t1 t2 t3\n"
    assert "4 tokens" in captured.err
    assert "2 of 2 prompt tokens cached" in captured.err
    path, body = behaviour.asked[0]
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello?"},
        ],
        "max_tokens": 4,
        "top_k": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert behaviour.headers[0]["Authorization"] == "Bearer from-the-environment"


def test_a_question_comes_through_a_pipe_too(
    server: tuple[str, Behaviour],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, behaviour = server
    monkeypatch.setattr(sys, "stdin", io.StringIO("What?\n"))
    assert quire(monkeypatch, "chat", "--url", url, "--model", "named") == 0
    assert behaviour.asked[0][1]["messages"] == [{"role": "user", "content": "What?\n"}]
    assert behaviour.asked[0][1]["model"] == "named"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert quire(monkeypatch, "chat", "--url", url, "--model", "named") == 1
    assert "standard input is empty" in capsys.readouterr().err


def test_a_conversation_is_kept_and_commands_change_it(
    server: tuple[str, Behaviour], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, behaviour = server
    talk, _, said = talk_to(url)
    file = tmp_path / "chat.json"
    lines = iter(
        [
            *("one", "/system Be kind.", "two", "", f"/save {file}", "/save", "/nothing"),
            *("/save /no/such/folder/x", "/help", "/reset", "three", "/exit", "never asked"),
        ]
    )
    talk.run(lambda: next(lines))
    messages = [body["messages"] for _, body in behaviour.asked]
    answer = {"role": "assistant", "content": " t0 t1 t2"}
    kind, one = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "one"}
    assert messages[0] == [one]
    assert messages[1] == [kind, one, answer, {"role": "user", "content": "two"}]
    assert messages[2] == [kind, {"role": "user", "content": "three"}]
    assert json.loads(file.read_text())["messages"] == [*messages[1], answer]
    for text in ("system: Be kind.", "5 messages are in", "/save needs the name of a file"):
        assert text in said.getvalue()
    for text in ("/nothing is not a command", "cannot be written: No such file", "/exit, /quit"):
        assert text in said.getvalue()
    assert capsys.readouterr().out == " t0 t1 t2\n" * 3


def test_the_end_of_the_input_ends_and_an_interrupt_does_not(server: tuple[str, Behaviour]) -> None:
    talk, _, said = talk_to(server[0])
    steps: Iterator[type[BaseException]] = iter([KeyboardInterrupt, EOFError])

    def read() -> str:
        raise next(steps)

    talk.run(read)
    assert "Ctrl-D or /exit ends" in said.getvalue()
    assert list(steps) == []


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(
    server: tuple[str, Behaviour],
) -> None:
    _, conversation, _ = talk_to(server[0])

    async def first_piece() -> str:
        pieces = conversation.ask("one")
        piece = await anext(pieces)
        await pieces.aclose()
        return piece.text

    assert asyncio.run(first_piece()) == " t0"
    assert conversation.messages[-1] == {"role": "assistant", "content": " t0"}
    assert conversation.figures.finish_reason is None


def test_an_interrupt_stops_the_answer_and_not_the_program(
    server: tuple[str, Behaviour], monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, conversation, said = talk_to(server[0])
    monkeypatch.setattr(sys, "stdout", InterruptedAfterOne())
    assert talk.answer("one")
    assert "stopped" in said.getvalue()
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


class InterruptedAfterOne(io.StringIO):
    def write(self, text: str) -> int:
        if text == " t1":
            raise KeyboardInterrupt
        return super().write(text)


def test_without_a_chat_template_the_text_is_continued(
    server: tuple[str, Behaviour], capsys: pytest.CaptureFixture[str]
) -> None:
    url, behaviour = server
    behaviour.has_chat = False
    talk, _, said = talk_to(url)
    assert talk.answer("def f():")
    assert talk.answer("more")
    paths = [path for path, _ in behaviour.asked]
    assert paths == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
    assert behaviour.asked[1][1]["prompt"] == "def f():"
    assert behaviour.asked[2][1]["prompt"].startswith("def f():\n t0 t1")
    assert behaviour.asked[2][1]["prompt"].endswith("\nmore")
    assert said.getvalue().count("has no chat template") == 1


def test_a_refusal_is_one_line_and_nothing_is_kept(
    server: tuple[str, Behaviour], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, behaviour = server
    talk, conversation, said = talk_to(url)
    behaviour.status = 400
    assert not talk.answer("one")
    assert "error:" in said.getvalue()
    assert "the prompt is too long" in said.getvalue()
    assert conversation.messages == []
    behaviour.status, behaviour.first_event = 200, '{"error": {"message": "it fell over"}}'
    assert not talk.answer("one")
    assert "it fell over" in said.getvalue()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--url", "http://127.0.0.1:1"), "--url http://127.0.0.1:1: /v1/models does not"),
        (("--url", "ftp://x"), "--url 'ftp://x' is not an address"),
        (("--url", "unix:"), "--url 'unix:' is not an address"),
        (("--url", "unix:/no/socket"), "--url unix:/no/socket: /v1/models does not"),
        (("--api-key", "two words"), "--api-key must be printable ASCII without spaces"),
        (("--model", "m", "--prompt", " "), "--prompt is empty"),
    ],
)
def test_bad_input_is_one_clear_line(
    flags: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert quire(monkeypatch, "chat", *flags) == 1
    err = capsys.readouterr().err
    assert said in err
    assert "two words" not in err


def test_where_no_server_is_one_is_started_and_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    nowhere = "http://127.0.0.1:1"
    monkeypatch.setattr(import_module("quire.cli.chat"), "DEFAULT_URL", nowhere)
    monkeypatch.setenv("QUIRE_API_KEY", "of-another-server")
    flags = ("--url", nowhere, "--prompt", "def add(a, b):", "--max-tokens", "4")
    assert quire(monkeypatch, "chat", *flags) == 0
    captured = capfd.readouterr()
    assert captured.out.strip()
    assert "no server at http://127.0.0.1:1: starting an engine" in " ".join(captured.err.split())
    assert "4 tokens" in captured.err
    assert "loading the demo model" in captured.err
    assert "Error" not in captured.err
    assert not list(Path(tempfile.gettempdir()).glob("quire-chat-*"))
    assert quire(monkeypatch, "chat", "./no-such-folder", *flags) == 1
    assert "there is no folder" in capfd.readouterr().err


def test_a_server_that_has_no_such_model_is_left_alone(
    server: tuple[str, Behaviour],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, behaviour = server
    started: list[str | None] = []

    @contextmanager
    def pretended(model: str | None) -> Iterator[tuple[str, str]]:
        started.append(model)
        yield url, "key"

    chat = import_module("quire.cli.chat")
    monkeypatch.setattr(chat, "own_server", pretended)
    monkeypatch.setattr(chat, "DEFAULT_URL", url)
    for model in ("tiny", "./another"):
        assert quire(monkeypatch, "chat", model, "--url", url, "--prompt", "x") == 0
    assert started == ["./another"]
    assert f"{url} has tiny: starting an engine for ./another" in " ".join(
        capsys.readouterr().err.split()
    )
    assert [body["model"] for _, body in behaviour.asked] == ["tiny", "tiny"]


def test_a_server_that_wants_a_key_says_so(
    server: tuple[str, Behaviour],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, behaviour = server
    monkeypatch.setenv("COLUMNS", "1000")
    behaviour.status = 401
    assert quire(monkeypatch, "chat", "tiny", "--url", url, "--prompt", "x") == 1
    assert "give its key with --api-key" in capsys.readouterr().err


def test_what_is_typed_during_an_answer_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        before = termios.tcgetattr(theirs)
        for number in (None, signal.SIGTERM, signal.SIGHUP):
            with suppress(SystemExit), unseen():
                assert not termios.tcgetattr(theirs)[3] & termios.ECHO
                assert termios.tcgetattr(theirs)[3] & termios.ISIG
                if number is not None:
                    signal.raise_signal(number)
                    pytest.fail("it went on")
            assert termios.tcgetattr(theirs) == before
    os.close(ours)


def test_a_reason_is_openais_message_or_what_came() -> None:
    assert RefusedByServer(400, '{"error": {"message": "too long"}}').reason == "too long"
    assert RefusedByServer(502, "<html>").reason == "<html>"
    assert RefusedByServer(502, "").reason == "HTTP 502"


def test_figures_are_said_in_a_line() -> None:
    figures = Figures(output_tokens=11, ttft_s=0.5, elapsed_s=2.5, finish_reason="length")
    assert described(figures) == "11 tokens, 5.0 tokens/s, first after 500 ms, ended by length"
