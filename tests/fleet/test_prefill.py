"""Prompts that one replica computes for another: the same answers, whatever becomes of it."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fleet.replicas import OPTIONS, Fleet, door, engine, fleet_of, until
from quire import LLM, AsyncLLM, SamplingParams
from quire.errors import ConfigError
from quire.fleet.detours import Detours
from quire.fleet.placement import Load, Placed
from quire.fleet.prefill import PrefillPlaces
from quire.fleet.replica import facts_of, load_of
from quire.models.loader import load
from server.asking import run

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
BUSY = {"num_running": 10_000}  # so many would wait for a prompt


def prompt(number: int, length: int = 100) -> list[int]:
    return [5 + (number * 31 + n * 7) % 290 for n in range(length)]


@pytest.fixture(scope="module")
def llms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AsyncLLM]]:
    places = PrefillPlaces.made(str(tmp_path_factory.mktemp("places")), 1)
    config, held = places.take()
    made = {
        "first": AsyncLLM(load(), **OPTIONS, kv_transfer_config=config),
        "here": AsyncLLM(load(), **OPTIONS, kv_transfer_config=places.of_decoder()),
    }
    yield made
    for llm in made.values():
        llm.close()
    os.close(held)


@asynccontextmanager
async def apart(llms: dict[str, AsyncLLM], **options: Any) -> AsyncIterator[Fleet]:
    """A fleet of a prefill replica and a busy one that goes on."""
    async with fleet_of("first", "here", llms=llms, prefills_apart=True, **options) as fleet:
        for each in fleet.replicas:
            each.load_changes["compute_s_per_token"] = 1e-3
        fleet.replicas[1].load_changes.update(BUSY)
        await until(lambda: fleet.placement.loads["here"].num_running == BUSY["num_running"])
        yield fleet


async def answer(fleet: Any, token_ids: list[int], **how: Any) -> tuple[list[int], int, str | None]:
    """Tokens, how many of the prompt's were found, and how it ended."""
    tokens, found, reason = list[int](), 0, None
    request = await fleet.request(token_ids, GREEDY)
    async for delta in fleet.generate(request, **how):
        tokens += delta.token_ids
        found, reason = delta.num_cached_tokens, delta.finish_reason
    return tokens, found, reason


async def expected(token_ids: list[int]) -> list[int]:
    return (await answer(engine("alone"), token_ids))[0]


def test_a_prompt_is_computed_apart_and_goes_on(llms) -> None:
    async def scene() -> None:
        async with apart(llms) as fleet:
            first, here = fleet.replicas
            want = await expected(prompt(1))
            assert await answer(fleet.engine, prompt(1)) == (want, 96, "length")
            assert fleet.engine.num_prefilled == {"apart": 1}
            (asked,) = first.requests
            assert asked.leaves_blocks
            assert asked.params.max_tokens == 1
            assert here.requests[0].remote is not None
            await fleet.is_idle()
            assert fleet.outcomes() == {"length": 2}

    run(scene())


def test_what_does_not_pay_is_computed_where_its_answer_is(llms) -> None:
    async def scene() -> None:
        async with apart(llms) as fleet:
            first, here = fleet.replicas
            await answer(fleet.engine, prompt(2, 12))  # less than a block
            here.load_changes["num_running"] = 0
            await until(lambda: not fleet.placement.loads["here"].num_running)
            await answer(fleet.engine, prompt(3))  # it would delay no sequence
            assert fleet.engine.num_prefilled == {"here": 2}
            assert not first.requests
            assert all(each.remote is None for each in here.requests)

    run(scene())


def test_a_prefill_replica_that_has_measured_nothing_costs_what_others_have(llms) -> None:
    token_s = 2.5e-8  # so 10 000 sequences wait for 25 ms; a guess makes it 30 ms apart

    async def scene() -> None:
        async with apart(llms) as fleet:
            first, here = fleet.replicas
            here.load_changes.update(compute_s_per_token=token_s, load_s_per_block={"STORAGE": 0})
            first.load_changes["compute_s_per_token"] = None
            await until(lambda: fleet.placement.loads["first"].compute_s_per_token == token_s)
            await answer(fleet.engine, prompt(11))
            assert fleet.engine.num_prefilled == {"apart": 1}

    run(scene())


