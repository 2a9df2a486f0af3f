"""Where a step of our own engine goes when 32 sequences decode, and what the machine would allow.

    python -m benchmarks.engine.profile MODEL

The engine runs as it always does; calls of its parts are clocked from outside. Then once more
without recordings of the model's passes, for in these there is nothing to be seen from outside: so
the model's own parts are clocked by their class. A part's time is its own, without that of parts
within it. Medians over the steps that decode one token of each sequence and do nothing else.
"""

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.engine.worker import NUM_SEQUENCES, NUM_THREADS
from benchmarks.engine.workloads import TOKEN_BYTES, Asked, Workload
from benchmarks.harness.quiet import take_turns
from benchmarks.harness.roofline import STREAMS, Stream, last_cache_bytes, matmul
from quire import LLM, SamplingParams

PROMPT_TOKENS, NUM_TOKENS = 256, 48
PARTS = (
    SCHEDULING := "scheduling, accounting",
    INPUTS := "building inputs",
    LINEAR := "linear layers, with their activation",
    ATTENTION := "attention, with writing",
    NORMS := "norms",
    REST := "the model, but for what is named",
    SAMPLING := "sampling",
    OUTSIDE := "delivery of tokens and text",
)


class Clock:
    """Time by part, each part's own."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._parts = [OUTSIDE]
        self._since = time.perf_counter()

    def clocked(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return call

    def clock_modules(self) -> None:
        """Every module of the kinds below. Hooks would tell a model's owner that it has changed."""
        own, parts = nn.Module.__call__, dict[type, str | None]()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            kind = type(module)
            if kind not in parts:
                parts[kind] = _part_of(kind)
            if (part := parts[kind]) is None:
                return own(module, *args, **kwargs)
            self._enter(part)
            try:
                return own(module, *args, **kwargs)
            finally:
                self._leave()

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def take(self) -> dict[str, float]:
        """What was spent since it was last asked."""
        self._charge()
        spent, self.spent = dict(self.spent), defaultdict(float)
        return spent

    def _enter(self, part: str) -> None:
        self._charge()
        self._parts.append(part)

    def _leave(self) -> None:
        self._charge()
        self._parts.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        self.spent[self._parts[-1]] += now - self._since
        self._since = now


def _part_of(kind: type) -> str | None:
    if issubclass(kind, nn.Linear) or kind.__name__.endswith("MLP"):
        return LINEAR
    return NORMS if kind.__name__.endswith("Norm") else None


def profile(model: str) -> dict[str, Any]:
    """Seconds of a step by part, and what reading and multiplying the weights takes here."""
    torch.set_num_threads(NUM_THREADS)
    llm = LLM(
        model,
        max_num_seqs=NUM_SEQUENCES,
        kv_cache_memory_bytes=2**31,
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    asked = _asked()
    prompts = [one.prompt for one in asked]
    params = [
        SamplingParams(max_tokens=one.num_tokens, temperature=0, ignore_eos=True) for one in asked
    ]
    llm.generate(prompts[:2], params[:2])
    clocked = _clocked(llm)
    llm.generate(prompts, params)  # which records
    clocked.clear()
    llm.generate(prompts, params)
    steps, parts = len(clocked), _medians(clocked)
    runner: Any = llm.engine._runner
    runner._model._recordings = None
    clocked.clear()
    llm.generate(prompts, params)
    weights = sum(p.nbytes for p in runner._model._model.parameters())
    return {
        "steps": steps,
        "parts_s": parts,
        "unrecorded_parts_s": _medians(clocked),
        "weight_bytes": weights,
        **_machine(weights),
    }


def _asked() -> list[Asked]:
    one = Workload(name="", num_sequences=1, prompt_tokens=PROMPT_TOKENS).requests()[0]
    return [
        Asked(prompt=one.prompt[n:] + one.prompt[:n], num_tokens=NUM_TOKENS)
        for n in range(NUM_SEQUENCES)
    ]


def _medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """By part; the first steps warm up."""
    return {part: statistics.median(step.get(part, 0.0) for step in steps[2:]) for part in PARTS}


def _clocked(llm: LLM) -> list[dict[str, float]]:
    """Where the time by part goes of each step from now on that decodes all sequences."""
    clock, steps = Clock(), list[dict[str, float]]()
    engine: Any = llm.engine
    runner = engine._runner
    steady = False
    plan, step = engine.scheduler.plan, clock.clocked(SCHEDULING, engine.step)

    def watched_plan(*args: Any) -> Any:
        nonlocal steady
        planned = plan(*args)
        steady = planned.num_tokens == len(planned.chunks) == NUM_SEQUENCES
        return planned

    def watched_step() -> Any:
        """What lies between two steps belongs to the first."""
        spent = clock.take()
        if steady:
            steps.append(spent)
        return step()

    engine.scheduler.plan, engine.step = watched_plan, watched_step
    for part, owner, name in (
        (INPUTS, runner, "run"),
        (REST, runner._model, "forward"),
        (SAMPLING, engine._sampler, "sample"),
        (ATTENTION, runner._backend, "attend"),
        (ATTENTION, runner._kv.storage, "write"),
    ):
        setattr(owner, name, clock.clocked(part, getattr(owner, name)))
    clock.clock_modules()
    return steps


def _machine(weight_bytes: int) -> dict[str, float]:
    """What a step cannot go below: weights, keys and values read once; its products multiplied."""
    stream = Stream(3 * max(last_cache_bytes(), 64 * 2**20))
    multiply, operations = matmul(torch.bfloat16)
    reading = {name: call for name, call in stream.calls().items() if name in STREAMS}
    timings = take_turns({**reading, "matmul": multiply}, num_rounds=5)
    stream_s = min(timings[name].best_s for name in STREAMS)
    kv_bytes = NUM_SEQUENCES * (PROMPT_TOKENS + NUM_TOKENS // 2) * TOKEN_BYTES
    products = 2.0 * NUM_SEQUENCES * weight_bytes / 2  # a multiplication and an addition a weight
    return {
        "stream_bytes_s": stream.nbytes / stream_s,
        "reading_s": weight_bytes / stream.nbytes * stream_s,
        "kv_bytes": kv_bytes,
        "kv_reading_s": kv_bytes / stream.nbytes * stream_s,
        "multiplying_s": products / (operations / timings["matmul"].best_s),
    }


if __name__ == "__main__":
    with torch.inference_mode():
        print(json.dumps(profile(sys.argv[1])))
