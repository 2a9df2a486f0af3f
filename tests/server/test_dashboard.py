"""The memory page's feed: what it says of the cache, to whom, how often, and what it never says."""

import asyncio
import dataclasses
import itertools
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from conformance.covering import only
from quire import SamplingParams
from quire.config import ServerConfig
from quire.kv import CellState, Occupancy
from quire.server.dashboard.feed import Feed
from quire.server.dashboard.frames import FEED, About, Cells, Frame
from quire.server.dashboard.page_routes import FILES
from quire.server.dashboard.snapshot import MOST_CELLS, OwnCells, Picture
from server.asking import Call, Slowly, run, serving

PROMPT = "def secret_of_mine(number):\n    return number\n" * 8
FOR_LONG = SamplingParams(max_tokens=150, ignore_eos=True)


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "strategy", only(["paged", "virtual", "contiguous", "growing"], "virtual", "growing")
)
def test_a_frame_says_what_accounting_knows(strategy: str) -> None:
    async def body() -> None:
        async with serving(cache=strategy, observe=(slowly := Slowly())) as client:
            llm = client.service.engine
            feed = client.call(FEED, method="GET")
            task = asyncio.create_task(llm.complete(PROMPT, FOR_LONG))
            frame = await a_frame(feed, lambda f: f.num_running == 1)
            slowly.has_been_seen = True
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
        async with serving(observe=(slowly := Slowly())) as client:
            llm, feed = client.service.engine, client.call(FEED, method="GET")
            one = asyncio.create_task(llm.complete(PROMPT, FOR_LONG))
            await a_frame(feed, lambda f: f.num_running == 1)
            two = asyncio.create_task(llm.complete(PROMPT, FOR_LONG))
            frame = await a_frame(feed, share_a_prefix)
            slowly.has_been_seen = True
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


TENANTS = ServerConfig(api_key=("alice", "bob"), admin_api_key=("root",))


