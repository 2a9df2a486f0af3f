"""What the server counts and logs of its own answers, and what it never does."""

import asyncio
import json
import time
from datetime import datetime

from quire.config import ServerConfig
from quire.server.loop import Progress
from server.asking import Client, Slowly, run, serving


async def value(client: Client, name: str, **labels: str) -> float:
    answer = await client.get("/metrics")
    assert answer.status == 200
    for line in answer.body.decode().splitlines():
        if line.startswith(name) and all(f'{k}="{v}"' in line for k, v in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def test_models_are_listed_for_clients_of_both_interfaces() -> None:
    async def ask() -> None:
        async with serving(ServerConfig(served_model_name=("one", "two"))) as client:
            listed = json.loads((await client.get("/v1/models")).body)
            first = listed["data"][0]
            assert [card["id"] for card in listed["data"]] == ["one", "two"]
            assert (listed["object"], first["object"], first["type"]) == ("list", "model", "model")
            assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (
                "one",
                "two",
                False,
            )
            assert first["display_name"] == "one"
            assert datetime.fromisoformat(first["created_at"]).timestamp() == first["created"]
            icon = await client.get("/favicon.ico")
            assert (icon.status, icon.headers["content-type"]) == (200, "image/svg+xml")

    run(ask())


def test_answers_and_rejections_are_counted_by_route_and_reason() -> None:
    async def ask() -> None:
        config = ServerConfig(max_num_queued_reqs=1)
        async with serving(config, max_num_seqs=1, observe=(slowly := Slowly())) as client:
            body = {"prompt": [7], "max_tokens": 60, "ignore_eos": True}
            running = client.call("/v1/completions", {**body, "max_tokens": 250, "stream": True})
            await running.until(1)
            waiting = client.call("/v1/completions", body)
            async with asyncio.timeout(20):
                while not client.service.admission.num_queued:
                    await asyncio.sleep(0.001)
            refused = await client.post("/v1/completions", body)
            assert (refused.status, refused.error["code"]) == (503, "max_num_queued_reqs")
            assert int(refused.headers["retry-after"]) >= 1
            assert (await client.post("/v1/completions", b"{")).status == 503  # not even read
            slowly.has_been_seen = True
            assert (await waiting.whole()).status == 200
            await running.whole()
            assert (await client.post("/v1/completions", b"{")).status == 400
            await client.get("/v1/models/none")
            name = "vllm:admission_rejections_total"
            assert await value(client, name, reason="max_num_queued_reqs") == 2
            name = "http_requests_total"
            for route, status, number in (
                ("/v1/completions", "200", 2),
                ("/v1/completions", "503", 2),
                ("/v1/completions", "400", 1),
                ("/v1/models/{name:path}", "404", 1),
            ):
                assert await value(client, name, handler=route, status=status) == number, route

    run(ask())


def test_going_down_refuses_newcomers_and_says_so_in_health() -> None:
    async def ask() -> None:
        async with serving(observe=(slowly := Slowly())) as client:
            body = {"prompt": [7], "max_tokens": 100, "ignore_eos": True, "stream": True}
            running = client.call("/v1/completions", body)
            await running.until(1)
            draining = asyncio.ensure_future(client.service.drain(60))
            await asyncio.sleep(0)
            assert (await client.get("/health")).status == 503
            refused = await client.post("/v1/completions", body)
            assert (refused.status, refused.error["code"]) == (503, "draining")
            slowly.has_been_seen = True
            assert await draining
            answer = await running.whole()
            assert answer.events[-1] == "[DONE]"
            assert answer.events[-2]["choices"][0]["finish_reason"] == "length"
            assert await value(client, "vllm:admission_rejections_total", reason="draining") == 1

    run(ask())


def test_how_the_engine_is_doing_is_said_while_it_does_something() -> None:
    async def ask() -> None:
        async with serving() as client:
            progress = Progress(client.service.engine)
            now_s = time.monotonic()
            assert progress.line(now_s + 10) is None
            body = {"prompt": [7] * 9, "max_tokens": 30, "ignore_eos": True}
            await client.post("/v1/completions", body)
            line = progress.line(now_s + 20)
            assert line is not None
            assert line.startswith("tokens/s: 0.9 of prompts, 3.0 generated; 0 running, 0 waiting")
            assert "0.0 of prompts, 0.0 generated" in str(progress.line(now_s + 30))
            assert progress.line(now_s + 40) is None

    run(ask())
