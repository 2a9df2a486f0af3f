"""Real lengths, unscaled, through the real scheduler and each strategy's accounting. No tensors.

A model of Qwen3-4B's shape says nothing here but when each request ends. Requests come in the
trace's order, as fast as they find room: 64 always wait. So the pool is under pressure from the
first refusal until the last request of the sample has come, and that is what is measured.

A step's figures are taken when its room is. They are weighted with the time that the step would
take on an accelerator that reads 1.5 TB/s and computes 300 TFLOP/s: the longer of reading weights
and keys and values once, and of computing its tokens. Only that clock is made up.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from benchmarks.memory.utilization.lengths import Lengths
from benchmarks.memory.utilization.waste import Fate, Moment, Watch, mean
from quire import SamplingParams
from quire.engine.scheduler import Scheduler, SchedulerLimits
from quire.engine.sequence import Request
from quire.engine.step_plan import Sampled, StepPlan
from quire.errors import RequestTooLong
from quire.kv import CacheConfig, build_accounting
from quire.spec import FullAttention, Layer, ModelSpec

GIB = 2**30
QWEN3_4B = ModelSpec(
    model_type="qwen3",
    layers=(Layer(specs=(FullAttention(num_kv_heads=8, head_dim=128, dtype="bfloat16"),)),) * 36,
    max_model_len=40_960,
    dtype="bfloat16",
)
NUM_WEIGHTS = 4.02e9
BYTES_A_SECOND, OPERATIONS_A_SECOND = 1.5e12, 300e12

MAX_TOKENS = 1_000  # the longest answer of the trace: what clients would have to ask for
MAX_NUM_SEQS = 1_024  # never reached
MAX_NUM_BATCHED_TOKENS = 8_192
WATERMARK = 0.01
PAGE_BYTES = 4_096
NUM_WAITING = 64
EVERY = 8  # steps: figures are taken of one in so many
_TOKEN, _END = 1, 0
_NEXT, _LAST = Sampled(token_ids=(_TOKEN,)), Sampled(token_ids=(_END,))


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A strategy with its options."""

    name: str
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)  # more of CacheConfig
    knows_length: bool = False  # a client asks for as many tokens as it will get
    max_model_len: int = QWEN3_4B.max_model_len

    def max_tokens(self, lengths: Lengths) -> int:
        return lengths.output_tokens if self.knows_length else MAX_TOKENS

    def range_tokens(self, lengths: Lengths) -> int:
        """The range of a strategy that gives ranges."""
        if self.options.get("reserve") != "request":
            return self.max_model_len
        return min(self.max_model_len, lengths.prompt_tokens + self.max_tokens(lengths))


_REQUEST, _DEFRAG = {"reserve": "request"}, {"reserve": "request", "defrag": True}
LONGEST, LONG, SHORT = 40_960, 16_384, 4_096
SYSTEMS = (
    System(name="contiguous, 40,960 each", strategy="contiguous", max_model_len=LONGEST),
    System(name="contiguous, 16,384 each", strategy="contiguous", max_model_len=LONG),
    System(name="contiguous, 4,096 each", strategy="contiguous", max_model_len=SHORT),
    System(name="contiguous, prompt + 1,000", strategy="contiguous", options=_REQUEST),
    System(name="contiguous, prompt + 1,000, defrag", strategy="contiguous", options=_DEFRAG),
    System(
        name="contiguous, length foretold",
        strategy="contiguous",
        options=_REQUEST,
        knows_length=True,
    ),
    System(
        name="contiguous, length foretold, defrag",
        strategy="contiguous",
        options=_DEFRAG,
        knows_length=True,
    ),
    System(
        name="growing, doubling from 16",
        strategy="growing",
        options={"growth": "doubling", "growth_tokens": 16},
    ),
    System(name="growing, uniform 256", strategy="growing"),
    System(
        name="growing, staggered 128",
        strategy="growing",
        options={"growth": "staggered", "growth_tokens": 128},
    ),
    System(name="paged", strategy="paged"),
    System(name="virtual, unshared", strategy="virtual"),
    System(name="virtual, shared", strategy="virtual", options={"shares_pages": True}),
)


