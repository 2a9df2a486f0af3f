"""The scheduler over the real accounting of every strategy, with no model and no tensor.

``Workload`` is what comes, and when; ``Run`` plays it step by step, and ``Watch`` checks every
promise after each: the budget holds, room exists for what is planned, the first to come is served
first, what is skipped has been computed, no sequence ends for lack of room without a reason, and
everything ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conformance.covering import examples
from engine.scheduler_machine import EOS, HEADROOM, PRICES, Watch
from quire.engine.scheduler import Scheduler, SchedulerLimits
from quire.engine.scheduling.step_costs import Costs, Prices
from quire.engine.scheduling.swap_space import SwapSpace
from quire.engine.sequence import Request, Sequence, TokenLogprobs
from quire.engine.step_plan import Sampled
from quire.errors import RequestTooLong
from quire.kv import STRATEGIES, Accounting, CacheConfig
from quire.kv.paged import PagedAccounting
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.spec import FullAttention, Group, SlidingWindow

MAX_MODEL_LEN = 48
PAGE_BYTES = 64
SHARED = "virtual-shared"
STORED = (*STRATEGIES, SHARED)
_COMMON = dict(num_kv_heads=1, head_dim=4, dtype="float32")  # 32 bytes a token and layer
FULL = Group(spec=FullAttention(**_COMMON), layers=(0, 2))
WINDOW = Group(spec=SlidingWindow(**_COMMON, window=7), layers=(1, 3))
GROUPS = {"full": (FULL,), "hybrid": (FULL, WINDOW)}


@dataclass(frozen=True, kw_only=True)
class Arrival:
    step: int
    num_prompt_tokens: int
    max_tokens: int
    text: int = 0  # prompts of one text begin alike
    eos_after: int | None = None  # output tokens, the last of which is EOS
    abort_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    strategy: str
    groups: str
    capacity_tokens: int  # the ceiling, in tokens that hold every layer
    budget: int
    max_num_seqs: int
    arrivals: tuple[Arrival, ...]
    growth: str = "uniform"
    growth_tokens: int = 8
    reserve: str = "max_model_len"
    caching: bool = True
    headroom: float | None = 0.0
    prices: Prices | None = None
    policy: str = "fcfs"
    swap_tokens: int = 0

    def accounting(self) -> Accounting:
        groups = GROUPS[self.groups]
        config = CacheConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=self.max_num_seqs,
            capacity_bytes=self.capacity_tokens * sum(g.bytes_per_token for g in groups),
            block_size=4,
            page_bytes=PAGE_BYTES,
            growth=self.growth,
            growth_tokens=self.growth_tokens,
            reserve=self.reserve,
            enable_prefix_caching=self.caching,
            shares_pages=self.strategy == SHARED,
        )
        name = "virtual" if self.strategy == SHARED else self.strategy
        return STRATEGIES[name].make_accounting(groups, config)


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[Arrival, ...]:
    several = draw(
        st.lists(
            st.builds(
                Arrival,
                step=st.integers(0, 12),
                num_prompt_tokens=st.integers(1, MAX_MODEL_LEN - 1),
                max_tokens=st.integers(1, MAX_MODEL_LEN),
                text=st.integers(0, 2),
                eos_after=st.none() | st.integers(1, 20),
                abort_step=st.none() | st.none() | st.integers(0, 40),
            ),
            min_size=1,
            max_size=7,
        )
    )
    return tuple(sorted(several, key=lambda arrival: arrival.step))


workloads = st.builds(
    Workload,
    strategy=st.sampled_from(sorted(STORED)),
    groups=st.sampled_from(sorted(GROUPS)),
    capacity_tokens=st.integers(4, 150),
    budget=st.integers(1, 64),
    max_num_seqs=st.integers(1, 5),
    arrivals=arrivals(),
    growth=st.sampled_from(["uniform", "doubling", "staggered"]),
    growth_tokens=st.integers(1, 20),
    reserve=st.sampled_from(["max_model_len", "request"]),
    caching=st.sampled_from([True, True, False]),
    headroom=st.sampled_from(HEADROOM),
    prices=st.sampled_from(PRICES),
    policy=st.sampled_from(["fcfs", "priority", "shortest"]),
    swap_tokens=st.sampled_from([0, 0, 30, 200]),
)


def request(
    seq_id: int, num_prompt_tokens: int, max_tokens: int, text: int = 0, priority: int = 0
) -> Request:
    first = 100 * text + 1
    return Request(
        request_id=seq_id,
        prompt_token_ids=tuple(range(first, first + num_prompt_tokens)),
        params=SamplingParams(max_tokens=max_tokens),
        priority=priority,
    )


class Run(Watch):
    """One workload, played to its end."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(
            workload.accounting,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=workload.max_num_seqs,
            budget=workload.budget,
            skips=workload.strategy in ("paged", SHARED) and workload.caching,
            staggered=(workload.strategy, workload.growth) == ("growing", "staggered"),
            headroom=workload.headroom,
            prices=workload.prices,
            policy=workload.policy,
            swap_bytes=workload.swap_tokens * sum(g.bytes_per_token for g in GROUPS["hybrid"]),
        )
        self.arrivals = workload.arrivals
        self.num_arrived = 0

    def play(self) -> None:
        limit = self.most_steps()
        while self.num_arrived < len(self.arrivals) or self.scheduler.has_unfinished:
            assert self.num_steps <= limit, "it does not come to an end"
            while self.num_arrived < len(self.arrivals) and (
                self.arrivals[self.num_arrived].step <= self.num_steps
            ):
                self.arrive(self.arrivals[self.num_arrived])
            for sequence in self.sequences:
                if self.arrivals[sequence.request.request_id].abort_step == self.num_steps:
                    self.abort(sequence)
            self.advance()
        assert all(s.finish_reason for s in self.sequences)
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        self.assert_empty()

    def most_steps(self) -> int:
        """Each token of each sequence may have to be computed again for each new one: no more."""
        lengths = [min(a.num_prompt_tokens + a.max_tokens, MAX_MODEL_LEN) for a in self.arrivals]
        return 60 + 2 * sum(length * (length + 2) for length in lengths)

    def arrive(self, arrival: Arrival) -> None:
        length = arrival.num_prompt_tokens
        priority = arrival.max_tokens % 3
        self.add(request(self.num_arrived, length, arrival.max_tokens, arrival.text, priority))
        self.num_arrived += 1

    def advance(self) -> None:
        self.step(self.next_token)

    def to_the_end(self) -> None:
        self.drain(self.next_token)
        self.assert_empty()

    def next_token(self, sequence: Sequence) -> int:
        arrival = self.arrivals[sequence.request.request_id]
        return EOS if sequence.num_output_tokens + 1 == arrival.eos_after else 5


