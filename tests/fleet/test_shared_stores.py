"""A folder that the replicas of a fleet share is found by all, whichever has stored there."""

from pathlib import Path

from fleet.replicas import EVENTS, SIZES, fleet_of, placed_by_prefixes, until
from quire import LLM
from quire.fleet.replica import facts_of
from quire.kv import NO_KEYS
from quire.models.loader import load
from quire.sampling_params import SamplingParams
from server.asking import run

PROMPT = list(range(5, 101))  # six blocks


def test_what_one_has_stored_goes_to_another(tmp_path: Path) -> None:
    async def scene() -> None:
        params = SamplingParams(max_tokens=2, temperature=0)
        folder = f"file:{tmp_path}?size=64MiB"
        fleet_here = placed_by_prefixes(kv_tier=(folder,), kv_tier_write="always")
        async with fleet_here as (fleet, directory):

            async def ask() -> str:
                before = {name: len(own.counts.outcomes) for name, own in fleet.members.items()}
                request = await fleet.request([*PROMPT, 7], params)
                async for _ in fleet.generate(request):
                    pass
                after = {name: len(own.counts.outcomes) for name, own in fleet.members.items()}
                (name,) = [name for name in after if after[name] > before[name]]
                return name

            first = await ask()
            other = {"a": "b", "b": "a"}[first]
            hashes = directory.hashes(PROMPT, NO_KEYS)
            await until(
                lambda: directory.find(hashes, [other]) == {other: {"STORAGE": 6}}, within_s=20
            )
            await fleet.drain(first, 0.0)
            await fleet.leave(first)
            assert await ask() == other  # what the replica that has gone has left is found
            assert fleet.members[other].counts.predicted_tokens == 96
            assert fleet.members[other].counts.routed_tokens["STORAGE"] == 96

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
            loads = fleet.placement.loads
            await until(lambda: loads["b"].load_s_per_block == {"STORAGE": 0.5, "CPU": 1.0})
            assert loads["a"].load_s_per_block == {"STORAGE": 0.5, "CPU": 0.25}

    run(scene())
