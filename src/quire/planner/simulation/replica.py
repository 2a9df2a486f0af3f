"""One engine of a simulated fleet: requests come at their times, and it steps until a moment."""

from collections import deque
from collections.abc import Callable
from typing import final

import numpy as np

from quire.engine.engine import Engine
from quire.engine.params import SamplingParams
from quire.engine.sequence import Request, Sequence
from quire.errors import RequestTooLong
from quire.kv import Accounting
from quire.planner.simulation.costs import StepCosts
from quire.planner.simulation.prompts import prompt_of
from quire.planner.simulation.strides import find_stride, take_stride
from quire.planner.simulation.timeline import State, Timeline
from quire.planner.simulation.virtual import VirtualCache, VirtualClock
from quire.planner.simulation.waste import Waste
from quire.planner.simulation.work import Reach
from quire.traces import TraceRequest

_PROBE = -1  # sequences count from 0


@final
class Replica:
    """``ended`` hears of each sequence that has; ``by_steps`` takes none of them together;
    ``waste`` is told which come and end, and looks now and then.

    ``now_s`` is where its clock is. What happens at one moment happens in this order: a step ends,
    requests come, the next step begins.
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
    ) -> None:
        self.engine, self.cache = engine, cache
        self.scheduler = engine.scheduler
        self.timeline = Timeline()
        self.num_refused = 0  # requests that can never run
        self.num_steps = 0
        self._clock, self._costs = clock, costs
        self._ended, self._by_steps, self.waste = ended, by_steps, waste
        self._may_stride = Reach(cache.accounting.groups).is_full
        self._coming: deque[tuple[TraceRequest, int]] = deque()
        self._params: dict[int, SamplingParams] = {}  # by their one number: to check takes time
        # Only the first requests can come into a step; the others wait as what they are in a
        # trace, which takes no room. Where requests may overtake, all must be known.
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

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait."""
        return self.scheduler.num_running + self.scheduler.num_waiting + len(self._coming)

    def add(self, request: TraceRequest, number: int) -> None:
        """The ``number``-th request of the trace has come, at the latest now."""
        if self.is_idle and request.at_s > self.now_s:
            self.timeline.jump(request.at_s)
            self._clock.wait_until(request.at_s)
            if self.waste is not None:
                self.waste.skip(request.at_s)
        self._coming.append((request, number))

    def num_cached_tokens(self, request: TraceRequest, number: int) -> int:
        """What it would find computed here."""
        token_ids = prompt_of(request, number, longest=self.scheduler.limits.max_model_len)
        self.accounting.add(_PROBE)
        hit = self.accounting.match_prefix(_PROBE, np.array(token_ids, np.int32))
        self.accounting.free(_PROBE)
        return hit.num_tokens

    def run_until(self, moment_s: float) -> None:
        """Every step that begins before that moment."""
        while self.now_s < moment_s and not self.is_idle:
            self._let_in()
            if not self.scheduler.has_unfinished:
                continue
            if not self._stride(moment_s):
                self._step()
            self._note()

    def step(self) -> None:
        """One step, with the requests that have come; nothing where none has."""
        self._let_in()
        self._step()

    def _let_in(self) -> None:
        while self._coming and self.scheduler.num_waiting < self._most_known:
            request, number = self._coming.popleft()
            try:
                came = self.scheduler.add(self._request(request, number), arrived_s=request.at_s)
            except RequestTooLong:
                self.num_refused += 1
                continue
            if self.waste is not None:
                longest = min(came[0].request.max_tokens, self.scheduler.limits.max_model_len)
                self.waste.came(came[0].seq_id, longest - 1)

    def _request(self, request: TraceRequest, number: int) -> Request:
        max_tokens = max(1, request.output_tokens)
        params = self._params.get(max_tokens)
        if params is None:
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            self._params[max_tokens] = params
        return Request(
            request_id=number, prompt_token_ids=prompt_of(request, number), params=params
        )

    def _stride(self, moment_s: float) -> bool:
        """Several steps that are alike, if there are some."""
        if not self._may_stride:
            return False
        stride = find_stride(self.scheduler, self.accounting, self._costs, self.now_s, moment_s)
        if stride is None:
            return False
        if self._by_steps:
            for _ in stride.moments_s:
                self._step()
            return True
        self._clock.wait_until(stride.moments_s[-1])
        for sequence in take_stride(self.scheduler, self.accounting, stride):
            self.engine.finish(sequence, "length")  # what belongs to it besides its room
            self._end(sequence)
        self.cache.carry_out()
        self.num_steps += len(stride.moments_s)
        return True

    def _step(self) -> None:
        self.num_steps += 1
        for output in self.engine.step():
            if output.finish_reason is not None:
                self._end(output.sequence)

    def _end(self, sequence: Sequence) -> None:
        if self.waste is not None:
            self.waste.ended(sequence.seq_id)
        self._ended(sequence)

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
