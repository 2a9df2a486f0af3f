"""The scheduler over the real accounting of every strategy, with no model and no tensor.

``Workload`` is what comes, and when; ``run`` plays it step by step and checks every promise after
each: the budget holds, room exists for what is planned, who came first is served first, a refusal
is never final without a reason, and everything ends.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.engine.scheduler import Scheduler, StepPlan
from quire.engine.sequence import Request, SamplingParams, Sequence
from quire.errors import RequestTooLong
from quire.spec import FullAttention, Group, SlidingWindow
from quire.strategies import STRATEGIES, Accounting, CacheConfig, Fits

MAX_MODEL_LEN = 48
EOS = 0
PAGE_BYTES = 64
_COMMON = dict(num_kv_heads=1, head_dim=4, dtype="float32")  # 32 bytes a token and layer
FULL = Group(spec=FullAttention(**_COMMON), layers=(0, 2))
WINDOW = Group(spec=SlidingWindow(**_COMMON, window=7), layers=(1, 3))
GROUPS = {"full": (FULL,), "hybrid": (FULL, WINDOW)}


@dataclass(frozen=True, kw_only=True)
class Arrival:
    step: int
    num_prompt_tokens: int
    max_tokens: int
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
        )
        return STRATEGIES[self.strategy][0](groups, config)

    def scheduler(self, accounting: Accounting) -> Scheduler:
        return Scheduler(
            accounting,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            eos_token_ids=frozenset([EOS]),
        )


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[Arrival, ...]:
    several = draw(
        st.lists(
            st.builds(
                Arrival,
                step=st.integers(0, 12),
                num_prompt_tokens=st.integers(1, MAX_MODEL_LEN - 1),
                max_tokens=st.integers(1, MAX_MODEL_LEN),
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
    strategy=st.sampled_from(sorted(STRATEGIES)),
    groups=st.sampled_from(sorted(GROUPS)),
    capacity_tokens=st.integers(4, 150),
    budget=st.integers(1, 64),
    max_num_seqs=st.integers(1, 5),
    arrivals=arrivals(),
    growth=st.sampled_from(["uniform", "doubling", "staggered"]),
    growth_tokens=st.integers(1, 20),
    reserve=st.sampled_from(["max_model_len", "request"]),
)


def request(seq_id: int, num_prompt_tokens: int, max_tokens: int) -> Request:
    return Request(
        request_id=seq_id,
        prompt_token_ids=tuple(range(1, num_prompt_tokens + 1)),
        params=SamplingParams(max_tokens=max_tokens),
    )


def next_token(sequence: Sequence, arrival: Arrival) -> int:
    return EOS if sequence.num_output_tokens + 1 == arrival.eos_after else 5


class Run:
    """One workload, played to its end."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.accounting = workload.accounting()
        self.scheduler = workload.scheduler(self.accounting)
        self.sequences: list[Sequence] = []
        self.computed: dict[int, int] = {}  # tokens that the last step of a sequence reached
        self.num_steps = 0
        self.was_empty = False

    def play(self) -> None:
        arrivals, limit = self.workload.arrivals, self.most_steps()
        while len(self.sequences) < len(arrivals) or self.scheduler.has_unfinished:
            assert self.num_steps <= limit, "it does not come to an end"
            while len(self.sequences) < len(arrivals) and (
                arrivals[len(self.sequences)].step <= self.num_steps
            ):
                self.arrive(arrivals[len(self.sequences)])
            for sequence, arrival in zip(self.sequences, arrivals, strict=False):
                if arrival.abort_step == self.num_steps:
                    self.abort(sequence)
            self.step()
            self.num_steps += 1
        self.check_end()

    def most_steps(self) -> int:
        """Each token of each sequence may have to be computed again for each new one: no more."""
        lengths = [
            min(a.num_prompt_tokens + a.max_tokens, MAX_MODEL_LEN) for a in self.workload.arrivals
        ]
        return 60 + 2 * sum(length * (length + 2) for length in lengths)

    def arrive(self, arrival: Arrival) -> None:
        seq_id = len(self.sequences)
        self.sequences.append(
            self.scheduler.add(request(seq_id, arrival.num_prompt_tokens, arrival.max_tokens))
        )
        self.scheduler.check()

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence, "stop", "aborted")
        assert sequence.finish_reason is not None
        self.assert_freed(sequence)
        self.scheduler.finish(sequence, "length", "a second call does nothing")
        assert sequence.finish_detail != "a second call does nothing"
        self.scheduler.check()

    def step(self) -> None:
        unfinished = [s for s in self.sequences if s.finish_reason is None]
        plan = self.scheduler.plan()
        self.scheduler.check()
        self.check_plan(plan)
        ended = [s for s in unfinished if s.finish_reason is not None]
        for sequence in ended:
            self.check_lack_of_room(sequence)
        is_empty = not plan.chunks and not ended
        assert not (is_empty and self.was_empty and unfinished), "two steps without progress"
        self.was_empty = is_empty

        arrival_of = self.workload.arrivals
        sampling = plan.sampling  # as it is now: update appends to the sequences
        tokens = [next_token(s, arrival_of[s.seq_id]) for s in sampling]
        before = [s.num_tokens for s in sampling]
        outputs = self.scheduler.update(plan, tokens)
        self.scheduler.check()
        told = {output.sequence.seq_id for output in outputs}
        assert told == {s.seq_id for s in [*sampling, *ended]}
        assert [s.num_tokens for s in sampling] == [n + 1 for n in before]
        for chunk in plan.chunks:
            assert chunk.sequence.num_computed_tokens == chunk.stop
            self.computed[chunk.sequence.seq_id] = chunk.stop
        for output in outputs:
            if output.finish_reason is not None:
                self.assert_freed(output.sequence)

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.workload.budget
        assert len(plan.chunks) <= self.workload.max_num_seqs
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert 0 <= chunk.start < chunk.stop <= sequence.num_tokens
            assert self.accounting.num_tokens(sequence.seq_id) >= chunk.stop
            # It goes on where it was, or begins anew after it had to make room.
            assert chunk.start in (0, self.computed.get(sequence.seq_id, 0))
            if chunk.start == 0 and self.computed.get(sequence.seq_id):
                assert sequence.num_preemptions > 0
        # First come, first served: those in the plan are the oldest that have not ended.
        oldest = [s for s in self.sequences if s.finish_reason is None]
        assert [c.sequence for c in plan.chunks] == oldest[: len(plan.chunks)]

    def check_lack_of_room(self, sequence: Sequence) -> None:
        """It ends for lack of room only where it would have ended with the cache to itself."""
        assert sequence.finish_reason == "capacity"
        assert "raise " in sequence.finish_detail
        if (self.workload.strategy, self.workload.growth) == ("growing", "staggered"):
            return  # what it takes ahead depends on where it began, so it may end elsewhere alone
        assert not self.fits_alone(sequence), sequence.finish_detail

    def fits_alone(self, sequence: Sequence) -> bool:
        alone = self.workload.accounting()
        longest = min(sequence.max_tokens, MAX_MODEL_LEN)
        for chunk in (1, self.workload.budget, sequence.num_tokens):
            alone.add(0, max_tokens=longest)
            stops = [*range(chunk, sequence.num_tokens, chunk), sequence.num_tokens]
            fits = all(isinstance(alone.try_extend(0, stop), Fits) for stop in stops)
            alone.free(0)
            if fits:
                return True
        return False

    def assert_freed(self, sequence: Sequence) -> None:
        with pytest.raises(KeyError):
            self.accounting.num_tokens(sequence.seq_id)

    def check_end(self) -> None:
        for sequence, arrival in zip(self.sequences, self.workload.arrivals, strict=True):
            if sequence.finish_reason == "length":
                full = sequence.num_tokens == MAX_MODEL_LEN
                assert sequence.num_output_tokens == arrival.max_tokens or full
            if sequence.finish_reason == "stop" and not sequence.finish_detail:
                assert sequence.token_ids[-1] == EOS
        usage = self.accounting.usage()
        assert usage.committed_bytes == usage.num_sequences == usage.used_bytes == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0


