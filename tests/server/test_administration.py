"""What an operator does with a running server: it forgets, sleeps, wakes up, and says its load."""

import asyncio
import re
import threading
from typing import Any

import pytest

from engine.test_offloading import kind, offload, until
from quire.config import ServerConfig
from quire.errors import MemoryUnavailable
from quire.tiers import Tier
from quire.tiers.host_memory import HostMemoryTier
from server.asking import Answer, Client, Slowly, nothing_runs, run, serving
from server.random_requests import TEMPLATE
from tiers.faulty import FaultyTier

PROMPT = list(range(20, 84))
KEYED = ServerConfig(api_key=("client",), admin_api_key=("operator",))


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}


async def cached_tokens(client: Client) -> int:
    answer = await client.post("/v1/completions", body())
    assert answer.status == 200, answer.body
    number: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


async def is_sleeping(client: Client) -> bool:
    said: bool = (await client.get("/is_sleeping")).json["is_sleeping"]
    return said


async def asked(client: Client, path: str, query: str = "") -> Answer:
    return await client.call(path, query=query).whole()


def test_the_prefix_cache_is_forgotten_also_while_requests_run_if_they_may_begin_anew() -> None:
    async def ask() -> None:
        async with serving() as client:
            assert [await cached_tokens(client) for _ in range(2)] == [0, 63]
            assert (await asked(client, "/reset_prefix_cache")).status == 200
            assert await cached_tokens(client) == 0
            whole = client.call("/v1/completions", body(max_tokens=60, stream=True))
            await whole.until(2)
            refused = await asked(client, "/reset_prefix_cache")
            assert (refused.status, refused.error["param"]) == (409, "reset_running_requests")
            done = await asked(client, "/reset_prefix_cache", "reset_running_requests=true")
            assert done.status == 200
            events = (await whole.whole()).events[:-1]
            text = "".join(event["choices"][0]["text"] for event in events)
            alone = await client.post("/v1/completions", body(max_tokens=60))
            assert alone.json["choices"][0]["text"] == text
            wrong = await asked(client, "/reset_prefix_cache", "reset_running_requests=maybe")
            assert wrong.status == 400

    run(ask())


def test_asleep_it_refuses_what_generates_and_awake_it_answers_as_before() -> None:
    async def ask() -> None:
        async with serving() as client:
            before = (await client.post("/v1/completions", body())).json["choices"]
            assert not await is_sleeping(client)
            assert (await asked(client, "/sleep")).status == 200
            assert await is_sleeping(client)
            assert (await client.service.engine.usage()).committed_bytes == 0
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                refused = await client.post(path, b"{ is not read")
                assert (refused.status, refused.error["code"]) == (503, "sleeping")
                assert refused.headers["retry-after"] == "5"
            assert (await client.get("/health")).status == 200
            metrics = (await client.get("/metrics")).body.decode()
            assert 'sleep_state="weights_offloaded"} 1' in metrics
            assert re.search(r'rejections_total{[^}]*reason="sleeping"[^}]*} 3', metrics)
            assert (await asked(client, "/sleep")).status == 200  # as it does
            assert (await asked(client, "/wake_up")).status == 200
            assert (await client.post("/v1/completions", body())).json["choices"] == before
            assert (await asked(client, "/wake_up")).status == 200

    run(ask())


def test_what_runs_ends_first_and_nothing_comes_in_meanwhile() -> None:
    async def ask() -> None:
        async with serving(observe=(slowly := Slowly())) as client:
            running = client.call("/v1/completions", body(max_tokens=60, stream=True))
            await running.until(2)
            assert (await client.get("/load")).json == {"server_load": 1}
            sleeping = client.call("/sleep")
            while not client.service.admission.sleeping:
                await asyncio.sleep(0)
            assert (await client.post("/v1/completions", body())).status == 503
            assert not await is_sleeping(client)
            slowly.has_been_seen = True
            assert (await sleeping.whole()).status == 200
            *_, last, _ = (await running.whole()).events
            assert last["choices"][0]["finish_reason"] == "length"
            assert await is_sleeping(client)
            assert (await client.get("/load")).json == {"server_load": 0}

    run(ask())


