"""Simulate one engine of a fleet: requests arrive at their times, and it steps up to a moment."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, nextafter
from typing import Final, final

import numpy as np

from quire.engine.core import Engine
from quire.engine.scheduler import Scheduler
from quire.engine.scheduling.offload_policy import OffloadCounts
from quire.engine.scheduling.policy import POLICIES
from quire.engine.sequence import RemoteBlocks, Request, Sequence
from quire.errors import RequestTooLong
from quire.fleet.detours import prompt_alone
from quire.fleet.placement import Load
from quire.fleet.shared_evidence import TELL_S
from quire.kv import Accounting
from quire.kv.evidence import EvidenceSource
from quire.kv.interface import BlockEventSource
from quire.kv.prefix_index import Medium
from quire.planner.simulation.cost_model import Reach, StepCosts, StepWork
from quire.planner.simulation.routing import RouterLine
from quire.planner.simulation.simulated_engine import (
    VirtualCache,
    VirtualClock,
    output_id,
    prices_of,
    prompt_of,
)
from quire.planner.simulation.timeline import State, Timeline
from quire.planner.simulation.virtual_carrier import VirtualCarrier
from quire.planner.simulation.waste import Waste
from quire.sampling_params import SamplingParams
from quire.traces import TraceRequest

# -- strides ---------------------------------------------------------------------------------------

MOST_STEPS = 1024


@dataclass(frozen=True, slots=True)
class Stride:
    """Several decoding steps that are taken at once, which makes a simulation fast.

    While no request arrives and no sequence computes its prompt, a step gives each running sequence
    a token, and the scheduler decides nothing. As long as all tokens have room and change only
    counts (``Accounting.steady_tokens``), the cache may hear of all steps at once. The clock still
    advances step by step, up to the step in which the first sequence ends.

    The same steps taken one by one give the same figures; tests compare both.
    """

    moments_s: list[float]
    sequences: list[Sequence]
    lasts: list[int]  # tokens that each has at its end


def find_stride(
    scheduler: Scheduler,
    accounting: Accounting,
    costs: StepCosts,
    now_s: float,
    until_s: float,
) -> Stride | None:
    """Find steps that begin before ``until_s`` and that a stride may take, if there are any."""
    if scheduler.num_waiting and scheduler.num_running < scheduler.limits.max_num_seqs:
        return None  # the next step may admit a sequence
    sequences = scheduler.decoding
    if not sequences or not _decides_nothing(scheduler, sequences):
        return None
    most_model_len = scheduler.limits.max_model_len
    lasts = [min(s.request.max_tokens, most_model_len) for s in sequences]
    count = _most_steps(accounting, sequences, lasts)
    if not count:
        return None
    return Stride(_moments(sequences, costs, now_s, until_s, count), sequences, lasts)


def take_stride(scheduler: Scheduler, accounting: Accounting, stride: Stride) -> list[Sequence]:
    """Carry out a stride; the caller sets its clock. Returns: the sequences that have ended."""
    count, sequences = len(stride.moments_s), stride.sequences
    seq_ids = [s.seq_id for s in sequences]
    ends = [len(s.token_ids) + count - 1 for s in sequences]
    fitting = accounting.try_extend_each(seq_ids, ends)
    assert fitting == len(sequences), "room that was counted is not there"
    tokens = [output_id(s) for s in sequences]
    computed = np.repeat(np.array(tokens, np.int32), count)
    accounting.mark_computed(seq_ids, [count] * len(tokens), computed)
    scheduler.note_steps(count)
    _note(scheduler, stride)
    last_s, ended = stride.moments_s[-1], list[Sequence]()
    for sequence, token, end, last in zip(sequences, tokens, ends, stride.lasts, strict=True):
        sequence.token_ids += [token] * count
        sequence.num_computed_tokens = sequence.most_computed_tokens = end
        sequence.last_token_s = last_s
        if end + 1 == last:
            ended.append(sequence)
    for sequence in ended:
        scheduler.finish(sequence, "length")
    return ended


def _decides_nothing(scheduler: Scheduler, sequences: list[Sequence]) -> bool:
    limits, statistics = scheduler.limits, scheduler.statistics
    if len(sequences) != scheduler.num_running or scheduler.suspects:
        return False
    if len(sequences) > limits.max_num_batched_tokens:
        return False
    if scheduler.num_waiting:
        # Here they wait for a seat; make sure that none of them would preempt a running sequence.
        grade = POLICIES[limits.policy].grade
        same = len({grade(s) for s in sequences}) == 1 and limits.policy != "priority"
        if not same:
            return False
    return all(
        s.last_token_s == statistics.now_s and s.most_computed_tokens == s.num_computed_tokens
        for s in sequences
    )


def _most_steps(accounting: Accounting, sequences: list[Sequence], lasts: list[int]) -> int:
    """Count the steps up to the first end for which all sequences are steady and have room."""
    lengths, count = list[int](), MOST_STEPS
    for s, last in zip(sequences, lasts, strict=True):
        num_tokens, num_prompt_tokens = len(s.token_ids), len(s.request.prompt_token_ids)
        steady = accounting.steady_tokens(s.seq_id) + 1
        count = min(count, last - num_tokens, steady - num_tokens)
        # A prompt of which the cache had all but the last token still computes that token.
        if count < 1 or num_tokens == num_prompt_tokens:
            return 0
        lengths.append(num_tokens)
    free_bytes = accounting.ceiling.now_bytes - accounting.held_bytes
    at, ends = np.array(lengths, np.int64), np.array(lasts, np.int64)
    # Each sequence has room for all of its tokens but the last.
    held_bytes = int(accounting.bytes_alone(at - 1, ends).sum())
    while count:
        then = accounting.bytes_alone(at + (count - 1), ends)
        if int(then.sum()) - held_bytes <= free_bytes:
            return count
        count //= 2
    return 0


def _moments(
    sequences: list[Sequence], costs: StepCosts, now_s: float, until_s: float, count: int
) -> list[float]:
    """Return the moments at which the steps end that begin before ``until_s``."""
    number = len(sequences)
    context = sum(len(s.token_ids) for s in sequences)
    seconds: Callable[[StepWork], float] = costs.seconds
    moments_s: list[float] = []
    for _ in range(count):
        if now_s >= until_s:
            break
        # Each token reads all tokens before it, and itself.
        now_s += seconds(StepWork(number, number, number, float(context), float(context)))
        moments_s.append(now_s)
        context += number
    return moments_s


def _note(scheduler: Scheduler, stride: Stride) -> None:
    """Add to the scheduler's statistics what single steps would have added."""
    statistics, number = scheduler.statistics, len(stride.sequences)
    last_s = statistics.now_s
    for now_s in stride.moments_s:
        statistics.inter_token_s.observe(now_s - last_s, number)
        last_s = now_s
    count = len(stride.moments_s)
    statistics.step_tokens.observe(number, count)
    statistics.num_generation_tokens += number * count
    statistics.now_s = last_s


