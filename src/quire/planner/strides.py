"""Several steps of decoding at once, where they can only be alike: what makes a simulation fast.

While nobody comes, ends or is still taking in a prompt, a step gives each running sequence a token,
and the scheduler decides nothing. As long as there is room for all of them and a token changes
nothing but counts and new room (``Accounting.steady_tokens``), it makes no difference whether the
cache hears of every step or of all of them together. The clock goes on step by step.

Taken one by one, the same steps give the same figures; tests take both ways.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.engine.scheduler import Scheduler
from quire.engine.scheduling.policy import POLICIES
from quire.engine.sequence import Sequence
from quire.planner.costs import StepCosts
from quire.planner.prompts import output_id
from quire.planner.work import Work
from quire.strategies import Accounting

MOST_STEPS = 1024


@dataclass(frozen=True, slots=True)
class Stride:
    """The moments at which its steps end, and who decodes."""

    moments_s: list[float]
    sequences: list[Sequence]


def find_stride(
    scheduler: Scheduler,
    accounting: Accounting,
    costs: StepCosts,
    now_s: float,
    until_s: float,
) -> Stride | None:
    """The steps that begin before ``until_s`` and can only be alike; None for fewer than two."""
    sequences = scheduler.decoding
    if not sequences or not _decides_nothing(scheduler, sequences):
        return None
    count = _most_steps(scheduler, accounting, sequences)
    if count < 2:
        return None
    moments_s = _moments(sequences, costs, now_s, until_s, count)
    return Stride(moments_s, sequences) if len(moments_s) > 1 else None


def take_stride(scheduler: Scheduler, accounting: Accounting, stride: Stride) -> None:
    """Carry it out; the caller's clock goes to the last of its moments."""
    count, sequences = len(stride.moments_s), stride.sequences
    seq_ids = [s.seq_id for s in sequences]
    ends = [s.num_tokens + count - 1 for s in sequences]
    fitting = accounting.try_extend_each(seq_ids, ends)
    assert fitting == len(sequences), "room that was counted is not there"
    tokens = [output_id(s) for s in sequences]
    accounting.mark_computed(
        seq_ids, [count] * len(tokens), np.repeat(np.array(tokens, np.int32), count)
    )
    _note(scheduler, stride)
    last_s = stride.moments_s[-1]
    for sequence, token, end in zip(sequences, tokens, ends, strict=True):
        sequence.token_ids += [token] * count
        sequence.num_computed_tokens = sequence.most_computed_tokens = end
        sequence.last_token_s = last_s


def _decides_nothing(scheduler: Scheduler, sequences: list[Sequence]) -> bool:
    limits, statistics = scheduler.limits, scheduler.statistics
    if len(sequences) != scheduler.num_running or scheduler.suspects:
        return False
    if len(sequences) > limits.max_num_batched_tokens:
        return False
    if scheduler.num_waiting:
        # For a seat, and nobody will be displaced for one.
        grade = POLICIES[limits.policy].grade
        same = len({grade(s) for s in sequences}) == 1 and limits.policy != "priority"
        if len(sequences) < limits.max_num_seqs or not same:
            return False
    return all(
        s.last_token_s == statistics.now_s and s.most_computed_tokens == s.num_computed_tokens
        for s in sequences
    )


def _most_steps(scheduler: Scheduler, accounting: Accounting, sequences: list[Sequence]) -> int:
    """As long as nobody ends, everybody stays steady, and there is room."""
    longest, count = scheduler.limits.max_model_len, MOST_STEPS
    for s in sequences:
        left = min(s.request.params.max_tokens - s.num_output_tokens, longest - s.num_tokens) - 1
        count = min(count, left)
        if count < 2:
            return 0
        count = min(count, accounting.steady_tokens(s.seq_id) - s.num_tokens + 1)
        if count < 2:
            return 0
    lengths = np.array([s.num_tokens for s in sequences], np.int64)
    most = np.array([scheduler.limits.longest(s.request) for s in sequences], np.int64)
    free_bytes = accounting.ceiling.now_bytes - accounting.held_bytes
    # Each has room for one token less than it has.
    held_bytes = int(accounting.bytes_alone(lengths - 1, most).sum())
    while count > 1:
        then = accounting.bytes_alone(lengths + (count - 1), most)
        if int(then.sum()) - held_bytes <= free_bytes:
            return count
        count //= 2
    return 0


def _moments(
    sequences: list[Sequence], costs: StepCosts, now_s: float, until_s: float, count: int
) -> list[float]:
    """When the steps end that begin before ``until_s``."""
    number = len(sequences)
    context = sum(s.num_tokens for s in sequences)
    seconds: Callable[[Work], float] = costs.seconds
    moments_s: list[float] = []
    for _ in range(count):
        if now_s >= until_s:
            break
        # Each token reads all before it, and itself.
        now_s += seconds(Work(number, number, number, float(context), float(context)))
        moments_s.append(now_s)
        context += number
    return moments_s


def _note(scheduler: Scheduler, stride: Stride) -> None:
    """What the engine's own steps would have noted."""
    statistics, number = scheduler.statistics, len(stride.sequences)
    last_s = statistics.now_s
    for now_s in stride.moments_s:
        statistics.inter_token_s.observe(now_s - last_s, number)
        last_s = now_s
    count = len(stride.moments_s)
    statistics.step_tokens.observe(number, count)
    statistics.num_generation_tokens += number * count
    statistics.now_s = last_s
