"""How long a fleet takes: the steps of its engines, its streams, and its door.

Engines are calibrated at once, a processor each. Then a real fleet of such engines is asked: for
streams at once, which says how much longer a step takes where its tokens are passed on; for a
prompt at each replica, twice, which says what a first token takes beside steps, and what a token
costs that no cache has; and for short requests at once, which says how long the door's processor is
busy with each. Its requests are none of those that a benchmark compares.
"""

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from queue import Empty
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.fleet.processes import OPTIONS, replicas_of, running
from benchmarks.planner.real import Plenty
from quire.bench.workload import Vocabulary
from quire.fleet.event_follower import ZmqFollower
from quire.fleet.fleet_engine import FleetEngine
from quire.fleet.placement import PrefixAware
from quire.fleet.prefix_directory import PrefixDirectory
from quire.planner.simulation.cost_model import (
    FittedCosts,
    Reach,
    StepWork,
    first_token_s,
    nonnegative_least_squares,
)
from quire.sampling_params import SamplingParams

NUM_REPLICAS = 2
EVENTS = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://127.0.0.1:0",
    "replay_endpoint": "tcp://127.0.0.1:0",
}


# -- a real fleet ----------------------------------------------------------------------------------


@asynccontextmanager
async def serving(model: str | None) -> AsyncIterator[FleetEngine]:
    """Run a fleet of ``NUM_REPLICAS`` warm processes, placed by their caches' events."""
    with TemporaryDirectory() as folder:
        several = [{"kv_events_config": EVENTS}] * NUM_REPLICAS
        replicas = replicas_of(Path(folder), model, several, is_warm=True)
        facts = await replicas[0].facts()
        directory = PrefixDirectory(facts.groups, facts.block_size)
        follower = ZmqFollower(directory)
        async with running(replicas, PrefixAware(directory, seed=0), follower=follower) as engine:
            yield engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """When the pieces of an answer came, by ``time.perf_counter``."""

    sent_s: float
    pieces: list[tuple[float, int]]  # moments, and how many tokens
    found_tokens: int  # of the prompt, in a cache

    @property
    def first_s(self) -> float:
        """Seconds to the first piece."""
        return self.pieces[0][0] - self.sent_s

    @property
    def end_s(self) -> float:
        return self.pieces[-1][0]

    @property
    def num_tokens(self) -> int:
        return sum(num for _, num in self.pieces)

    def token_s(self, begun_s: float) -> float:
        """Return the seconds between its tokens from a moment on."""
        inside = [piece for piece in self.pieces if piece[0] >= begun_s]
        return (inside[-1][0] - inside[0][0]) / sum(num for _, num in inside[1:])


async def ask(fleet: FleetEngine, token_ids: Sequence[int], num_tokens: int) -> Answer:
    """Ask a fleet for exactly so many tokens."""
    sent_s = time.perf_counter()
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    request = await fleet.request(list(token_ids), params)
    pieces, found = list[tuple[float, int]](), 0
    async for delta in fleet.generate(request):
        if not pieces:
            found = delta.num_cached_tokens
        pieces.append((time.perf_counter(), len(delta.token_ids)))
    return Answer(sent_s=sent_s, pieces=pieces, found_tokens=found)


PROBE_TOKENS, PROBE_ANSWER = 128, 8
_NUM_PROBES = 4


async def probe(fleet: FleetEngine) -> list[float]:
    """Return the seconds to the first pieces of some prompts that are each alone."""
    vocabulary, rng = Vocabulary(), np.random.default_rng()
    prompts = [vocabulary.draw(rng, PROBE_TOKENS) for _ in range(_NUM_PROBES)]
    return [(await ask(fleet, each, PROBE_ANSWER)).first_s for each in prompts]


# -- its engines -----------------------------------------------------------------------------------


# All numbers of a cost model.
_COEFFICIENTS = tuple(
    each.name
    for each in fields(FittedCosts)
    if each.name not in ("about", "is_recorded", "beyond_s")
)


