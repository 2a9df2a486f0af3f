"""The memory page's feed: what it says of the cache, to whom, how often, and what it never says."""

import asyncio
import json
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from quire import SamplingParams
from quire.config import ServerConfig
from quire.server.dashboard.feed import Feed
from quire.server.dashboard.files import FILES
from quire.server.dashboard.frames import FEED, About, Cells, Frame
from quire.server.dashboard.picture import Picture
from quire.server.dashboard.snapshot import MOST_CELLS
from quire.strategies import CellState, Census
from server.asking import Call, run, serving

PROMPT = "def secret_of_mine(number):\n    return number\n" * 8
FOR_LONG = SamplingParams(max_tokens=150, ignore_eos=True)


def slowly(_: object) -> None:
    """Observe a step so that it takes long enough to be seen."""
    time.sleep(0.005)


def frames_of(call: Call) -> list[Frame]:
    """All frames that have come whole."""
    frames = []
    for event in call.answer.body.decode().split("\n\n")[:-1]:
        name, _, data = event.split("\n") if event.startswith("event:") else ("", "", "")
        if name == "event: frame":
            frames.append(msgspec.json.decode(data.removeprefix("data: "), type=Frame))
    return frames


async def a_frame(call: Call, fits: Any) -> Frame:
    """The first one that fits. Raises: TimeoutError."""
    async with asyncio.timeout(30):
        while True:
            if found := [frame for frame in frames_of(call) if fits(frame)]:
                return found[0]
            await call.until(call.answer.body.count(b"data: ") + 1)


def share_a_prefix(frame: Frame) -> bool:
    return "s" in frame.cells[0].states and len(frame.sequences) == 2


