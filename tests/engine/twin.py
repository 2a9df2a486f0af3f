"""A slow twin of the statistics: it watches an LLM from outside, keeps all values, and counts last.

It hears of plans, of what came of them, and of the clock, of which it owns the hands. What it takes
from the engine are chunks, tokens and the ends of sequences, and no figure.
"""

import random
from collections import Counter
from itertools import pairwise
from typing import Any

from quire import LLM, SamplingParams
from quire.engine.sequence import Sequence
from quire.engine.statistics import Histogram, Statistics
from quire.engine.step_plan import StepPlan


class Hands:
    """A clock that goes on by itself, by a little, whenever it is read."""

    def __init__(self, seed: int) -> None:
        self.now_s, self._rng = 0.0, random.Random(seed)

    def __call__(self) -> float:
        self.now_s += self._rng.choice([0.001, 0.02, 0.3, 4.0])
        return self.now_s


class Life:
    """What was seen of one sequence."""

    def __init__(self, sequence: Sequence, arrived_s: float) -> None:
        self.sequence, self.arrived_s = sequence, arrived_s
        self.came_s: float | None = None
        self.hit_tokens = 0
        self.token_s: list[float] = []  # when each token came
        self.ended_s: float | None = None
        self.num_preemptions = 0


class Twin:
    """Of one LLM, from its first step on. ``start`` and ``abort`` instead of the LLM's own."""

    def __init__(self, llm: LLM, seed: int = 0) -> None:
        self.llm, self.clock = llm, Hands(seed)
        llm.engine.clock = self.clock
        self.lives: dict[int, Life] = {}
        self.step_tokens: list[int] = []
        self._plan, self._update = llm.engine.scheduler.plan, llm.engine.scheduler.update
        llm.engine.scheduler.plan = self.plan  # type: ignore[method-assign]
        llm.engine.scheduler.update = self.update  # type: ignore[method-assign]

    def start(self, prompt: Any, params: SamplingParams, **keys: Any) -> list[Sequence]:
        request = self.llm.request(prompt, params, **keys)
        sequences = self.llm.start(request, lambda _: None)
        for sequence in sequences:
            self.lives[sequence.seq_id] = Life(sequence, self.clock.now_s)
        return sequences

    def abort(self, sequence: Sequence) -> None:
        if sequence.finish_reason is None:
            self.llm.abandon([sequence])
            self.lives[sequence.seq_id].ended_s = self.clock.now_s

    def run(self) -> None:
        while self.llm.step():
            pass

    # -- what it hears ---------------------------------------------------------------------------

    def plan(self, *args: Any) -> StepPlan:
        at_s = self.clock.now_s
        before = {life: life.sequence.num_preemptions for life in self.lives.values()}
        plan = self._plan(*args)
        for life, count in before.items():
            life.num_preemptions += life.sequence.num_preemptions - count
        for chunk in plan.chunks:
            life = self.lives[chunk.sequence.seq_id]
            if life.came_s is None:
                life.came_s, life.hit_tokens = at_s, chunk.start
        return plan

    def update(self, plan: StepPlan, sampled: Any) -> Any:
        if plan.chunks:
            self.step_tokens.append(sum(chunk.stop - chunk.start for chunk in plan.chunks))
        for chunk, siblings in [(c, list(c.sequence.siblings)) for c in plan.chunks]:
            if chunk.samples:  # they go on from its prompt, and look nothing up
                for sibling in siblings:
                    life = self.lives[sibling.seq_id]
                    life.came_s, life.hit_tokens = self.lives[chunk.sequence.seq_id].came_s, -1
        outputs = self._update(plan, sampled)
        for output in outputs:
            life = self.lives[output.sequence.seq_id]
            if output.token_id is not None:
                life.token_s.append(self.clock.now_s)
            if output.finish_reason is not None:
                life.ended_s = self.clock.now_s
        return outputs

    # -- what it expects -------------------------------------------------------------------------

    def check(self) -> None:
        """Raises: AssertionError where the statistics say otherwise. All has ended."""
        got, lives = self.llm.statistics, list(self.lives.values())
        leaders = [life for life in lives if life.hit_tokens >= 0]
        assert got.num_generation_tokens == sum(len(life.token_s) for life in lives)
        begun = [life for life in leaders if life.token_s]
        assert got.num_prompt_tokens == sum(life.sequence.num_prompt_tokens for life in begun)
        reasons = Counter(life.sequence.finish_reason for life in lives)
        assert {reason: n for reason, n in got.num_finished.items() if n} == reasons
        looked_up = [life for life in leaders if life.came_s is not None]
        assert got.prefix_query_tokens == sum(x.sequence.num_prompt_tokens for x in looked_up)
        assert got.prefix_hit_tokens == sum(life.hit_tokens for life in looked_up)
        missed = sum(x.sequence.num_prompt_tokens - 1 - x.hit_tokens for x in looked_up)
        assert sum(got.prefix_missed_tokens.values()) == missed
        self._check_histograms(got, lives)

    def _check_histograms(self, got: Statistics, lives: list[Life]) -> None:
        told = [life for life in lives if life.token_s]
        steps = [sorted(set(life.token_s)) for life in told]
        same(got.step_tokens, self.step_tokens)
        same(got.first_token_s, [x.token_s[0] - x.arrived_s for x in told])
        same(got.inter_token_s, [b - a for s in steps for a, b in pairwise(s)])
        several = [life for life in told if len(life.token_s) > 1]
        same(got.token_s, [(x.token_s[-1] - x.token_s[0]) / (len(x.token_s) - 1) for x in several])
        ended = {life: life.ended_s or 0.0 for life in lives}
        same(got.e2e_s, [end - life.arrived_s for life, end in ended.items()])
        came = {x: end if x.came_s is None else x.came_s for x, end in ended.items()}
        same(got.queue_s, [at - life.arrived_s for life, at in came.items()])
        same(got.prefill_s, [life.token_s[0] - came[life] for life in told])
        same(got.decode_s, [life.token_s[-1] - life.token_s[0] for life in told])
        same(got.inference_s, [life.token_s[-1] - came[life] for life in told])
        same(got.prompt_tokens, [life.sequence.num_prompt_tokens for life in lives])
        same(got.generation_tokens, [len(life.token_s) for life in lives])
        same(got.request_preemptions, [life.num_preemptions for life in lives])
        same(got.max_tokens, [life.sequence.request.params.max_tokens for life in lives])
        requests = {life.sequence.request.request_id: life.sequence.request for life in lives}
        same(got.num_choices, [request.params.n for request in requests.values()])
        longest = Counter[int]()
        for life in lives:
            number = life.sequence.request.request_id
            longest[number] = max(longest[number], len(life.token_s))
        same(got.longest_generation_tokens, list(longest.values()))


def same(histogram: Histogram, values: list[float]) -> None:
    """Raises: AssertionError unless it holds these values and no others."""
    for place, bound in enumerate(histogram.bounds):
        want = sum(value <= bound for value in values)
        assert sum(histogram.counts[: place + 1]) == want, (bound, values)
    assert histogram.count == len(values)
    assert abs(histogram.sum - sum(values)) <= 1e-6 * max(1.0, sum(values))
