"""A sequence always gets on: at the edges of memory, and in a machine that looks for more edges.

The property is stated in ``scheduler_machine``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from conformance.covering import only
from conformance.strategy_cases import OPTIONS, layers_of, model_spec
from engine.scheduler_machine import SchedulerMachine, Watch
from quire.engine.scheduler import Scheduler
from quire.engine.scheduling.admission import InBatchPrefixes
from quire.engine.scheduling.plan_builder import PlanBuilder
from quire.engine.scheduling.slot_allocator import SlotAllocator
from quire.engine.scheduling.swap_space import SwapSpace
from quire.engine.sequence import Request, Sequence
from quire.kv import STRATEGIES, BlockCoordinator, CacheConfig
from quire.kv.paged import PagedAccounting
from quire.sampling_params import SamplingParams
from quire.spec import Group

SETTINGS = settings(max_examples=10, stateful_step_count=30, deadline=None)
MORE = settings(SETTINGS, max_examples=40)
FULL = model_spec(layers_of("full", "bfloat16", wide=False)).groups
WINDOW = model_spec(layers_of("full+sliding", "bfloat16", wide=False)).groups


# Of options that differ in where entries lie, and not in what fits, one.
_SAMPLED = (
    "contiguous-request-defrag", "growing-staggered-kept", "growing-doubling-freed", "paged-1",
    "paged-4", "virtual", "virtual-shared-stacks",
)  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("option", only(OPTIONS, *_SAMPLED))
def test_a_sequence_always_gets_on(option: str) -> None:
    run_state_machine_as_test(lambda: SchedulerMachine(option), settings=SETTINGS)


@pytest.mark.full
@pytest.mark.parametrize("option", OPTIONS)
def test_a_sequence_always_gets_on_for_longer(option: str) -> None:
    run_state_machine_as_test(lambda: SchedulerMachine(option), settings=MORE)


# -- a machine that never fails proves nothing ---------------------------------------------------


def _wait_for_ever(self: Scheduler, sequence: Sequence, *_: Any) -> None:
    """A sequence that finds no room in an empty cache is not ended."""
    if self._queues.is_running(sequence):
        _preempt(self, sequence, "no sequence")
    self._preempted.add(sequence.seq_id)  # so that the plan comes to an end


def _to_the_tail(self: Scheduler, *arguments: Any, **options: Any) -> None:
    _preempt(self, *arguments, **options)
    self._queues.waiting.append(self._queues.waiting.pop(0))


def _the_first_makes_room(self: Scheduler, step: PlanBuilder, sequence: Sequence) -> None:
    first = self._queues.running[0]
    if first is not sequence:
        self._preempt(first, "one behind it")
    _extend(self, step, sequence)


def _a_token_too_far(self: Scheduler, chunks: Any, *arguments: Any) -> None:
    _mark_computed(self, chunks, *arguments)
    for chunk in chunks[:1]:
        chunk.sequence.num_computed_tokens += not chunk.samples


def _a_token_more(self: SlotAllocator, sequence: Sequence, *arguments: Any) -> Any:
    """Swap is said to hold more than was saved."""
    attempt = _look_up(self, sequence, *arguments)
    if attempt.num_restored and attempt.stop > attempt.start + 1:
        attempt.start, attempt.num_restored = attempt.start + 1, attempt.num_restored + 1
    return attempt


def _a_step_too_long(self: InBatchPrefixes) -> None:
    self.waits_for.clear()
    self._num_seen = 0


_preempt, _extend, _look_up = Scheduler._preempt, Scheduler._extend, SlotAllocator.look_up
_mark_computed = Scheduler._mark_computed
MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "who never fits waits for ever": (Scheduler, "_end_for_lack_of_room", _wait_for_ever),
    "who made room is served last": (Scheduler, "_preempt", _to_the_tail),
    "the first makes room": (Scheduler, "_extend", _the_first_makes_room),
    "a token is skipped": (Scheduler, "_mark_computed", _a_token_too_far),
    "a token is restored that was not saved": (SlotAllocator, "look_up", _a_token_more),
    "one waits for a step that is over": (InBatchPrefixes, "begin_plan", _a_step_too_long),
    "swap space is not given back": (SwapSpace, "release", lambda *_: None),
}


# Machines take long to find these.
_FOUND_LATE = (
    "a token is restored that was not saved",
    "one waits for a step that is over",
    "swap space is not given back",
    "the first makes room",
    "who made room is served last",
)


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(each, marks=pytest.mark.full) if each in _FOUND_LATE else each
        for each in MUTATIONS
    ],
)
def test_a_broken_scheduler_is_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[mutation])
    one_failure = settings(
        SETTINGS,
        max_examples=300,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, KeyError, ValueError)):
        run_state_machine_as_test(lambda: SchedulerMachine("paged-4"), settings=one_failure)


# -- what happens, told one by one ---------------------------------------------------------------


def watch(
    capacity_tokens: int,
    *,
    strategy: str = "paged",
    groups: tuple[Group, ...] = FULL,
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    budget: int = 64,
    block_size: int = 4,
    page_bytes: int = 128,
    policy: str = "fcfs",
    headroom: float | None = None,
    shared_tokens: int = 16,
) -> Watch:
    config = CacheConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        capacity_bytes=capacity_tokens * sum(group.bytes_per_token for group in groups),
        block_size=block_size,
        page_bytes=page_bytes,
        reserve="request",
        growth_tokens=4,
    )
    return Watch(
        lambda: STRATEGIES[strategy].make_accounting(groups, config),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        budget=budget,
        skips=strategy == "paged",
        policy=policy,
        headroom=headroom,
        shared_tokens=shared_tokens,
    )


def request(seq_id: int, num_prompt_tokens: int, max_tokens: int) -> Request:
    """A prompt that begins like no other."""
    first = 1000 * seq_id + 1
    return Request(
        request_id=seq_id,
        prompt_token_ids=tuple(range(first, first + num_prompt_tokens)),
        params=SamplingParams(max_tokens=max_tokens),
    )


def added(one: Watch, *sizes: tuple[int, int]) -> list[Sequence]:
    """Requests of so many prompt tokens and new tokens, none of which is refused."""
    first = len(one.sequences)
    sequences = [one.add(request(first + i, *size)) for i, size in enumerate(sizes)]
    assert all(sequences)
    return one.sequences[first:]


def blocks_of(one: Watch) -> BlockCoordinator:
    assert isinstance(one.accounting, PagedAccounting)
    return one.accounting


def five(_: Sequence) -> int:
    return 5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_request_that_can_never_fit_is_refused_at_once_and_the_others_run(strategy: str) -> None:
    one = watch(32, strategy=strategy)
    before = added(one, (8, 8))
    assert one.add(request(90, 33, 1)) is None
    after = added(one, (8, 8))
    one.drain(five)
    assert [s.finish_reason for s in (*before, *after)] == ["length", "length"]
    one.assert_empty()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_who_outgrows_the_cache_ends_with_its_text_and_the_others_go_on(strategy: str) -> None:
    one = watch(32, strategy=strategy)
    if strategy == "contiguous":  # its range would be too long, so it is refused on arrival
        prompt, params = tuple(range(10)), SamplingParams(max_tokens=38)
        assert one.add(Request(request_id=7, prompt_token_ids=prompt, params=params)) is None
        return
    large, small = added(one, (10, 38), (4, 8))
    one.drain(five)
    assert small.finish_reason == "length"
    assert large.finish_reason == "capacity"
    for part in ("48 at most", "12.00 KiB is all", "32 tokens", "raise ", "kv_cache_memory_bytes"):
        assert part in large.finish_detail
    assert large.output_token_ids == [5] * 23
    one.assert_empty()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cache_without_memory_refuses_every_request(strategy: str) -> None:
    one = watch(0, strategy=strategy)
    assert [one.add(request(seq_id, 1 + seq_id, 1)) for seq_id in range(3)] == [None] * 3
    assert not one.scheduler.has_unfinished
    one.assert_empty()


def test_a_pin_that_holds_everything_ends_who_waits_and_says_why() -> None:
    one = watch(32)
    first, second = added(one, (28, 5), (8, 4))
    while not first.finish_reason:
        one.step(five)
    assert blocks_of(one).pin(-1, np.array(first.token_ids, np.int32)) == 32
    one.alone = False
    one.drain(five)
    assert second.finish_reason == "capacity"
    assert "hold the rest: it fits when they end" in second.finish_detail
    one.accounting.free(-1)
    (third,) = added(one, (8, 4))
    one.drain(five)
    assert third.finish_reason == "length"


def test_a_lone_sequence_whose_hit_lies_scattered_over_pages_takes_smaller_steps() -> None:
    # A page holds 4 blocks of full attention or 8 of the window's, and either way takes 4 KiB.
    one = watch(64, groups=WINDOW, page_bytes=2048)
    # Side by side each takes every fourth block, so the first one's 4 come to lie in 4 pages.
    first, *_ = added(one, (4, 13), (4, 12), (4, 12), (4, 12))
    one.drain(five)
    again = tuple(first.token_ids[:16]) + tuple(range(9000, 9032))
    blocks_of(one).pin(-1, np.array(again, np.int32))
    assert blocks_of(one).resize(5 * 4096) == 5 * 4096
    one.accounting.free(-1)
    one.accounting.add(-1)
    assert one.accounting.match_prefix(-1, np.array(again, np.int32)).num_tokens == 16
    one.accounting.free(-1)
    # With these 4 pages it needs 6 for all at once, and in smaller steps 5.
    lone = one.add(
        Request(request_id=4, prompt_token_ids=again, params=SamplingParams(max_tokens=1))
    )
    assert lone is not None
    one.drain(five)
    assert (lone.finish_reason, lone.num_cached_tokens, lone.num_preemptions) == ("length", 16, 0)
    assert one.num_computed[4] == 48 - 16


def test_sequences_go_on_in_a_pool_that_shrinks_under_them() -> None:
    one = watch(128)
    sequences = added(one, *[(16, 16)] * 4)
    for _ in range(6):
        one.step(five)
    assert one.scheduler.num_running == 4
    half = blocks_of(one).pools.ceiling.capacity_bytes // 4
    while blocks_of(one).resize(half) > half:  # what is held goes as sequences end
        one.forgive()
        one.step(five)
    one.drain(five)
    assert [s.finish_reason for s in sequences] == ["length"] * 4
    assert one.accounting.usage().committed_bytes <= half


def test_thrash_is_bounded() -> None:
    """16 requests of 64 + 128 tokens in a pool of 1,024: vLLM computes 43.6 % of them again."""
    one = watch(1024, max_model_len=192, max_num_seqs=16, budget=1024, block_size=16, headroom=0.0)
    sequences = added(one, *[(64, 128)] * 16)
    one.drain(five)
    assert {s.finish_reason for s in sequences} == {"length"}
    ideal = 16 * (64 + 128 - 1)
    recomputed = one.num_recomputed.total()
    assert one.num_computed.total() == ideal + recomputed
    assert 0 < recomputed < ideal / 2
