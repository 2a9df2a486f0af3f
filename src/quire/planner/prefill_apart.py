"""Tell what prefill replicas would give a plan's traffic, and what they would take.

A fleet of equal replicas computes each prompt where its answer is written. Prefill replicas compute
prompts for the others, over a link. Both are looked at in the steady state of a cost model; what
the door would do with a prompt is weighed by the door's own code (``quire.fleet.detours``). A
simulation of both fleets has the arrivals and the waiting besides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, inf
from types import MappingProxyType
from typing import Literal, TypeAlias, TypedDict

from quire.engine.scheduling.block_carrier import columns_read, reads_all
from quire.engine.scheduling.offload_policy import BLOCKS_AT_ONCE, SHARE_OF_A_STEP
from quire.fleet.detours import Detours, Trade
from quire.fleet.placement import Load, Placed
from quire.kv.prefix_index import Medium
from quire.planner.capacity import CapacityPlan
from quire.planner.planned_tiers import PlannedTier
from quire.planner.saturation import Saturation, at_rate, saturated
from quire.planner.simulation.cost_model import Reach, StepCosts, StepWork, first_token_s
from quire.planner.simulation.simulated_engine import prices_of
from quire.units import ceil_div, format_count, format_latency

Worth: TypeAlias = Literal["loses", "is a trade", "wins", "changes little"]

_HALVINGS = 20  # of the share of prompts that are computed apart


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMove:
    """What it takes to move a prompt's blocks from replica to replica."""

    num_tokens: int  # of whole blocks in front of the prompt's last token
    num_bytes: int
    num_records: int
    copy_out_s: float  # from the device, between two steps
    leave_s: float  # written where others load them, by one thread of a prefill replica
    load_s: float  # over the link, by one thread of the replica that goes on
    insert_s: float  # into the cache of the replica that goes on, beside its steps
    copy_in_s: float  # the part of that which its steps wait for

    @property
    def seconds(self) -> float:
        """Return how much later the first token comes for it."""
        return self.copy_out_s + self.leave_s + self.load_s + self.insert_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What a fleet does with the planned requests: with equal replicas, or with prefill replicas.

    At the rate of the comparison; None: it does not carry that rate.
    """

    most_requests_per_s: float
    num_sequences: int  # at once, in the memory of the replicas that write answers
    token_s: float | None = None  # between two tokens of an answer, in the mean
    longest_step_s: float | None = None  # of those that write
    prompt_steps: float | None = None  # the share of their steps that compute prompts
    first_token_s: float | None = None  # in the mean


# What sides are compared by: the figure's name, and whether more of it is better.
_FIGURES: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {
        "most_requests_per_s": ("requests a second at most", True),
        "token_s": ("time between tokens", False),
        "longest_step_s": ("longest step", False),
        "first_token_s": ("first token", False),
    }
)
_EQUAL = 0.05  # figures that differ by less are alike


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillApart:
    """Prefill replicas beside others, against as many equal ones.

    Of the prompts ``share`` is computed apart: all, as many as prefill replicas and links can, or
    none where the door would keep them.
    """

    num_replicas: int  # that write answers
    num_prefill: int
    requests_per_s: float  # at which both are compared
    share: float | None  # at that rate; None: it is not carried
    move: PromptMove
    together: Side
    apart: Side
    prefill_idle_fraction: float  # at the most that this fleet answers
    trade: Trade | None  # of a prompt at the door, at that rate; None: it is not carried

    @property
    def verdict(self) -> Worth:
        """Return whether prefill replicas gain something, lose something, or both."""
        gains, losses = self._compared
        if gains:
            return "is a trade" if losses else "wins"
        return "loses" if losses else "changes little"

    @property
    def sentence(self) -> str:
        """Say the verdict, with the figures that it is made of."""
        gains, losses = ("; ".join(each) or "nothing" for each in self._compared)
        equal = format_count(self.num_replicas + self.num_prefill)
        return (
            f"apart {self.verdict} here: beside {equal} equal replicas "
            f"{format_count(self.num_replicas)} + {format_count(self.num_prefill)} gain {gains}, "
            f"and lose {losses}"
        )

    @property
    def _compared(self) -> tuple[list[str], list[str]]:
        """Return in words what apart is better at than together, and what it is worse at."""
        gains, losses = list[str](), list[str]()
        for key, (name, is_more) in _FIGURES.items():
            ours, theirs = getattr(self.apart, key), getattr(self.together, key)
            if ours is None and theirs is None:
                continue
            if ours is None or theirs is None:
                is_better = theirs is None
            elif abs(ours - theirs) <= _EQUAL * max(ours, theirs):
                continue
            else:
                is_better = (ours > theirs) == is_more
            said = f"{name}: {_said(key, ours)} in place of {_said(key, theirs)}"
            (gains if is_better else losses).append(said)
        return gains, losses


def _said(key: str, value: float | None) -> str:
    if value is None:
        return "falling behind"
    return f"{value:,.3g}" if key == "most_requests_per_s" else format_latency(value)


def prefill_apart(
    found: CapacityPlan,
    costs: StepCosts,
    link: PlannedTier,
    *,
    num_replicas: int,
    num_prefill: int,
    requests_per_s: float | None = None,
) -> PrefillApart | None:
    """Compare a fleet with prefill replicas to equal ones; None if not one sequence fits.

    ``requests_per_s``: of the whole fleet, at which both are compared; None: half of the most that
    equal replicas answer.
    """
    whole = saturated(found, costs)
    if whole is None:
        return None
    answered, num_equal = found.request.output_tokens, num_replicas + num_prefill
    together_most = num_equal * whole.output_tokens_per_s / answered
    rate = together_most / 2 if requests_per_s is None else requests_per_s
    move = _move(found, costs, link, step_s=whole.plain_step_s)
    prompt_s = _prompt_s(found, costs) + move.copy_out_s
    # As many as are computed there, and as the threads leave and load.
    apart_per_s = min(
        num_prefill / max(prompt_s, move.leave_s), num_replicas / (move.load_s or prompt_s)
    )
    is_sent = _trade(found, costs, link, move, whole, 0.0).pays
    most = _most(found, costs, move, num_replicas, apart_per_s if is_sent else 0.0)
    together = Side(
        most_requests_per_s=together_most,
        num_sequences=num_equal * found.cell.num_sequences,
    )
    if (state := at_rate(found, costs, rate / num_equal)) is not None:
        first_s = _first_together_s(found, state, rate / num_equal)
        if first_s < inf:
            together = _at_rate(together, state, first_s, state.prompt_steps)
    apart = Side(
        most_requests_per_s=most.requests_per_s,
        num_sequences=num_replicas * found.cell.num_sequences,
    )
    share, trade = min(1.0, apart_per_s / rate), None
    writer = at_rate(found, costs, rate / num_replicas, **_skips(move, share))
    if writer is not None and not _trade(found, costs, link, move, writer, 0.0).pays:
        share = 0.0
        writer = at_rate(found, costs, rate / num_replicas)
    if writer is not None:
        move = _move(found, costs, link, step_s=writer.step_s)
        queue_s = _queue_s(share * rate / num_prefill, prompt_s)
        trade = _trade(found, costs, link, move, writer, 0.0)
        # The door keeps a prompt where its answer is when the queue costs more than that.
        queue_s = min(queue_s, max(0.0, trade.here_s - trade.apart_s))
        trade = _trade(found, costs, link, move, writer, queue_s / prompt_s)
        queue_s += _loading_queue_s(move, link, share * rate / num_replicas, num_prefill)
        first_s = queue_s + _alone_s(found, costs) + move.seconds + 1.5 * writer.step_s
        if share < 1:
            here = at_rate(found, costs, rate / num_replicas) or whole
            kept = (1 - share) * rate / num_replicas
            first_s = share * first_s + (1 - share) * _first_together_s(found, here, kept)
            longest_s = max(writer.prompt_step_s, here.prompt_step_s, writer.step_s)
            writer = replace(writer, prompt_step_s=longest_s)
        apart = _at_rate(apart, writer, first_s, (1 - share) * writer.prompt_steps)
    return PrefillApart(
        num_replicas=num_replicas,
        num_prefill=num_prefill,
        requests_per_s=rate,
        share=None if writer is None else share,
        move=move,
        together=together,
        apart=apart,
        prefill_idle_fraction=1 - most.share * most.requests_per_s * prompt_s / num_prefill,
        trade=trade,
    )


def _at_rate(side: Side, state: Saturation, first_s: float, prompt_steps: float) -> Side:
    return replace(
        side,
        token_s=state.step_s,
        longest_step_s=state.prompt_step_s,
        prompt_steps=prompt_steps,
        first_token_s=first_s,
    )


class _Skips(TypedDict):
    found_tokens: int
    besides_s: float


def _skips(move: PromptMove, share: float) -> _Skips:
    """Return what those that write do not compute of a prompt, in the mean, and do besides."""
    return _Skips(found_tokens=int(share * move.num_tokens), besides_s=share * move.copy_in_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Most:
    """The most requests a second of a fleet with prefill replicas."""

    requests_per_s: float
    share: float  # of the prompts, that are computed apart


def _most(
    found: CapacityPlan, costs: StepCosts, move: PromptMove, num_replicas: int, prompts_per_s: float
) -> _Most:
    """Find the share of prompts that prefill replicas compute where both sides have most to do."""

    def written(share: float) -> float:
        state = saturated(found, costs, **_skips(move, share))
        assert state is not None, "what holds a sequence together holds it apart"
        return num_replicas * state.output_tokens_per_s / found.request.output_tokens

    low, high = 0.0, 1.0
    if written(1.0) <= prompts_per_s:
        low = 1.0
    for _ in range(_HALVINGS if low < high else 0):
        middle = (low + high) / 2
        if middle * written(middle) <= prompts_per_s:
            low = middle
        else:
            high = middle
    most = written(low)
    return _Most(requests_per_s=most, share=low)


# -- moving ----------------------------------------------------------------------------------------


def _move(found: CapacityPlan, costs: StepCosts, link: PlannedTier, *, step_s: float) -> PromptMove:
    """Return what moving a prompt takes to a replica whose steps take so long."""
    groups, size = found.spec.groups, link.block_size
    num_blocks = (found.request.input_tokens - 1) // size
    if link.num_blocks is not None:  # the others are computed where the answer is
        num_blocks = min(num_blocks, link.num_blocks)
    counts = [
        len(columns_read(group, size, 0, num_blocks)) if num_blocks else 0 for group in groups
    ]
    num_bytes = sum(count * each for count, each in zip(counts, link.record_bytes, strict=True))
    copy_in_s = num_bytes * costs.load_s_per_byte
    insert_s = copy_in_s
    # Windows and states go in whole, other blocks some at a time beside steps.
    if num_blocks and all(reads_all(group) for group in groups):
        round_s = BLOCKS_AT_ONCE * copy_in_s / num_blocks
        num_rounds = max(1, ceil(SHARE_OF_A_STEP * step_s / round_s)) if round_s else num_blocks
        insert_s += ceil_div(num_blocks, num_rounds * BLOCKS_AT_ONCE) * step_s
    return PromptMove(
        num_tokens=num_blocks * size,
        num_bytes=num_bytes,
        num_records=sum(counts),
        copy_out_s=num_bytes * costs.save_s_per_byte,
        leave_s=num_bytes / link.speed.write_bytes_per_s,
        load_s=link.load_records_s(sum(counts), num_bytes),
        insert_s=insert_s,
        copy_in_s=copy_in_s,
    )


# -- prompts ---------------------------------------------------------------------------------------


def _alone_s(found: CapacityPlan, costs: StepCosts) -> float:
    """Return the seconds that a prompt takes which is alone."""
    reach, chunk = Reach(found.spec.groups), found.config.max_num_batched_tokens
    return first_token_s(costs, reach, found.request.input_tokens, chunk)


def _prompt_s(found: CapacityPlan, costs: StepCosts) -> float:
    """Return the seconds of a prompt where nothing else is computed, with others in its steps."""
    asked, chunk = found.request.input_tokens, found.config.max_num_batched_tokens
    count = chunk // asked
    if count <= 1:
        return _alone_s(found, costs)
    read, attended = Reach(found.spec.groups).of_range(0, asked)
    work = StepWork(count * asked, count, count, count * read, count * attended, count)
    return costs.seconds(work) / count


def _queue_s(requests_per_s: float, each_s: float) -> float:
    """Return the mean wait where requests come at random and each takes as long as the others."""
    share = requests_per_s * each_s
    return share * each_s / (2 * (1 - share)) if share < 1 else inf


def _loading_queue_s(
    move: PromptMove, link: PlannedTier, requests_per_s: float, num_prefill: int
) -> float:
    """Return the mean wait for the thread that loads. No more wait than prefill replicas hold."""
    queue_s = _queue_s(requests_per_s, move.load_s)
    if link.capacity_bytes is None or not move.num_bytes:
        return queue_s
    return min(queue_s, num_prefill * link.capacity_bytes / move.num_bytes * move.load_s)


def _first_together_s(found: CapacityPlan, state: Saturation, requests_per_s: float) -> float:
    """Return the mean seconds to the first token where answers are written, too."""
    chunk = max(1, found.config.max_num_batched_tokens - state.num_sequences)
    num_chunks = found.request.input_tokens / chunk
    queue_s = _queue_s(requests_per_s, num_chunks * state.prompt_step_s)
    return state.step_s / 2 + queue_s + ceil(num_chunks) * state.prompt_step_s


def _trade(
    found: CapacityPlan,
    costs: StepCosts,
    link: PlannedTier,
    moved: PromptMove,
    writer: Saturation,
    num_queued: float,
) -> Trade:
    """Weigh a prompt as the door would, by what replicas report."""
    token_s = prices_of(costs, found.config.max_num_batched_tokens).token_s
    asked = found.request.input_tokens
    loads = dict[Medium, float]()
    if moved.num_records:
        record_bytes = moved.num_bytes / moved.num_records
        loads["STORAGE"] = record_bytes / link.speed.read_bytes_per_s
    return Detours().weigh(
        Placed(number=0, replica="", num_prompt_tokens=asked),
        Load(compute_s_per_token=token_s, load_s_per_block=loads),
        Load(compute_s_per_token=token_s),
        num_running=writer.num_sequences,
        queued_tokens=round(num_queued * asked),
        block_size=link.block_size,
    )