@pytest.mark.parametrize("strategy", only(["paged", "growing"], "paged"))
def test_a_tenant_sees_nothing_of_another_but_how_much_it_holds_in_steps(strategy: str) -> None:
    prompt, long = list(range(30, 131)), {"max_tokens": 140, "ignore_eos": True}

    async def body() -> None:
        async with serving(
            TENANTS, cache=strategy, kv_cache_memory_bytes="4MB", observe=Slowly(0.005)
        ) as client:
            alice, bob, root = (client.with_key(key) for key in ("alice", "bob", "root"))
            seen, whole = (each.call(FEED, method="GET") for each in (alice, root))
            await asyncio.gather(seen.until(2), whole.until(2))
            asked = {"prompt": prompt, **long}
            assert (await bob.post("/v1/completions", asked)).status == 200
            of_bob = await a_frame(whole, lambda f: f.sequences and f.sequences[0].tokens > 150)
            await a_frame(whole, lambda f: not f.sequences and f.counters.generated)
            # Whatever bob does, alice's frames are alike but for one number.
            frames = frames_of(seen)
            [alike] = {replace(frame, others_percent=0) for frame in frames}
            steps = [frame.others_percent for frame in frames]
            assert all(one != other for one, other in itertools.pairwise(steps))
            assert all(step in range(0, 101, 5) for step in steps)
            assert max(steps) >= 15, "bob was not seen"
            assert (alike.sequences, alike.counters, alike.cells[0].states) == ((), None, "")
            # With a sequence of her own: what she sees has her numbers, and is numbered anew.
            both = [client.post("/v1/completions", asked) for client in (bob, alice)]
            answers = asyncio.gather(*both)
            frame = await a_frame(seen, lambda f: f.sequences and f.sequences[0].tokens > 130)
            [own] = frame.sequences
            assert own.id != of_bob.sequences[0].id
            assert set(frame.cells[0].holders[::2]) <= {own.id, -1}
            assert own.tables[0] == (0, -(-own.computed // 16))
            assert frame.num_running == 1
            assert frame.memory.used == own.computed * 4096 <= frame.memory.committed
            assert frame.others_percent in range(5, 101, 5)
            assert len((await a_frame(whole, lambda f: len(f.sequences) == 2)).sequences) == 2
            assert {answer.status for answer in await answers} == {200}
            for each in (seen, whole):
                each.leave()
                await each.whole()

    run(body())


def test_the_only_key_sees_all() -> None:
    async def body() -> None:
        async with serving(ServerConfig(api_key=("sesame",))) as client:
            feed = client.with_key("sesame").call(FEED, method="GET")
            frame = await a_frame(feed, lambda f: True)
            assert frame.others_percent is None
            assert frame.counters is not None
            feed.leave()
            await feed.whole()

    run(body())


def test_a_tenants_cells_are_numbered_as_if_there_were_no_others() -> None:
    pool = census(100, [3, 4, 7, 8, 9, 20], [3, 3, 4, 3, 3, 2])
    tables = {7: np.array([-1, 9, 7]), 8: np.array([7, 3])}
    own = OwnCells.of(replace_holders(pool, [8, 1, 7, 1, 7, 7]), tables)
    assert own.occupancy.num_cells == len(own.occupancy.ids) == 4
    assert own.occupancy.states.tolist() == [3, 4, 2, 3]  # 9, 7, 20, which is spare, and 3
    assert own.occupancy.holders.tolist() == [7, 7, 7, 8]
    assert [own.numbered(table).tolist() for table in tables.values()] == [[0, 1], [1, 3]]
    rows = census(80, [9, 10, 33, 41], [3, 3, 3, 2], row_cells=8)
    own = OwnCells.of(replace_holders(rows, [1, 1, 7, 8]), {7: np.array([33]), 8: np.array([])})
    assert (own.occupancy.num_cells, own.occupancy.ids.tolist()) == (16, [1, 9])
    nothing = OwnCells.of(pool, {})
    assert (nothing.occupancy.num_cells, len(nothing.occupancy.ids)) == (0, 0)


def replace_holders(own: Occupancy, holders: list[int]) -> Occupancy:
    return dataclasses.replace(own, holders=np.array(holders, np.int64))


def test_tiers_are_shown_to_those_who_see_all() -> None:
    async def body() -> None:
        options = dict(kv_tier=("memory:?size=8MiB",), kv_tier_write="always")
        async with serving(TENANTS, **options) as client:
            whole, part = (client.with_key(key).call(FEED, method="GET") for key in ("root", "bob"))
            await client.service.engine.complete(PROMPT, SamplingParams(max_tokens=4))
            frame = await a_frame(whole, lambda f: f.tiers and f.tiers[0].records)
            [tier] = frame.tiers
            assert (tier.name, tier.state, tier.hits) == ("memory", "ok", 0)
            assert 0 < tier.used <= tier.capacity <= 8 * 2**20
            assert (await a_frame(part, lambda f: True)).tiers == ()
            for each in (whole, part):
                each.leave()
                await each.whole()

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
            feed = Feed(client.service.engine, interval_s=0.01)
            first, second = await feed.open(), await feed.open()
            assert feed.num_taken == 0
            for viewer in (first, second):
                assert (await anext(viewer)).startswith(b"event: about")
                assert (await anext(viewer)).startswith(b"event: frame")
            assert feed.num_viewers == 2
            await client.service.engine.complete(PROMPT, FOR_LONG)
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


def test_a_viewer_who_comes_while_the_last_one_leaves_gets_frames() -> None:
    """As of a page that is loaded again."""

    async def body() -> None:
        async with serving() as client:
            feed = Feed(client.service.engine, interval_s=0.01)
            for num_turns in range(6):
                leaving, coming = await feed.open(), await feed.open()
                await anext(leaving)
                await anext(leaving)
                gone = asyncio.ensure_future(leaving.aclose())
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                assert (await anext(coming)).startswith(b"event: about")
                assert (await anext(coming)).startswith(b"event: frame")
                await gone
                await coming.aclose()

    run(body())


def test_one_who_takes_nothing_holds_up_nobody_and_gets_the_newest() -> None:
    async def body() -> None:
        async with serving() as client:
            slow, quick = client.call(FEED, method="GET"), client.call(FEED, method="GET")
            await slow.until(2)
            slow.reads.clear()
            await client.service.engine.complete(PROMPT, FOR_LONG)
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
            feed = Feed(client.service.engine, interval_s=0.01)
            viewer = await feed.open()
            assert [await anext(viewer) for _ in range(2)]
            await client.service.engine.aclose()
            rest = [event async for event in viewer]
            assert rest[-1].startswith(b"event: over")
            assert (await client.get(FEED)).status >= 400

    run(body())


def census(num_cells: int, ids: list[int], states: list[int], *, row_cells: int = 0) -> Occupancy:
    return Occupancy(
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
        async with serving(
            kv_cache_memory_bytes="2GB", max_num_seqs=128, observe=Slowly(0.005)
        ) as client:
            llm, feed = client.service.engine, client.call(FEED, method="GET")
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
