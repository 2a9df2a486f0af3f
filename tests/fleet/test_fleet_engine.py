"""Streams over replicas that end, freeze, drain and refuse: whole, or ended by one error."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.replicas import OPTIONS, BreakableReplica, engine, fleet_of, until
from quire import AsyncLLM, SamplingParams
from quire.engine.outputs import TextDelta
from quire.errors import ConfigError, QuireError, RequestError
from quire.fleet.fleet_engine import FleetEngine
from quire.fleet.members import NoReplica
from quire.fleet.placement import LeastLoaded, RoundRobin
from quire.fleet.replica import LocalReplica, ReplicaLost, facts_of
from quire.models.loader import load
from quire.sampling_params import BeamSearchParams
from server.asking import run
from tiny import tiny_model

PROMPTS = [f"def f{n}(x):\n    return " for n in range(40)]


class Read:
    """What one reader of a stream has got."""

    def __init__(self) -> None:
        self.text, self.token_ids = "", list[int]()
        self.reasons: list[str] = []
        self.error: QuireError | None = None

    @property
    def num_ends(self) -> int:
        return len(self.reasons) + (self.error is not None)

    def add(self, delta: TextDelta) -> None:
        assert not self.reasons or delta.choice, "a piece after the end"
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            self.reasons.append(delta.finish_reason)


async def read(fleet: FleetEngine | AsyncLLM, prompt: Any, params: Any, **how: Any) -> Read:
    found = Read()
    try:
        request = await fleet.request(prompt, params)
        async for delta in fleet.generate(request, **how):
            found.add(delta)
    except QuireError as error:
        found.error = error
    return found


async def expected(prompts: list[str], params: SamplingParams) -> list[Read]:
    """What one engine alone gives."""
    return list(
        await asyncio.gather(*(read(engine("alone"), prompt, params) for prompt in prompts))
    )


def is_whole(found: Read, want: Read) -> None:
    assert found.error is None
    assert (found.text, found.token_ids) == (want.text, want.token_ids)
    assert found.reasons == want.reasons


def test_streams_are_those_of_one_engine() -> None:
    async def ask() -> None:
        params = SamplingParams(max_tokens=8, temperature=0)
        want = await expected(PROMPTS[:8], params)
        async with fleet_of() as fleet:
            found = await asyncio.gather(
                *(read(fleet.engine, prompt, params) for prompt in PROMPTS[:8])
            )
            for own, whole in zip(found, want, strict=True):
                is_whole(own, whole)
            assert all(each.requests for each in fleet.replicas), "one replica has done it all"
            assert fleet.outcomes() == {"length": 8}

    run(ask())


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(dies_at=st.integers(1, 12), seed=st.none() | st.integers(0, 9), stop=st.booleans())
def test_a_stream_goes_on_where_its_replica_has_ended(
    dies_at: int, seed: int | None, stop: bool
) -> None:
    how: dict[str, Any] = {"temperature": 0} if seed is None else {"seed": seed}
    params = SamplingParams(max_tokens=12, stop=("return x",) if stop else (), **how)

    async def ask() -> None:
        (want,) = await expected(PROMPTS[:1], params)
        async with fleet_of(placement=RoundRobin()) as fleet:
            first, second = fleet.replicas
            first.dies_at = dies_at
            found = await read(fleet.engine, PROMPTS[0], params)
            is_whole(found, want)
            if first.mode == "dead":
                assert fleet.engine.members["a"].state == "lost"
                assert len(second.requests) == 1
                assert (
                    len(second.requests[0].output_token_ids) >= dies_at - 1
                )  # a piece may have several tokens
                assert fleet.engine.num_resumed == (dies_at > 1)

    run(ask())


def test_two_hundred_streams_while_a_replica_is_killed() -> None:
    async def ask() -> None:
        random = Random(0)
        greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        want = await expected(PROMPTS[:10], greedy)
        async with fleet_of("a", "b", "c") as fleet:
            victim = fleet.replicas[0]
            victim.dies_at = random.randrange(30, 200)
            several = [
                replace(greedy, n=2, temperature=1.0) if n % 10 == 0 else greedy for n in range(200)
            ]
            found = await asyncio.gather(
                *(read(fleet.engine, PROMPTS[n % 10], params) for n, params in enumerate(several))
            )
            assert victim.mode == "dead"
            num_errors = 0
            for number, (own, params) in enumerate(zip(found, several, strict=True)):
                if params.n == 1:
                    is_whole(own, want[number % 10])
                elif own.error is None:
                    assert own.reasons == ["length", "length"]
                else:
                    num_errors += 1
                    assert isinstance(own.error, ReplicaLost)
                    assert "several continuations" in str(own.error)
                    assert len(own.reasons) <= 1
            assert fleet.engine.num_resumed > 0
            assert fleet.outcomes()["lost"] >= fleet.engine.num_resumed + num_errors
            victim.mode, victim.dies_at = "works", None
            await until(lambda: fleet.engine.members["a"].state == "up")

    run(ask())


def test_what_samples_without_a_seed_goes_on_too() -> None:
    async def ask() -> None:
        params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
        async with fleet_of(placement=RoundRobin()) as fleet:
            first, second = fleet.replicas
            first.dies_at = 2
            found = await read(fleet.engine, PROMPTS[0], params)
            assert (found.error, len(found.token_ids)) == (None, 12)
            seed = first.requests[0].params.seed
            assert seed is not None
            assert second.requests[0].params.seed == seed
            (want,) = await expected(PROMPTS[:1], replace(params, seed=seed))
            assert found.token_ids == want.token_ids
            first.mode = "works"
            await read(fleet.engine, PROMPTS[0], params)
            assert second.requests[-1].params.seed != seed

    run(ask())


@pytest.mark.parametrize(("seed", "is_same"), [(7, True), (None, False)])
def test_a_fleet_draws_as_its_seed_says(seed: int | None, is_same: bool) -> None:
    async def seeds() -> list[int | None]:
        async with fleet_of("a", seed=seed) as fleet:
            for _ in range(2):
                await read(fleet.engine, PROMPTS[0], SamplingParams(max_tokens=1))
            return [request.params.seed for request in fleet.replicas[0].requests]

    first, again = run(seeds()), run(seeds())
    assert len(set(first)) == 2
    assert (first == again) is is_same


def test_a_stream_is_moved_once() -> None:
    async def ask() -> None:
        params = SamplingParams(max_tokens=12, temperature=0)
        async with fleet_of("a", "b", "c", placement=RoundRobin()) as fleet:
            for each in fleet.replicas:
                each.dies_at = 3
            found = await read(fleet.engine, PROMPTS[0], params)
            assert isinstance(found.error, ReplicaLost)
            assert "it has been moved once" in str(found.error)
            assert 4 <= len(found.token_ids) < 12  # four pieces, of a token or more
            assert not found.reasons
            assert sorted(len(each.requests) for each in fleet.replicas) == [0, 1, 1]
            assert [each.mode for each in fleet.replicas].count("works") == 1

    run(ask())


@pytest.mark.parametrize("params", [SamplingParams(n=2, seed=1), BeamSearchParams(beam_width=2)])
def test_what_has_no_piece_yet_begins_anew(params: Any) -> None:
    async def ask() -> None:
        want = await read(engine("alone"), PROMPTS[0], params)
        async with fleet_of(placement=RoundRobin()) as fleet:
            fleet.replicas[0].dies_at = 1
            found = await read(fleet.engine, PROMPTS[0], params)
            assert found.error is None
            assert sorted(found.token_ids) == sorted(want.token_ids)
            assert len(found.reasons) == 2
            assert fleet.engine.num_resumed == 0

    run(ask())


def test_a_frozen_replica_is_waited_for_no_longer_than_the_timeout() -> None:
    async def ask() -> None:
        params = SamplingParams(max_tokens=12, temperature=0)
        (want,) = await expected(PROMPTS[:1], params)
        async with fleet_of(placement=RoundRobin(), replica_timeout_s=1.5) as fleet:
            stream: AsyncGenerator[TextDelta, None]
            async with aclosing(
                fleet.engine.generate(await fleet.engine.request(PROMPTS[0], params))
            ) as stream:
                found = Read()
                found.add(await anext(stream))
                fleet.replicas[0].mode = "frozen"
                async for delta in stream:
                    found.add(delta)
            is_whole(found, want)
            member = fleet.engine.members["a"]
            assert (member.state, member.why) == ("lost", "it has not answered for 1.5 s")
            assert "a" in fleet.placement.forgotten
            is_whole(await read(fleet.engine, PROMPTS[0], params), want)
            assert len(fleet.replicas[0].requests) == 1
            fleet.replicas[0].mode = "works"
            await until(lambda: member.state == "up")

    run(ask())


def test_a_reader_between_two_pieces_finds_a_frozen_replica_too() -> None:
    """A wait that begins after the replica was lost ends at once."""

    async def ask() -> None:
        params = SamplingParams(max_tokens=12, temperature=0)
        (want,) = await expected(PROMPTS[:1], params)
        async with fleet_of(placement=RoundRobin(), replica_timeout_s=1.5) as fleet:
            request = await fleet.engine.request(PROMPTS[0], params)
            async with aclosing(fleet.engine.generate(request)) as stream:
                found = Read()
                found.add(await anext(stream))
                fleet.replicas[0].mode = "frozen"
                await until(lambda: fleet.engine.members["a"].state == "lost")
                watching = fleet.engine.members["a"].watching
                assert watching is not None
                watching.cancel()  # the next report that does not come would end the wait, too
                async with asyncio.timeout(10):
                    async for delta in stream:
                        found.add(delta)
            is_whole(found, want)

    run(ask())


def test_draining_breaks_no_stream() -> None:
    async def ask() -> None:
        params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        want = await expected(PROMPTS[:12], params)
        async with fleet_of() as fleet:
            reading = [
                asyncio.create_task(read(fleet.engine, prompt, params)) for prompt in PROMPTS[:12]
            ]
            first = fleet.replicas[0]
            async with asyncio.timeout(20):
                while first.num_pieces < 5:
                    await asyncio.sleep(0.001)
            num_sent = len(first.requests)
            assert await fleet.engine.drain("a", 60.0)
            more = [asyncio.create_task(read(fleet.engine, each, params)) for each in PROMPTS[:5]]
            for own, whole in zip(
                await asyncio.gather(*reading, *more), want + want[:5], strict=True
            ):
                is_whole(own, whole)
            assert len(first.requests) == num_sent
            assert fleet.engine.members["a"].state == "draining"
            assert fleet.engine.num_resumed == 0
            await fleet.engine.leave("a")
            assert list(fleet.engine.members) == ["b"]

    run(ask())


def test_what_does_not_end_in_time_goes_on_elsewhere_or_is_aborted() -> None:
    async def ask() -> None:
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        (want,) = await expected(PROMPTS[:1], params)
        async with fleet_of(placement=RoundRobin()) as fleet:
            one = asyncio.create_task(read(fleet.engine, PROMPTS[0], params))
            await asyncio.sleep(0)
            both = asyncio.create_task(
                read(fleet.engine, PROMPTS[1], replace(params, n=2, temperature=1.0))
            )
            async with asyncio.timeout(20):
                while not all(each.num_pieces > 3 for each in fleet.replicas):
                    await asyncio.sleep(0.001)
            names = {len(m.streams): n for n, m in fleet.engine.members.items()}
            assert names
            for name in ("a", "b"):
                members = fleet.engine.members[name].streams
                if any(stream.request.params.n == 2 for stream in members):
                    assert not await fleet.engine.drain(name, 0.0)
            assert (await both).reasons == ["abort", "abort"]
            fleet.engine.members["a"].told_to_drain = False
            is_whole(await one, want)

    run(ask())


def test_a_drain_that_is_out_of_time_moves_a_stream() -> None:
    async def ask() -> None:
        params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        (want,) = await expected(PROMPTS[:1], params)
        async with fleet_of(placement=RoundRobin()) as fleet:
            one = asyncio.create_task(read(fleet.engine, PROMPTS[0], params))
            async with asyncio.timeout(20):
                while fleet.replicas[0].num_pieces < 3:
                    await asyncio.sleep(0.001)
            assert not await fleet.engine.drain("a", 0.0)
            is_whole(await one, want)
            assert fleet.engine.num_resumed == 1

    run(ask())


def test_replicas_that_drain_by_themselves_are_passed_over() -> None:
    async def ask() -> None:
        params = SamplingParams(max_tokens=4, temperature=0)
        async with fleet_of(placement=RoundRobin(), report_interval_s=1000.0) as fleet:
            await fleet.replicas[0].begin_drain()  # the fleet has not heard of it
            assert (await read(fleet.engine, PROMPTS[0], params)).reasons == ["length"]
            assert fleet.outcomes() == {"refused": 1, "length": 1}
            await fleet.replicas[1].begin_drain()
            found = await read(fleet.engine, PROMPTS[0], params)
            assert isinstance(found.error, NoReplica)

    run(ask())


def test_readers_that_leave_end_their_requests_there() -> None:
    async def ask() -> None:
        params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
        async with fleet_of() as fleet:
            request = await fleet.engine.request(PROMPTS[0], params)
            async with aclosing(fleet.engine.generate(request)) as stream:
                await anext(stream)
            waiting = asyncio.create_task(read(fleet.engine, PROMPTS[1], params))
            await until(lambda: sum(len(each.requests) for each in fleet.replicas) == 2)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await fleet.is_idle()
            assert fleet.outcomes() == {"left": 2}
            wrong = await read(fleet.engine, PROMPTS[0], SamplingParams(), request_id="x")
            assert wrong.num_ends == 1

    run(ask())


def test_aborted_requests_get_a_last_piece() -> None:
    async def ask() -> None:
        params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
        async with fleet_of(placement=RoundRobin()) as fleet:
            names = ["one", "two", "three"]
            reading = [
                asyncio.create_task(read(fleet.engine, PROMPTS[0], params, request_id=name))
                for name in names
            ]
            async with asyncio.timeout(20):
                while not all(each.num_pieces > 3 for each in fleet.replicas):
                    await asyncio.sleep(0.001)
            again = await read(fleet.engine, PROMPTS[0], params, request_id="two")
            assert "'two' is in use" in str(again.error)
            await fleet.engine.abort(["two", "unknown"])
            assert (await reading[1]).reasons == ["abort"]
            fleet.replicas[0].mode = "dead"  # which cannot be told
            await fleet.engine.abort(None)
            for each in await asyncio.gather(reading[0], reading[2]):
                assert (each.reasons, each.error) == (["abort"], None)
            assert fleet.outcomes()["abort"] >= 1

    run(ask())


def test_an_engine_that_is_closed_hands_its_streams_on() -> None:
    """A real engine's end: its readers are told "abort", and the door's go on elsewhere."""

    async def ask() -> None:
        params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        (want,) = await expected(PROMPTS[:1], params)
        own = AsyncLLM(load(), **OPTIONS)
        handles = [LocalReplica("short-lived", own), BreakableReplica("b")]
        fleet = await FleetEngine.start(handles, RoundRobin(), report_interval_s=0.02, seed=0)
        while len([m for m in fleet.members.values() if m.state == "up"]) < 2:
            await asyncio.sleep(0.01)
        for _ in range(2):  # whichever comes first
            request = await fleet.request(PROMPTS[0], params)
            async with aclosing(fleet.generate(request)) as stream:
                found = Read()
                async for delta in stream:
                    found.add(delta)
                    if len(found.token_ids) > 5 and fleet.members["short-lived"].streams:
                        await own.aclose()
            is_whole(found, want)
        assert fleet.num_resumed == 1
        assert fleet.members["short-lived"].state == "lost"
        await fleet.aclose()
        assert isinstance(fleet.failure, RequestError)

    run(ask())


def test_two_models_under_one_name_are_refused() -> None:
    async def ask() -> None:
        other = AsyncLLM(tiny_model("llama"), **{"kv_cache_memory_bytes": "8MiB"})
        smaller = AsyncLLM(load(), **{**OPTIONS, "max_model_len": 256})
        async with fleet_of("a") as fleet:
            with pytest.raises(ConfigError, match=r"another model.*weights"):
                await fleet.engine.join(LocalReplica("other", other))
            assert fleet.engine.members["other"].state == "refused"
            with pytest.raises(ConfigError, match="max_model_len=256, and the fleet 512"):
                await fleet.engine.join(LocalReplica("smaller", smaller))
            with pytest.raises(ConfigError, match="has a replica 'a'"):
                await fleet.engine.join(BreakableReplica("a"))
            params = SamplingParams(max_tokens=3, temperature=0)
            for _ in range(4):
                assert (await read(fleet.engine, PROMPTS[0], params)).reasons == ["length"]
            assert fleet.outcomes() == {"length": 4}
        await other.aclose()
        await smaller.aclose()

    run(ask())


def test_equal_replicas_cost_the_same_whatever_each_has_measured() -> None:
    measured = {"a": 1.00e-3, "b": 1.06e-3, "slow": 2e-3}
    costs = {"a": 1.03e-3, "b": 1.03e-3, "slow": 2e-3}

    async def ask() -> None:
        async with fleet_of(*measured) as fleet:
            for each in fleet.replicas:
                each.load_changes["compute_s_per_token"] = measured[each.name]
            loads = fleet.placement.loads
            await until(
                lambda: {n: loads[n].compute_s_per_token for n in costs} == pytest.approx(costs)
            )

    run(ask())


def test_the_first_replica_opens_the_door() -> None:
    class Slow(BreakableReplica):
        ready = asyncio.Event()

        async def facts(self) -> Any:
            await self.ready.wait()
            return await super().facts()

    async def ask() -> None:
        slow, dead = Slow("b"), BreakableReplica("c")
        dead.mode = "dead"
        handles = [slow, dead, BreakableReplica("a")]
        fleet = await FleetEngine.start(handles, LeastLoaded(), report_interval_s=0.02, seed=0)
        assert fleet.failure is None
        states = {name: member.state for name, member in fleet.members.items()}
        assert states == {"a": "up", "b": "joining", "c": "lost"}
        assert (
            await read(fleet, PROMPTS[0], SamplingParams(max_tokens=2, temperature=0))
        ).reasons == ["length"]
        slow.ready.set()
        await until(lambda: fleet.members["b"].state == "up")
        await fleet.aclose()
        with pytest.raises(ReplicaLost, match="killed"):
            await FleetEngine.start([dead], LeastLoaded())
        with pytest.raises(ConfigError, match="at least one"):
            await FleetEngine.start([], LeastLoaded())
        for name in ("replica_timeout_s", "report_interval_s"):
            with pytest.raises(ConfigError, match=f"{name}=0"):
                FleetEngine(LeastLoaded(), **{name: 0})

    run(ask())


def test_facts_are_those_of_the_engine() -> None:
    llm = engine("a").llm
    assert facts_of(llm).model is llm.facts
    assert facts_of(llm).fingerprint == facts_of(engine("b").llm).fingerprint


def test_requests_wait_a_moment_while_all_replicas_are_out() -> None:
    async def ask() -> None:
        params = SamplingParams(max_tokens=6, temperature=0)
        (want,) = await expected(PROMPTS[:1], params)
        async with fleet_of("a", patience_s=30.0) as fleet:
            fleet.replicas[0].mode = "dead"
            while fleet.engine.members["a"].state != "lost":
                await asyncio.sleep(0.01)
            assert fleet.engine.failure is None
            waits = asyncio.ensure_future(read(fleet.engine, PROMPTS[0], params))
            await asyncio.sleep(0.1)
            assert not waits.done()
            fleet.replicas[0].mode = "works"
            is_whole(await waits, want)

    run(ask())


def test_no_request_waits_longer_than_the_patience() -> None:
    async def ask() -> None:
        async with fleet_of("a", patience_s=0.1) as fleet:
            fleet.replicas[0].mode = "dead"
            found = await read(
                fleet.engine, PROMPTS[0], SamplingParams(max_tokens=6, temperature=0)
            )
            assert isinstance(found.error, NoReplica)
            assert fleet.engine.failure is not None

    run(ask())
