"""Timing on a machine that others use too: which samples count, and pairs taken in turn.

A sample calls one candidate again and again for ``SAMPLE_S``. It is clean if no other task was
runnable just before it (/proc/loadavg) and other processes, and the machine's host, used little of
the processors during it (/proc/stat). Candidates take turns, so that sample i of one and sample i
of another saw the same machine. Needs only the standard library: peers' environments run it too.
"""

import gc
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TypeAlias

SAMPLE_S = 0.06
WAIT_S = 0.2  # for the others to leave; then the sample is taken all the same, and is dirty
ENOUGH = 5  # clean samples of each candidate
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

Call: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    seconds: float  # a call, on average
    is_clean: bool


@dataclass(slots=True)
class Timing:
    """One candidate's samples, in the order of the rounds."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def num_clean(self) -> int:
        return sum(sample.is_clean for sample in self.samples)

    @property
    def num_dirty(self) -> int:
        return len(self.samples) - self.num_clean

    @property
    def counted(self) -> list[float]:
        """Seconds a call in the clean samples; in all of them if none is."""
        clean = [sample.seconds for sample in self.samples if sample.is_clean]
        return clean or [sample.seconds for sample in self.samples]

    @property
    def best_s(self) -> float:
        return min(self.counted)

    @property
    def median_s(self) -> float:
        return statistics.median(self.counted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Of pairs that were taken in the same round."""

    median: float
    least: float
    greatest: float
    num_pairs: int
    all_clean: bool

    @property
    def spread(self) -> float:
        """How far a pair was from 1: the noise, where both sides are the same."""
        return max(self.greatest - 1, 1 - self.least)


def times_as_fast(fast: Timing, slow: Timing) -> Ratio:
    """How many times as fast ``fast`` is: over the clean pairs if they are enough, else all."""
    pairs = list(zip(fast.samples, slow.samples, strict=False))
    clean = [(one, two) for one, two in pairs if one.is_clean and two.is_clean]
    chosen = clean if len(clean) >= min(ENOUGH, len(pairs)) else pairs
    ratios = [two.seconds / one.seconds for one, two in chosen]
    return Ratio(
        median=statistics.median(ratios),
        least=min(ratios),
        greatest=max(ratios),
        num_pairs=len(ratios),
        all_clean=chosen is clean,
    )


def differences(longer: Timing, shorter: Timing) -> Timing:
    """What one takes more than the other, round by round."""
    return Timing(
        [
            Sample(seconds=one.seconds - two.seconds, is_clean=one.is_clean and two.is_clean)
            for one, two in zip(longer.samples, shorter.samples, strict=False)
        ]
    )


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside, and none overdue."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_turn(calls: Iterable[Call]) -> Call:
    """One call that is the next of these each time."""
    following = cycle(list(calls))
    return lambda: next(following)()


def take_turns(
    calls: Mapping[str, Call], *, num_rounds: int, budget_s: float = 15.0
) -> dict[str, Timing]:
    """``num_rounds`` samples of each, and up to twice that until each has enough clean ones.

    Those beyond the first ENOUGH rounds end with ``budget_s``.
    """
    timings = {name: Timing() for name in calls}
    begun = time.monotonic()
    with no_collection():
        for call in calls.values():
            call()
        for turn in range(2 * num_rounds):
            enough = all(t.num_clean >= min(ENOUGH, num_rounds) for t in timings.values())
            late = time.monotonic() - begun > budget_s
            if (turn >= min(ENOUGH, num_rounds) and late) or (turn >= num_rounds and enough):
                break
            for name, call in calls.items():
                timings[name].samples.append(sample(call))
    return timings


def sample(call: Call) -> Sample:
    alone = _wait_alone()
    busy_s, own_s, begun = machine_busy_s(), _own_s(), time.perf_counter()
    num_calls = 0
    while time.perf_counter() - begun < SAMPLE_S:
        call()
        num_calls += 1
    wall_s = time.perf_counter() - begun
    others_s = machine_busy_s() - busy_s - (_own_s() - own_s)
    # Processor time is counted in ticks: one and a half of them are within its error.
    quiet = others_s < 1.5 * _TICK_S + 0.05 * wall_s
    return Sample(seconds=wall_s / num_calls, is_clean=alone and quiet)


def _wait_alone() -> bool:
    """Whether we are, at last, the only task that is runnable, and were 2 ms ago."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if _num_runnable() <= 1:
            time.sleep(0.002)
            if _num_runnable() <= 1:
                return True
        time.sleep(0.004)
    return False


def _num_runnable() -> int:
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])


def machine_busy_s() -> float:
    """Processor time of the whole machine since its start: all but idle and waiting for disks."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split(None, 9)[1:9]
    )
    return (user + nice + system + irq + softirq + steal) * _TICK_S


def _own_s() -> float:
    """Processor time of this process and of children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