def _calibrate_one(processor: int, model: str | None, begins: Any, results: Any) -> None:
    os.sched_setaffinity(0, {processor})
    os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"] = "1", "PASSIVE"
    from quire.bench.calibrate import calibrate
    from quire.engine.llm import LLM

    with LLM(model, gauge=Plenty(), **OPTIONS) as llm:
        begins.wait()
        costs = calibrate(llm, rounds=1).costs
        results.put(replace(costs, about={}))


def engines_costs(model: str | None) -> FittedCosts:
    """Calibrate as many engines at once as there will be replicas: means of their costs.

    Raises: RuntimeError where one of them ends early.
    """
    context = multiprocessing.get_context("spawn")
    begins, results = context.Barrier(NUM_REPLICAS), context.Queue()
    processors = sorted(os.sched_getaffinity(0))
    processes = [
        context.Process(
            target=_calibrate_one,
            args=(processors[n % len(processors)], model, begins, results),
        )
        for n in range(NUM_REPLICAS)
    ]
    for process in processes:
        process.start()
    found: list[FittedCosts] = []
    while len(found) < NUM_REPLICAS:
        try:
            found.append(results.get(timeout=1.0))
        except Empty:
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.terminate()
                raise RuntimeError("a calibration has ended early") from None
    for process in processes:
        process.join()
    is_recorded = all(own.is_recorded for own in found)
    beyond_s = zip(*(own.beyond_s for own in found), strict=True) if is_recorded else ()
    return FittedCosts(
        **{name: mean(getattr(own, name) for own in found) for name in _COEFFICIENTS},
        is_recorded=is_recorded,
        beyond_s=tuple(map(mean, beyond_s)),
    )


# -- its streams, prompts and door -----------------------------------------------------------------

_STREAMS, _STREAM_PROMPT, _STREAM_TOKENS = (1, 2, 4, 8), 32, 48  # of each replica
_PROMPTS, _ANSWER = (32, 64, 96, 128, 192, 256, 384, 512), 8  # tokens
_AT_ONCE = 16
_WARM_UPS, _ROUNDS = 2, 5
_PAUSE_S = 0.06


async def fleets_costs(fleet: FleetEngine, costs: FittedCosts) -> FittedCosts:
    """Measure what a fleet takes beside its engines' steps, and add it to their costs."""
    run = _Runs(fleet)
    longer_s = _measured(await run.streams(costs))
    rows = np.array([(1.0, count) for count in longer_s])
    step_s, sample_s = _fitted(rows, longer_s)
    costs = replace(costs, step_s=costs.step_s + step_s, sample_s=costs.sample_s + sample_s)

    fresh_s, again_s = map(_measured, await run.prompts(costs))
    rows = np.array([(1.0, length) for length in again_s])
    door_s, door_token_s = _fitted(rows, again_s)
    # What is left for a prompt that no cache has belongs to the tokens that steps compute: a fleet
    # is told of each block. Tokens that are drawn have theirs already.
    lengths = np.array(list(fresh_s), float)
    left_s = np.array(list(map(median, fresh_s.values()))) - door_s - door_token_s * lengths
    token_s = max(0.0, float(np.median(left_s / lengths)))
    names = ("token_s", "next_token_s", "further_token_s", "long_token_s")
    costs = replace(
        costs,
        **{name: getattr(costs, name) + token_s for name in names},
        sample_s=max(0.0, costs.sample_s - token_s),
    )

    busy_s = await run.at_once()
    return replace(
        costs,
        door_s=door_s,
        door_token_s=door_token_s,
        door_busy_s=min(door_s, median(busy_s)),
        about={
            "longer_steps_ms": _told(longer_s),
            "beside_steps_ms": _told(fresh_s),
            "beside_steps_of_cached_prompts_ms": _told(again_s),
            "token_ms": round(1000 * token_s, 4),
            "door_busy_ms": [round(1000 * each, 3) for each in busy_s],
        },
    )