@given(workload=workloads)
@settings(deadline=None, max_examples=examples(50, of=150))
@example(
    # Alone near the ceiling: the copy into a larger buffer does not fit, begun anew it does.
    workload=Workload(
        strategy="growing",
        groups="full",
        capacity_tokens=40,
        budget=4,
        max_num_seqs=2,
        arrivals=(Arrival(step=0, num_prompt_tokens=36, max_tokens=4),),
        growth_tokens=4,
    )
)
@example(
    workload=Workload(
        strategy="growing",
        groups="hybrid",
        capacity_tokens=40,
        budget=3,
        max_num_seqs=3,
        arrivals=tuple(Arrival(step=i, num_prompt_tokens=10, max_tokens=30) for i in range(3)),
        growth_tokens=1,
    )
)
@example(
    # Windows: a chunk that is too large for the cache is taken in smaller ones.
    workload=Workload(
        strategy="paged",
        groups="hybrid",
        capacity_tokens=20,
        budget=14,
        max_num_seqs=2,
        arrivals=tuple(Arrival(step=0, num_prompt_tokens=n, max_tokens=1) for n in (1, 1, 1, 21)),
    )
)
def test_every_workload_comes_to_its_end(workload: Workload) -> None:
    Run(workload).play()


def filled(strategy: str, num_seqs: int = 3) -> tuple[Run, list[Sequence]]:
    """Three sequences for which there is no room at once."""
    arrivals = tuple(
        Arrival(step=0, num_prompt_tokens=20, max_tokens=20, text=text) for text in range(num_seqs)
    )
    run = Run(
        Workload(
            strategy=strategy,
            groups="full",
            capacity_tokens=72,
            budget=64,
            max_num_seqs=3,
            arrivals=arrivals,
        )
    )
    for arrival in arrivals:
        run.arrive(arrival)
    return run, run.sequences


def until_preempted(run: Run, sequence: Sequence) -> None:
    while not sequence.num_preemptions:
        assert sequence.finish_reason is None
        run.advance()


@pytest.mark.parametrize("strategy", ["growing", "paged", "virtual", SHARED])
def test_the_youngest_makes_room_and_is_resumed(strategy: str) -> None:
    run, (first, *_, last) = filled(strategy)
    until_preempted(run, last)
    assert first.num_preemptions == 0
    assert first.num_computed_tokens > 0
    assert last.num_computed_tokens == 0
    outputs_so_far = last.output_token_ids
    run.to_the_end()
    assert last.finish_reason == "length"
    assert last.output_token_ids[: len(outputs_so_far)] == outputs_so_far
    assert run.scheduler.num_preemptions == sum(s.num_preemptions for s in run.sequences) > 0


