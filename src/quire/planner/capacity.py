"""Plan what fits: bytes, sequences and waste for a model, a machine and options.

The plan asks the engine's own code and has no second formula: needs, ledger and cache sizes come
from ``quire.engine.kv_sizing``, and bytes per sequence from the strategies' accountings. ``fit``
finds the options that make a plan fit.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from quire.config import EngineConfig
from quire.engine.kv_sizing import cache_sizes, kv_needs, ledger_for, stored_spec
from quire.kv import STRATEGIES, CacheConfig, Commit, Fits, build_accounting
from quire.kv.interface import found_block_size
from quire.kv.page_tables import page_table_bytes
from quire.memory.budget import BUDGETS, Footprint, Ledger, Needs
from quire.memory.machine import Machine
from quire.planner.planned_tiers import (
    PlannedTier,
    TierTable,
    planned_peer,
    planned_tiers,
    require_tier_blocks,
)
from quire.planner.sequence_memory import Moment, PlannedLengths, lengths, moments
from quire.planner.subject import Subject
from quire.spec import Group, ModelSpec
from quire.spec.tensor_parallel import rank_spec
from quire.units import align_up, ceil_div

# -- many sequences in one pool of blocks ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One sequence's part of a group's pool, in bytes.

    A pool commits blocks in granules of whole pages, and sequences share a granule: on a GPU, with
    pages of 2 MiB, one may hold a thousand blocks. So n sequences take their blocks, and together
    one granule more at most.
    """

    end: int  # its blocks at its end
    most: int  # its blocks at its peak
    granule: int  # what the pool commits at once

    def together(self, num_sequences: int) -> int:
        """Return the bytes committed for sequences at their ends, of which one is at its peak."""
        if not num_sequences:
            return 0
        return align_up((num_sequences - 1) * self.end + self.most, self.granule)


def pooled_shares(
    strategy: str, spec: ModelSpec, sizes: CacheConfig, each: Iterable[int]
) -> tuple[Share, ...] | None:
    """Return a sequence's share of each group's pool; it grows through the lengths in ``each``.

    Returns None for a strategy whose sequences share no granule.
    """
    accounting = build_accounting(strategy, spec, sizes)
    if not accounting.shares_blocks or sizes.shares_pages:
        return None
    groups = range(len(accounting.groups))
    block_bytes = [accounting.block_size(g) * accounting.slot_bytes(g) for g in groups]
    accounting.add(0)
    accounting.try_extend(0, 1)
    granules = [0 for _ in groups]
    for change in accounting.drain():
        if isinstance(change, Commit):
            slots = change.stop - change.start
            granules[change.group] += slots * accounting.slot_bytes(change.group)
    held = most = [0 for _ in groups]
    for num_tokens in each:
        accounting.try_extend(0, num_tokens)
        accounting.drain()
        blocks = [int((accounting.table(g, 0) >= 0).sum()) for g in groups]
        held = [count * size for count, size in zip(blocks, block_bytes, strict=True)]
        most = [max(pair) for pair in zip(most, held, strict=True)]
    return tuple(
        Share(end=end, most=peak, granule=granule)
        for end, peak, granule in zip(held, most, granules, strict=True)
    )


# -- the plan --------------------------------------------------------------------------------------


def rank_footprint(own: Footprint, num_ranks: int) -> Footprint:
    """Return a rank's part of the weights and activations, under tensor parallelism.

    It divides the weights evenly, which is an estimate: each rank keeps all norms.
    """
    if num_ranks == 1:
        return own
    return replace(
        own,
        weights_bytes=ceil_div(own.weights_bytes, num_ranks),
        widest_rows=max(own.hidden_size, ceil_div(own.widest_rows, num_ranks)),
    )


# Returns a rank's part of a model's KV entries, of so many ranks. Raises: ConfigError.
Divide: TypeAlias = Callable[[ModelSpec, int], ModelSpec]

