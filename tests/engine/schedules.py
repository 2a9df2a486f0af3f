"""Random schedules of the demo model, each of whose sequences must get the tokens of `generate()`.

``Schedule(seed)`` draws a strategy, a cache so small that sequences make room for each other, a
policy, chunks, speculation, swap and n; then prompts, some of which begin alike, that come one
after the other and some of which are given up. In float32 a token may differ only where the model
itself all but tossed a coin: where its two largest logits are closer than ``GAP``.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.engine.outputs import TextDelta
from quire.engine.sequence import Sequence
from quire.kv import STRATEGIES
from quire.memory import MemoryProvider
from quire.models.loader import LoadedModel, load

GAP = 1e-4
LONGEST_OUTPUT = 40
TEXTS = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + ",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def put(self, item):\n",
    "import os\n\n\ndef main(argv):\n    for name in argv:\n        print(name)\n    for ",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the ",
)


@cache
def demo() -> LoadedModel:
    return load(dtype="float32")


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Six of each text: it and its beginnings, so that many begin alike."""
    several: list[tuple[int, ...]] = []
    for text in TEXTS:
        ids = tuple(demo().tokenizer(text)["input_ids"])
        several += [ids[: len(ids) - cut] for cut in (0, 1, 2, 5, 9, len(ids) - 2)]
    return tuple(several)


@cache
def alone(which: int) -> tuple[int, ...]:
    """What the model's own ``generate`` continues a prompt with."""
    prompt = torch.tensor([prompts()[which]])
    out = demo().model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=LONGEST_OUTPUT,
        min_new_tokens=LONGEST_OUTPUT,
    )
    return tuple(out[0, prompt.shape[1] :].tolist())


def top_two_gap(which: int, num_output_tokens: int) -> float:
    """How much closer the likeliest next token is than the second, by the model alone."""
    ids = torch.tensor([[*prompts()[which], *alone(which)[:num_output_tokens]]])
    with torch.inference_mode():
        first, second = demo().model(ids, use_cache=False).logits[0, -1].topk(2).values.tolist()
    return first - second


@dataclass
class Result:
    """Of one schedule or of several."""

    num_sequences: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_swaps: int = 0  # of these
    num_accepted_tokens: int = 0  # of drafts
    differences: list[str] = field(default_factory=list)  # with a gap below GAP
    faults: list[str] = field(default_factory=list)  # with a larger one

    def add(self, other: "Result") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Schedule:
    """One engine and what comes to it, from a seed."""

    def __init__(
        self, seed: int, cache: str | None = None, provider: MemoryProvider | None = None
    ) -> None:
        self.provider = provider
        self.loaded: Callable[[], Any] = demo
        self.began: Callable[[LLM], object] = bool  # is shown the engine, before anything comes
        self.stepped: Callable[[LLM], object] = bool  # … and after each step
        self.rng = rng = random.Random(seed)
        self.seed = seed
        strategy = cache or rng.choice([*STRATEGIES, "virtual-shared"])
        self.options: dict[str, Any] = dict(
            cache="virtual" if strategy == "virtual-shared" else strategy,
            enable_prefix_caching=strategy != "virtual" and rng.random() < 0.8,
            max_model_len=128,
            max_num_seqs=rng.choice([2, 4, 8]),
            max_num_batched_tokens=rng.choice([8, 32, 128]),
            growth_tokens=rng.choice([16, 64]),
            reserve=rng.choice(["max_model_len", "request"]),
            scheduling_policy=rng.choice(["fcfs", "fcfs", "priority", "shortest"]),
            speculative_config=rng.choice([None, '{"method": "ngram"}']),
            swap_space=rng.choice([0, 0, "4MiB"]),
            kv_cache_memory_bytes=rng.choice([128, 160, 256, 1024]) * 8 * 2 * 2 * 64 * 4,
        )

    def run(self, waves: int = 1) -> Result:
        """Have requests come, in so many waves: the next comes when all have ended."""
        result = Result()
        with LLM(self.loaded(), provider=self.provider, **self.options) as llm:
            self.began(llm)
            for _ in range(waves):
                self._wave(llm, result)
            statistics = llm.engine.scheduler.statistics
            result.num_preemptions = statistics.num_preemptions
            result.num_swaps = statistics.num_swaps
            result.num_accepted_tokens = statistics.num_accepted_tokens
        return result

    def _wave(self, llm: LLM, result: Result) -> None:
        rng = self.rng
        coming = [rng.randrange(len(prompts())) for _ in range(rng.randint(4, 12))]
        started: list[tuple[int, list[Sequence], deque[TextDelta]]] = []
        while coming or llm.engine.scheduler.has_unfinished:
            if coming and rng.random() < 0.5:
                which, deltas = coming.pop(), deque[TextDelta]()
                prompt, params = self.prompt(which), self.params(which)
                request = llm.request(list(prompt), params, priority=rng.randrange(3))
                started.append((which, llm.start(request, deltas.append), deltas))
            if started and rng.random() < 0.03:
                llm.abandon(rng.choice(started)[1])
            if rng.random() < 0.15:  # as an operator or a machine short of memory would have it
                llm.engine.scheduler.preempt_youngest(spare_oldest=rng.random() < 0.5)
            llm.step()
            self.stepped(llm)
        for which, sequences, deltas in started:
            for sequence in sequences:
                self.compare(which, sequence, result)
            self.compare_deltas(which, deltas, result)

    def prompt(self, which: int) -> tuple[int, ...]:
        """One of ``prompts``."""
        return prompts()[which]

    def params(self, which: int) -> SamplingParams:
        """For the next request, of a prompt."""
        return SamplingParams(
            temperature=0,
            max_tokens=self.rng.randint(4, LONGEST_OUTPUT),
            ignore_eos=True,
            n=self.rng.choice([1, 1, 1, 2]),
        )

    def compare_deltas(self, which: int, deltas: deque[TextDelta], result: Result) -> None:
        """Of all continuations of a request."""

    def compare(self, which: int, sequence: Sequence, result: Result) -> None:
        result.num_sequences += 1
        result.num_cached_tokens += sequence.num_cached_tokens
        told, want = sequence.output_token_ids, list(alone(which))
        whole = sequence.finish_reason == "length"
        assert whole or sequence.finish_reason in ("abort", "capacity"), sequence.finish_detail
        if told == want[: len(told)]:
            return
        at = next(i for i, (a, b) in enumerate(zip(told, want, strict=False)) if a != b)
        gap = top_two_gap(which, at)
        text = f"seed {self.seed}, {self.options['cache']}: prompt {which}, token {at}, gap {gap}"
        (result.differences if gap < GAP else result.faults).append(text)
