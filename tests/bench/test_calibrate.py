"""A calibration by a clock that goes on by one tick whenever it is read: what must come out."""

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest

from quire.bench import calibrate as calibration
from quire.bench.calibrate import CostPoint, calibrate, price_copies
from quire.bench.load import vocabulary_of
from quire.engine.llm import LLM
from quire.planner.simulation.cost_model import StepWork

TICK_S = 1e-3
NUM_LAYERS = 8  # of the demo model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=4, max_model_len=128) as made:
        yield made


def ticking() -> Callable[[], float]:
    moments = count()
    return lambda: next(moments) * TICK_S


@pytest.mark.full
def test_steps_that_all_take_a_tick_are_a_tick_each(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_TIMES", 2)  # by this clock nothing is slow at first
    found = calibrate(llm, rounds=1, clock=ticking())
    assert found.num_steps > 100
    for work in (StepWork(1, 1, 1, 20.0, 20.0), StepWork(64, 2, 2, 64.0, 1056.0)):
        assert found.costs.seconds(work) == pytest.approx(TICK_S, rel=0.02)


def test_a_tick_is_shared_by_the_layers_of_a_copy(llm: LLM) -> None:
    prices = price_copies(llm, ticking())
    assert prices.copy_s == pytest.approx(TICK_S / NUM_LAYERS)
    assert prices.copy_s_per_byte == pytest.approx(0, abs=1e-12)
    # Of any length, a sequence is swapped in a tick.
    assert [prices.save_s, prices.load_s] == pytest.approx([TICK_S] * 2)
    assert [prices.save_s_per_byte, prices.load_s_per_byte] == pytest.approx([0, 0], abs=1e-12)


def test_planning_looks_ahead_where_one_waits_for_room(llm: LLM) -> None:
    point = CostPoint(num_sequences=3, prompt_tokens=24, lacks_room=True)
    vocabulary, rng = vocabulary_of(llm), np.random.default_rng(0)
    capacity_bytes = llm.accounting.ceiling.capacity_bytes
    steps = list(calibration.steps_of(llm, point, vocabulary, rng, ticking()))
    with_prompts = [work for work, _ in steps if work.num_prompts]
    looking = [work for work, _ in steps if work.num_outlooks]
    assert len(with_prompts) == 2  # the three together, and at last the one that waited
    assert len(looking) >= 2
    assert all(not work.num_prompts for work in looking)
    assert llm.accounting.ceiling.capacity_bytes == capacity_bytes


def test_what_was_taken_for_it_is_given_back(llm: LLM) -> None:
    before = llm.memory.reserved_bytes, llm.memory.committed_bytes
    price_copies(llm, ticking())
    assert (llm.memory.reserved_bytes, llm.memory.committed_bytes) == before