_SHORT_STEPS = 4096  # most steps of a sequence to follow; a longer one is sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """The machine or device on which a model would run."""

    machine: Machine
    page_bytes: int
    can_share: bool  # map a page at several addresses
    max_mappings: int | None  # None: no limit
    here: str | None = None  # the engine's name of a device of this machine; None: another machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The memory of typical sequences under a strategy."""

    strategy: str
    end: Moment  # the end of a sequence that is alone
    peak_bytes: int  # most bytes that are committed for it
    alone_bytes: int  # bytes with which the accounting counts it: the most that it ever holds
    longest_bytes: int  # the same for a sequence of the full context
    shares: tuple[Share, ...] | None  # None: sequences share no granule of a pool

    def together_bytes(self, num_sequences: int) -> int:
        """Return the most bytes committed for sequences at their ends, of which one still grows."""
        if self.shares is not None:
            return sum(share.together(num_sequences) for share in self.shares)
        if not num_sequences:
            return 0
        held = (num_sequences - 1) * self.end.committed_bytes
        return held + max(self.peak_bytes, self.alone_bytes)

    def num_in(self, capacity_bytes: int) -> int:
        """Return how many sequences these bytes hold."""
        low, high = 0, 1
        while self.together_bytes(high) <= capacity_bytes:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.together_bytes(middle) <= capacity_bytes
            low, high = (middle, high) if fits else (low, middle)
        return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The plan for one strategy under one budget rule."""

    strategy: str
    ledger: Ledger
    course: Course
    max_num_seqs: int
    request: PlannedLengths

    @property
    def kv_bytes(self) -> int:
        """Return the bytes that the rule gives; 0 if it refuses."""
        return 0 if self.ledger.refusal is not None else max(0, self.ledger.kv_bytes)

    @property
    def num_fitting(self) -> int:
        """Return how many typical sequences the bytes hold, each at its end."""
        return self.course.num_in(self.kv_bytes)

    @property
    def num_sequences(self) -> int:
        """Return how many of them ``max_num_seqs`` lets run."""
        return min(self.num_fitting, self.max_num_seqs)

    @property
    def num_longest(self) -> float:
        """Return how many sequences of the full context the bytes hold."""
        return self.kv_bytes / self.course.longest_bytes

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all typical sequences together."""
        return self.num_sequences * self.request.num_tokens

    @property
    def waste_fraction(self) -> float:
        """Return the unused share of the bytes that all sequences hold at their ends."""
        count = max(1, self.num_sequences)
        held, used = count * self.course.end.committed_bytes, count * self.course.end.used_bytes
        if self.course.shares is not None:
            held = sum(align_up(count * share.end, share.granule) for share in self.course.shares)
        return 1 - used / held if held else 0.0

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes committed, with one sequence still growing."""
        return self.course.together_bytes(self.num_sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """A plan: the question, and the answer for each strategy and rule."""

    subject: Subject
    config: EngineConfig
    place: PlanTarget
    num_ranks: int
    divide: Divide
    request: PlannedLengths
    spec: ModelSpec  # of a rank, with the dtype in which keys and values are stored
    needs: Needs
    cell: Cell  # of the strategy and rule that the options name
    cells: tuple[Cell, ...]  # of each strategy under each rule

    @property
    def ledger(self) -> Ledger:
        return self.cell.ledger

    def page_table_bytes(self, num_sequences: int) -> int | None:
        """Return the bytes of the kernel's page tables for typical sequences at their ends.

        These are the figures of the engine's ``usage``, for the strategy of the options. Pages that
        sequences share need none, and a GPU's page tables belong to its driver.
        """
        on_rank = self.divide(self.subject.spec, self.num_ranks)
        sizes = sizes_of(self.config, on_rank, self.place, max(1, self.cell.kv_bytes))
        accounting = build_accounting(self.config.cache, self.spec, sizes)
        for number in range(num_sequences):
            accounting.add(number, max_tokens=self.request.num_tokens + 1)
            if not isinstance(accounting.try_extend(number, self.request.num_tokens), Fits):
                break
            accounting.drain()
        return page_table_bytes(accounting, self.place.page_bytes)

    @property
    def fits(self) -> bool:
        """Return whether the rule accepts, and a sequence of the full context fits."""
        return self.ledger.refusal is None and self.cell.num_longest >= 1


def plan(
    subject: Subject,
    config: EngineConfig,
    place: PlanTarget,
    *,
    num_ranks: int = 1,
    divide: Divide = rank_spec,
    request: PlannedLengths | None = None,
    compare: bool = True,
    course: Course | None = None,
) -> CapacityPlan:
    """Plan a model on a machine; ``compare`` adds all strategies and rules to those of the options.

    ``course`` is the course of the options' strategy if the caller has it: it depends on the page
    size, the context and the request, and not on ``max_num_seqs`` or the size of the machine.

    Raises: ConfigError for a longer context than the model has, or heads that no ranks divide.
    """
    on_rank = divide(subject.spec, num_ranks)
    spec = stored_spec(config, on_rank)
    own = rank_footprint(subject.own, num_ranks)
    on_gpu = place.machine.device is not None

    def needs_of(options: EngineConfig) -> Needs:
        page_bytes = place.page_bytes
        return kv_needs(options, subject.name, on_rank, own, page_bytes, on_gpu=on_gpu)

    needs = needs_of(config)
    request = request or typical(needs.context_tokens)
    pairs = {(config.cache, config.budget): config}
    if compare:
        for strategy in dict.fromkeys((*STRATEGIES.own_names, config.cache)):
            for rule in BUDGETS:
                by = replace(config, cache=strategy, budget=rule, kv_cache_memory_bytes=None)
                pairs.setdefault((strategy, rule), by)
    courses = {
        strategy: (course if strategy == config.cache else None)
        or _course(strategy, on_rank, config, place, needs, request)
        for strategy in dict.fromkeys(strategy for strategy, _ in pairs)
    }
    cells = {
        pair: Cell(
            strategy=pair[0],
            ledger=ledger_for(by, needs_of(by), place.machine),
            course=courses[pair[0]],
            max_num_seqs=config.max_num_seqs,
            request=request,
        )
        for pair, by in pairs.items()
    }
    return CapacityPlan(
        subject=subject,
        config=config,
        place=place,
        num_ranks=num_ranks,
        divide=divide,
        request=request,
        spec=spec,
        needs=needs,
        cell=cells[config.cache, config.budget],
        cells=tuple(cells.values()) if compare else (),
    )


def tiers_of(found: CapacityPlan, table: TierTable | None = None) -> tuple[PlannedTier, ...]:
    """Return the tiers that a plan's options name, the nearest first.

    ``table`` has their speeds, and sizes that addresses lack. Raises: ConfigError for tiers that
    the engine would refuse, or of unknown speed.
    """
    if not found.config.tiers:
        return ()
    groups, block_size = _stored_blocks(found)
    return planned_tiers(found.config, groups, block_size=block_size, table=table)


def peer_of(found: CapacityPlan, table: TierTable | None = None) -> PlannedTier:
    """Return what a prefill replica has for blocks that it leaves, and the link to it.

    Raises: ConfigError for a cache whose blocks cannot be handed to another one.
    """
    groups, block_size = _stored_blocks(found, has_peers=True)
    return planned_peer(groups, block_size=block_size, table=table)


def _stored_blocks(found: CapacityPlan, *, has_peers: bool = False) -> tuple[Sequence[Group], int]:
    """Return the groups of a plan's cache, and the tokens of a block that leaves its pool.

    Raises: ConfigError for a cache whose blocks cannot leave it.
    """
    config = found.config
    on_rank = found.divide(found.subject.spec, found.num_ranks)
    ample = found.spec.bytes_for(found.needs.context_tokens)
    sizes = sizes_of(config, on_rank, found.place, ample)
    accounting = build_accounting(config.cache, found.spec, sizes)
    require_tier_blocks(
        config,
        found.subject.name,
        accounting,
        num_ranks=found.num_ranks,
        source_tokens=found.subject.spec.source_tokens,
        has_peers=has_peers,
    )
    return accounting.groups, found_block_size(accounting, config.block_size)


def typical(max_model_len: int) -> PlannedLengths:
    """Return a request of 1024 tokens and 256 generated ones, or less for a short context."""
    output_tokens = max(1, min(256, max_model_len // 5))
    return PlannedLengths(
        input_tokens=min(1024, max_model_len - output_tokens), output_tokens=output_tokens
    )


def sizes_of(
    config: EngineConfig, spec: ModelSpec, place: PlanTarget, capacity_bytes: int
) -> CacheConfig:
    """Return the cache's sizes as an engine on this machine would choose them."""
    return cache_sizes(
        config,
        spec,
        page_bytes=place.page_bytes,
        capacity_bytes=capacity_bytes,
        can_share=place.can_share,
        max_mappings=place.max_mappings,
    )


