"""Time real steps over a grid of sizes, and fit a cost model of this machine to them.

A step is timed as a whole, with the engine's own time. Prompts share no prefix.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from quire.bench.load import vocabulary_of
from quire.bench.workload import Vocabulary
from quire.engine.scheduling.step_costs import Clock
from quire.engine.scheduling.swap_space import readable_tokens, slots_of
from quire.kv import Accounting, CacheConfig, Copy, Fits, Storage, build_accounting, build_storage
from quire.planner.simulation.cost_model import (
    RECORDED_SIZES,
    Fit,
    Reach,
    StepWork,
    fit,
    nonnegative_least_squares,
)
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm import LLM
    from quire.engine.step_plan import StepPlan


# -- copies ----------------------------------------------------------------------------------------

# A buffer of ``growing`` that grows commits pages, copies, and releases pages, layer by layer; that
# is timed as a whole. It runs in storages of its own, in the engine's kind of memory.
_MOST_BYTES = 32 * 2**20  # of a buffer, in all layers
_NUM_STEPS = 12  # steps in which a buffer grows to that size
_SWAPPED_TOKENS = (16, 64, 192, 512)  # of a sequence
_ROUNDS = 4  # the first one is a warm-up


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPrices:
    """Seconds of copies.

    ``copy_s`` is the constant part of a copy in one layer, and those of swapping are a sequence's.
    """

    copy_s: float
    copy_s_per_byte: float
    save_s: float
    save_s_per_byte: float
    load_s: float
    load_s_per_byte: float


def price_copies(llm: "LLM", clock: Clock) -> CopyPrices:
    """Time copies and swapping on this machine, with this model's layers."""
    longest = min(llm.max_model_len, max(1, _MOST_BYTES // max(1, llm.spec.bytes_per_token)))
    copy_s, copy_s_per_byte = _growing(llm, longest, clock)
    save, load = _swapping(llm, longest, clock)
    return CopyPrices(
        copy_s=copy_s,
        copy_s_per_byte=copy_s_per_byte,
        save_s=save[0],
        save_s_per_byte=save[1],
        load_s=load[0],
        load_s_per_byte=load[1],
    )


def _growing(llm: "LLM", longest: int, clock: Clock) -> tuple[float, float]:
    rows: list[tuple[int, int]] = []  # copies, their bytes
    seconds: list[float] = []
    step = max(1, min(llm.config.growth_tokens, longest // _NUM_STEPS))
    with _pair(llm, "growing", longest, step) as (accounting, storage):
        for number in range(_ROUNDS):
            accounting.add(number)
            for num_tokens in range(step, longest + 1, step):
                accounting.try_extend(number, num_tokens)
                changes = accounting.drain()
                begin_s = clock()
                storage.apply(changes)
                took_s = clock() - begin_s
                copies = [change for change in changes if isinstance(change, Copy)]
                if number and copies:
                    moved = sum(c.num_slots * accounting.slot_bytes(c.group) for c in copies)
                    rows.append((len(copies), moved))
                    seconds.append(took_s)
            accounting.free(number)
            storage.apply(accounting.drain())
    return _each_and_per_byte(rows, seconds)


def _each_and_per_byte(rows: list[tuple[int, int]], seconds: list[float]) -> tuple[float, float]:
    """Fit what each copy takes, and each byte, to rows of copies and their bytes."""
    if not rows:  # no layer of this model grows, or is swapped
        return 0.0, 0.0
    # The fastest of each size: a copy is short, and a disturbance takes longer.
    sizes = sorted(set(rows))
    least = np.array([min(s for r, s in zip(rows, seconds, strict=True) if r == z) for z in sizes])
    matrix, scale = np.array(sizes, float) / least[:, None], np.array([1.0, 1e6])
    each_s, s_per_byte = nonnegative_least_squares(matrix / scale, np.ones(len(sizes))) / scale
    return float(each_s), float(s_per_byte)


def _swapping(
    llm: "LLM", longest: int, clock: Clock
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return what swapping a sequence out takes, and a byte of it; and the same for swapping in."""
    from quire.devices import choose_device
    from quire.engine.kv_cache import KVCache
    from quire.engine.swap.kv_mover import make_mover

    rows: list[tuple[int, int]] = []  # one sequence, its bytes
    save_s, load_s = list[float](), list[float]()
    folder, device = llm.config.swap_path, choose_device(llm.config.device)
    with _pair(llm, "paged", longest, 1) as pair:
        accounting, kv = pair[0], KVCache(lambda: pair)
        mover = make_mover(kv, folder, longest, device, clock)
        accounting.add(0)
        for num_tokens in sorted({min(longest, each) for each in _SWAPPED_TOKENS}):
            accounting.try_extend(0, num_tokens)
            kv.carry_out()
            tokens = readable_tokens(accounting.groups, 0, num_tokens)
            slots = [slots_of(accounting, number, 0, own) for number, own in enumerate(tokens)]
            for _ in range(_ROUNDS):
                begun = mover.timer.begin()
                mover.save(0, slots)
                mover.timer.end(begun, save_s.append)
                begun = mover.timer.begin()
                size = mover.put_back(0, slots, [0] * len(slots))
                mover.timer.end(begun, load_s.append)
                mover.drop([0])
                rows.append((1, size))
        mover.timer.settle(wait=True)
        mover.close()
    if not all(size for _, size in rows):
        return (0.0, 0.0), (0.0, 0.0)
    return _each_and_per_byte(rows, save_s), _each_and_per_byte(rows, load_s)


@contextmanager
def _pair(
    llm: "LLM", strategy: str, longest: int, growth_tokens: int
) -> Iterator[tuple[Accounting, Storage]]:
    """Make an accounting and a storage for one sequence, apart from the engine's own."""
    sizes = CacheConfig(
        max_model_len=longest,
        max_num_seqs=1,
        capacity_bytes=8 * _MOST_BYTES,
        page_bytes=llm.memory.page_bytes,
        growth_tokens=growth_tokens,
        enable_prefix_caching=False,
    )
    accounting = build_accounting(strategy, llm.spec, sizes)
    storage = build_storage(strategy, accounting, llm.memory)
    try:
        yield accounting, storage
    finally:
        storage.close()


# -- steps -----------------------------------------------------------------------------------------

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (8, 24, 64, 200, 600, 1500)
_DECODES = 12  # decoding steps per point
_TIMES = 25  # the engine records a pass when 24 steps of its size have run
_MOST_LATE = 8  # most sequences that start one by one, or end so
_MOST_SHORT = 200  # tokens of a prompt where room is short


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPoint:
    """A point of the grid: sequences that run side by side, with prompts of one length.

    With ``comes_late`` each step starts one more, so that some compute prompts while others decode.
    With ``lacks_room`` they end one by one, while a longer one waits for their memory.
    """

    num_sequences: int
    prompt_tokens: int
    comes_late: bool = False
    lacks_room: bool = False


def grid(max_num_seqs: int, max_model_len: int, room_tokens: int) -> list[CostPoint]:
    """Return the points that fit in a KV memory of ``room_tokens``, with some reserve."""
    points = [
        CostPoint(num_sequences=batch, prompt_tokens=context)
        for batch in BATCHES
        for context in CONTEXTS
        if batch <= max_num_seqs
        and context + _most_decodes(batch) + 1 <= max_model_len
        and batch * (context + _most_decodes(batch) + 16) <= room_tokens
    ]
    few = [p for p in points if 2 <= p.num_sequences <= _MOST_LATE]
    late = [replace(p, comes_late=True) for p in few]
    short = [replace(p, lacks_room=True) for p in few if p.prompt_tokens <= _MOST_SHORT]
    return points + late + short


def _most_decodes(num_sequences: int) -> int:
    """Return the decoding steps of a point; the first late sequence waits for the last one."""
    return _DECODES + min(num_sequences, _MOST_LATE)


def warm_up(llm: "LLM") -> None:
    """Run an engine until its kernels are compiled and its passes over few tokens recorded."""
    limits = llm.engine.scheduler.limits
    longest = min(limits.max_num_batched_tokens, llm.max_model_len - 1)
    vocabulary, rng = vocabulary_of(llm), np.random.default_rng(1)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for size in (n for n in RECORDED_SIZES if n <= longest):
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
    """Fit a cost model to this machine; ``report`` receives the points done, and all points.

    ``is_warm`` skips the warm-up of an engine that has been calibrated before.

    Raises: RequestError if the KV memory has no room for the grid.
    """
    capacity = llm.accounting.ceiling.capacity_bytes
    scheduler = llm.engine.scheduler
    room_tokens = int(0.9 * capacity / max(1, llm.spec.bytes_per_token))
    points = grid(scheduler.limits.max_num_seqs, llm.max_model_len, room_tokens)
    vocabulary, rng = vocabulary_of(llm), np.random.default_rng(0)
    measured: list[tuple[StepWork, float]] = []
    llm.reset_prefix_cache()  # so that prompts of an earlier calibration are computed again
    num_unmeasured = 0 if is_warm else 1  # warm-up rounds, for longer steps and pages
    if not is_warm:
        warm_up(llm)
    total = (num_unmeasured + rounds) * len(points)
    every = product(range(num_unmeasured + rounds), points)
    for done, (number, point) in enumerate(every):
        report(done, total)
        steps = list(steps_of(llm, point, vocabulary, rng, clock))
        if number >= num_unmeasured:
            measured += steps
    report(total, total)
    found = fit(measured)
    prices = price_copies(llm, clock)
    return replace(found, costs=replace(found.costs, **asdict(prices)))


def about(found: Fit, *, machine: str, model: str, cache: str, num_threads: int) -> Fit:
    """Add a description for readers of the file."""
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


def timed_steps(llm: "LLM", clock: Clock) -> Iterator[tuple[StepWork, float]]:
    """Step until all sequences have ended; yields the work and the seconds of each step."""
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


def steps_of(
    llm: "LLM", point: CostPoint, vocabulary: Vocabulary, rng: np.random.Generator, clock: Clock
) -> Iterator[tuple[StepWork, float]]:
    """Run a point of the grid; yields the work and the seconds of each step."""
    if point.lacks_room:
        yield from _steps_short_of_room(llm, point, vocabulary, rng, clock)
        return
    num_tokens = (_most_decodes(point.num_sequences) if point.comes_late else _DECODES) + 1

    def start(count: int) -> None:
        for _ in range(count):
            _start(llm, vocabulary.draw(rng, point.prompt_tokens), num_tokens)

    started = 1 if point.comes_late else point.num_sequences
    start(started)
    for step in timed_steps(llm, clock):
        yield step
        if started < point.num_sequences:
            start(1)
            started += 1


def _steps_short_of_room(
    llm: "LLM", point: CostPoint, vocabulary: Vocabulary, rng: np.random.Generator, clock: Clock
) -> Iterator[tuple[StepWork, float]]:
    """Whenever a sequence ends, planning looks anew whether the one that waits has room."""
    lengths = range(2, 2 + point.num_sequences)  # of their outputs
    for num_tokens in lengths:
        _start(llm, vocabulary.draw(rng, point.prompt_tokens), num_tokens)
    accounting, capacity_bytes = llm.accounting, llm.accounting.ceiling.capacity_bytes
    steps = timed_steps(llm, clock)
    while llm.engine.scheduler.num_waiting:  # until all have their prompts
        yield next(steps)
    longest = point.prompt_tokens + np.array(lengths)
    most = max(accounting.held_bytes, int(accounting.bytes_alone(longest, longest).sum()))
    newcomer = min(int(longest.sum()) * 3 // 4, llm.max_model_len - 1)
    llm.resize(most)
    try:
        if isinstance(accounting.could_hold(newcomer + 1), Fits):
            _start(llm, vocabulary.draw(rng, newcomer), 2)
        yield from steps
    finally:
        llm.resize(capacity_bytes)


def _start(llm: "LLM", prompt: list[int], num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    llm.start(llm.request(prompt, params), lambda _: None)