@given(workload=workloads)
@settings(deadline=None, max_examples=400)
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
    arrivals = tuple(Arrival(step=0, num_prompt_tokens=20, max_tokens=20) for _ in range(num_seqs))
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


@pytest.mark.parametrize("strategy", ["growing", "paged", "virtual"])
def test_the_youngest_makes_room_and_is_resumed(strategy: str) -> None:
    run, (first, *_, last) = filled(strategy)
    while not last.num_preemptions:
        run.step()
    assert first.num_preemptions == 0
    assert first.num_computed_tokens > 0
    assert last.num_computed_tokens == 0
    outputs_so_far = last.output_token_ids
    while run.scheduler.has_unfinished:
        run.step()
    assert last.finish_reason == "length"
    assert last.output_token_ids[: len(outputs_so_far)] == outputs_so_far
    assert run.scheduler.num_preemptions == sum(s.num_preemptions for s in run.sequences) > 0
    run.check_end()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sequence_can_be_ended_wherever_it_is(strategy: str) -> None:
    run, (first, second, third) = filled(strategy)
    run.abort(second)  # waiting
    run.step()
    run.abort(first)  # running
    while run.scheduler.has_unfinished:
        run.step()
    assert third.finish_reason == "length"
    run.check_end()


@pytest.mark.parametrize("strategy", ["growing", "paged", "virtual"])
def test_a_preempted_sequence_can_be_ended(strategy: str) -> None:
    run, sequences = filled(strategy)
    last = sequences[-1]
    while not last.num_preemptions:
        run.step()
    run.abort(last)
    while run.scheduler.has_unfinished:
        run.step()
    assert [s.finish_reason for s in sequences] == ["length", "length", "stop"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_can_be_ended_at_once(strategy: str) -> None:
    run, sequences = filled(strategy, num_seqs=5)
    run.step()
    run.scheduler.finish_all("stop", "enough")
    assert {s.finish_detail for s in sequences} == {"enough"}
    assert not run.scheduler.has_unfinished
    run.scheduler.check()
    assert run.accounting.usage().committed_bytes == 0


def test_no_more_run_at_once_than_max_num_seqs() -> None:
    run, _ = filled("paged", num_seqs=5)
    while run.scheduler.has_unfinished:
        run.step()
        assert run.scheduler.num_running <= 3


def steps(scheduler: Scheduler) -> Iterator[StepPlan]:
    while scheduler.has_unfinished:
        plan = scheduler.plan()
        yield plan
        scheduler.update(plan, [5] * len(plan.sampling))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_who_outgrows_the_cache_ends_with_numbers_and_the_option(strategy: str) -> None:
    workload = Workload(
        strategy=strategy,
        groups="full",
        capacity_tokens=32,
        budget=64,
        max_num_seqs=3,
        arrivals=(),
        reserve="request",
    )
    accounting = workload.accounting()
    scheduler = workload.scheduler(accounting)
    large = scheduler.add(request(0, 10, 38))
    small = scheduler.add(request(1, 4, 8))
    for _ in steps(scheduler):
        scheduler.check()
    assert small.finish_reason == "length"
    assert large.finish_reason == "capacity"
    for part in ("48 at most", "2.00 KiB", "32 tokens", "raise ", "kv_cache_memory_bytes"):
        assert part in large.finish_detail
    assert accounting.usage().committed_bytes == 0


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    workload = Workload(
        strategy="paged",
        groups="full",
        capacity_tokens=100,
        budget=8,
        max_num_seqs=2,
        arrivals=(),
    )
    scheduler = workload.scheduler(workload.accounting())
    scheduler.add(request(0, 20, 3))
    scheduler.add(request(1, 2, 2))
    chunks = [[(c.sequence.seq_id, c.start, c.stop) for c in p.chunks] for p in steps(scheduler)]
    assert chunks == [
        [(0, 0, 8)],
        [(0, 8, 16)],
        [(0, 16, 20), (1, 0, 2)],
        [(0, 20, 21), (1, 2, 3)],
        [(0, 21, 22)],
    ]


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused() -> None:
    workload = Workload(
        strategy="paged", groups="full", capacity_tokens=99, budget=8, max_num_seqs=2, arrivals=()
    )
    scheduler = workload.scheduler(workload.accounting())
    with pytest.raises(RequestTooLong, match=r"48 tokens .* ends at 48.*max_model_len"):
        scheduler.add(request(0, MAX_MODEL_LEN, 1))
    assert not scheduler.has_unfinished
    scheduler.add(request(1, MAX_MODEL_LEN - 1, 1))


def test_scheduling_imports_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import quire.engine.scheduler, quire.engine.sequence, quire.engine.prompts, quire.config\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
