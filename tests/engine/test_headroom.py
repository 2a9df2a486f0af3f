"""What is expected of running sequences, against the same worked out step by step."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.covering import examples, only
from engine.scheduler_machine import Watch
from engine.test_progress import FULL, added, five, request, watch
from quire.engine.scheduler import Scheduler, SchedulerLimits
from quire.engine.scheduling import headroom as company_module
from quire.engine.scheduling.admission import Admission
from quire.engine.scheduling.headroom import (
    BytesAt,
    Outlook,
    OutputLengths,
    Prospects,
    RunningSet,
    Survival,
    joined,
)
from quire.engine.scheduling.policy import POLICIES
from quire.engine.scheduling.step_costs import Costs, Prices
from quire.engine.sequence import Request, Sequence
from quire.engine.step_plan import Sampled
from quire.kv import CacheConfig
from quire.kv.paged import PagedAccounting
from quire.sampling_params import SamplingParams

NONE_RUNNING = np.zeros(0, np.int64), np.zeros(0)
HORIZON = 100


def blocks_of_four(num_tokens: np.ndarray, _: Prospects) -> np.ndarray:
    return -(-num_tokens // 4) * 4


def growth_bytes(several: Prospects, survival: Survival, bytes_at: BytesAt) -> int:
    """Of all but the last, and then that one beside them, as a newcomer is asked for."""
    size = len(several.count)
    others, last = (
        several.only(np.arange(size) < size - 1),
        several.only(np.arange(size) == size - 1),
    )
    outlook = Outlook(others, survival, bytes_at, horizon=HORIZON)
    return max(0, int(outlook.need_bytes(outlook.curves(last)).max()))


def prospects(sizes: list[tuple[int, int, int]], *, sure: bool) -> Prospects:
    """Of each sequence: tokens of its prompt, generated ones, and how many it may generate."""
    prompt, output, most = np.array(sizes, np.int64).T
    held = -(-(prompt + output) // 4) * 4.0
    return Prospects(
        count=np.ones_like(prompt),
        num_tokens=prompt + output,
        num_output=output,
        most_output=most,
        sure=np.full(len(sizes), sure),
        has_room=np.ones(len(sizes), bool),
        held_bytes=held,
        freed_bytes=held,
    )


def peak_step_by_step(sizes: list[tuple[int, int, int]]) -> int:
    """The slow twin for sequences that end at their limits: each gets a token a step."""
    now = sum(-(-(prompt + output) // 4) * 4 for prompt, output, _ in sizes)
    peak = 0
    for step in range(max(most - output for _, output, most in sizes)):
        running = [(p, o + step) for p, o, most in sizes if o + step < most]
        peak = max(peak, sum(-(-(p + o) // 4) * 4 for p, o in running) - now)
    return peak


sequences = st.tuples(st.integers(1, 40), st.integers(0, 30), st.integers(1, 60)).map(
    lambda size: (size[0], min(size[1], size[2] - 1), size[2])
)


@given(sizes=st.lists(sequences, min_size=1, max_size=6))
@settings(deadline=None, max_examples=examples(50, of=150))
def test_where_ends_are_known_the_peak_is_exact(sizes: list[tuple[int, int, int]]) -> None:
    known = OutputLengths().survival(*NONE_RUNNING)
    several = prospects(sizes, sure=True)
    alone = Outlook(several, known, blocks_of_four, horizon=HORIZON)
    nothing = several.only(np.zeros(len(sizes), bool))
    assert max(0, int(alone.need_bytes(alone.curves(nothing)).max())) == peak_step_by_step(sizes)
    # A sequence that may end before its limit needs no more, beyond the spread that is kept.
    assert growth_bytes(prospects(sizes, sure=False), known, blocks_of_four) >= 0


@given(
    sizes=st.lists(sequences, min_size=1, max_size=6),
    more=st.lists(sequences, min_size=1, max_size=4),
    sure=st.booleans(),
)
@settings(deadline=None, max_examples=examples(40, of=100))
def test_newcomers_beside_others_need_what_all_of_them_need(
    sizes: list[tuple[int, int, int]], more: list[tuple[int, int, int]], sure: bool
) -> None:
    """One after the other, with no look at the others: at the same moments, or a little more."""
    known = OutputLengths().survival(*NONE_RUNNING)
    others, newcomers = prospects(sizes, sure=sure), prospects(more, sure=sure)
    both = joined(others, newcomers)
    together = Outlook(both, known, blocks_of_four, horizon=HORIZON)
    outlook = Outlook(others, known, blocks_of_four, horizon=HORIZON)
    for number in range(len(more)):
        one = newcomers.only(np.arange(len(more)) == number)
        curves = outlook.curves(one)
        need = outlook.need_bytes(curves)
        outlook.add(curves)
    nothing = both.only(np.zeros(len(both.count), bool))
    exact = together.need_bytes(together.curves(nothing))[
        np.searchsorted(together.moments, outlook.moments)
    ]
    if sure:  # at its limit one is counted up to the next moment
        assert (need >= exact - 1e-6).all()
    if set(newcomers.num_left.tolist()) <= set(outlook.moments.tolist()):
        assert need == pytest.approx(exact)


@given(
    ended=st.lists(st.tuples(st.integers(1, 300), st.booleans()), max_size=300),
    running=st.lists(st.integers(0, 300), max_size=5),
)
@settings(deadline=None, max_examples=60)
def test_shares_never_rise_and_stay_above_nothing(
    ended: list[tuple[int, bool]], running: list[int]
) -> None:
    lengths = OutputLengths()
    for num_tokens, cut_off in ended:
        lengths.note(num_tokens, cut_off=cut_off)
    shares = lengths.survival(np.array(running, np.int64), np.ones(len(running)))(np.arange(5000))
    assert (np.diff(shares) <= 1e-12).all()
    assert shares[0] <= 1
    assert shares[-1] > 0


def test_sequences_of_many_gigabytes_are_no_overflow() -> None:
    """The square of what one of them holds is more than an int64 can."""
    nothing = np.zeros(2)
    several = prospects([(10, 1, 900), (10, 1, 900)], sure=False)
    several = replace(several, held_bytes=nothing, freed_bytes=nothing)
    known = OutputLengths().survival(*NONE_RUNNING)
    size = 5_700_000_000  # its square wraps around to less than 0
    found = growth_bytes(several, known, lambda tokens, _: np.full_like(tokens, size))
    assert 2 * size <= found < 4 * size


def test_it_learns_and_forgets() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.note(20, cut_off=False)
    longer = lengths.survival(*NONE_RUNNING)(np.array([19, 20, 100]))
    assert longer[0] > 0.95 > 0.05 > longer[1] >= longer[2]
    for _ in range(200):
        lengths.note(400, cut_off=False)
    assert lengths.survival(*NONE_RUNNING)(np.array([300]))[0] > 0.8


def test_what_was_cut_off_counts_as_at_least_so_long() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        lengths.note(16, cut_off=True)
    assert lengths.survival(*NONE_RUNNING)(np.array([16]))[0] > 0.9


def test_a_newcomer_waits_for_the_others_growth_and_none_makes_room() -> None:
    one = watch(64, max_model_len=64, max_num_seqs=4)
    sequences = [
        Request(
            request_id=number,
            prompt_token_ids=tuple(range(100 * number + 1, 100 * number + 9)),
            params=SamplingParams(max_tokens=24, ignore_eos=True),
        )
        for number in range(6)
    ]
    for each in sequences:
        one.add(each)
    one.step(five)
    assert one.scheduler.num_running == 2  # 31 tokens each in the end: 8 blocks of 16
    one.drain(five)
    assert one.scheduler.num_preemptions == 0


def priorities(one: Watch, *values: int) -> None:
    for value in values:
        number = len(one.sequences)
        sized = request(number, 16, 16)
        one.add(
            Request(
                request_id=number,
                prompt_token_ids=sized.prompt_token_ids,
                params=sized.params,
                priority=value,
            )
        )


@pytest.mark.parametrize("lacking", ["room", "seat"])
def test_a_better_priority_takes_room_and_seat_and_equals_wait(lacking: str) -> None:
    capacity, seats = (40, 8) if lacking == "room" else (512, 2)
    one = watch(capacity, max_num_seqs=seats, policy="priority", headroom=0.0)
    priorities(one, 1, 1)
    one.step(five)
    first, second = one.sequences
    running = one.scheduler.num_running
    priorities(one, 1)
    one.step(five)
    assert one.scheduler.num_preemptions == 0, "equals never displace each other"
    priorities(one, 0)
    best = one.sequences[-1]
    one.step(five)
    assert best.num_computed_tokens == 16
    assert one.scheduler.num_running <= running
    assert (first.num_preemptions, second.num_preemptions) in ((0, 1), (1, 0))
    one.drain(five)
    assert {s.finish_reason for s in one.sequences} == {"length"}


def test_who_came_back_is_spared_once() -> None:
    one = watch(64, max_num_seqs=8, headroom=0.0)
    a, b, c = added(one, (16, 30), (12, 30), (8, 30))
    victim = one.scheduler._victim
    assert victim([a, b, c]) is c
    c.came_back = True
    assert victim([a, b, c]) is b
    assert not c.came_back
    assert victim([a, b, c]) is c
    b.came_back = c.came_back = True
    assert victim([b, c]) is c, "there is no other choice"
    one.drain(five)


def test_the_cheaper_way_is_taken_and_means_follow_what_is_measured() -> None:
    costs = Costs(bytes_per_token=100)
    assert costs.swap_pays, "nothing is known of computing yet"
    costs.note_step(num_tokens=8, num_sequences=8, num_read=80, seconds=1.08)
    assert costs.swap_pays, "steps of one token each tell nothing of text"
    costs.note_step(num_tokens=100, num_sequences=1, num_read=100, seconds=2.0)
    assert costs.recompute_s(50) == pytest.approx(0.5)
    costs.note_saved(1000, 0.05)
    costs.note_loaded(1000, 0.06)
    assert costs.swap_s(100) == pytest.approx(0.011)
    assert not costs.swap_pays
    for _ in range(60):
        costs.note_saved(1000, 0.01)
        costs.note_loaded(1000, 0.01)
    assert costs.swap_s(100) == pytest.approx(0.002, rel=0.01)
    assert costs.swap_pays


@given(
    step_s=st.floats(0.001, 0.1),
    token_tokens=st.floats(2, 2000),
    entry_share=st.floats(0, 0.01),
    rng=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=15)
def test_prices_are_found_among_steps_that_vary(
    step_s: float, token_tokens: float, entry_share: float, rng: random.Random
) -> None:
    """``token_tokens``: tokens that take as long as a step itself; ``entry_share``: of a token."""
    token_s, costs = step_s / token_tokens, Costs()

    def step(num_tokens: int, num_sequences: int, num_read: int) -> None:
        seconds = step_s + token_s * (num_tokens + entry_share * num_read)
        costs.note_step(num_tokens, num_sequences, num_read, seconds * rng.uniform(0.99, 1.01))

    for _ in range(20):
        step(rng.choice([100, 400, 1000]), 1, 1000)
    for _ in range(200):  # which tell nothing of text, and are far more
        beside = rng.randint(1, 64)
        step(beside, beside, beside * rng.randint(50, 1000))
    assert costs.prices.step_s == pytest.approx(step_s, rel=0.2)
    assert costs.recompute_s(1000) == pytest.approx(1000 * token_s, rel=0.2, abs=0.05 * step_s)


def test_short_prompts_do_not_say_that_tokens_cost_nothing() -> None:
    """Steps of a few tokens take as long as any, by chance less; long prompts are loaded then."""
    costs = Costs()
    for _ in range(50):
        costs.note_step(num_tokens=1, num_sequences=1, num_read=40, seconds=0.0101)
        costs.note_step(num_tokens=20, num_sequences=1, num_read=20, seconds=0.0099)
    assert 0.05 < costs.recompute_s(2000) < 1.0
    for _ in range(50):
        costs.note_step(num_tokens=1, num_sequences=1, num_read=40, seconds=0.0101)
        costs.note_step(num_tokens=2000, num_sequences=1, num_read=2000, seconds=0.03)
    assert costs.recompute_s(2000) == pytest.approx(0.02, rel=0.1)


def test_prices_that_are_given_stay() -> None:
    costs = Costs(prices=Prices(step_s=1.0, token_s=0.1))
    costs.note_step(num_tokens=100, num_sequences=1, num_read=100, seconds=99.0)
    assert costs.prices == Prices(step_s=1.0, token_s=0.1)


def test_outputs_that_reach_their_limit_count_as_cut_off() -> None:
    one = watch(256, max_num_seqs=8)
    added(one, *[(4, 2)] * 60)
    one.drain(five)
    survival = one.scheduler._admission._lengths.survival(*NONE_RUNNING)
    assert survival(np.array([2]))[0] > 0.9


# -- the watermark -------------------------------------------------------------------------------

BLOCK = sum(group.bytes_for(4) for group in FULL)


def comes_beside_one(
    watermark_blocks: int, max_tokens: int, *, headroom: float | None = None
) -> bool:
    """Whether a prompt of two blocks comes beside a sequence of two, into a cache of eight.

    What runs has an output of two tokens and ends there; ``max_tokens`` are the newcomer's.
    """
    config = CacheConfig(
        max_model_len=64, max_num_seqs=4, capacity_bytes=8 * BLOCK, block_size=4, page_bytes=BLOCK
    )
    limits = SchedulerLimits(
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        watermark_bytes=watermark_blocks * BLOCK,
        headroom=headroom,
    )
    accounting = PagedAccounting(FULL, config)
    scheduler = Scheduler(accounting, limits)
    for number, most in enumerate((2, max_tokens)):
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        prompt = tuple(range(100 * number, 100 * number + 8))
        scheduler.add(Request(request_id=number, prompt_token_ids=prompt, params=params))
        plan = scheduler.plan()
        assert plan.chunks, "alone, a sequence comes whatever the watermark"
        accounting.drain()
        if number:
            return len(plan.chunks) == 2
        scheduler.update(plan, [Sampled(token_ids=(5,))])
    raise AssertionError


@pytest.mark.parametrize("watermark_blocks", [0, 3, 4, 8])
def test_a_newcomer_leaves_the_watermark_free(watermark_blocks: int) -> None:
    """Of eight blocks three are held (the first one's ninth token needs one) and two asked for."""
    fits = watermark_blocks <= 3
    assert comes_beside_one(watermark_blocks, 2, headroom=0.0) == fits


@pytest.mark.parametrize("watermark_blocks", [0, 3, 4, 8])
@pytest.mark.parametrize("max_tokens", [2, 20])
def test_the_watermark_stays_free_beside_the_headroom(
    watermark_blocks: int, max_tokens: int
) -> None:
    """Both find room to their ends, and the newcomer leaves the watermark free all the same.

    With 2 tokens they find it even if both were at their ends at once; with 20 only since what
    runs is gone before the newcomer has become long: it needs no more blocks than are left.
    """
    assert comes_beside_one(watermark_blocks, max_tokens) == (watermark_blocks <= 3)


# -- several newcomers at once -------------------------------------------------------------------


def _one_by_one(admission: Admission, newcomer: Sequence, outlook: Outlook) -> Any:
    """The slow twin: each by itself, with its siblings."""
    to_come = admission.company.to_come(newcomer)
    return outlook.curves(to_come), float(to_come.held_bytes[0])


def chunks_of_a_crowd(seed: int) -> list[list[tuple[int, int, int]]]:
    """Which tokens each step computes of requests that come ten at a time, more than find room."""
    draw = random.Random(seed)
    config = CacheConfig(
        max_model_len=256, max_num_seqs=64, capacity_bytes=1200 * FULL[0].bytes_per_token
    )
    limits = SchedulerLimits(
        max_model_len=256, max_num_seqs=64, max_num_batched_tokens=512, policy="priority"
    )
    known = Costs(prices=Prices(step_s=1.0, token_s=0.05))
    scheduler = Scheduler(PagedAccounting(FULL, config), limits, costs=known)
    steps = []
    while len(steps) < 60 or (scheduler.has_unfinished and len(steps) < 1000):
        for number in range(10 * (len(steps) % 10 == 0 and len(steps) < 60)):
            length, most = draw.randint(1, 60), draw.randint(1, 120)
            params = SamplingParams(max_tokens=most, n=draw.choice((1, 1, 2, 3)), ignore_eos=True)
            first = 1000 * (10 * len(steps) + number)
            scheduler.add(
                Request(
                    request_id=first,
                    prompt_token_ids=tuple(range(first, first + length)),
                    params=params,
                    priority=draw.randint(0, 1),
                )
            )
        plan = scheduler.plan()
        steps.append([(c.sequence.seq_id, c.start, c.stop) for c in plan.chunks])
        scheduler.update(plan, [Sampled(token_ids=(7,)) for _ in plan.draws])
        scheduler.check()
    assert not scheduler.has_unfinished
    return steps


def test_those_behind_a_newcomer_come_with_it() -> None:
    """Of its two siblings it is known that they will share its prompt."""
    limits = SchedulerLimits(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=512)
    config = CacheConfig(max_model_len=256, max_num_seqs=8, capacity_bytes=2**20)
    accounting = PagedAccounting(FULL, config)
    scheduler = Scheduler(accounting, limits)
    company = RunningSet(limits, POLICIES["fcfs"], accounting)
    params = [SamplingParams(max_tokens=20, n=n) for n in (1, 3)]
    alone, leader = (
        scheduler.add(Request(request_id=n, prompt_token_ids=tuple(range(30)), params=each))[0]
        for n, each in enumerate(params)
    )
    both = company.to_come(alone, leader)
    assert both.count.tolist() == [1, 1, 2]
    held = 2 * 16 * FULL[0].bytes_per_token
    assert both.held_bytes.tolist() == [held, held, held]
    assert both.freed_bytes.tolist() == [held, held, 0]
    assert both.longest.tolist() == [50, 50, 50]


def test_a_newcomer_that_was_refused_is_asked_again_while_others_only_grow() -> None:
    """The later it comes, the less it grows until the one that runs has ended."""
    config = CacheConfig(
        max_model_len=264, max_num_seqs=2, capacity_bytes=64 * BLOCK, block_size=4, page_bytes=BLOCK
    )
    limits = SchedulerLimits(max_model_len=264, max_num_seqs=2, max_num_batched_tokens=64)
    accounting = PagedAccounting(FULL, config)
    dear = Costs(prices=Prices(step_s=1.0, token_s=10.0))  # no newcomer is worth a preemption
    scheduler = Scheduler(accounting, limits, costs=dear)
    for number, most in enumerate((140, 220)):
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        prompt = tuple(range(100 * number, 100 * number + 8))
        scheduler.add(Request(request_id=number, prompt_token_ids=prompt, params=params))
    came = 0
    while scheduler.num_running < 2 and came < 150:
        plan = scheduler.plan()
        accounting.drain()
        scheduler.update(plan, [Sampled(token_ids=(5,))] * len(plan.draws))
        came += 1
    # With room for 256 tokens: as soon as the first one's 148 and as many of its own fit.
    assert 140 - 100 < came <= 140 - 100 + 16 + 1


def test_none_is_taken_for_longer_than_it_can_become(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among very many, whose lengths are looked at seldom, one takes in its prompt step by step."""
    monkeypatch.setattr(company_module, "_LOOKED_AT", 1)
    limits = SchedulerLimits(max_model_len=64, max_num_seqs=9, max_num_batched_tokens=512)
    config = CacheConfig(max_model_len=64, max_num_seqs=9, capacity_bytes=2**20)
    accounting = PagedAccounting(FULL, config)
    company = RunningSet(limits, POLICIES["fcfs"], accounting)
    params = SamplingParams(max_tokens=8)
    for number, num_prompt_tokens in enumerate([4] * 8 + [62]):
        prompt = tuple(range(num_prompt_tokens))
        of = Request(request_id=number, prompt_token_ids=prompt, params=params)
        last = Sequence(of, seq_id=number, index=0, arrived_s=0.0)
        accounting.add(number)
        accounting.try_extend(number, num_prompt_tokens)
        company.join(last)
    for num_computed in (16, 32, 48, 62):
        last.num_computed_tokens = num_computed
        company.note_step()
        company.prospects(0)
    last.token_ids.append(5)  # its first one
    company.note_step()
    several = company.prospects(0)
    assert several.num_tokens.max() <= 64
    assert (several.num_tokens <= several.longest).all()


@pytest.mark.parametrize("seed", only(range(3), 0))
def test_newcomers_that_are_worked_out_together_come_as_they_would_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = chunks_of_a_crowd(seed)
    monkeypatch.setattr(Admission, "_ask", _one_by_one)
    assert chunks_of_a_crowd(seed) == together
