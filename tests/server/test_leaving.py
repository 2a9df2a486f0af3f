"""Clients that leave, or read slowly or not at all: what they held goes back; no other waits."""

import asyncio
import gc
from typing import Any

import pytest

from quire.config import ServerConfig
from server.asking import Client, Slowly, leave_while_it_runs, nothing_runs, run, serving

LONG: dict[str, Any] = {"prompt": [7] * 20, "max_tokens": 220, "temperature": 0, "ignore_eos": True}


async def free_bytes(client: Client) -> int:
    usage = await client.service.engine.usage()
    assert usage.num_sequences == usage.used_bytes == 0
    held: int = client.service.engine.llm.memory.committed_bytes - usage.cached_bytes
    return held


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_it_runs_frees_what_only_it_held_and_keeps_what_is_shared(
    stream: bool,
) -> None:
    async def ask() -> None:
        async with serving() as client:
            await client.post("/v1/completions", {**LONG, "max_tokens": 1})
            body = {**LONG, "stream": stream}
            answer = await leave_while_it_runs(client, "/v1/completions", body, events=3)
            if not stream:
                assert not answer.status
            again = await client.post("/v1/completions", {**LONG, "max_tokens": 1})
            assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
            await nothing_runs(client)
            await free_bytes(client)

    run(ask())


def test_leaving_the_queue_is_leaving() -> None:
    async def ask() -> None:
        async with serving(max_num_seqs=1, observe=(slowly := Slowly())) as client:
            first = client.call("/v1/completions", {**LONG, "stream": True})
            await first.until(1)
            waiting = [client.call("/v1/completions", {**LONG, "stream": s}) for s in (True, False)]
            async with asyncio.timeout(20):
                while client.service.admission.num_queued < 2:
                    await asyncio.sleep(0.001)
            for call in waiting:
                call.leave()
                await call.task
            assert client.service.admission.num_queued == 0
            slowly.has_been_seen = True
            assert (await first.whole()).events[-1] == "[DONE]"
            await nothing_runs(client)

    run(ask())


def test_a_reader_who_takes_nothing_is_cut_off_and_the_others_are_not() -> None:
    async def ask() -> None:
        async with serving(ServerConfig(send_timeout=0.3)) as client:
            stuck = client.call("/v1/completions", {**LONG, "stream": True})
            await stuck.until(2)
            stuck.reads.clear()
            other = await client.post("/v1/completions", LONG)
            assert other.json["usage"]["completion_tokens"] == 220
            await stuck.task
            assert not stuck.answer.ended
            await nothing_runs(client)

    run(ask())


def test_a_slow_reader_gets_all_of_it_in_fewer_pieces() -> None:
    async def ask() -> None:
        async with serving() as client:
            slow = client.call("/v1/completions", {**LONG, "stream": True})
            await slow.until(1)
            slow.reads.clear()
            whole = await client.post("/v1/completions", LONG)
            slow.reads.set()
            answer = await slow.whole()
            pieces = [event["choices"][0]["text"] for event in answer.events[:-1]]
            assert "".join(pieces) == whole.json["choices"][0]["text"]
            assert len(pieces) < 150

    run(ask())


@pytest.mark.parametrize("num", [200, pytest.param(10_000, marks=pytest.mark.full)])
def test_an_abort_storm_leaves_nothing(num: int) -> None:
    """Nine in ten are cancelled wherever they are; the tenth is served whole."""

    async def ask() -> None:
        async with serving(ServerConfig(max_num_queued_reqs=num * 4), max_num_seqs=16) as client:
            before = await free_bytes(client)
            seats = asyncio.Semaphore(200)

            async def one(number: int) -> bool:
                fields = {**LONG, "prompt": [number % 50] * (1 + number % 60), "n": 1 + number % 3}
                fields["max_tokens"] = 220 if number % 10 else 20
                async with seats:
                    call = client.call("/v1/completions", {**fields, "stream": number % 2 == 0})
                    if number % 10:
                        await asyncio.sleep((number * 7919 % 1000) / 2000)
                        call.leave()
                        await call.task
                        return False
                    return (await call.whole()).ended

            resident = 0
            for begin in range(0, num, 1000):
                ended = await asyncio.gather(*map(one, range(begin, min(num, begin + 1000))))
                assert sum(ended) >= min(num, 1000) // 10  # no client that stays is lost
                if begin == 1000:
                    resident = _resident_bytes()
            await nothing_runs(client)
            assert await free_bytes(client) == before
            assert await client.service.engine.reset_prefix_cache()
            assert (await client.service.engine.usage()).committed_bytes == 0
            if resident:
                grown = _resident_bytes() / resident - 1
                print(f"{num} requests: resident memory {grown:+.2%} after the second thousand")
                assert grown < 0.01

    run(ask(), at_most_s=3600)


def _resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096
