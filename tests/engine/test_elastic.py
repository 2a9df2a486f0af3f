"""An engine whose memory comes and goes: the same texts, and the bytes really given back."""

import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.covering import only
from engine.test_llm import GREEDY, generated_by_transformers, ids, model_of, prompts
from quire import LLM, SamplingParams
from quire.errors import ConfigError, MemoryUnavailable, RequestError
from quire.kv import STRATEGIES, Extension, Fits
from quire.memory.machine.probe import process_memory
from quire.memory.machine.readings import HostGauge, MemoryReading

KIB = 1 << 10  # of a token's keys and values, in this model
TOTAL = 4096 * KIB  # so that 1024 KiB are left to others …
FLOOR = 768 * KIB  # … who are answered when they have more than a quarter of them
PARAMS = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
LENGTHS = (50, 40, 60, 55)


class Stage:
    """A machine that is told how much others take, and what time it is."""

    def __init__(self) -> None:
        self.time_s, self.others_bytes, self.silent = 0.0, 0, False
        self.committed: Callable[[], int] = int

    def now_s(self) -> float:
        return self.time_s

    def read(self) -> MemoryReading:
        if self.silent:
            raise MemoryUnavailable("it is not known how much memory there is")
        available = max(0, TOTAL - self.others_bytes - self.committed())
        return MemoryReading(total_bytes=TOTAL, available_bytes=available)

    def leave(self, num_bytes: int) -> None:
        """From now on so much is available, until the cache changes."""
        self.others_bytes = TOTAL - num_bytes - self.committed()

    def pass_time(self, seconds: float) -> None:
        self.time_s += seconds


@pytest.fixture
def stage() -> Stage:
    return Stage()


def elastic(stage: Stage, **options: Any) -> LLM:
    defaults: dict[str, Any] = dict(
        max_model_len=128, max_num_seqs=8, growth_tokens=16, kv_cache_memory_bytes=2048 * KIB
    )
    llm = LLM(model_of("llama"), gauge=stage, **{**defaults, **options})
    stage.committed = lambda: llm.memory.committed_bytes
    return llm


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)


def settle(llm: LLM, stage: Stage, seconds: float = 0.0, *, step_s: float = 0.25) -> None:
    """Let time pass while no sequence runs."""
    for _ in range(round(seconds / step_s) or 1):
        with llm._elastic.lock:
            stage.pass_time(step_s)
            llm._elastic.settle()