@pytest.mark.parametrize("strategy", STORED)
def test_a_sequence_can_be_ended_wherever_it_is(strategy: str) -> None:
    run, (first, second, third) = filled(strategy)
    run.abort(second)  # waiting
    run.advance()
    run.abort(first)  # running
    run.to_the_end()
    assert third.finish_reason == "length"


@pytest.mark.parametrize("strategy", ["growing", "paged", "virtual", SHARED])
def test_a_preempted_sequence_can_be_ended(strategy: str) -> None:
    run, sequences = filled(strategy)
    last = sequences[-1]
    until_preempted(run, last)
    run.abort(last)
    run.to_the_end()
    assert [s.finish_reason for s in sequences] == ["length", "length", "stop"]


@pytest.mark.parametrize("strategy", STORED)
def test_all_can_be_ended_at_once(strategy: str) -> None:
    run, sequences = filled(strategy, num_seqs=5)
    run.advance()
    run.scheduler.finish_all("stop", "enough")
    assert {s.finish_detail for s in sequences} == {"enough"}
    assert not run.scheduler.has_unfinished
    run.scheduler.check()
    run.assert_empty()


def test_no_more_run_at_once_than_max_num_seqs() -> None:
    run, _ = filled("paged", num_seqs=5)
    while run.scheduler.has_unfinished:
        run.advance()
        assert run.scheduler.num_running <= 3


def paged(capacity_tokens: int, budget: int) -> Run:
    """A scheduler over an empty paged cache, to be used step by step."""
    return Run(
        Workload(
            strategy="paged",
            groups="full",
            capacity_tokens=capacity_tokens,
            budget=budget,
            max_num_seqs=2,
            arrivals=(),
        )
    )


def chunks_of_steps(scheduler: Scheduler) -> Iterator[list[tuple[int, int, int]]]:
    while scheduler.has_unfinished:
        plan = scheduler.plan()
        yield [(c.sequence.seq_id, c.start, c.stop) for c in plan.chunks]
        scheduler.update(plan, [Sampled(token_ids=(5,))] * len(plan.draws))
        scheduler.check()


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    scheduler = paged(capacity_tokens=100, budget=8).scheduler
    scheduler.add(request(0, 20, 3))
    scheduler.add(request(1, 2, 2, text=1))
    assert list(chunks_of_steps(scheduler)) == [
        [(0, 0, 8)],
        [(0, 8, 16)],
        [(0, 16, 20), (1, 0, 2)],
        [(0, 20, 21), (1, 2, 3)],
        [(0, 21, 22)],
    ]


def test_a_prompt_begins_where_the_computed_tokens_of_another_end() -> None:
    scheduler = paged(capacity_tokens=100, budget=16).scheduler
    (first,) = scheduler.add(request(0, 20, 2))
    (second,) = scheduler.add(request(1, 20, 2))  # all but the last token can be skipped …
    (third,) = scheduler.add(request(2, 20, 1, text=1))  # … and nothing of another text
    assert list(chunks_of_steps(scheduler)) == [
        [(0, 0, 16)],
        [(0, 16, 20), (1, 16, 20)],
        [(0, 20, 21), (1, 20, 21)],
        [(2, 0, 16)],
        [(2, 16, 20)],
    ]
    assert [s.num_cached_tokens for s in (first, second, third)] == [0, 16, 0]
    (fourth,) = scheduler.add(request(3, 20, 1))
    assert list(chunks_of_steps(scheduler)) == [[(3, 19, 20)]]
    assert fourth.num_cached_tokens == 19


def test_who_was_preempted_begins_anew_with_its_own_blocks() -> None:
    run, (first, _, last) = filled("paged")
    until_preempted(run, last)
    computed = run.num_computed[last.seq_id]
    run.abort(first)
    run.advance()
    # What it held last has gone to who needed the room; what it began with is still there.
    assert computed == 24
    assert run.num_skipped[last.seq_id] == 16
    assert run.num_recomputed[last.seq_id] == computed - 16
    assert last.num_computed_tokens == computed + 1
    assert last.num_cached_tokens == 0, "of the prompt, it found none when it was admitted first"
    run.to_the_end()


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused() -> None:
    scheduler = paged(capacity_tokens=99, budget=8).scheduler
    with pytest.raises(RequestTooLong, match=r"48 tokens .* ends at 48.*max_model_len"):
        scheduler.add(request(0, MAX_MODEL_LEN, 1))
    assert not scheduler.has_unfinished
    scheduler.add(request(1, MAX_MODEL_LEN - 1, 1))


