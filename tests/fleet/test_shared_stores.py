"""A folder that the replicas of a fleet share is found by all, whichever has stored there."""

import asyncio
from pathlib import Path
from typing import Any

from fleet.replicas import fleet_of
from quire import LLM, AsyncLLM
from quire.fleet.event_follower import ZmqFollower
from quire.fleet.fleet_engine import FleetEngine
from quire.fleet.placement import PrefixAware
from quire.fleet.prefix_directory import PrefixDirectory
from quire.fleet.replica import LocalReplica, facts_of
from quire.kv import NO_KEYS
from quire.models.loader import load
from quire.sampling_params import SamplingParams
from server.asking import run

SIZES: dict[str, Any] = dict(kv_cache_memory_bytes="24MiB", max_model_len=512)
EVENTS = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://127.0.0.1:0",
    "replay_endpoint": "tcp://127.0.0.1:0",
}
PROMPT = list(range(5, 101))  # six blocks


def test_what_one_has_stored_goes_to_another(tmp_path: Path) -> None:
    async def scene() -> None:
        tiers = dict(kv_tier=(f"file:{tmp_path}?size=64MiB",), kv_tier_write="always")
        llms = [AsyncLLM(load(), kv_events_config=EVENTS, **SIZES, **tiers) for _ in range(2)]
        facts = facts_of(llms[0].llm)
        directory = PrefixDirectory(facts.groups, facts.block_size)
        fleet = await FleetEngine.start(
            [LocalReplica(name, llm) for name, llm in zip("ab", llms, strict=True)],
            PrefixAware(directory, seed=1),
            follower=ZmqFollower(directory),
            report_interval_s=0.02,
        )
        while any(each.state != "up" for each in fleet.members.values()):
            await asyncio.sleep(0.01)

        async def ask() -> str:
            before = {name: len(own.counts.outcomes) for name, own in fleet.members.items()}
            request = await fleet.request([*PROMPT, 7], SamplingParams(max_tokens=2, temperature=0))
            async for _ in fleet.generate(request):
                pass
            after = {name: len(own.counts.outcomes) for name, own in fleet.members.items()}
            (name,) = [name for name in after if after[name] > before[name]]
            return name

        first = await ask()
        other = {"a": "b", "b": "a"}[first]
        hashes = directory.hashes(PROMPT, NO_KEYS)
        async with asyncio.timeout(20):
            while directory.find(hashes, [other]) != {other: {"STORAGE": 6}}:
                await asyncio.sleep(0.01)
        await fleet.drain(first, 0.0)
        await fleet.leave(first)
        assert await ask() == other  # what the replica that has gone has left is found
        assert fleet.members[other].counts.predicted_tokens == 96
        assert fleet.members[other].counts.routed_tokens["STORAGE"] == 96
        await fleet.aclose()

    run(scene())


def test_a_store_is_told_by_its_place(tmp_path: Path) -> None:
    def store_of(*tiers: str) -> str | None:
        with LLM(load(), kv_events_config=EVENTS, **SIZES, kv_tier=tiers) as llm:
            events = facts_of(llm).events
            assert events is not None
            return events.store

    one, two = f"file:{tmp_path / 'one'}", f"file:{tmp_path / 'two'}"
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    assert store_of() is None
    assert store_of("memory:?size=1MiB") is None
    here = store_of("memory:?size=1MiB", one)
    assert here is not None
    linked = store_of(f"file:{tmp_path / 'link'}")
    assert linked == here
    assert store_of(two) != here
    assert store_of(one, two) not in (None, here)


def test_a_tier_costs_what_others_have_measured() -> None:
    async def scene() -> None:
        async with fleet_of("a", "b") as fleet:
            a, b = fleet.replicas
            a.load_changes["load_s_per_block"] = {"STORAGE": 0.5, "CPU": 0.25}
            b.load_changes["load_s_per_block"] = {"CPU": 1.0}
            async with asyncio.timeout(10):
                while fleet.placement.loads["b"].load_s_per_block != {"STORAGE": 0.5, "CPU": 1.0}:
                    await asyncio.sleep(0.01)
            assert fleet.placement.loads["a"].load_s_per_block == {"STORAGE": 0.5, "CPU": 0.25}

    run(scene())