class _Runs:
    """Requests of a fleet that does nothing else, and what they take beyond their steps."""

    def __init__(self, fleet: FleetEngine) -> None:
        self._fleet = fleet
        self._rng, self._vocabulary = np.random.default_rng(7), Vocabulary()
        member = next(iter(fleet.members.values()))
        assert member.facts is not None, "a fleet that serves knows its replicas"
        self._reach = Reach(member.facts.groups)

    def _drawn(self, count: int, length: int) -> list[list[int]]:
        return [self._vocabulary.draw(self._rng, length) for _ in range(count)]

    def _sent(self) -> Iterator[int]:
        """Yield how many requests have ended at each replica."""
        return (each.counts.outcomes.total() for each in self._fleet.members.values())

    async def _ask(self, prompts: list[list[int]], num_tokens: int) -> list[Answer]:
        """Ask for all at once. Returns: no answers where replicas did not get as many each."""
        before = list(self._sent())
        answers = await asyncio.gather(*(ask(self._fleet, each, num_tokens) for each in prompts))
        await asyncio.sleep(_PAUSE_S)
        each_got = {now - then for now, then in zip(self._sent(), before, strict=True)}
        return answers if len(each_got) == 1 else []

    async def streams(self, costs: FittedCosts) -> dict[int, list[float]]:
        """Return how much longer steps take whose tokens are passed on, by their sequences."""
        longer_s: dict[int, list[float]] = {count: [] for count in _STREAMS}
        for number in range(_WARM_UPS + _ROUNDS):
            for count, own in longer_s.items():
                prompts = self._drawn(count * NUM_REPLICAS, _STREAM_PROMPT)
                answers = await self._ask(prompts, _STREAM_TOKENS)
                context = float(count * (_STREAM_PROMPT + _STREAM_TOKENS // 2))
                step_s = costs.seconds(StepWork(count, count, count, context, context))
                if answers and number >= _WARM_UPS:
                    begun_s = max(each.pieces[0][0] for each in answers)
                    own.append(mean(each.token_s(begun_s) for each in answers) - step_s)
        return longer_s

    async def prompts(
        self, costs: FittedCosts
    ) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
        """Return what first tokens take beside steps, by the prompt's length: fresh, and again.

        Each replica has one at once, as engines are calibrated at once. The answer has more tokens:
        the first one leaves while the next is computed.
        """
        fresh_s: dict[int, list[float]] = {length: [] for length in _PROMPTS}
        again_s: dict[int, list[float]] = {length: [] for length in _PROMPTS}
        most = OPTIONS["max_num_batched_tokens"]
        for number in range(_WARM_UPS + _ROUNDS):
            for length in _PROMPTS:
                prompts = self._drawn(NUM_REPLICAS, length)
                for beside_s in (fresh_s, again_s):
                    answers = await self._ask(prompts, _ANSWER)
                    if answers and number >= _WARM_UPS:
                        beside_s[length].append(
                            mean(
                                each.first_s
                                - first_token_s(
                                    costs, self._reach, length, most, found_tokens=each.found_tokens
                                )
                                for each in answers
                            )
                        )
        return fresh_s, again_s

    async def at_once(self) -> list[float]:
        """Return the processor seconds of this process for a short request, of each round.

        It is the door and its client.
        """
        busy_s = list[float]()
        for _ in range(_ROUNDS):
            prompts = self._drawn(_AT_ONCE, _STREAM_PROMPT)
            begun_s = time.process_time()
            await self._ask(prompts, 1)
            busy_s.append((time.process_time() - begun_s) / _AT_ONCE)
        return busy_s


def _fitted(
    rows: "np.ndarray[Any, Any]", samples: Mapping[int, list[float]]
) -> tuple[float, float]:
    """Fit two coefficients of at least zero to the medians of samples."""
    scale = np.array([1.0, rows[:, 1].max()])
    seconds = np.array(list(map(median, samples.values())))
    first, second = (nonnegative_least_squares(rows / scale, seconds) / scale).tolist()
    return first, second


def _measured(samples: dict[int, list[float]]) -> dict[int, list[float]]:
    """Return the sizes that have samples. Raises: RuntimeError where most have none."""
    found = {size: own for size, own in samples.items() if own}
    if 2 * len(found) < len(samples):
        raise RuntimeError("the placement gave the replicas unlike numbers of requests: run again")
    return found


def _told(several: Mapping[int, list[float]]) -> dict[str, list[float]]:
    """Return samples for readers of the file, in milliseconds."""
    return {str(size): [round(1000 * each, 2) for each in own] for size, own in several.items()}