def test_what_runs_ends_at_once_if_it_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    """That is what the operator wants, and no error of the server."""
    own = {"max_tokens": 180, "stream": True, "temperature": 0}
    hello = [{"role": "user", "content": "Hello"}]

    async def ask() -> None:
        config = ServerConfig(chat_template=TEMPLATE)
        async with serving(config, observe=Slowly()) as client:
            running = client.call("/v1/completions", body(max_tokens=180, stream=True, n=2))
            message = client.call("/v1/messages", {**own, "messages": hello})
            response = client.call(
                "/v1/responses", {"input": "Hello", "stream": True, "max_output_tokens": 180}
            )
            for each in (running, message, response):
                await each.until(2)
            assert (await asked(client, "/sleep", "mode=abort")).status == 200
            *_, last, _ = (await running.whole()).events
            assert last["choices"][0]["finish_reason"] == "abort"
            assert (await message.whole()).events[-1]["type"] == "error"
            assert (await response.whole()).events[-1]["type"] == "response.failed"
        assert [each for each in caplog.records if each.levelname == "ERROR"] == []

    run(ask())


def test_one_that_aborts_does_not_wait_for_one_that_waits() -> None:
    async def ask() -> None:
        async with serving(observe=Slowly()) as client:
            running = client.call("/v1/completions", body(max_tokens=180, stream=True))
            await running.until(2)
            waiting = client.call("/sleep")
            while not client.service.admission.sleeping:
                await asyncio.sleep(0)
            assert (await asked(client, "/sleep", "mode=abort")).status == 200
            assert (await waiting.whole()).status == 200
            *_, last, _ = (await running.whole()).events
            assert last["choices"][0]["finish_reason"] == "abort"
            assert await is_sleeping(client)

    run(ask())


def test_an_operator_who_leaves_before_it_sleeps_has_changed_nothing() -> None:
    async def ask() -> None:
        async with serving(observe=(slowly := Slowly())) as client:
            running = client.call("/v1/completions", body(max_tokens=180, stream=True))
            await running.until(2)
            sleeping = client.call("/sleep")
            while not client.service.admission.sleeping:
                await asyncio.sleep(0)
            sleeping.leave()
            await sleeping.task
            slowly.has_been_seen = True
            assert not client.service.admission.sleeping
            assert (await client.post("/v1/completions", body())).status == 200
            running.leave()
            await nothing_runs(client)
            assert not await is_sleeping(client)

    run(ask())


def test_one_that_cannot_wake_up_says_why_and_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def short() -> None:
        raise MemoryUnavailable("there are no pages")

    async def ask() -> None:
        async with serving() as client:
            await asked(client, "/sleep")
            with monkeypatch.context() as patch:
                patch.setattr(client.service.engine.llm._resident, "prefault", short)
                refused = await asked(client, "/wake_up")
            assert (refused.status, refused.error["message"]) == (503, "there are no pages")
            assert (await client.post("/v1/completions", body())).error["code"] == "sleeping"
            assert (await asked(client, "/wake_up")).status == 200
            assert (await client.post("/v1/completions", body())).status == 200

    run(ask())


def test_what_it_cannot_do_is_refused_and_nothing_is_done() -> None:
    async def ask() -> None:
        async with serving() as client:
            levels = ("0", "3", "9" * 4000, "%F0%9F%92%A4", "1.0", "2")  # 2: it was handed in
            for query in (*(f"level={level}" for level in levels), "mode=keep", "mode="):
                refused = await asked(client, "/sleep", query)
                assert refused.status == 400, query
                assert query.partition("=")[0] in refused.error["message"]
                assert not client.service.admission.sleeping
            assert (await client.post("/v1/completions", body())).status == 200
            running = client.call("/v1/completions", body(stream=True, max_tokens=60))
            await running.until(2)
            assert (await asked(client, "/sleep", "level=2&mode=abort")).status == 400
            *_, last, _ = (await running.whole()).events
            assert last["choices"][0]["finish_reason"] == "length"

    run(ask())


