"""Several steps of decoding at once, where they can only be alike: what makes a simulation fast.

While no request comes and no sequence still computes its prompt, a step gives each running sequence
a token, and the scheduler decides nothing. As long as there is room for all of them and a token
changes nothing but counts and new room (``Accounting.steady_tokens``), it makes no difference
whether the cache hears of every step or of all of them together. The clock goes on step by step, up
to the one in which the first sequence ends.

Taken one by one, the same steps give the same figures; tests take both ways.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.engine.scheduler import Scheduler
from quire.engine.scheduling.policy import POLICIES
from quire.engine.sequence import Sequence
from quire.kv import Accounting
from quire.planner.simulation.costs import StepCosts
from quire.planner.simulation.prompts import output_id
from quire.planner.simulation.work import Work

MOST_STEPS = 1024


@dataclass(frozen=True, slots=True)
class Stride:
    """The moments at which its steps end, and the sequences that decode."""

    moments_s: list[float]
    sequences: list[Sequence]


def find_stride(
    scheduler: Scheduler,
    accounting: Accounting,
    costs: StepCosts,
    now_s: float,
    until_s: float,
) -> Stride | None:
    """The steps that begin before ``until_s`` and can only be alike, if there are any."""
    if scheduler.num_waiting and scheduler.num_running < scheduler.limits.max_num_seqs:
        return None  # a sequence may come into the next step
    sequences = scheduler.decoding
    if not sequences or not _decides_nothing(scheduler, sequences):
        return None
    count = _most_steps(scheduler, accounting, sequences)
    if not count:
        return None
    return Stride(_moments(sequences, costs, now_s, until_s, count), sequences)


def take_stride(scheduler: Scheduler, accounting: Accounting, stride: Stride) -> list[Sequence]:
    """Carry it out; the caller's clock goes to the last of its moments. Returns: what has ended."""
    count, sequences = len(stride.moments_s), stride.sequences
    seq_ids = [s.seq_id for s in sequences]
    ends = [len(s.token_ids) + count - 1 for s in sequences]
    fitting = accounting.try_extend_each(seq_ids, ends)
    assert fitting == len(sequences), "room that was counted is not there"
    tokens = [output_id(s) for s in sequences]
    computed = np.repeat(np.array(tokens, np.int32), count)
    accounting.mark_computed(seq_ids, [count] * len(tokens), computed)
    _note(scheduler, stride)
    last_s, ended = stride.moments_s[-1], list[Sequence]()
    for sequence, token, end in zip(sequences, tokens, ends, strict=True):
        sequence.token_ids += [token] * count
        sequence.num_computed_tokens = sequence.most_computed_tokens = end
        sequence.last_token_s = last_s
        if end + 1 == _last(scheduler, sequence):
            ended.append(sequence)
    for sequence in ended:
        scheduler.finish(sequence, "length")
    return ended


def _decides_nothing(scheduler: Scheduler, sequences: list[Sequence]) -> bool:
    limits, statistics = scheduler.limits, scheduler.statistics
    if len(sequences) != scheduler.num_running or scheduler.suspects:
        return False
    if len(sequences) > limits.max_num_batched_tokens:
        return False
    if scheduler.num_waiting:
        # They wait for a seat, as has been seen, and no sequence will be displaced for one.
        grade = POLICIES[limits.policy].grade
        same = len({grade(s) for s in sequences}) == 1 and limits.policy != "priority"
        if not same:
            return False
    return all(
        s.last_token_s == statistics.now_s and s.most_computed_tokens == s.num_computed_tokens
        for s in sequences
    )


def _last(scheduler: Scheduler, sequence: Sequence) -> int:
    """Tokens that it has when it ends."""
    request = sequence.request
    most = len(request.prompt_token_ids) + request.params.max_tokens
    return min(most, scheduler.limits.max_model_len)


def _most_steps(scheduler: Scheduler, accounting: Accounting, sequences: list[Sequence]) -> int:
    """Up to the first end, as long as all sequences stay steady and there is room."""
    lengths, most, count = list[int](), list[int](), MOST_STEPS
    for s in sequences:
        num_tokens, num_prompt_tokens = len(s.token_ids), len(s.request.prompt_token_ids)
        last = _last(scheduler, s)
        steady = accounting.steady_tokens(s.seq_id) + 1
        count = min(count, last - num_tokens, steady - num_tokens)
        # The last token of a prompt is computed by itself where all others were found.
        if count < 1 or num_tokens == num_prompt_tokens:
            return 0
        lengths.append(num_tokens)
        most.append(last)
    free_bytes = accounting.ceiling.now_bytes - accounting.held_bytes
    at, ends = np.array(lengths, np.int64), np.array(most, np.int64)
    # Each has room for one token less than it has.
    held_bytes = int(accounting.bytes_alone(at - 1, ends).sum())
    while count:
        then = accounting.bytes_alone(at + (count - 1), ends)
        if int(then.sum()) - held_bytes <= free_bytes:
            return count
        count //= 2
    return 0


def _moments(
    sequences: list[Sequence], costs: StepCosts, now_s: float, until_s: float, count: int
) -> list[float]:
    """When the steps end that begin before ``until_s``."""
    number = len(sequences)
    context = sum(len(s.token_ids) for s in sequences)
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