def _course(
    strategy: str,
    on_rank: ModelSpec,
    config: EngineConfig,
    place: PlanTarget,
    needs: Needs,
    request: PlannedLengths,
) -> Course:
    """Follow one sequence in a cache with more room than it needs."""
    spec = stored_spec(config, on_rank)
    own = replace(config, cache=strategy, max_num_seqs=1)
    # ``bytes_alone`` does not depend on the capacity, and the size of the block tables does.
    sizes = sizes_of(own, on_rank, place, spec.bytes_for(needs.context_tokens))
    probe = build_accounting(strategy, spec, sizes)
    counts = np.array([request.num_tokens, needs.context_tokens - 1], np.int64)
    each_max = np.array([request.num_tokens + 1, needs.context_tokens], np.int64)
    alone_bytes, longest_bytes = probe.bytes_alone(counts, each_max).tolist()
    ample = replace(sizes, capacity_bytes=4 * max(alone_bytes, longest_bytes))
    each = _steps(request, config)
    end, peak_bytes = None, 0
    for end in moments(strategy, spec, ample, each, request.num_tokens + 1):
        peak_bytes = max(peak_bytes, end.peak_bytes)
    assert end is not None, "a request has at least one token"
    return Course(
        strategy=strategy,
        end=end,
        peak_bytes=peak_bytes,
        alone_bytes=max(alone_bytes, end.committed_bytes),
        longest_bytes=longest_bytes,
        shares=pooled_shares(strategy, spec, ample, each),
    )


def _steps(request: PlannedLengths, config: EngineConfig) -> list[int]:
    """Return the length after each step; for a very long output, after some and the last steps."""
    every = list(lengths(request, config.max_num_batched_tokens))
    if len(every) <= _SHORT_STEPS:
        return every
    stride = -(-len(every) // _SHORT_STEPS)
    return sorted({*every[::stride], *every[-_SHORT_STEPS // 4 :]})
