"""The side of the engine benchmark that runs inside each engine's own process and environment.

A worker loads once, writes one JSON line that says what it is, and then answers each line of its
standard input, ``{"workload": …, "limit_s": …}``, with one line. Needs nothing but the standard
library. What an engine itself writes to standard output goes to standard error.

Time is measured here, and alike for all: from handing over the requests until each token is out.
"""

import json
import os
import queue
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, Protocol, TypeAlias

from benchmarks.engine.workloads import WARM_UP, WORKLOADS, Asked, Workload

NUM_THREADS = 2
NUM_SEQUENCES = 32  # at most, at once
POOL_TOKENS = 20_480  # where a pool's size must be said: more than any workload holds at once
SHOWN = 4  # ids of the first request that are told, to compare engines

Arrival: TypeAlias = tuple[int, int | None]  # which request; the token, where the engine tells it
Answer: TypeAlias = dict[str, Any]


class Engine(Protocol):
    """An engine that has loaded the model."""

    @property
    def about(self) -> dict[str, str]:
        """``version``, ``precision`` of weights / compute / KV, and ``settings``, in words."""
        ...

    def run(self, asked: list[Asked]) -> Generator[Arrival, None, None]:
        """Continue all requests together, greedily. Closing it early aborts what still runs.

        What should not be timed is done by the call itself; the work begins with the first item.
        """
        ...


def serve(make: Callable[[str], Engine]) -> None:
    """Answer until standard input ends. The first argument is the folder of the model."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    begun = time.monotonic()
    engine = make(sys.argv[1])
    for _ in engine.run(_warm_up()):
        pass
    print(json.dumps({**engine.about, "load_s": time.monotonic() - begun}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        answer = _measure(engine, WORKLOADS[order["workload"]], order["limit_s"])
        print(json.dumps(answer), file=answers)
    os._exit(0)  # threads of engines would keep the process alive


def arrivals_of(
    waiting: "queue.SimpleQueue[Arrival | BaseException | None]", num_running: int
) -> Generator[Arrival, None, None]:
    """What threads of so many requests put into a queue, each None at its end. Raises: theirs."""
    while num_running:
        match waiting.get():
            case None:
                num_running -= 1
            case BaseException() as error:
                raise error
            case arrival:
                yield arrival


def _warm_up() -> list[Asked]:
    """Four requests of several lengths."""
    several = Workload(name=WARM_UP, num_sequences=4).requests(seed=1)
    return [Asked(prompt=asked.prompt, num_tokens=8) for asked in several]


def _measure(engine: Engine, workload: Workload, limit_s: float) -> Answer:
    asked = workload.requests()
    expected = sum(one.num_tokens for one in asked)
    times: list[float] = []
    first_ids: list[int] = []
    cut = False
    with closing(engine.run(asked)) as arrivals:
        begun = time.perf_counter()
        for index, token_id in arrivals:
            times.append(time.perf_counter() - begun)
            if index == 0 and token_id is not None and len(first_ids) < SHOWN:
                first_ids.append(token_id)
            if times[-1] > limit_s:
                cut = True
                break
    if not times or (not cut and len(times) != expected):
        return {"error": f"{len(times)} tokens came instead of {expected}"}
    answer: Answer = {"cut": cut, "seconds": times[-1], "tokens": len(times), "ids": first_ids}
    if not workload.is_mixed:
        answer["prefill_s"] = times[0]
        answer["token_s"] = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
    return answer
