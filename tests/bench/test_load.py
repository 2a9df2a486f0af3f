"""How a workload is sent, to whom, and what is kept of the answers."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from bench.sse_server import Behaviour, Framing, serving
from quire.bench.load import AnswerPiece, CompletionsServer, Outcome, first_model, send, send_all
from quire.bench.workload import Query
from quire.errors import ConfigError
from quire.http import Http

QUERY = Query(token_ids=[5, 6, 7], max_tokens=4)


class Actor:
    """Answers with given pieces; notes how many are answered at once."""

    def __init__(self, *pieces: AnswerPiece | Exception) -> None:
        self._pieces = pieces
        self.now = self.most = self.num_asked = 0

    async def answer(self, query: Query) -> AsyncIterator[AnswerPiece]:
        self.now += 1
        self.num_asked += 1
        self.most = max(self.most, self.now)
        try:
            for piece in self._pieces:
                await asyncio.sleep(0)
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            self.now -= 1


def sent(*pieces: AnswerPiece | Exception) -> Outcome:
    return asyncio.run(send(Actor(*pieces), QUERY))


def test_an_answer_is_timed_piece_by_piece() -> None:
    outcome = sent(
        AnswerPiece(text="a"), AnswerPiece(text="b"), AnswerPiece(text="c", num_tokens=2)
    )
    assert (outcome.text, outcome.output_tokens, outcome.prompt_tokens) == ("abc", 4, 3)
    assert outcome.succeeded
    assert len(outcome.itls_s) == 2
    assert outcome.ttft_s > 0
    assert outcome.latency_s == pytest.approx(outcome.ttft_s + sum(outcome.itls_s))


def test_a_piece_without_tokens_is_not_timed_and_what_the_server_counts_counts() -> None:
    usage = AnswerPiece(num_tokens=0, prompt_tokens=9, output_tokens=7, cached_tokens=2)
    outcome = sent(AnswerPiece(num_tokens=0), AnswerPiece(text="a"), usage)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (9, 7, 2)
    assert outcome.itls_s == []
    assert outcome.latency_s == outcome.ttft_s


def test_what_fails_says_why_and_the_others_go_on() -> None:
    assert sent().error == "the answer has no tokens"
    assert sent(AnswerPiece(num_tokens=0)).error == "the answer has no tokens"
    half = sent(AnswerPiece(text="a"), ValueError("broken"))
    assert (half.error, half.succeeded, half.text) == ("ValueError: broken", False, "a")
    assert half.latency_s == half.ttft_s


@pytest.mark.parametrize("most", [1, 3, None])
def test_no_more_than_allowed_are_under_way(most: int | None) -> None:
    actor, ended = Actor(AnswerPiece(text="a"), AnswerPiece(text="b")), []
    queries = [QUERY] * 10
    outcomes, duration_s = asyncio.run(
        send_all(actor, queries, max_concurrency=most, report=lambda: ended.append(1))
    )
    assert actor.most == (most or 10)
    assert (len(outcomes), len(ended), actor.now) == (10, 10, 0)
    assert all(outcome.succeeded and outcome.queue_s >= 0 for outcome in outcomes)
    assert duration_s >= max(outcome.latency_s for outcome in outcomes)
    if most == 1:  # each waits for all before it
        for before, after in pairwise(outcomes):
            assert after.start_s >= before.start_s + before.latency_s


def test_nothing_is_sent_before_its_time() -> None:
    queries = [Query(token_ids=[1], max_tokens=1, at_s=at) for at in (0.06, 0.0, 0.03)]
    outcomes, _ = asyncio.run(send_all(Actor(AnswerPiece(text="a")), queries))
    begin = outcomes[1].start_s
    assert outcomes[2].start_s - begin >= 0.029
    assert outcomes[0].start_s - begin >= 0.059


# -- a server elsewhere ---------------------------------------------------------------------------


def ask(url: str, query: Query = QUERY, **options: Any) -> Outcome:
    settings = dict(temperature=0.0, ignore_eos=True)
    return asyncio.run(
        send(CompletionsServer(Http(url, timeout_s=30), "tiny", **{**settings, **options}), query)
    )


@pytest.mark.parametrize("framing", ["chunked", "length", "until-close"])
@pytest.mark.parametrize("cut", [1, 7, 40, 10**9])
def test_streams_are_read_however_they_are_framed_and_torn(framing: Framing, cut: int) -> None:
    with serving() as (url, behaviour):
        behaviour.framing, behaviour.cut_in_pieces_of = framing, cut
        outcome = ask(url)
    assert outcome.error == ""
    assert outcome.text == " t0 t1 t2 t3"
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (3, 4, 2)
    assert len(outcome.itls_s) == 3


def test_the_request_is_openais() -> None:
    with serving() as (url, behaviour):
        ask(url)
        ask(f"{url}/v1", ignore_eos=False, temperature=0.5)
        asyncio.run(
            send(
                CompletionsServer(
                    Http(f"{url}/proxy/", {"Authorization": "Bearer x"}, timeout_s=30),
                    "m",
                    temperature=0.0,
                    ignore_eos=True,
                ),
                QUERY,
            )
        )
    (path, body), (second_path, second), (third_path, third) = behaviour.asked
    assert body == {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert (path, second_path, third_path) == (
        "/v1/completions",
        "/v1/completions",
        "/proxy/v1/completions",
    )
    assert "ignore_eos" not in second
    assert (second["temperature"], third["model"]) == (0.5, "m")
    assert "Authorization" not in behaviour.headers[0]
    assert behaviour.headers[2]["Authorization"] == "Bearer x"


def test_a_server_that_does_not_count_is_counted_by_pieces() -> None:
    with serving() as (url, behaviour):
        behaviour.tells_usage = False
        outcome = ask(url)
    assert (outcome.prompt_tokens, outcome.output_tokens) == (3, 4)


def break_off(behaviour: Behaviour) -> None:
    behaviour.num_events_before_end = 2


def break_off_with_length(behaviour: Behaviour) -> None:
    behaviour.framing, behaviour.num_events_before_end = "length", 2


def end_without_done(behaviour: Behaviour) -> None:
    behaviour.framing, behaviour.num_events_before_end = "until-close", 2


def refuse(behaviour: Behaviour) -> None:
    behaviour.status = 400


def say_an_error(behaviour: Behaviour) -> None:
    behaviour.first_event = '{"error": {"message": "out of memory"}}'


def say_nonsense(behaviour: Behaviour) -> None:
    behaviour.first_event = "{nonsense"


@pytest.mark.parametrize(
    ("how", "error"),
    [
        (break_off, "incomplete chunked read"),
        (break_off_with_length, "without sending complete message body"),
        (end_without_done, "ended before its [DONE]"),
        (refuse, 'HTTP 400: {"error": "the prompt is too long"}'),
        (say_an_error, "out of memory"),
        (say_nonsense, "JSONDecodeError"),
    ],
)
def test_an_answer_that_goes_wrong_has_failed(how: Any, error: str) -> None:
    with serving() as (url, behaviour):
        how(behaviour)
        outcome = ask(url)
    assert not outcome.succeeded
    assert error in outcome.error


def test_no_server_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert "ConnectionError" in ask(url).error
        with pytest.raises(ConfigError, match=r"/v1/models does not list a model .*--model"):
            asyncio.run(first_model(Http(url, timeout_s=30)))


def test_a_server_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its backlog takes connections
        http = Http(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.05)
        with pytest.raises(ConfigError, match=r"said nothing for 0\.05 s"):
            asyncio.run(first_model(http))


def test_connections_are_kept_for_the_next_request() -> None:
    async def ask_often(url: str) -> list[Outcome]:
        async with Http(url, timeout_s=30) as http:
            target = CompletionsServer(http, "tiny", temperature=0.0, ignore_eos=True)
            await first_model(http)
            return [await send(target, QUERY) for _ in range(3)]

    with serving() as (url, behaviour):
        behaviour.keeps_alive = True
        outcomes = asyncio.run(ask_often(url))
    assert all(outcome.succeeded for outcome in outcomes)
    assert behaviour.num_connections == 1


def test_only_a_newline_ends_a_line() -> None:
    """JSON may hold other characters that end a line of text."""
    text = "a\u2028b\x85c"
    with serving() as (url, behaviour):
        behaviour.first_event = json.dumps({"choices": [{"text": text}]}, ensure_ascii=False)
        assert ask(url).text.startswith(text)


def test_no_proxy_is_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving() as (url, _):
        assert ask(url).succeeded


def test_the_server_names_its_model() -> None:
    with serving() as (url, behaviour):
        assert asyncio.run(first_model(Http(url, timeout_s=30))) == "tiny"
        for wrong in ({"data": []}, {}, [], "x", {"data": [{}]}):
            behaviour.models = wrong
            with pytest.raises(ConfigError, match="Is the server up"):
                asyncio.run(first_model(Http(url, timeout_s=30)))


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:y", "http://x:99999", "//"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Http(url, timeout_s=30)
