"""The server over a fleet: every API answers as over one engine, and the fleet can be seen."""

import asyncio
import json
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse
from rich.console import Console
from typer.testing import CliRunner

from fleet.replicas import OPTIONS, door, engine, fleet_of, placed_by_prefixes, until
from fleet.told import Prompt, on_the_wire
from quire import AsyncLLM
from quire.cli import command_line
from quire.cli.fleet_view import FleetView
from quire.config import ServerConfig
from quire.fleet.fleet_engine import FleetEngine
from quire.fleet.fleet_figures import FLEET_FAMILIES
from quire.fleet.fleet_status import FleetStatus
from quire.fleet.placement import RoundRobin
from quire.kv import NO_KEYS
from quire.models.loader import load
from quire.server.app import make_app
from quire.server.dashboard.frames import FEED
from quire.server.metrics import Metrics
from server.asking import Client, run, serving
from server.listening import listening

REFERENCE = Path(__file__).parents[2] / "docs/reference/metrics.md"
TEXT = "def fibonacci(n):"
MESSAGES = [{"role": "user", "content": "name a city"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}},
    "required": ["city"],
    "additionalProperties": False,
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 9}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [TEXT, "class Stack:"], **GREEDY, "logprobs": 2}),
    ("/v1/completions", {"prompt": TEXT, **GREEDY, "n": 2, "seed": 1, "temperature": 1.0}),
    (
        "/v1/completions",
        {"prompt": TEXT, "max_tokens": 5, "use_beam_search": True, "n": 2, "temperature": 0},
    ),
    ("/v1/completions/render", {"prompt": TEXT, **GREEDY}),
    ("/v1/chat/completions", {"messages": MESSAGES, **GREEDY}),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 60,
            "temperature": 0,
            "tools": TOOLS,
            "tool_choice": "required",
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 60,
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "c", "schema": CITY},
            },
        },
    ),
    ("/v1/chat/completions/render", {"messages": MESSAGES, **GREEDY}),
    ("/v1/responses", {"input": "name a city", "temperature": 0, "max_output_tokens": 16}),
    ("/v1/messages", {"messages": MESSAGES, "temperature": 0, "max_tokens": 9, "model": "demo"}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES, "model": "demo"}),
    ("/v1/embeddings", {"input": [TEXT, "class"], "encoding_format": "base64"}),
    ("/v1/score", {"text_1": TEXT, "text_2": ["def", "class"]}),
    ("/tokenize", {"prompt": TEXT}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/v1/completions", {"prompt": TEXT, "max_tokens": 10**5}),
    ("/v1/completions", {"prompt": [10**7]}),
    ("/v1/completions", {"prompt": TEXT, "structured_outputs": {"regex": "("}}),
    ("/v1/embeddings", {"input": TEXT, "dimensions": 10**5}),
]
# What differs from one answer to the next, and what caches hold.
OWN = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "request_id",
    "item_id",
    "response_id",
    "prompt_tokens_details",
    "input_tokens_details",
    "cache_read_input_tokens",
    "call_id",
    "input_tokens",
    "prompt_cache_key",
}


def test_every_api_answers_as_over_one_engine() -> None:
    async def ask() -> None:
        async with serving(llm=engine("alone")) as alone, fleet_of() as fleet:
            async with door(fleet) as client:
                for path, body in ASKED:
                    want, got = await alone.post(path, body), await client.post(path, body)
                    assert got.status == want.status, (path, body, got.body)
                    if "embeddings" in path and got.status == 200:
                        assert len(got.json["data"]) == len(want.json["data"])
                        continue  # bits of floats differ from batch to batch
                    assert got.json == alike_of(want.json, got.json), (path, body)
                for path in ("/v1/models", "/version", "/tokenizer_info", "/v1/models/demo"):
                    want, got = await alone.get(path), await client.get(path)
                    assert (got.status, got.json) == (200, alike_of(want.json, got.json)), path
                for path in ("/health", "/ping", "/", "/openapi.json"):
                    assert (await client.get(path)).status == 200, path
            assert all(each.requests for each in fleet.replicas)

    run(ask())