# -- pressure ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", only(STRATEGIES, "growing", "paged"))
def test_pressure_changes_no_token(strategy: str, stage: Stage) -> None:
    several = prompts(LENGTHS)
    with elastic(stage, cache=strategy) as llm:
        want = ids(llm.generate(several, PARAMS))
        peak = llm.memory.peak_committed_bytes
    most: list[int] = []

    def observe(usage: Any) -> None:
        stage.pass_time(0.3)
        if len(most) == 5:
            stage.leave(FLOOR - peak // 2)
        if len(most) > 6 and llm.engine.scheduler.num_running == 1:
            stage.others_bytes = 0
        most.append(usage.committed_bytes)

    stage.others_bytes = 0
    with elastic(stage, cache=strategy) as llm:
        completions = llm.generate(several, PARAMS, observe=observe)
        assert ids(completions) == want
        assert {(c.finish_reason, c.detail) for c in completions} == {("length", "")}
        state = llm.elastic
        assert state.num_shrinks > 0
        assert state.num_preemptions > 0
        assert state.returned_bytes > 0
        assert most[7] <= most[5] - peak // 3  # after the step in which it was noticed
        llm.engine.scheduler.check()


@pytest.mark.parametrize("strategy", only(STRATEGIES, "contiguous", "virtual"))
def test_without_any_memory_a_sequence_still_gets_on(strategy: str, stage: Stage) -> None:
    """No sequence waits for ever, and none ends, for a shortage of the machine's."""
    with elastic(stage, cache=strategy) as llm:
        stage.others_bytes = 2 * TOTAL
        many = prompts(LENGTHS) * 2
        steps: list[int] = []

        def observe(_: Any) -> None:
            stage.pass_time(1.0)
            steps.append(llm.engine.scheduler.num_running)

        completions = llm.generate(many, PARAMS, observe=observe)
        assert ids(completions)[:4] == ids(completions)[4:]
        assert {c.finish_reason for c in completions} == {"length"}
        assert max(steps[2:]) <= 2  # one, and sometimes another one whose first block costs nothing
        assert len(steps) <= len(many) * 45
        settle(llm, stage, 1.0)
        assert llm.memory.committed_bytes <= TOTAL // 256


@settings(max_examples=5, deadline=None)
@given(
    strategy=st.sampled_from(sorted(STRATEGIES)),
    left=st.lists(st.sampled_from([0, 512, 900, 1100, 1400, 3000]), min_size=4, max_size=4),
    every=st.integers(1, 12),
    asked=st.sampled_from([None, 128, 200, 512]),
)
def test_whatever_the_machine_does_the_texts_are_the_same(
    strategy: str, left: list[int], every: int, asked: int | None
) -> None:
    stage, steps = Stage(), iter(range(10**6))

    def observe(_: Any) -> None:
        stage.pass_time(0.3)
        step = next(steps)
        if step % every == 0:
            stage.leave(left[step // every % 4] * KIB)
        if step == 10 and asked is not None:
            llm.resize(asked * KIB)
        with llm._elastic.lock:  # the thread that watches between steps may be at work
            llm.engine.scheduler.check()

    with elastic(stage, cache=strategy) as llm:
        completions = llm.generate(prompts(), GREEDY, observe=observe)
        assert ids(completions) == generated_by_transformers("llama")
        with llm._elastic.lock:
            assert llm.usage().committed_bytes == llm.memory.committed_bytes


def test_what_is_only_cached_goes_at_the_first_reaction(stage: Stage) -> None:
    with elastic(stage) as llm:
        llm.generate(prompts(LENGTHS), PARAMS)
        cached = llm.usage().cached_bytes
        assert cached > 100 * KIB
        stage.leave(FLOOR - KIB)
        settle(llm, stage)
        assert llm.usage().cached_bytes <= cached // 10
        assert llm.memory.committed_bytes == llm.usage().committed_bytes <= cached // 10
        assert llm.elastic.num_shrinks == 1
        assert llm.elastic.returned_bytes >= cached * 9 // 10
        assert "is missing" in llm.elastic.reason


def test_in_dedicated_mode_only_what_is_missing_goes(stage: Stage) -> None:
    with elastic(stage, memory_mode="dedicated") as llm:
        llm.generate(prompts(LENGTHS), PARAMS)
        cached = llm.usage().cached_bytes
        settle(llm, stage, 60.0)
        assert llm.usage().cached_bytes == cached
        stage.leave(FLOOR - KIB)  # the headroom is 512 MiB, or a quarter of a small total
        settle(llm, stage)
        missing = 1024 * KIB - FLOOR + KIB
        assert cached - missing - 16 * KIB <= llm.usage().cached_bytes <= cached - missing


def test_it_grows_again(stage: Stage) -> None:
    with elastic(stage) as llm:
        llm.generate(prompts(LENGTHS), PARAMS)
        stage.leave(FLOOR - KIB)
        settle(llm, stage)
        low = llm.elastic.ceiling_bytes
        assert low < 2048 * KIB == llm.elastic.capacity_bytes
        stage.others_bytes = 0
        settle(llm, stage, 4.0)
        assert llm.elastic.ceiling_bytes == low
        settle(llm, stage, 90.0)
        assert llm.elastic.ceiling_bytes == 2048 * KIB
        assert ids(llm.generate(prompts(), GREEDY)) == generated_by_transformers("llama")


def test_idle_gives_back_what_is_only_cached(stage: Stage) -> None:
    """A stream that is still read is not idle, however slowly it is read."""
    with elastic(stage) as llm:
        stream = llm.stream(prompts()[0], GREEDY)
        next(stream)
        settle(llm, stage, 60.0)
        assert llm.memory.committed_bytes > 0
        list(stream)
        assert llm.memory.committed_bytes > 0
        settle(llm, stage, 19.0)
        assert llm.memory.committed_bytes > 0
        settle(llm, stage, 11.0)
        assert llm.memory.committed_bytes == 0
        assert llm.elastic.ceiling_bytes == llm.elastic.capacity_bytes
        assert llm.generate(prompts()[0], GREEDY)[0].num_cached_tokens == 0


# -- a system that kills -------------------------------------------------------------------------


class Deadly(Stage):
    """It ends who takes more than there is, and has 64 MiB; others may take back what is given."""

    total_bytes = 64 << 20
    refilled_bytes: int | None = None  # how much others leave, whatever is given back to them

    def read(self) -> MemoryReading:
        available = max(0, self.total_bytes - self.others_bytes - self.committed())
        if self.refilled_bytes is not None:
            available = self.refilled_bytes
        return MemoryReading(
            total_bytes=self.total_bytes,
            available_bytes=available,
            left_bytes=available,
            source="cgroup memory.max of /box",
        )


class Told:
    """What a step took, as a test has it."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def begin(self) -> None: ...

    def peak_bytes(self) -> int:
        return self.num_bytes


def test_where_the_cache_is_not_enough_the_step_shrinks_and_grows_again() -> None:
    stage = Deadly()
    several = prompts(LENGTHS)
    with elastic(stage) as llm:
        want = ids(llm.generate(several, PARAMS))
    budgets: list[int] = []
    committed: list[int] = []
    with elastic(stage, enable_prefix_caching=False) as llm:
        sizes, peak = llm._elastic._step_bytes, Told(0)
        assert sizes is not None
        llm._elastic._peak = peak  # type: ignore[assignment]
        # Half of it is for a step of ten tokens, and it is far from the headroom.
        little = 2 * sizes.of(10, len(several))
        assert little < 4 << 20

        def observe(usage: Any) -> None:
            stage.pass_time(0.3)
            budgets.append(llm.elastic.token_budget)
            committed.append(usage.committed_bytes)
            if len(budgets) == 3:
                stage.refilled_bytes = little
            if len(budgets) == 40:
                peak.num_bytes = little * 5 // 8
            if len(budgets) == 60:
                stage.refilled_bytes = None

        steps = llm.engine.scheduler.statistics.step_tokens
        planned: list[int] = []
        llm.engine.watch = lambda plan: planned.append(plan.num_tokens)
        completions = llm.generate(several, PARAMS, observe=observe)
        assert max(planned[4:60]) <= 10 < max(planned)
        assert ids(completions) == want
        assert {c.finish_reason for c in completions} == {"length"}
        assert set(budgets[:3]) == {512}
        assert set(budgets[4:40]) == {10}
        assert all(1 <= budget < 10 for budget in budgets[42:60]), "steps took more than estimated"
        assert max(committed[4:60]) <= (16 << 20) // 64, "the cache has given back what it could"
        assert budgets[-1] == 512
        assert steps.count > 60
        llm.engine.scheduler.check()


def test_without_room_for_one_token_it_waits_and_goes_on() -> None:
    stage = Deadly()
    with elastic(stage) as llm:
        want = ids(llm.generate(prompts(), PARAMS))
    seen: list[int] = []

    def observe(_: Any) -> None:
        stage.pass_time(1.0)
        llm._elastic._peak = Told(1 << 30)  # type: ignore[assignment]
        seen.append(llm.engine.scheduler.statistics.step_tokens.count)
        stage.refilled_bytes = 1000 if 5 <= len(seen) < 30 else None

    with elastic(stage) as llm:
        assert ids(llm.generate(prompts(), PARAMS, observe=observe)) == want
        assert seen[29] == seen[6], "no step was begun"
        assert seen[31] > seen[29]


def test_what_one_step_was_said_to_take_keeps_no_others_from_being_tried() -> None:
    """Another thread may have had the memory meanwhile. Half of it is forgotten in 5 s."""
    stage = Deadly()
    with elastic(stage) as llm:
        want = ids(llm.generate(prompts(), PARAMS))
    with elastic(stage) as llm:
        sizes = llm._elastic._step_bytes
        assert sizes is not None
        stage.refilled_bytes = 2 * sizes.of(10, 4)
        peak = llm._elastic._peak = Told(8 * stage.refilled_bytes)  # type: ignore[assignment]
        paused: list[bool] = []

        def observe(_: Any) -> None:
            stage.pass_time(0.5)
            paused.append(not llm.elastic.token_budget)
            if sum(paused) == 2:
                peak.num_bytes = 0

        assert ids(llm.generate(prompts(), PARAMS, observe=observe)) == want
        assert 10 < sum(paused) < 60


def test_where_not_one_token_fits_for_half_a_minute_it_ends_in_words() -> None:
    stage, seen = Deadly(), list[int]()

    def observe(_: Any) -> None:
        stage.pass_time(1.0)
        seen.append(llm.engine.scheduler.statistics.step_tokens.count)
        if len(seen) == 3:
            stage.refilled_bytes = 1000

    llm = elastic(stage)
    with pytest.raises(MemoryUnavailable) as error:
        llm.generate(prompts(), PARAMS, observe=observe)
    assert seen[-1] == seen[4]
    assert 30 <= len(seen) <= 40
    said = str(error.value)
    assert "a step of one token takes" in said
    assert "no more than 1000 B has been left of 64.00 MiB (cgroup memory.max of /box)" in said
    assert "raise that limit" in said
    with pytest.raises(RequestError, match="closed"):
        llm.generate(prompts(), PARAMS)


def test_a_system_that_does_not_kill_shrinks_no_step(stage: Stage) -> None:
    with elastic(stage) as llm:
        stage.others_bytes = 2 * TOTAL
        llm.generate(prompts(), PARAMS, observe=lambda _: stage.pass_time(1.0))
        assert llm.elastic.token_budget == 512


# -- an operator's ceiling -----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", only(STRATEGIES, "contiguous", "paged"))
def test_a_lowered_capacity_holds_from_the_next_step_on(strategy: str, stage: Stage) -> None:
    several = prompts(LENGTHS)
    seen: list[int] = []

    def observe(usage: Any) -> None:
        seen.append(usage.committed_bytes)
        if len(seen) == 6:
            llm.resize("192KiB")

    with elastic(stage, cache=strategy) as llm:
        want = ids(llm.generate(several, PARAMS))
    with elastic(stage, cache=strategy) as llm:
        completions = llm.generate(several, PARAMS, observe=observe)
        assert ids(completions) == want
        assert seen[5] > 192 * KIB >= max(seen[6:])
        assert llm.elastic.capacity_bytes == 192 * KIB
        llm.resize(2048 * KIB)
        assert ids(llm.generate(several, PARAMS)) == want


@pytest.mark.parametrize("strategy", only(STRATEGIES, "growing", "virtual"))
def test_who_is_too_long_for_a_lowered_capacity_ends_and_the_others_go_on(
    strategy: str, stage: Stage
) -> None:
    steps = iter(range(1, 10**6))

    def observe(_: Any) -> None:
        if next(steps) == 8:
            llm.resize(64 * KIB)

    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (20, 20)]
    # The first is at 97 tokens by then, the second still fits.
    both = [prompts((90,))[0], prompts((20,))[0]]
    with elastic(stage, cache=strategy, reserve="request") as llm:
        want = ids(llm.generate(both, params))
    with elastic(stage, cache=strategy, reserve="request") as llm:
        long, short = llm.generate(both, params, observe=observe)
        assert long.finish_reason == "capacity"
        assert long.token_ids == want[0][: len(long.token_ids)]
        assert len(long.token_ids) == 8
        assert "64.00 KiB is all there can be" in long.detail
        assert "raise kv_cache_memory_bytes" in long.detail
        assert (short.finish_reason, short.token_ids) == ("length", want[1])


def test_more_than_it_was_made_with_is_refused(stage: Stage) -> None:
    with elastic(stage) as llm:
        for wanted in (2048 * KIB + 1, "1GiB", 0):
            with pytest.raises(ConfigError, match=r"at most the 2\.00 MiB \(2,097,152\)"):
                llm.resize(wanted)
    with pytest.raises(RequestError, match="closed"):
        llm.resize(KIB)


def test_another_thread_may_change_the_capacity_while_prompts_run(stage: Stage) -> None:
    done: list[float] = []

    def operate() -> None:
        for share in (1, 2, 1, 4):
            begin = time.monotonic()
            llm.resize(share * 512 * KIB)
            done.append(time.monotonic() - begin)

    with elastic(stage) as llm:
        thread = threading.Thread(target=operate)
        for index, _ in enumerate(llm.stream(prompts(LENGTHS), PARAMS)):
            if index == 10:
                thread.start()
        thread.join()
        assert len(done) == 4
        assert llm.elastic.capacity_bytes == 2048 * KIB


# -- the thread ----------------------------------------------------------------------------------


def watchers() -> Iterator[threading.Thread]:
    return (thread for thread in threading.enumerate() if thread.name == "quire-elastic")


def test_the_thread_begins_with_the_first_run_and_ends_with_the_llm(stage: Stage) -> None:
    before = set(watchers())
    llm = elastic(stage)
    assert set(watchers()) == before
    llm.generate(prompts()[:1], GREEDY)
    llm.generate(prompts()[:1], GREEDY)
    (own,) = set(watchers()) - before
    assert own.daemon
    stage.pass_time(60.0)
    wait_until(lambda: llm.memory.committed_bytes == 0)
    llm.close()
    assert not own.is_alive()


def test_an_llm_that_is_dropped_takes_its_thread_with_it(stage: Stage) -> None:
    before = set(watchers())
    llm = elastic(stage)
    llm.generate(prompts()[:1], GREEDY)
    stage.committed = int  # the stage knows the LLM
    del llm
    gc.collect()
    wait_until(lambda: set(watchers()) == before)


def test_where_the_system_says_nothing_nothing_is_moved(stage: Stage) -> None:
    stage.silent = True
    with elastic(stage) as llm:
        assert ids(llm.generate(prompts(), GREEDY)) == generated_by_transformers("llama")
        settle(llm, stage, 60.0)
        assert llm.memory.committed_bytes > 0
        assert "it is not known how much" in llm.elastic.reason


def test_a_system_that_was_silent_is_asked_again_and_the_log_says_so_once(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="quire.engine.elastic")
    with elastic(stage) as llm:
        llm.generate(prompts(), PARAMS)
        for _ in range(2):
            committed = llm.memory.committed_bytes
            caplog.clear()
            stage.silent = True
            stage.leave(FLOOR - committed // 2)
            settle(llm, stage, 60.0)
            assert llm.memory.committed_bytes == committed > 0
            stage.silent = False
            settle(llm, stage, 6.0)
            assert llm.memory.committed_bytes < committed
            assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
            assert "it is not known how much" not in llm.elastic.reason
            stage.others_bytes = 0
            settle(llm, stage, 60.0)
            llm.generate(prompts(), PARAMS)


# -- a real neighbour ----------------------------------------------------------------------------

NEIGHBOUR = """
import sys
taken = bytearray(600 << 20)
taken[::4096] = b"x" * len(taken[::4096])
print(flush=True)
sys.stdin.read()
"""


class SmallHost(HostGauge):
    """This machine, but for what is withheld from its total."""

    withheld_bytes = 0

    def read(self) -> MemoryReading:
        available = super().read().available_bytes - self.withheld_bytes
        return MemoryReading(total_bytes=2 << 30, available_bytes=max(0, available))

    def leave(self, num_bytes: int) -> None:
        self.withheld_bytes = super().read().available_bytes - num_bytes


def fill(llm: LLM, num_bytes: int) -> None:
    """Cached-only blocks with content, without computing them."""
    accounting, length = llm._kv.accounting, llm.max_model_len
    for number in range(num_bytes // (length * llm.spec.bytes_per_token)):
        seq_id = -2 - number
        accounting.add(seq_id)
        verdict = accounting.try_extend(seq_id, length, Extension(external_tokens=length - 1))
        assert isinstance(verdict, Fits)
        text = np.arange(length, dtype=np.int32) + number * length
        accounting.mark_computed([seq_id], [length], text)
        accounting.free(seq_id)
        llm._kv.carry_out()


def test_a_real_neighbour_gets_the_memory() -> None:
    gauge = SmallHost()
    gauge.leave(2 << 30)
    with LLM(
        model_of("llama"), gauge=gauge, max_model_len=512, kv_cache_memory_bytes="256MiB"
    ) as llm:
        (want,) = ids(llm.generate(prompts()[:1], GREEDY))
        with llm._elastic.lock:
            fill(llm, 200 << 20)
        cached, resident = llm.usage().cached_bytes, process_memory()
        assert cached >= 190 << 20
        # Little more than the headroom, so that others who leave this machine make no room.
        gauge.leave((512 << 20) + (50 << 20))
        command = [sys.executable, "-c", NEIGHBOUR]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as neighbour:
            assert neighbour.stdout is not None
            neighbour.stdout.readline()
            wait_until(lambda: llm.memory.committed_bytes <= cached // 10)
            assert llm.usage().committed_bytes == llm.memory.committed_bytes
            now = process_memory()
            if resident is not None and now is not None:
                assert resident.rss_bytes - now.rss_bytes >= cached * 9 // 10
            assert ids(llm.generate(prompts()[:1], GREEDY)) == [want]
            neighbour.communicate()
