"""Real steps over a grid of sizes, timed: what a cost model of this machine is fitted to.

Each step is timed as a whole, with the engine's own time in it. Prompts share nothing.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from quire.bench.copying import price_copies
from quire.bench.here import vocabulary_of
from quire.bench.workload import Vocabulary
from quire.engine.params import SamplingParams
from quire.engine.scheduling.swap import Clock
from quire.planner.simulation.costs import RECORDED_TOKENS
from quire.planner.simulation.fitting import Fit, fit
from quire.planner.simulation.work import Reach, Work

if TYPE_CHECKING:
    from quire.engine.llm import LLM
    from quire.engine.plan import StepPlan

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (8, 24, 64, 200, 600, 1500)
_DECODES = 12  # steps of each point
# Steps of up to 128 tokens are recorded, by size, when 24 have come.
_SIZES = (1, 2, 3, 4, 6, 8, 12, *range(16, 65, 8), 80, 96, 112, RECORDED_TOKENS)
_TIMES = 25
_MOST_LATE = 8  # sequences that come one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """So many sequences side by side, each with a prompt of so many tokens.

    ``comes_late``: one more with each step, so that some take in prompts while others generate.
    """

    num_sequences: int
    prompt_tokens: int
    comes_late: bool = False


def grid(max_num_seqs: int, max_model_len: int, room_tokens: int) -> list[Point]:
    """What fits in the KV memory, with some room to spare."""
    points = [
        Point(num_sequences=batch, prompt_tokens=context)
        for batch in BATCHES
        for context in CONTEXTS
        if batch <= max_num_seqs
        and context + _most_decodes(batch) + 1 <= max_model_len
        and batch * (context + _most_decodes(batch) + 16) <= room_tokens
    ]
    late = [replace(p, comes_late=True) for p in points if 2 <= p.num_sequences <= _MOST_LATE]
    return points + late


def _most_decodes(num_sequences: int) -> int:
    """The first of those that come late decodes until the last one has come."""
    return _DECODES + min(num_sequences, _MOST_LATE)


def warm_up(llm: "LLM") -> None:
    """Let an engine do for the first time what it does only once, as one that serves has done.

    Kernels are compiled, and a pass over few tokens is recorded when its size has come often.
    """
    limits = llm.engine.scheduler.limits
    longest = min(limits.max_num_batched_tokens, llm.max_model_len - 1)
    vocabulary, rng = vocabulary_of(llm), np.random.default_rng(1)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for size in (n for n in _SIZES if n <= longest):
        for _ in range(_TIMES):
            prompt = vocabulary.draw(rng, size)
            llm.start(llm.request(prompt, params), lambda _: None)
            while llm.engine.scheduler.has_unfinished:
                llm.step()


def calibrate(
    llm: "LLM",
    *,
    rounds: int = 2,
    is_warm: bool = False,
    report: Callable[[int, int], None] = lambda *_: None,
    clock: Clock = time.perf_counter,
) -> Fit:
    """Fit a cost model to this machine. ``report`` is told how many points are done, of how many.

    ``is_warm``: this engine has been calibrated before, and nothing is done for the first time.

    Raises: RequestError if the KV memory has no room for a grid.
    """
    capacity = llm.accounting.ceiling.capacity_bytes
    scheduler = llm.engine.scheduler
    room_tokens = int(0.9 * capacity / max(1, llm.spec.bytes_per_token))
    points = grid(scheduler.limits.max_num_seqs, llm.max_model_len, room_tokens)
    vocabulary, rng = vocabulary_of(llm), np.random.default_rng(0)
    measured: list[tuple[Work, float]] = []
    llm.reset_prefix_cache()  # a prompt of the last calibration is to be computed again
    num_unmeasured = 0 if is_warm else 1  # rounds: what longer steps do only once, and pages
    if not is_warm:
        warm_up(llm)
    total = (num_unmeasured + rounds) * len(points)
    for done, (number, point) in enumerate(_rounds(num_unmeasured + rounds, points)):
        report(done, total)
        steps = list(_steps(llm, point, vocabulary, rng, clock))
        if number >= num_unmeasured:
            measured += steps
    report(total, total)
    found = fit(measured)
    prices = price_copies(llm, clock)
    return replace(found, costs=replace(found.costs, **asdict(prices)))


def about(found: Fit, *, machine: str, model: str, cache: str, num_threads: int) -> Fit:
    """With what a reader of the file will want to know."""
    said = {
        "machine": machine,
        "model": model,
        "cache": cache,
        "num_threads": num_threads,
        "num_steps": found.num_steps,
        "num_kinds": found.num_kinds,
        "median_error": round(found.median_error, 4),
        "p90_error": round(found.p90_error, 4),
        "spread": round(found.spread, 4),
    }
    return replace(found, costs=replace(found.costs, about=MappingProxyType(said)))


def timed_steps(llm: "LLM", clock: Clock) -> Iterator[tuple[Work, float]]:
    """Step until all is done; what each step was, and how long it took."""
    reach = Reach(llm.accounting.groups)
    plans: list[StepPlan] = []
    watch, llm.engine.watch = llm.engine.watch, plans.append
    try:
        while llm.engine.scheduler.has_unfinished:
            plans.clear()
            begin_s = clock()
            llm.step()
            seconds = clock() - begin_s
            if plans and plans[0].chunks:
                yield reach.of(plans[0]), seconds
    finally:
        llm.engine.watch = watch


def _rounds(rounds: int, points: list[Point]) -> Iterator[tuple[int, Point]]:
    for number in range(rounds):
        for point in points:
            yield number, point


def _steps(
    llm: "LLM", point: Point, vocabulary: Vocabulary, rng: np.random.Generator, clock: Clock
) -> Iterator[tuple[Work, float]]:
    num_tokens = (_most_decodes(point.num_sequences) if point.comes_late else _DECODES) + 1
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)

    def start(count: int) -> None:
        for _ in range(count):
            prompt = vocabulary.draw(rng, point.prompt_tokens)
            llm.start(llm.request(prompt, params), lambda _: None)

    started = 1 if point.comes_late else point.num_sequences
    start(started)
    for step in timed_steps(llm, clock):
        yield step
        if started < point.num_sequences:
            start(1)
            started += 1
