"""An engine that computes nothing: the real loop, scheduler and accounting on a clock of its own.

What takes time in an engine takes it here too, as the cost model says: steps, copies, swapping. The
tokens are known beforehand; each request generates as many as the trace says.
"""

from collections.abc import Iterable
from typing import final

from quire.engine.core import Engine
from quire.engine.scheduler import Scheduler, SchedulerLimits
from quire.engine.scheduling.step_costs import Costs, Prices
from quire.engine.scheduling.swap_space import SwapSpace, num_bytes, readable_tokens
from quire.engine.sequence import Sequence
from quire.engine.step_plan import Chunk, Sampled, Save, StepPlan
from quire.kv import Accounting, Copy
from quire.planner.simulation.cost_model import Reach, StepCosts, StepWork
from quire.traces import TraceRequest

# -- token ids -------------------------------------------------------------------------------------

# Token ids for a trace that has only lengths and hash ids: two prompts share what their ids share.
#
# A prefix is told by where it begins to differ, so a few telling ids are enough: a stretch of
# tokens that stands for one hash id begins with that id, a prompt without any with a number of its
# own, and all other tokens are alike. Nothing is remembered from prompt to prompt.
#
# What is generated is told by its sequence, and is like nothing else: a trace does not say what
# its outputs were, so none is found again.


_FILLER = 0
_NUM_IDS = 2**31  # that an int32 holds, from 0 on: a trace's
_NUM_OWN = 2**30  # below 0: odd ones are for one prompt's own tokens, even ones for outputs


def prompt_of(request: TraceRequest, number: int, *, longest: int | None = None) -> tuple[int, ...]:
    """The prompt of the ``number``-th request, up to ``longest`` tokens; at least one."""
    num_tokens = max(1, request.input_tokens)
    if longest is not None:
        num_tokens = min(num_tokens, longest)
    each = max(1, request.id_tokens)
    ids = request.hash_ids[: -(-num_tokens // each)]
    token_ids: list[int] = []
    for hash_id in ids:
        token_ids += _stretch(hash_id, each)
    if len(token_ids) < num_tokens:  # tokens beyond its hash ids are its own
        rest = num_tokens - len(token_ids)
        token_ids.append(-1 - 2 * (number % _NUM_OWN))
        token_ids += [_FILLER] * (rest - 1)
    del token_ids[num_tokens:]
    return tuple(token_ids)


def _stretch(hash_id: int, num_tokens: int) -> list[int]:
    """An id of up to 63 bits in two tokens, as int32 holds them."""
    low, high = hash_id % _NUM_IDS, hash_id // _NUM_IDS
    if num_tokens == 1:
        return [low]
    return [low, high if high < _NUM_IDS else high - 2 * _NUM_IDS, *[_FILLER] * (num_tokens - 2)]


def output_id(sequence: Sequence) -> int:
    """What every token is that this sequence generates."""
    return -2 - 2 * (sequence.seq_id % _NUM_OWN)


# -- the engine ------------------------------------------------------------------------------------


@final
class VirtualClock:
    """Seconds since the beginning of the trace."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait_until(self, moment_s: float) -> None:
        self.now_s = max(self.now_s, moment_s)


@final
class VirtualCache:
    """An accounting whose decisions are carried out by counting them."""

    refusal: Exception | None = None

    def __init__(self, accounting: Accounting, costs: StepCosts, clock: VirtualClock) -> None:
        self.accounting = accounting
        self.copied_bytes = 0
        self._costs, self._clock = costs, clock
        self._slot_bytes = [accounting.slot_bytes(n) for n in range(len(accounting.groups))]

    @property
    def committed_bytes(self) -> int:
        return self.accounting.usage().committed_bytes

    def carry_out(self) -> None:
        groups, num_layers, num_bytes = self.accounting.groups, 0, 0
        for change in self.accounting.drain():
            if isinstance(change, Copy):
                num_layers += len(groups[change.group].layers)
                num_bytes += self._slot_bytes[change.group] * change.num_slots
        if num_layers:
            self.copied_bytes += num_bytes
            self._clock.now_s += num_layers * self._costs.copy_s
            self._clock.now_s += num_bytes * self._costs.copy_s_per_byte

    def restart(self) -> None:
        raise AssertionError("a step that computes nothing cannot fail")


@final
class VirtualRunner:
    """Takes the time of a step."""

    overwrites_states = False

    def __init__(self, reach: Reach, costs: StepCosts, clock: VirtualClock) -> None:
        self._reach, self._costs, self._clock = reach, costs, clock

    def run(self, plan: StepPlan) -> None:
        self._clock.now_s += self._costs.seconds(self._reach.of(plan))

    def close(self) -> None:
        """Nothing is held."""


@final
class ForeseenTokens:
    """Every draw gives its sequence's own token."""

    def __init__(self) -> None:
        self._known: dict[int, Sampled] = {}

    def sample(self, logits: None, plan: StepPlan) -> list[Sampled]:
        return [self._of(draw.sequence) for draw in plan.draws]

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence.seq_id, None)

    def _of(self, sequence: Sequence) -> Sampled:
        sampled = self._known.get(sequence.seq_id)
        if sampled is None:
            sampled = Sampled(token_ids=(output_id(sequence),))
            self._known[sequence.seq_id] = sampled
        return sampled


@final
class VirtualSwap:
    """Saving and bringing back take their time and never fail."""

    def __init__(self, accounting: Accounting, costs: StepCosts, clock: VirtualClock) -> None:
        self._groups = accounting.groups
        self._costs, self._clock = costs, clock

    def save(self, saves: Iterable[Save]) -> list[Sequence]:
        for save in saves:
            self._clock.now_s += save.num_bytes * self._costs.save_s_per_byte
        return []

    def load(self, chunk: Chunk) -> bool:
        tokens = readable_tokens(self._groups, chunk.start - chunk.num_restored, chunk.start)
        self._clock.now_s += num_bytes(self._groups, tokens) * self._costs.load_s_per_byte
        return True

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


def prices_of(costs: StepCosts, num_tokens: int) -> Prices:
    """What the scheduler would measure where steps take so long, of up to so many tokens."""
    text_s = costs.seconds(StepWork(num_tokens + 1, 2, 1, num_tokens, num_tokens**2 / 2, 1))
    short_s = costs.seconds(StepWork(1, 1, 1, 0.0, 0.0))
    token_s = max(0.0, text_s - short_s) / num_tokens
    return Prices(step_s=max(0.0, short_s - token_s), token_s=token_s)


def virtual_engine(
    accounting: Accounting,
    limits: SchedulerLimits,
    costs: StepCosts,
    clock: VirtualClock,
    *,
    swap_bytes: int = 0,
) -> tuple[Engine, VirtualCache]:
    """The loop around an accounting, and what counts its copies."""
    cache = VirtualCache(accounting, costs, clock)
    known = Costs(
        bytes_per_token=sum(group.bytes_per_token for group in accounting.groups),
        prices=prices_of(costs, limits.max_num_batched_tokens),
    )
    known.save_s_per_byte, known.load_s_per_byte = costs.save_s_per_byte, costs.load_s_per_byte
    engine = Engine(
        Scheduler(accounting, limits, swap=SwapSpace(swap_bytes), costs=known),
        cache,
        VirtualRunner(Reach(accounting.groups), costs, clock),
        ForeseenTokens(),
        swap=VirtualSwap(accounting, costs, clock) if swap_bytes else None,
        clock=clock,
    )
    return engine, cache