def test_sequences_that_began_since_the_last_report_would_wait(llms) -> None:
    async def scene() -> None:
        async with apart(llms) as fleet, AsyncExitStack() as stack:
            _, here = fleet.replicas
            here.load_changes.update(num_running=0, load_s_per_block={"STORAGE": 0})
            await until(lambda: not fleet.placement.loads["here"].num_running)
            long = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
            for number in range(4):
                request = await fleet.engine.request(prompt(20 + number, 12), long)
                pieces = await stack.enter_async_context(aclosing(fleet.engine.generate(request)))
                await anext(pieces)
            await answer(fleet.engine, prompt(12))
            assert fleet.engine.num_prefilled == {"here": 4, "apart": 1}

    run(scene())


def test_an_embedding_is_made_where_it_is_asked_for(llms) -> None:
    async def scene() -> None:
        async with apart(llms) as fleet, door(fleet) as client:
            body = {"input": prompt(4)}
            assert (await client.post("/v1/embeddings", body)).status == 200
            assert not fleet.engine.num_prefilled

    run(scene())


@pytest.mark.parametrize("how", ["dies", "freezes", "drains", "leaves nothing"])
def test_without_the_prefill_replica_the_prompt_is_computed(llms, how) -> None:
    async def scene() -> None:
        waits = {"replica_timeout_s": 1.0} if how == "freezes" else {}
        async with apart(llms, **waits) as fleet:
            first, here = fleet.replicas
            want = await expected(prompt(5))
            if how == "leaves nothing":
                first.piece_changes = {"kv_transfer_params": None}
            elif how == "dies":
                first.dies_at = first.num_pieces + 1
            elif how == "freezes":
                first.freezes_at = first.num_pieces + 1
            else:
                await first.begin_drain()
            tokens, _, reason = await answer(fleet.engine, prompt(5))
            assert (tokens, reason) == (want, "length")
            assert here.requests[0].remote is None
            # One that says that it drains may have been passed over.
            assert fleet.engine.num_prefilled in ({"failed": 1}, {} if how == "drains" else None)
            first.begin_anew()

    run(scene())


def test_a_lease_that_is_lost_has_the_prompt_computed(llms) -> None:
    async def scene() -> None:
        async with apart(llms) as fleet:
            first, _ = fleet.replicas
            params = {"do_remote_prefill": True, "remote_host": "unix:/nowhere", "remote_port": 0}
            first.piece_changes = {"kv_transfer_params": params}
            want = await expected(prompt(6))
            tokens, _, reason = await answer(fleet.engine, prompt(6))
            assert (tokens, reason) == (want, "length")

    run(scene())


def test_an_aborted_request_ends_at_the_prefill_replica_too(llms) -> None:
    async def scene() -> None:
        async with apart(llms) as fleet:
            first, here = fleet.replicas
            first.holds = asyncio.Event()
            reading = asyncio.create_task(answer(fleet.engine, prompt(7), request_id="x"))
            await until(lambda: first.requests)
            ending = asyncio.create_task(fleet.engine.abort("x"))
            await asyncio.sleep(0)
            first.holds.set()
            await ending
            tokens, _, reason = await reading
            assert (tokens, reason) == ([], "abort")
            assert first.aborted
            assert not here.requests

    run(scene())


def test_a_reader_that_leaves_ends_its_prompt(llms) -> None:
    async def scene() -> None:
        async with apart(llms) as fleet:
            first, here = fleet.replicas
            first.holds = asyncio.Event()
            reading = asyncio.create_task(answer(fleet.engine, prompt(8)))
            await until(lambda: first.requests)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            first.holds.set()
            await fleet.is_idle()
            assert not here.requests
            assert fleet.outcomes() == {"left": 2}

    run(scene())


