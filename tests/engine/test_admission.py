"""Costs decide what comes beside others: against headroom that is always kept, or never."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.accounting.bench_admission import FIXED, TABLES
from benchmarks.accounting.loads import Load, any_load, play, ten_loads
from conformance.covering import in_turn
from quire.engine.scheduling.step_costs import Costs, Prices
from quire.planner.simulation.cost_model import StepCosts
from quire.planner.simulation.simulated_engine import prices_of

# Of the numbers of requests and of pools: seconds, and still many more than find room at once.
SCALES = (1, 1, 0.15, 0.15, 0.3, 0.4, 0.4, 0.25, 0.3, 0.06)
AS_GOOD, NEVER_WORSE = 1.05, 1.10


def best_s(load: Load, prices: StepCosts) -> float:
    """The shortest time to finish of those with headroom, half of it, and none."""
    return min(play(load, prices, headroom=share).seconds for share in FIXED.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("number", "table"), in_turn(range(10), [*TABLES], kept=[2, 3, 4, 7, 9]))
def test_on_ten_loads_costs_decide_as_well_as_the_best_of_three(number: int, table: str) -> None:
    load, prices = ten_loads(1, SCALES[number])[number], TABLES[table]
    goal_s = AS_GOOD * best_s(load, prices)
    known = Costs(prices=prices_of(prices, load.max_num_batched_tokens))
    assert play(load, prices, costs=known).seconds <= goal_s


@pytest.mark.full
@given(seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=3, derandomize=True, database=None)
def test_no_load_takes_much_longer_than_with_the_best_of_three(seed: int) -> None:
    load, prices = any_load(random.Random(seed))
    known = Costs(prices=prices_of(prices, load.max_num_batched_tokens))
    assert play(load, prices, costs=known).seconds <= NEVER_WORSE * best_s(load, prices)


@pytest.mark.parametrize("table", TABLES)
def test_costs_that_are_measured_do_as_well(table: str) -> None:
    load, prices = ten_loads(1)[1], TABLES[table]  # 16 at once, whose ends are not known
    assert play(load, prices).seconds <= NEVER_WORSE * best_s(load, prices)


def test_where_computing_again_is_dear_none_makes_room_and_where_it_is_cheap_all_run() -> None:
    load, step = ten_loads(1)[0], TABLES["GPU"]  # 16 at once, of 64 + 128 tokens, in 1,024
    dear = play(load, step, costs=Costs(prices=Prices(step_s=1.0, token_s=1.0)))
    cheap = play(load, step, costs=Costs(prices=Prices(step_s=1.0, token_s=1e-4)))
    assert (dear.num_preemptions, cheap.num_steps) == (0, 318)
    assert cheap.num_preemptions > 0
    assert dear.num_steps > 1.5 * cheap.num_steps