@dataclass(slots=True, kw_only=True)
class Replay:
    """What one system made of one sample of requests."""

    moments: list[tuple[Moment, float]] = field(default_factory=list)  # with the step's seconds
    num_preemptions: int = 0
    num_refused: int = 0  # prompts too long for the system's max_model_len
    num_cut: int = 0  # … answers

    @property
    def mean(self) -> Moment:
        return mean(self.moments)

    @property
    def mean_by_step(self) -> Moment:
        return mean((moment, 1) for moment, _ in self.moments)


def replay(system: System, requests: Sequence[Lengths], capacity_bytes: int) -> Replay:
    accounting = build_accounting(
        system.strategy,
        QWEN3_4B,
        CacheConfig(
            max_model_len=system.max_model_len,
            max_num_seqs=MAX_NUM_SEQS,
            capacity_bytes=capacity_bytes,
            page_bytes=PAGE_BYTES,
            **system.options,
        ),
    )
    limits = SchedulerLimits(
        max_model_len=system.max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        eos_token_ids=frozenset([_END]),
        watermark_bytes=int(WATERMARK * capacity_bytes),
    )
    scheduler, watch = Scheduler(accounting, limits), Watch(accounting, PAGE_BYTES)
    found, coming = Replay(), deque(enumerate(requests))
    for step in count():
        while coming and scheduler.num_waiting < NUM_WAITING:
            _send(scheduler, watch, system, *coming.popleft(), found)
        if not coming:
            break
        plan = scheduler.plan()
        accounting.drain()
        if watch.one_has_waited and step % EVERY == 0:
            moment = watch.now()
            found.moments.append((moment, _seconds(plan, moment.bytes.used)))
        for output in scheduler.update(plan, _sampled(plan, requests)):
            assert output.finish_reason in (None, "stop", "length"), output.sequence.finish_detail
    scheduler.check()
    found.num_preemptions = scheduler.num_preemptions
    return found


def _send(
    scheduler: Scheduler, watch: Watch, system: System, number: int, lengths: Lengths, found: Replay
) -> None:
    """Queue a prompt that begins like no other, if it is not too long for the system."""
    request = Request(
        request_id=number,
        prompt_token_ids=(number, *(_TOKEN,) * (lengths.prompt_tokens - 1)),
        params=SamplingParams(max_tokens=system.max_tokens(lengths)),
    )
    try:
        scheduler.check_request(request)
    except RequestTooLong:
        found.num_refused += 1
        return
    final_tokens = min(lengths.final_tokens, system.max_model_len - 1)
    found.num_cut += final_tokens < lengths.final_tokens
    watch.expect(Fate(final_tokens=final_tokens, range_tokens=system.range_tokens(lengths)))
    scheduler.add(request)


def _sampled(plan: StepPlan, requests: Sequence[Lengths]) -> list[Sampled]:
    """What a model would say that ends each answer where the trace does."""
    sampled = []
    for draw in plan.draws:
        asked = requests[draw.sequence.request.request_id]
        is_last = draw.sequence.num_output_tokens + 1 == asked.output_tokens
        sampled.append(_LAST if is_last else _NEXT)
    return sampled


def _seconds(plan: StepPlan, used_bytes: float) -> float:
    reading = (2 * NUM_WEIGHTS + used_bytes) / BYTES_A_SECOND
    return max(reading, 2 * NUM_WEIGHTS * plan.num_tokens / OPERATIONS_A_SECOND)


def samples(
    requests: Sequence[Lengths], num_samples: int, num_requests: int
) -> Iterable[Sequence[Lengths]]:
    """Stretches of the trace, evenly spaced over all of it."""
    last = len(requests) - num_requests
    for index in range(num_samples):
        first = last * index // max(1, num_samples - 1)
        yield requests[first : first + num_requests]