@pytest.mark.parametrize("strategy", ["paged", "virtual", "contiguous", "growing"])
def test_a_frame_says_what_accounting_knows(strategy: str) -> None:
    async def body() -> None:
        async with serving(cache=strategy, observe=slowly) as client:
            llm = client.service.llm
            feed = client.call(FEED, method="GET")
            task = asyncio.create_task(llm.complete(PROMPT, FOR_LONG))
            frame = await a_frame(feed, lambda f: f.num_running == 1)
            [sequence] = frame.sequences
            assert (sequence.state, sequence.id) == ("running", 0)
            assert 0 < sequence.computed <= sequence.tokens <= sequence.max_tokens
            [cells] = frame.cells
            assert cells.each == 1
            places = [
                i
                for first, count in zip(*[iter(sequence.tables[0])] * 2, strict=True)
                for i in range(first, first + count)
            ]
            about = msgspec.json.decode(events(feed)["about"][0], type=About)
            assert len(places) == -(-sequence.computed // about.groups[0].cell_tokens)
            assert {cells.states[place] for place in places} == {"h"}
            backed = sum(state != "." for state in cells.states)
            alike = len(llm.llm.accounting.groups)  # growing keeps each layer apart
            assert backed * about.groups[0].cell_bytes * alike == frame.memory.committed
            assert sum(cells.holders[1::2]) == len(cells.states) == len(cells.fills)
            memory = frame.memory
            assert memory.used + memory.cached <= memory.committed <= memory.ceiling
            assert sum(term.bytes for term in about.ledger) == memory.capacity
            await task
            feed.leave()
            await feed.whole()

    run(body())


def events(call: Call) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for event in call.answer.body.decode().split("\n\n")[:-1]:
        if event.startswith("event:"):
            name, _, data = event.split("\n")
            found.setdefault(name.removeprefix("event: "), []).append(data.removeprefix("data: "))
    return found


def test_what_two_share_is_shared_and_goes_when_they_end() -> None:
    async def body() -> None:
        async with serving(observe=slowly) as client:
            llm, feed = client.service.llm, client.call(FEED, method="GET")
            one = asyncio.create_task(llm.complete(PROMPT, FOR_LONG))
            await a_frame(feed, lambda f: f.num_running == 1)
            two = asyncio.create_task(llm.complete(PROMPT, FOR_LONG))
            frame = await a_frame(feed, share_a_prefix)
            assert -(-frame.sequences[1].cached // 16) == frame.cells[0].states.count("s")
            assert (frame.counters.hits, frame.num_waiting) == (frame.sequences[1].cached, 0)
            await asyncio.gather(one, two)
            last = await a_frame(feed, lambda f: f.counters.hits and not f.sequences)
            assert set(last.cells[0].states) == {"c", "."}
            assert last.memory.used == 0 < last.memory.cached == last.memory.committed
            feed.leave()
            await feed.whole()

    run(body())


def test_no_text_no_token_and_no_key_is_in_it() -> None:
    async def body() -> None:
        async with serving(ServerConfig(api_key=("sesame-open",))) as client:
            own = client.with_key("sesame-open")
            feed = own.call(FEED, method="GET", x_request_id="told-by-the-client")
            asked = {"prompt": PROMPT, "max_tokens": 60, "user": "somebody", "cache_salt": "pinch"}
            answer = await own.post("/v1/completions", asked)
            assert answer.status == 200, answer.json
            await a_frame(feed, lambda f: f.memory.cached)
            said = feed.answer.body.decode()
            for secret in ("secret", "number", "sesame", "somebody", "pinch"):
                assert secret not in said
            feed.leave()
            await feed.whole()

    run(body())


def test_the_feed_asks_for_a_key_and_the_files_do_not() -> None:
    async def body() -> None:
        async with serving(ServerConfig(api_key=("sesame",))) as client:
            assert (await client.get(FEED)).status == 401
            assert (await client.with_key("wrong").get(FEED)).status == 401
            for path in FILES:
                page = await client.get(path)
                assert (page.status, page.headers["x-content-type-options"]) == (200, "nosniff")
                assert "unsafe" not in page.headers["content-security-policy"]
                again = await client.get(path, if_none_match=page.headers["etag"])
                assert (again.status, again.body) == (304, b"")

    run(body())


def test_frames_are_taken_once_for_all_and_only_while_somebody_watches() -> None:
    async def body() -> None:
        async with serving() as client:
            feed = Feed(client.service.llm, interval_s=0.01)
            first, second = await feed.open(), await feed.open()
            assert feed.num_taken == 0
            for viewer in (first, second):
                assert (await anext(viewer)).startswith(b"event: about")
                assert (await anext(viewer)).startswith(b"event: frame")
            assert feed.num_viewers == 2
            await client.service.llm.complete(PROMPT, FOR_LONG)
            before = feed.num_taken
            while feed.num_taken < before + 3:
                await asyncio.sleep(0.01)
            # Neither has looked meanwhile: both get the newest, and that alone.
            newest = await anext(first)
            assert await anext(second) == newest
            assert b'"sequences":[]' in newest
            await first.aclose()
            assert feed.num_viewers == 1
            await second.aclose()
            assert feed.num_viewers == 0
            taken = feed.num_taken
            await asyncio.sleep(0.1)
            assert feed.num_taken == taken

    run(body())


def test_one_who_takes_nothing_holds_up_nobody_and_gets_the_newest() -> None:
    async def body() -> None:
        async with serving() as client:
            slow, quick = client.call(FEED, method="GET"), client.call(FEED, method="GET")
            await slow.until(2)
            slow.reads.clear()
            await client.service.llm.complete(PROMPT, FOR_LONG)
            last = await a_frame(quick, lambda f: f.memory.cached and not f.sequences)
            num_quick = len(frames_of(quick))
            slow.reads.set()
            assert last in [await a_frame(slow, lambda f: f == last)]
            assert len(frames_of(slow)) <= num_quick
            for each in (slow, quick):
                each.leave()
                await each.whole()

    run(body())


def test_it_ends_with_the_engine() -> None:
    async def body() -> None:
        async with serving() as client:
            feed = Feed(client.service.llm, interval_s=0.01)
            viewer = await feed.open()
            assert [await anext(viewer) for _ in range(2)]
            await client.service.llm.aclose()
            rest = [event async for event in viewer]
            assert rest[-1].startswith(b"event: over")
            assert (await client.get(FEED)).status >= 400

    run(body())


def census(num_cells: int, ids: list[int], states: list[int], *, row_cells: int = 0) -> Census:
    return Census(
        num_cells=num_cells,
        cell_tokens=16,
        cell_bytes=1024,
        entry_bytes=64,
        row_cells=row_cells,
        ids=np.array(ids, np.int64),
        states=np.array(states, np.uint8),
        holders=np.array([7 if state >= CellState.SPARE else -1 for state in states], np.int64),
        fills=np.full(len(ids), 16, np.int64),
    )


def test_a_large_pool_is_drawn_several_to_one() -> None:
    drawn = Picture.of(census(100, [0, 1, 2, 50, 99], [3, 3, 1, 1, 4]), 10)
    cells = drawn.cells()
    assert (cells.each, cells.num_cells, cells.num_shown) == (10, 100, 100)
    assert cells.states == "h....c...s"
    assert cells.fills == "3000010001"
    assert cells.holders == (7, 1, -1, 8, 7, 1)
    assert cells.counts == (0, 2, 0, 2, 1, 95)
    assert drawn.table(np.array([-1, 0, 1, 50, 51, 99])) == (0, 1, 5, 1, 9, 1)


def test_only_rows_that_somebody_has_are_drawn() -> None:
    drawn = Picture.of(census(80, [8, 9, 10, 40], [3, 3, 2, 3], row_cells=8), 100)
    cells = drawn.cells()
    assert (cells.row_cells, cells.num_shown, cells.states) == (8, 16, "hhr.....h.......")
    assert drawn.table(np.array([40])) == (8, 1)
    assert Picture.of(census(80, [], [], row_cells=8), 100).cells().states == ""


def test_frames_stay_small_whatever_the_cache() -> None:
    async def body() -> None:
        async with serving(kv_cache_memory_bytes="2GB", max_num_seqs=128, observe=slowly) as client:
            llm, feed = client.service.llm, client.call(FEED, method="GET")
            params = SamplingParams(max_tokens=300, ignore_eos=True)  # a frame will come by then
            tasks = [asyncio.create_task(llm.complete(f"# {i}\n" * 9, params)) for i in range(100)]
            frame = await a_frame(feed, lambda f: f.num_running + f.num_waiting > 80)
            cells: Cells = frame.cells[0]
            assert cells.each > 1
            assert len(cells.states) <= MOST_CELLS
            assert len(frame.sequences) <= 64
            assert len(frame.sequences) + frame.num_more == frame.num_running + frame.num_waiting
            assert all(len(event) < 64_000 for event in feed.answer.body.split(b"\n\n"))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            feed.leave()
            await feed.whole()

    run(body())


def test_it_is_json_that_anybody_can_read() -> None:
    async def body() -> None:
        async with serving() as client:
            feed = client.call(FEED, method="GET")
            await a_frame(feed, lambda f: True)
            assert feed.answer.headers["content-type"].startswith("text/event-stream")
            about, frame = (json.loads(data[0]) for data in events(feed).values())
            assert about["strategy"] == "paged"
            assert frame["num_running"] == 0
            feed.leave()
            await feed.whole()

    run(body())