def test_a_newcomer_waits_until_its_whole_prompt_fits() -> None:
    """Of 32 tokens a sequence holds 12: a prompt of 24 waits, though its first chunk would fit."""
    config = CacheConfig(
        max_model_len=32,
        max_num_seqs=2,
        capacity_bytes=8 * FULL.bytes_for(4),
        block_size=4,
        page_bytes=PAGE_BYTES,
    )
    limits = SchedulerLimits(
        max_model_len=32, max_num_seqs=2, max_num_batched_tokens=8, headroom=0.0
    )
    scheduler = Scheduler(PagedAccounting((FULL,), config), limits)
    scheduler.add(request(0, 8, 3))
    scheduler.update(scheduler.plan(), [Sampled(token_ids=(5,))])
    scheduler.add(request(1, 24, 1, text=1))
    assert list(chunks_of_steps(scheduler)) == [
        [(0, 8, 9)],
        [(0, 9, 10)],
        [(1, 0, 8)],
        [(1, 8, 16)],
        [(1, 16, 24)],
    ]


@pytest.mark.parametrize("then", ["it has all", "another runs first", "it has no more"])
def test_a_prompt_that_fits_in_chunks_only_goes_on_when_it_has_more_room(then: str) -> None:
    """Twice it found too little beside what an outsider held: once in chunks, once in one piece."""
    groups = GROUPS["hybrid"]
    config = CacheConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=3,
        capacity_bytes=16 * sum(group.bytes_per_token for group in groups),
        page_bytes=PAGE_BYTES,
    )
    accounting = STRATEGIES["virtual"].make_accounting(groups, config)
    limits = SchedulerLimits(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        policy="priority",
        headroom=0.0,
    )
    scheduler = Scheduler(accounting, limits)
    outsider = -1
    accounting.add(outsider)
    accounting.try_extend(outsider, 8)
    (sequence,) = scheduler.add(request(0, 17, 2, priority=1))
    for _ in range(4):
        play_step(scheduler)
    assert sequence.num_preemptions == 2
    if then == "it has no more":  # a third time would end like the second
        play_step(scheduler)
        assert sequence.finish_reason == "capacity"
        return
    accounting.free(outsider)
    if then == "another runs first":
        scheduler.add(request(1, 8, 3, text=1))
    while scheduler.has_unfinished:
        play_step(scheduler)
    assert sequence.finish_reason == "length", sequence.finish_detail


def play_step(scheduler: Scheduler) -> None:
    plan = scheduler.plan()
    logprobs = (TokenLogprobs(token_id=5, logprob=-1.0, rank=1),)
    scheduler.update(plan, [Sampled(token_ids=(5,), logprobs=logprobs) for _ in plan.draws])
    scheduler.check()


def swapping(swap_tokens: int) -> tuple[Run, list[Sequence]]:
    """Three sequences that have room for 24 tokens each, and two of them for 36; none is shared."""
    arrivals = tuple(
        Arrival(step=0, num_prompt_tokens=20, max_tokens=20, text=text) for text in range(3)
    )
    run = Run(
        Workload(
            strategy="paged",
            groups="full",
            capacity_tokens=72,
            budget=64,
            max_num_seqs=3,
            arrivals=arrivals,
            caching=False,
            swap_tokens=swap_tokens // 2,  # which Run counts in layers of both groups
        )
    )
    for arrival in arrivals:
        run.arrive(arrival)
    return run, run.sequences


def test_what_comes_back_from_swap_is_reported_whole_and_its_space_given_back() -> None:
    run, (first, _, last) = swapping(swap_tokens=40)
    until_preempted(run, last)
    assert run.scheduler.swap.used_bytes == 24 * FULL.bytes_per_token
    run.abort(first)
    run.advance()
    assert last.num_computed_tokens == 25
    assert run.scheduler.swap.used_bytes == 0
    tables = run.accounting.tables  # type: ignore[attr-defined]
    assert int(tables.num_computed[tables.rows[last.seq_id]]) == 25
    run.to_the_end()