# -- replica ---------------------------------------------------------------------------------------


REPORT_S: Final = 0.1  # between two reports of a replica's load


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """A request that has come to a replica."""

    request: TraceRequest
    number: int  # in the trace
    remote: RemoteBlocks | None = None  # what a prefill replica has left of its prompt


@final
class SimulatedReplica:
    """An engine on a virtual clock, with the requests that have arrived at it.

    ``ended`` receives each sequence that has ended. ``by_steps`` turns strides off. ``waste``
    samples fragmentation. ``carrier`` is that of the engine's tiers, if it has some. ``line`` leads
    to the router of a fleet, which hears of blocks, tokens and load. One whose carrier leaves
    blocks for others computes prompts alone. ``refused`` receives the number of a request that can
    never run. At one moment a step ends first, then requests arrive, then the next step begins.
    """

    def __init__(
        self,
        engine: Engine,
        cache: VirtualCache,
        clock: VirtualClock,
        costs: StepCosts,
        *,
        ended: Callable[[Sequence], None],
        by_steps: bool = False,
        waste: Waste | None = None,
        carrier: VirtualCarrier | None = None,
    ) -> None:
        self.engine, self.cache = engine, cache
        self.scheduler = engine.scheduler
        self.timeline = Timeline()
        self.num_refused = 0  # requests that can never run
        self.num_steps = 0
        self.busy_s = 0.0  # of steps
        self.refused: Callable[[int], None] = lambda _: None
        self._is_prefill = carrier is not None and carrier.is_of_prefill
        self._clock, self._costs = clock, costs
        self._ended, self._by_steps, self.waste = ended, by_steps, waste
        self.carrier = carrier
        self.line: RouterLine | None = None
        self._source = cache.accounting if isinstance(cache.accounting, BlockEventSource) else None
        self._before_token: dict[int, Sequence] = {}  # admitted or waiting, by number
        self._evidence = cache.accounting if isinstance(cache.accounting, EvidenceSource) else None
        if self._is_prefill:  # it sees the prompts of others once more: that is no evidence
            self._evidence = None
        self._evidence_s = 0.0  # when evidence is told next
        self._report_s = 0.0  # when the next report is due
        self._idle_is_told = False
        self._may_stride = Reach(cache.accounting.groups).is_full
        self._coming: deque[_Arrival] = deque()
        self._params: dict[int, SamplingParams] = {}  # by max_tokens, since their checks take time
        # FCFS admits only the first requests, so the others wait outside the scheduler, in the
        # small form that they have in a trace. Other policies must see all requests.
        limits = self.scheduler.limits
        self._most_known = limits.max_num_seqs + 1 if limits.policy == "fcfs" else 2**62

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    @property
    def accounting(self) -> Accounting:
        return self.cache.accounting

    @property
    def is_idle(self) -> bool:
        return not self._coming and not self.scheduler.has_unfinished

    def add(
        self,
        request: TraceRequest,
        number: int,
        *,
        at_s: float | None = None,
        remote: RemoteBlocks | None = None,
    ) -> None:
        """Add the ``number``-th request of the trace, which has come here by now.

        ``at_s``: when, if that was later than it came to the fleet; ``remote``: what a prefill
        replica has left of its prompt.
        """
        at_s = request.at_s if at_s is None else at_s
        if self.is_idle and at_s > self.now_s:
            self._store_until(at_s)
            self.timeline.jump(at_s)
            self._clock.wait_until(at_s)
            if self.waste is not None:
                self.waste.skip(at_s)
        self._coming.append(_Arrival(request=request, number=number, remote=remote))

    @property
    def next_s(self) -> float:
        """Return the moment of its next step, or, while it is idle, of its threads' next event."""
        if not self.is_idle:
            return self.now_s
        return inf if self.carrier is None else max(self.now_s, self.carrier.next_s)

    def do_next(self) -> None:
        """Take one step, or, while it is idle, let its threads do the next thing."""
        if not self.is_idle:
            self.run_until(nextafter(self.now_s, inf))
            return
        assert self.carrier is not None, "an idle replica without threads has nothing to do"
        moment_s = self.next_s
        self.carrier.do_next()
        if (offload := self.scheduler.offload) is not None and offload.has_more:
            self._clock.wait_until(moment_s)
            self.engine.store_blocks()

    @property
    def offload_counts(self) -> OffloadCounts:
        """Return what became of blocks outside the pool; all 0 without tiers."""
        offload = self.scheduler.offload
        return OffloadCounts() if offload is None else offload.counts

    def run_until(self, moment_s: float) -> None:
        """Take all steps that begin before a moment, in seconds."""
        while self.now_s < moment_s and not self.is_idle:
            self._let_in()
            if not self.scheduler.has_unfinished:
                continue
            if not self._stride(moment_s):
                self._step()
            self._note()
            if self.line is not None:
                self._tell(self.line)
        if self.line is not None:
            self._tell_idle(self.line)

    def step(self) -> None:
        """Take one step with the requests that have arrived, if any."""
        self._let_in()
        self._step()

    def _let_in(self) -> None:
        while self._coming and self.scheduler.num_waiting < self._most_known:
            arrival = self._coming.popleft()
            number, arrived_s = arrival.number, arrival.request.at_s
            try:
                came = self.scheduler.add(self._request(arrival), arrived_s=arrived_s)
            except RequestTooLong:
                self.num_refused += 1
                if self.line is not None:
                    self.line.tell_end(self.now_s, number)
                self.refused(number)
                continue
            if self.line is not None:
                self._before_token[number] = came[0]
            if self.waste is not None:
                longest = min(came[0].request.max_tokens, self.scheduler.limits.max_model_len)
                self.waste.came(came[0].seq_id, longest - 1)

    def _store_until(self, moment_s: float) -> None:
        """Let an idle engine copy out the blocks that its steps had no time for."""
        while self.now_s < moment_s and not self.engine.store_blocks():
            assert self.carrier is not None, "blocks that go nowhere"
            self.carrier.wait_for_room(moment_s - self.now_s)

    def _request(self, arrival: _Arrival) -> Request:
        max_tokens = max(1, arrival.request.output_tokens)
        params = self._params.get(max_tokens)
        if params is None:
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            self._params[max_tokens] = params
        request = Request(
            request_id=arrival.number,
            prompt_token_ids=prompt_of(arrival.request, arrival.number),
            params=params,
            remote=arrival.remote,
        )
        return prompt_alone(request) if self._is_prefill else request

    def _stride(self, moment_s: float) -> bool:
        """Take a stride if there is one. Returns: whether there was."""
        if not self._may_stride or not self._moves_nothing:
            return False
        stride = find_stride(self.scheduler, self.accounting, self._costs, self.now_s, moment_s)
        if stride is None:
            return False
        if self._by_steps:
            for _ in stride.moments_s:
                self._step()
            return True
        self.busy_s += stride.moments_s[-1] - self.now_s
        self._clock.wait_until(stride.moments_s[-1])
        for sequence in take_stride(self.scheduler, self.accounting, stride):
            self.engine.finish(sequence, "length")  # frees what the engine keeps besides its blocks
            self._end(sequence)
        self.cache.carry_out()
        self.num_steps += len(stride.moments_s)
        return True

    @property
    def _moves_nothing(self) -> bool:
        """Whether no block goes to tiers or comes from them, which happens beside single steps."""
        if self.carrier is None:
            return True
        return not (self.carrier.tiers or self.scheduler.num_waiting) and self.carrier.is_idle

    def _step(self) -> None:
        self.num_steps += 1
        begun_s = self.now_s
        outputs = self.engine.step()
        self.busy_s += self.now_s - begun_s
        for output in outputs:
            if self.line is not None and self._before_token:
                number = output.sequence.request.request_id
                if self._before_token.pop(number, None) is not None:
                    self.line.tell_first_token(self.now_s, number)
            if output.finish_reason is not None:
                self._end(output.sequence)

    def _end(self, sequence: Sequence) -> None:
        if self.waste is not None:
            self.waste.ended(sequence.seq_id)
        if self.line is not None:
            self.line.tell_end(self.now_s, sequence.request.request_id)
        self._ended(sequence)

    def _tell(self, line: RouterLine) -> None:
        """Tell the router what has changed since the last time."""
        if self._source is not None:
            line.tell_blocks(self.now_s, self._source.take_events())
        self._idle_is_told = False
        if self.now_s >= self._report_s:
            self._report_s = self.now_s + REPORT_S
            line.tell_load(self.now_s, self._load())
        if self._evidence is not None and self.now_s >= self._evidence_s:
            self._evidence_s = self.now_s + TELL_S
            others = line.tell_evidence(self.now_s, self._evidence.evidence())
            self._evidence.hear_evidence(others)

    def _tell_idle(self, line: RouterLine) -> None:
        """Tell the router once that nothing is left to do, or that nothing has come yet."""
        if self.is_idle and not self._idle_is_told:
            self._idle_is_told = True
            line.tell_load(self.now_s, self._load())

    def _load(self) -> Load:
        """Return what a replica would report now."""
        limits, num_running = self.scheduler.limits, self.scheduler.num_running
        prices = prices_of(self._costs, limits.max_num_batched_tokens)
        context = float(sum(len(each.token_ids) for each in self.scheduler.decoding))
        decode = StepWork(num_running, num_running, num_running, context, context)
        return Load(
            num_waiting=self.scheduler.num_waiting + len(self._coming),
            num_running=num_running,
            queued_tokens=sum(
                max(0, len(each.request.prompt_token_ids) - each.num_computed_tokens)
                for each in self._before_token.values()
            )
            + sum(each.request.input_tokens for each in self._coming),
            compute_s_per_token=prices.token_s,
            load_s_per_block=self._load_s_per_block(),
            decode_s_per_step=self._costs.seconds(decode) if num_running else prices.step_s,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
        )

    def _load_s_per_block(self) -> Mapping[Medium, float]:
        """Return the seconds for a record that a prefill replica has left, where some were."""
        carrier = self.carrier
        if carrier is None or not carrier.num_peer_records:
            return {}
        return {"STORAGE": carrier.peer_load_s / carrier.num_peer_records}

    def _note(self) -> None:
        if self.waste is not None:
            self.waste.note(self.now_s)
        usage = self.accounting.usage()
        self.timeline.note(
            self.now_s,
            State(
                used_bytes=usage.used_bytes,
                committed_bytes=usage.committed_bytes,
                cached_bytes=usage.cached_bytes,
                num_running=self.scheduler.num_running,
                num_waiting=self.scheduler.num_waiting + len(self._coming),
            ),
        )
