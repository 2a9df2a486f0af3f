"""Make an engine that computes nothing: the real loop, scheduler and accounting on a virtual clock.

Steps, copies and swapping take the time that the cost model gives. Tokens are known beforehand, and
each request generates as many as the trace says.
"""

from collections.abc import Iterable
from typing import final

from quire.engine.core import Engine
from quire.engine.scheduler import Scheduler, SchedulerLimits
from quire.engine.scheduling.block_carrier import BlockCarrier
from quire.engine.scheduling.offers import BlockTransfer, Offers
from quire.engine.scheduling.offload_policy import OffloadPolicy, WritePolicy
from quire.engine.scheduling.step_costs import Costs, Prices
from quire.engine.scheduling.swap_space import SwapSpace, num_bytes, readable_tokens
from quire.engine.sequence import Sequence
from quire.engine.step_plan import Chunk, Sampled, Save, StepPlan
from quire.kv import Accounting, Copy
from quire.planner.simulation.cost_model import Reach, StepCosts, StepWork
from quire.traces import TraceRequest

# -- token ids -------------------------------------------------------------------------------------

# A trace has lengths and hash ids only. Its prompts get token ids that agree as far as their hash
# ids do: the tokens of one hash id begin with that id, the tokens beyond a prompt's hash ids begin
# with a number of their own, and all others are 0. Outputs are unique to their sequence, since a
# trace does not tell them, and so no later prompt hits them.
_FILLER = 0
_NUM_IDS = 2**31  # ids ≥ 0 of an int32, for hash ids
_NUM_OWN = 2**30  # ids < 0: odd ones for a prompt's own tokens, even ones for outputs


def prompt_of(request: TraceRequest, number: int, *, longest: int | None = None) -> tuple[int, ...]:
    """Return token ids of the ``number``-th request's prompt: at least 1, at most ``longest``."""
    num_tokens = max(1, request.input_tokens)
    if longest is not None:
        num_tokens = min(num_tokens, longest)
    each = max(1, request.id_tokens)
    ids = request.hash_ids[: -(-num_tokens // each)]
    token_ids: list[int] = []
    for hash_id in ids:
        token_ids += _stretch(hash_id, each)
    if len(token_ids) < num_tokens:
        rest = num_tokens - len(token_ids)
        token_ids.append(-1 - 2 * (number % _NUM_OWN))
        token_ids += [_FILLER] * (rest - 1)
    del token_ids[num_tokens:]
    return tuple(token_ids)


def _stretch(hash_id: int, num_tokens: int) -> list[int]:
    """Return the tokens of one hash id, whose 63 bits take two of them."""
    low, high = hash_id % _NUM_IDS, hash_id // _NUM_IDS
    if num_tokens == 1:
        return [low]
    return [low, high if high < _NUM_IDS else high - 2 * _NUM_IDS, *[_FILLER] * (num_tokens - 2)]


def output_id(sequence: Sequence) -> int:
    """Return the id of all tokens that this sequence generates."""
    return -2 - 2 * (sequence.seq_id % _NUM_OWN)


# -- the engine ------------------------------------------------------------------------------------


@final
class VirtualClock:
    """Seconds since the start of the trace."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait_until(self, moment_s: float) -> None:
        """Advance to a moment, unless it has passed."""
        self.now_s = max(self.now_s, moment_s)


@final
class VirtualCache:
    """A cache that counts the operations of its accounting instead of carrying them out."""

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
        """Count the accounting's copies, and let them take their time."""
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
        """Fail, since no step fails here."""
        raise AssertionError("a step that computes nothing cannot fail")


@final
class VirtualRunner:
    """A runner whose steps only take time."""

    overwrites_states = False

    def __init__(self, reach: Reach, costs: StepCosts, clock: VirtualClock) -> None:
        self._reach, self._costs, self._clock = reach, costs, clock

    def run(self, plan: StepPlan) -> None:
        self._clock.now_s += self._costs.seconds(self._reach.of(plan))

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


@final
class ForeseenTokens:
    """A sampler that gives each sequence its own token."""

    def __init__(self) -> None:
        self._known: dict[int, Sampled] = {}

    def sample(self, logits: None, plan: StepPlan) -> list[Sampled]:
        """Return a token for each sequence that the plan samples."""
        return [self._of(draw.sequence) for draw in plan.draws]

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._known.pop(sequence.seq_id, None)

    def _of(self, sequence: Sequence) -> Sampled:
        sampled = self._known.get(sequence.seq_id)
        if sampled is None:
            sampled = Sampled(token_ids=(output_id(sequence),))
            self._known[sequence.seq_id] = sampled
        return sampled


@final
class VirtualSwap:
    """Swapping that only takes time and never fails; the scheduler hears of it as in an engine."""

    def __init__(
        self, accounting: Accounting, costs: StepCosts, clock: VirtualClock, known: Costs
    ) -> None:
        self._groups = accounting.groups
        self._costs, self._clock, self._known = costs, clock, known

    def save(self, saves: Iterable[Save]) -> list[Sequence]:
        """Swap sequences out. Returns: those that could not be, of which there are none."""
        for save in saves:
            seconds = self._costs.save_s + save.num_bytes * self._costs.save_s_per_byte
            self._clock.now_s += seconds
            self._known.note_saved(save.num_bytes, seconds)
        return []

    def load(self, chunk: Chunk) -> bool:
        """Swap a sequence in. Returns: True, since it never fails."""
        tokens = readable_tokens(self._groups, chunk.start - chunk.num_restored, chunk.start)
        size = num_bytes(self._groups, tokens)
        if size:
            seconds = self._costs.load_s + size * self._costs.load_s_per_byte
            self._clock.now_s += seconds
            self._known.note_loaded(size, seconds)
        return True

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Do nothing: there is nothing to forget."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def prices_of(costs: StepCosts, num_tokens: int) -> Prices:
    """Return what a scheduler would measure with these costs, in steps of up to ``num_tokens``."""
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
    carrier: BlockCarrier | None = None,
    write: WritePolicy = "auto",
    transfer: BlockTransfer | None = None,
) -> tuple[Engine, VirtualCache]:
    """Make an engine around an accounting, and the cache that counts its copies.

    ``carrier``: to and from tiers; ``write``: which blocks go there; ``transfer``: to and from
    other replicas.
    """
    cache = VirtualCache(accounting, costs, clock)
    known = Costs(
        bytes_per_token=sum(group.bytes_per_token for group in accounting.groups),
        prices=prices_of(costs, limits.max_num_batched_tokens),
    )
    known.save_s_per_byte, known.load_s_per_byte = costs.save_s_per_byte, costs.load_s_per_byte
    offload = None
    if carrier is not None:
        offers = None if transfer is None else Offers(transfer, clock)
        offload = OffloadPolicy(carrier, accounting, known, clock, write=write, offers=offers)
    engine = Engine(
        Scheduler(accounting, limits, swap=SwapSpace(swap_bytes), costs=known, offload=offload),
        cache,
        VirtualRunner(Reach(accounting.groups), costs, clock),
        ForeseenTokens(),
        swap=VirtualSwap(accounting, costs, clock, known) if swap_bytes else None,
        clock=clock,
    )
    return engine, cache