def test_what_is_found_cached_at_once_is_not_saved() -> None:
    """One that makes room, and comes back in the same plan because another waits for a choice."""
    config = CacheConfig(
        max_model_len=32,
        max_num_seqs=2,
        capacity_bytes=4 * FULL.bytes_for(4),
        block_size=4,
        page_bytes=PAGE_BYTES,
    )
    limits = SchedulerLimits(
        max_model_len=32, max_num_seqs=2, max_num_batched_tokens=16, headroom=0.0
    )
    costs = Costs(prices=Prices(step_s=1.0, token_s=1.0))
    accounting = PagedAccounting((FULL,), config)
    scheduler = Scheduler(accounting, limits, swap=SwapSpace(2**20), costs=costs)
    search = replace(request(0, 8, 8), beam=BeamSearchParams(beam_width=1))
    (undecided,) = scheduler.add(search)
    (sequence,) = scheduler.add(request(1, 7, 8, text=1))
    play_step(scheduler)
    assert undecided.awaits_choice
    play_step(scheduler)
    assert sequence.num_computed_tokens == 8
    plan = scheduler.plan()
    assert [(c.sequence, c.start, c.num_restored) for c in plan.chunks] == [(sequence, 8, 0)]
    assert sequence.num_preemptions == 1
    assert [save.sequence for save in plan.saves] == [undecided]


def test_what_finds_no_swap_space_is_computed_again() -> None:
    run, (_, second, last) = swapping(swap_tokens=40)
    until_preempted(run, last)
    until_preempted(run, second)
    assert (second.num_saved_tokens, last.num_saved_tokens) == (0, 24)
    assert run.scheduler.statistics.num_swaps == 1
    run.to_the_end()


def test_an_end_counts_after_min_tokens() -> None:
    scheduler = paged(capacity_tokens=100, budget=16).scheduler
    params = SamplingParams(max_tokens=9, min_tokens=2)
    (sequence,) = scheduler.add(Request(request_id=0, prompt_token_ids=(1, 2), params=params))
    while scheduler.has_unfinished:
        scheduler.update(scheduler.plan(), [Sampled(token_ids=(EOS,))])
    assert sequence.num_output_tokens == 3
    assert sequence.finish_reason == "stop"


def test_a_continuation_that_ends_before_its_prompt_is_computed_is_not_waited_for() -> None:
    scheduler = paged(capacity_tokens=100, budget=16).scheduler
    params = SamplingParams(max_tokens=3, n=2)
    first, second = scheduler.add(Request(request_id=0, prompt_token_ids=(1, 2), params=params))
    scheduler.finish(second, "stop", "aborted")
    scheduler.check()
    for _ in range(3):
        scheduler.update(scheduler.plan(), [Sampled(token_ids=(5,))])
        scheduler.check()
    assert first.num_output_tokens == 3
    assert not scheduler.has_unfinished


# -- guesses -------------------------------------------------------------------------------------


def guessing(num_blocks: int) -> tuple[PagedAccounting, Scheduler]:
    """Two sequences of four tokens that decode, in so many blocks of four."""
    config = CacheConfig(
        max_model_len=32,
        max_num_seqs=2,
        capacity_bytes=num_blocks * FULL.bytes_for(4),
        block_size=4,
        page_bytes=PAGE_BYTES,
    )
    accounting = PagedAccounting((FULL,), config)
    limits = SchedulerLimits(
        max_model_len=32, max_num_seqs=2, max_num_batched_tokens=32, headroom=0.0
    )
    scheduler = Scheduler(accounting, limits)
    for text in range(2):
        scheduler.add(request(text, 4, 20, text))
    plan = scheduler.plan()
    scheduler.update(plan, [Sampled(token_ids=(5,))] * 2)
    return accounting, scheduler


@pytest.mark.parametrize("num_right", range(4))
def test_room_for_guesses_that_fail_is_given_back(num_right: int) -> None:
    """A sequence keeps room for what it has computed, and for no token more."""
    accounting, scheduler = guessing(num_blocks=8)
    plan = scheduler.plan({0: (5, 5, 5), 1: (5, 5, 5)})
    assert [chunk.stop for chunk in plan.chunks] == [8, 8]
    scheduler.update(plan, [Sampled(token_ids=(5,) * (num_right + 1)), Sampled(token_ids=(6,))])
    assert [accounting.num_tokens(seq_id) for seq_id in range(2)] == [5 + num_right, 5]
    scheduler.check()


def test_room_for_guesses_is_taken_back_before_a_sequence_makes_room() -> None:
    """Of four blocks two are left: each needs one for its next token, and one more for guesses."""
    accounting, scheduler = guessing(num_blocks=4)
    guesses = (5, 5, 5, 5)
    plan = scheduler.plan({0: guesses, 1: guesses})
    assert [(chunk.stop, chunk.drafts) for chunk in plan.chunks] == [(5, ()), (5, ())]
    assert [accounting.num_tokens(seq_id) for seq_id in range(2)] == [5, 5]
    assert scheduler.num_preemptions == 0