def alike_of(want: Any, got: Any) -> Any:
    """``want``, with what differs each time as ``got`` has it."""
    match want, got:
        case dict(), dict():
            return {
                name: got.get(name) if name in OWN else alike_of(each, got.get(name))
                for name, each in want.items()
            }
        case list(), list() if len(want) == len(got):
            return [alike_of(one, other) for one, other in zip(want, got, strict=True)]
        case float(), _:
            return pytest.approx(want, abs=0.02)  # of bf16
        case _:
            return want


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
)
def test_streams_are_those_of_one_engine_also_when_a_replica_ends(path: str) -> None:
    body: dict[str, Any] = {"stream": True, "temperature": 0}
    body |= {"prompt": TEXT} if path == "/v1/completions" else {}
    body |= {"messages": MESSAGES} if "chat" in path or path == "/v1/messages" else {}
    body |= {"input": "name a city"} if path == "/v1/responses" else {}
    body |= {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 12}
    body |= {"model": "demo"}

    async def ask() -> None:
        async with serving(llm=engine("alone")) as alone:
            want = said(await alone.post(path, body))
        for dies_at in (None, 1, 4):
            async with fleet_of(placement=RoundRobin()) as fleet, door(fleet) as client:
                fleet.replicas[0].dies_at = dies_at
                answer = await client.post(path, body)
                assert answer.status == 200
                assert said(answer) == want
                assert fleet.engine.num_resumed == (dies_at == 4)

    run(ask())


def said(answer: Any) -> tuple[str, list[str]]:
    """The text of a stream, and why it ended."""
    text, reasons = "", list[str]()

    def look(given: Any) -> None:
        nonlocal text
        if isinstance(given, dict):
            for name, each in given.items():
                if name in ("text", "content", "delta") and isinstance(each, str):
                    text += each if given.get("type") not in DONE else ""
                elif name in ("finish_reason", "stop_reason", "error") and each is not None:
                    reasons.append(json.dumps(each))
                elif given.get("type") not in DONE:
                    look(each)
        elif isinstance(given, list):
            for each in given:
                look(each)

    for event in answer.events:
        look(event)
    return text, reasons


DONE = {
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
    "response.incomplete",
}


def test_a_stream_that_cannot_go_on_ends_with_one_error_event() -> None:
    body = {"prompt": TEXT, "n": 2, "max_tokens": 40, "stream": True, "ignore_eos": True}

    async def ask() -> None:
        async with fleet_of(placement=RoundRobin()) as fleet, door(fleet) as client:
            fleet.replicas[0].dies_at = 5
            answer = await client.post("/v1/completions", body)
            errors = [event["error"] for event in answer.events if "error" in event]
            assert answer.status == 200
            assert [error["code"] for error in errors] == ["engine_unavailable"]
            assert "replica a was killed" in errors[0]["message"]
            assert "several continuations" in errors[0]["message"]
            assert answer.events[-1] == "[DONE]"
            fleet.replicas[1].mode = "dead"
            await until(lambda: fleet.engine.failure is not None)
            for path in ("/v1/completions", "/v1/chat/completions"):
                asked = {"prompt": TEXT} if path == "/v1/completions" else {"messages": MESSAGES}
                refused = await client.post(path, asked)
                assert (refused.status, refused.error["code"]) == (503, "engine_dead")
            assert (await client.get("/health")).status == 503

    run(ask())


def test_a_client_that_leaves_ends_its_request_at_the_replica() -> None:
    body = {"prompt": TEXT, "max_tokens": 400, "ignore_eos": True, "stream": True}

    async def ask() -> None:
        async with fleet_of() as fleet, door(fleet) as client:
            for stream in (True, False):
                call = client.call("/v1/completions", {**body, "stream": stream})
                async with asyncio.timeout(20):
                    while not any(
                        [(await each.llm.usage()).num_sequences for each in fleet.replicas]
                    ):
                        await asyncio.sleep(0.002)
                call.leave()
                await call.task
                await fleet.is_idle()
            assert client.service.admission.num_under_way == 0

    run(ask())


