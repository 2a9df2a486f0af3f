"""Greedy tokens in float32 do not depend on who else runs, or on what happened on the way."""

import pytest

from conformance.covering import only
from engine.schedules import Result, Schedule
from quire.kv import STRATEGIES
from quire.models.recorded import recordings


def run(seeds: range, cache: str | None = None) -> Result:
    total = Result()
    for seed in seeds:
        total.add(Schedule(seed, cache).run())
    assert not total.faults
    assert 1000 * len(total.differences) < total.num_sequences or not total.differences
    return total


@pytest.fixture(autouse=True)
def _recorded_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that steps of all kinds are played, and some are not."""
    monkeypatch.setattr(recordings, "WORTH_IT", 3)


# "growing" and "virtual-shared": on an emulated device, in test_device_memory.py.
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "cache", only([*STRATEGIES, "virtual-shared"], "contiguous", "paged", "virtual")
)
def test_random_schedules_give_the_tokens_of_generate(cache: str) -> None:
    total = run(range(1), cache)
    assert total.num_sequences


@pytest.mark.full
def test_five_hundred_schedules_give_the_tokens_of_generate() -> None:
    total = run(range(500))
    assert total.num_preemptions > 500
    assert total.num_cached_tokens > 5000
    print(total)