def test_a_prefill_replica_alone_does_the_whole_of_it(llms) -> None:
    async def scene() -> None:
        async with apart(llms) as fleet:
            fleet.replicas[1].mode = "dead"
            await until(lambda: fleet.engine.members["here"].state == "lost")
            want = await expected(prompt(9))
            tokens, _, reason = await answer(fleet.engine, prompt(9))
            assert (tokens, reason) == (want, "length")

    run(scene())


def test_no_client_says_what_is_left_where(llms) -> None:
    async def scene() -> None:
        async with apart(llms) as fleet, door(fleet) as client:
            body = {
                "prompt": prompt(10),
                "max_tokens": 1,
                "kv_transfer_params": {"do_remote_decode": True},
            }
            found = await client.post("/v1/completions", body)
            assert found.status == 200
            assert found.headers["x-ignored-fields"] == "kv_transfer_params"
            assert found.json.get("kv_transfer_params") is None

    run(scene())


# -- whether it pays, and where they are -----------------------------------------------------------


def placed(tokens: int) -> Placed:
    return Placed(number=0, replica="here", num_prompt_tokens=tokens)


def test_it_pays_where_sequences_would_wait() -> None:
    load = Load(compute_s_per_token=1e-3, num_running=4, load_s_per_block={"STORAGE": 1e-3})
    idle, detours = Load(compute_s_per_token=1e-3), Detours()

    def pays(tokens: int = 1000, here: Load = load, there: Load = idle, queued: int = 0) -> bool:
        running = here.num_running
        trade = detours.weigh(
            placed(tokens), here, there, num_running=running, queued_tokens=queued, block_size=16
        )
        return trade.pays

    assert pays()
    assert not pays(here=Load(compute_s_per_token=1e-3))  # none runs there
    assert not pays(queued=4000)  # it would wait longer than four
    assert not pays(there=Load(compute_s_per_token=5e-3))  # it computes as slowly
    slow = Load(compute_s_per_token=1e-3, num_running=4, load_s_per_block={"STORAGE": 0.1})
    assert not pays(here=slow)  # what is loaded is computed sooner
    assert pays(tokens=20)
    assert not pays(tokens=15)  # of less than a block nothing is loaded
    for _ in range(100):
        detours.note(took_s=1.5, computing_s=1.0)
    assert 0.49 < detours.mean_s < 0.51
    assert not pays(tokens=20)  # a short prompt
    assert pays()


def test_short_prompts_do_not_tell_what_a_long_one_costs() -> None:
    with LLM(load(), **OPTIONS) as llm:
        assert load_of(llm, []).compute_s_per_token is None  # none yet
        costs = llm.engine.scheduler.costs
        for _ in range(20):
            costs.note_step(9, 1, 9, 0.02)  # a prompt takes no longer than a sequence's next token
            costs.note_step(1, 1, 500, 0.02)
        assert not costs.prices.tokens_are_told
        assert load_of(llm, []).compute_s_per_token is None
        for _ in range(20):
            costs.note_step(512, 1, 512, 0.02 + 512e-3)
        assert load_of(llm, []).compute_s_per_token == pytest.approx(1e-3, rel=0.1)


def test_a_place_is_one_replicas_as_long_as_it_lives(tmp_path: Path) -> None:
    places = PrefillPlaces.made(str(tmp_path), 1)
    taken = [places.take() for _ in range(places.num_places)]
    addresses = [config["kv_connector_extra_config"]["listen"] for config, _ in taken]
    assert len(set(addresses)) == places.num_places == 4
    assert places.of_decoder()["kv_connector_extra_config"]["peers"] == addresses
    with pytest.raises(ConfigError, match="all 4 places for prefill replicas are taken"):
        places.take()
    os.close(taken[2][1])
    config, held = places.take()
    assert config["kv_connector_extra_config"]["listen"] == addresses[2]
    for number in (0, 1, 3):
        os.close(taken[number][1])
    os.close(held)


def test_a_replica_says_what_it_is_for(llms) -> None:
    assert facts_of(llms["first"].llm).is_prefill
    assert not facts_of(llms["here"].llm).is_prefill
    assert not facts_of(engine("alone").llm).is_prefill