def test_what_needs_an_engine_in_this_process_says_so() -> None:
    async def ask() -> None:
        async with fleet_of("a") as fleet, door(fleet) as client:
            posts = ("/sleep", "/wake_up", "/reset_prefix_cache", "/tiers/trust")
            answers = [await client.post(path) for path in posts]
            answers += [await client.get(path) for path in ("/tiers", "/is_sleeping", FEED)]
            for answer in answers:
                assert answer.status == 501, answer.body
                assert "its engines are elsewhere" in answer.error["message"]
                assert answer.error["code"] == "no_engine_here"
            documented = (await client.get("/openapi.json")).json["paths"]
            assert "501" in documented["/sleep"]["post"]["responses"]
            assert "/fleet" in documented
        async with serving(llm=engine("alone")) as alone:
            documented = (await alone.get("/openapi.json")).json["paths"]
            assert "501" not in documented["/sleep"]["post"]["responses"]
            assert (await alone.get("/fleet")).status == 404

    run(ask())


def scraped(text: str) -> dict[tuple[str, ...], float]:
    return {
        (
            sample.name,
            *(value for name, value in sorted(sample.labels.items()) if name != "model_name"),
        ): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def test_the_fleet_is_seen() -> None:
    async def ask() -> None:
        config = ServerConfig(admin_api_key=("root",), api_key=("alice",))
        async with fleet_of(placement=RoundRobin()) as fleet, door(fleet, config) as keyless:
            alice, root = keyless.with_key("alice"), keyless.with_key("root")
            prompt = list(range(5, 105))
            body = {"prompt": prompt, **GREEDY, "ignore_eos": True}
            for _ in range(3):  # the third finds what the first has left
                assert (await alice.post("/v1/completions", body)).status == 200
            fleet.replicas[1].dies_at = 3 + fleet.replicas[1].num_pieces
            assert (await alice.post("/v1/completions", body)).status == 200
            await until(lambda: fleet.engine.members["b"].state == "lost")
            assert (await alice.get("/fleet")).status in (401, 403)
            seen = (await root.get("/fleet")).json
            first, second = seen["replicas"]
            assert seen["num_resumed_streams"] == 1
            assert (first["name"], first["state"], second["state"]) == ("a", "up", "lost")
            assert second["why"] == "replica b was killed"
            assert first["requests"] == {"length": 3}
            assert second["requests"] == {"length": 1, "lost": 1}
            sent = first["routed_tokens"].pop("none") - 300  # two pieces, of a token or more
            assert 2 <= sent < GREEDY["max_tokens"]
            assert not first["routed_tokens"]
            assert first["load"]["max_num_seqs"] == 32
            assert 0 <= first["load"]["kv_usage"] < 0.1
            assert first["found_tokens"].keys() == {"device"}
            assert seen["model"] == "demo"
            assert 0 < first["real_found_tokens"] <= 99
            figures = scraped((await root.get("/metrics")).body.decode())
            assert figures["quire:fleet_requests_total", "length", "a"] == 3
            assert figures["quire:fleet_requests_total", "lost", "b"] == 1
            assert figures["quire:fleet_resumed_streams_total",] == 1
            assert figures["quire:fleet_routed_tokens_total", "none"] == 500 + sent
            assert figures["quire:fleet_routed_tokens_total", "device"] == 0
            assert figures["quire:fleet_replica_up", "a"] == 1
            assert figures["quire:fleet_replica_up", "b"] == 0
            assert figures["quire:fleet_found_tokens_total", "a"] == first["real_found_tokens"]
            assert figures["quire:fleet_replica_found_tokens_total", "device", "a"] > 0
            assert any(name[0] == "http_requests_total" for name in figures)

    run(ask())


def test_a_scrape_has_every_engines_metrics() -> None:
    async def ask() -> None:
        llms = {name: AsyncLLM(load(), **OPTIONS) for name in "ab"}
        async with fleet_of(placement=RoundRobin(), llms=llms) as fleet, door(fleet) as client:
            for prompt_tokens in (40, 60, 50):
                body = {"prompt": list(range(5, 5 + prompt_tokens)), **GREEDY}
                assert (await client.post("/v1/completions", body)).status == 200
            figures = scraped((await client.get("/metrics")).body.decode())
            assert figures["vllm:prompt_tokens_total", "a"] == 90
            assert figures["vllm:prompt_tokens_total", "b"] == 60
            assert figures["vllm:request_prompt_tokens_count", "a"] == 2
            assert figures["quire:kv_bytes", "b", "committed"] > 0
            alone = Metrics(llms["b"].llm, "demo").render()[0].decode()
            ours, theirs = (
                {name for name, *labels in each if name.startswith(("quire:", "vllm:"))}
                for each in (figures, scraped(alone))
            )
            assert theirs <= ours
            # One that does not answer is left out, and keeps no scrape waiting.
            fleet.replicas[0].mode = "frozen"
            async with asyncio.timeout(10):
                figures = scraped((await client.get("/metrics")).body.decode())
            assert ("vllm:prompt_tokens_total", "a") not in figures
            assert figures["vllm:prompt_tokens_total", "b"] == 60
        for llm in llms.values():
            await llm.aclose()

    run(ask())


def test_a_session_is_told_to_the_placement() -> None:
    async def ask() -> None:
        config = ServerConfig(api_key=("alice", "bob"))
        async with fleet_of() as fleet, door(fleet, config) as keyless:
            alice, bob = keyless.with_key("alice"), keyless.with_key("bob")
            body = {"prompt": TEXT, **GREEDY}
            named = {**body, "user": "u", "safety_identifier": "i", "prompt_cache_key": "k"}
            header = {"x_session_id": "s"}
            for client, asked, headers in (
                (alice, body, header),
                (alice, named, header),
                (alice, {**body, "prompt_cache_key": "s"}, {}),
                (alice, named, {}),
                (alice, {**body, "safety_identifier": "i", "user": "u"}, {}),
                (alice, {**body, "user": "u"}, {}),
                (bob, {**body, "user": "u"}, {}),
                (alice, body, {}),
            ):
                answer = await client.call("/v1/completions", asked, **headers).whole()
                assert answer.status == 200
                assert "x-ignored-fields" not in answer.headers
            asked = {"model": "demo", "messages": MESSAGES, "max_tokens": 2}
            assert (await alice.call("/v1/messages", asked, **header).whole()).status == 200
            first, again, as_key, key, identifier, user, other, none, message = (
                fleet.placement.sessions
            )
            assert first == again == as_key == message
            assert len({first, key, identifier, user, other}) == 5
            assert none is None

    run(ask())


def test_quire_top_shows_the_replicas() -> None:
    def shown(view: FleetView) -> str:
        console = Console(width=100, file=StringIO())
        console.print(view)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue()

    async def ask() -> None:
        async with fleet_of(placement=RoundRobin()) as fleet, door(fleet) as client:
            body = {"prompt": TEXT, "max_tokens": 3, "temperature": 0}
            for _ in range(3):
                assert (await client.post("/v1/completions", body)).status == 200
            fleet.replicas[1].mode = "dead"
            await until(lambda: fleet.engine.members["b"].state == "lost")
            text = (await client.get("/fleet")).body
        view = FleetView("http://door", msgspec.json.decode(text, type=FleetStatus))
        title, heading, first, second, why, *_ = shown(view).splitlines()
        assert "demo, a fleet, 1 of 2 replicas up, http://door" in title
        assert heading.split()[:3] == ["replica", "state", "running"]
        assert first.split()[:2] == ["a", "up"]
        assert first.split()[8:10] == ["2", "0"]  # ended, lost
        assert "from" not in heading
        assert second.split()[:2] == ["b", "lost"]
        assert why.strip() == "b is lost: replica b was killed"
        assert "reconnecting" in shown(view.lost())

    run(ask())


def test_quire_top_of_a_door() -> None:
    """It asks for the memory feed, hears that there is no engine, and shows the fleet."""

    async def ask() -> None:
        async with fleet_of("a") as fleet, door(fleet) as client, listening(client) as url:
            asked = ["top", "--url", url, "--once"]
            found = await asyncio.to_thread(CliRunner().invoke, command_line(["top"]), asked)
            assert found.exit_code == 0, found.exception
            assert "1 of 1 replicas up" in found.output

    run(ask())


def test_the_reference_has_every_metric_of_a_fleet() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in REFERENCE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `quire:fleet_")
    ]
    want = [
        [f"`{f.name}`", f.kind, f.unit, ", ".join(f.labels) or "", f.meaning]
        for f in FLEET_FAMILIES
    ]
    assert rows == want


# -- placed by prefixes ----------------------------------------------------------------------------


def test_prefixes_stay_where_they_are_and_a_liar_costs_time_alone() -> None:
    random = Random(3)
    prefixes = [[random.randrange(5, 300) for _ in range(96)] for _ in range(6)]

    async def ask() -> None:
        async with placed_by_prefixes() as (fleet, directory):
            facts = fleet.members["a"].facts
            assert facts is not None
            client = Client(app_of(fleet))
            at: dict[int, str] = {}
            turns = [number for number in range(6) for _ in range(4)]
            random.shuffle(turns)

            def num_requests() -> dict[str, int]:
                return {name: sum(m.counts.outcomes.values()) for name, m in fleet.members.items()}

            async def sent(prompt: list[int]) -> str:
                before = num_requests()
                body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
                assert (await client.post("/v1/completions", body)).status == 200
                (name,) = [name for name, count in num_requests().items() if count > before[name]]
                return name

            async def told(name: str, prompt: list[int]) -> None:
                """Until the directory knows that a replica has a prompt's blocks."""
                hashes = directory.hashes(prompt, NO_KEYS)
                await until(
                    lambda: sum(directory.find(hashes, [name]).get(name, {}).values()) >= 96 // 16,
                    within_s=20,
                )

            for number in turns:
                prompt = [*prefixes[number], random.randrange(5, 300)]
                name = await sent(prompt)
                await told(name, prompt)
                assert at.setdefault(number, name) == name
            counts = [member.counts for member in fleet.members.values()]
            predicted = sum(each.predicted_tokens for each in counts)
            assert predicted == 18 * 96
            assert sum(each.found_tokens for each in counts) >= predicted
            # A replica that says to have what it has not gets the requests, and answers right.
            lie = [random.randrange(5, 300) for _ in range(96)]
            for number in range(len(facts.groups)):
                blocks = range(96 // facts.block_size)
                told_of = Prompt(tuple(lie)).stored(facts.block_size, blocks, number)
                directory.apply("b", on_the_wire(facts.groups, facts.block_size, told_of))
            found = sum(each.found_tokens for each in counts)
            assert await sent([*lie, 7]) == "b"
            assert sum(each.predicted_tokens for each in counts) == predicted + 96
            assert sum(each.found_tokens for each in counts) == found
            body = {"prompt": [*lie, 8], "max_tokens": 6, "temperature": 0}
            async with serving(llm=engine("alone")) as other:
                want = (await other.post("/v1/completions", body)).json["choices"]
            assert (await client.post("/v1/completions", body)).json["choices"] == want

    run(ask())


def app_of(fleet: FleetEngine) -> Any:
    return make_app(fleet, ServerConfig())