def test_what_is_prepared_while_it_falls_asleep_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that its prompt is wrong: it may ask again."""
    asleep = threading.Event()

    async def ask() -> None:
        async with serving() as client:
            texts = client.service.texts
            own = texts.encode

            def encode(text: str, **options: Any) -> list[int]:
                assert asleep.wait(20)
                return own(text, **options)

            monkeypatch.setattr(texts, "encode", encode)
            preparing = client.call("/v1/completions", body(prompt="def"))
            while not client.service.admission._num_prepared:
                await asyncio.sleep(0)
            assert (await asked(client, "/sleep")).status == 200
            asleep.set()
            refused = await preparing.whole()
            assert (refused.status, refused.error["code"]) == (503, "sleeping")

    run(ask())


def test_a_clients_key_administers_nothing() -> None:
    async def ask() -> None:
        async with serving(KEYED) as client:
            theirs, ours = client.with_key("client"), client.with_key("operator")
            for path in ("/sleep", "/wake_up", "/reset_prefix_cache"):
                assert (await asked(client, path)).status == 401
                assert (await asked(theirs, path)).error["code"] == "admin_key_needed"
                assert (await asked(ours, path)).status == 200
            for path in ("/is_sleeping", "/load"):
                assert (await theirs.get(path)).status == 403
                assert (await ours.get(path)).status == 200

    run(ask())


# -- tiers -----------------------------------------------------------------------------------------


def test_tiers_are_listed_and_trusted_again() -> None:
    def lying(*args: Any) -> Tier:
        return FaultyTier(HostMemoryTier(2**23, args[1]), faults=("payload bit",), share=1.0)

    async def ask() -> None:
        options = dict(kv_tier=("lying:", "memory:?size=8MiB"), kv_tier_write="always")
        async with serving(KEYED, **options) as client:
            ours = client.with_key("operator")
            costs = client.service.engine.llm.engine.scheduler.costs
            costs.note_step = lambda *_: None  # computing seems to take for ever: tiers are asked
            several = [body(), body(prompt=PROMPT[::-1])]
            answers = [await ours.post("/v1/completions", each) for each in several]
            until(lambda: not offload(client.service.engine.llm).has_more)
            listed = (await ours.get("/tiers")).json
            assert [tier["name"] for tier in listed["data"]] == ["lying", "memory"]
            assert listed["data"][0]["num_records"] is not None
            assert (await asked(ours, "/reset_prefix_cache")).status == 200
            for each, answer in zip(several, answers, strict=True):
                again = await ours.post("/v1/completions", each)
                assert again.json["choices"] == answer.json["choices"]
            first, second = (await ours.get("/tiers")).json["data"]
            assert (first["state"], second["state"]) == ("suspect", "ok")
            assert first["num_bad"]["checksum"] == 2
            unknown = await asked(ours, "/tiers/trust", "tier=attic")
            assert (unknown.status, unknown.error["param"]) == (404, "tier")
            assert "lying, memory" in unknown.error["message"]
            for query in ("tier=memory", "tier=lying", ""):
                answer = await asked(ours, "/tiers/trust", query)
                suspect = [tier["state"] == "suspect" for tier in answer.json["data"]]
                assert suspect == [query == "tier=memory", False]
            for path, method in (("/tiers", "GET"), ("/tiers/trust", "POST")):
                for key, status in ((None, 401), ("client", 403)):
                    refused = await client.with_key(key).call(path, method=method).whole()
                    assert refused.status == status
            unable = await asked(ours, "/reset_prefix_cache", "reset_external=true")
            assert (unable.status, unable.error["param"]) == (400, "reset_external")
            assert "lying cannot find all records" in unable.error["message"]

    with kind("lying", lying):
        run(ask())


def test_tiers_forget_with_the_prefix_cache() -> None:
    async def ask() -> None:
        async with serving(kv_tier=("memory:?size=8MiB",), kv_tier_write="always") as client:
            llm = client.service.engine.llm
            assert (await client.post("/v1/completions", body())).status == 200
            until(lambda: not offload(llm).has_more)
            until(lambda: llm.tiers.tiers[0].num_records > 0)
            external = "reset_external=true"
            assert (await asked(client, "/reset_prefix_cache", external)).status == 200
            assert (await client.get("/tiers")).json["data"][0]["num_records"] == 0
            failing = llm.engine.scheduler.offload._carrier.tiers[0]
            failing.clear = lambda _: "no route to host"
            refused = await asked(client, "/reset_prefix_cache", external)
            assert refused.status == 503
            assert "memory: no route to host" in refused.error["message"]
            assert (await asked(client, "/reset_prefix_cache", "reset_external=all")).status == 400

    run(ask())


def test_a_server_without_tiers_says_so() -> None:
    async def ask() -> None:
        async with serving() as client:
            assert (await client.get("/tiers")).json["data"] == []
            refused = await asked(client, "/tiers/trust")
            assert (refused.status, "kv_tier" in refused.error["message"]) == (404, True)
            refused = await asked(client, "/reset_prefix_cache", "reset_external=true")
            assert (refused.status, "no tiers" in refused.error["message"]) == (400, True)
            assert (await asked(client, "/reset_prefix_cache")).status == 200

    run(ask())
