"""What fits: bytes, sequences and waste, for a model, a machine and options, by the engine's rules.

The needs, the ledger and the cache's numbers come from ``quire.engine.kv_sizing``, who holds what
from the strategies' accountings: there is no second formula here. What would have to change for
what does not fit is ``fit``'s matter.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from quire.config import EngineConfig
from quire.engine.kv_sizing import cache_sizes, kv_needs, ledger_for, stored_spec
from quire.kv import STRATEGIES, CacheConfig, Commit, Fits, build_accounting
from quire.kv.page_tables import page_table_bytes
from quire.memory.budget import BUDGETS, Footprint, Ledger, Needs
from quire.memory.machine import Machine
from quire.planner.sequence_memory import Moment, PlannedLengths, lengths, moments
from quire.planner.subject import Subject
from quire.spec import ModelSpec
from quire.spec.tensor_parallel import rank_spec
from quire.units import align_up, ceil_div

# -- alike sequences in one pool -------------------------------------------------------------------

# What many sequences that are alike take of one pool of blocks.
#
# A pool commits blocks in granules of whole pages, which neighbours share: on a GPU, with pages of
# 2 MiB, a granule may be a thousand blocks. So a sequence among others takes its blocks, and all
# of them together one granule more at most. How many blocks, and how large a granule is, the
# accounting says.


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One sequence's part of a group's pool, in bytes."""

    end: int  # its blocks when it has come to its end
    most: int  # … and at most on the way
    granule: int  # what the pool commits at once

    def together(self, num_sequences: int) -> int:
        """Committed for so many at their ends, the last of them at its most."""
        if not num_sequences:
            return 0
        return align_up((num_sequences - 1) * self.end + self.most, self.granule)


def pooled_shares(
    strategy: str, spec: ModelSpec, sizes: CacheConfig, each: Iterable[int]
) -> tuple[Share, ...] | None:
    """A share of each group, for a sequence of these lengths, step by step.

    None for a strategy in which no two sequences share a granule.
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


# -- tensor parallelism ----------------------------------------------------------------------------

# A rank's part of a model besides its cache, of several that share it (tensor parallelism).
#
# Weights are divided evenly: an estimate, since norms are kept by all. What each remembers is
# ``spec.tensor_parallel``' matter.


def rank_footprint(own: Footprint, num_ranks: int) -> Footprint:
    """A rank's part of the weights, and of what a step computes in between."""
    if num_ranks == 1:
        return own
    return replace(
        own,
        weights_bytes=ceil_div(own.weights_bytes, num_ranks),
        widest_rows=max(own.hidden_size, ceil_div(own.widest_rows, num_ranks)),
    )


# -- the plan --------------------------------------------------------------------------------------


# What one of so many ranks remembers of a model. Raises: ConfigError.
Divide: TypeAlias = Callable[[ModelSpec, int], ModelSpec]

_SHORT_STEPS = 4096  # of a sequence that are followed one by one; a longer one in larger steps


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """Where a model would run."""

    machine: Machine
    page_bytes: int
    can_share: bool  # a page at several addresses
    max_mappings: int | None  # … so many; None: no limit
    here: str | None = None  # of this machine, by the engine's name; None: it is another


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Typical sequences under a strategy."""

    strategy: str
    end: Moment  # of one by itself
    peak_bytes: int  # of one by itself, committed at most on the way
    alone_bytes: int  # what the accounting counts it with: the most it ever holds by itself
    longest_bytes: int  # … at the longest
    shares: tuple[Share, ...] | None  # of a pool whose granules neighbours share

    def together_bytes(self, num_sequences: int) -> int:
        """Committed at most with so many: all at their ends, the last one on its way there."""
        if self.shares is not None:
            return sum(share.together(num_sequences) for share in self.shares)
        if not num_sequences:
            return 0
        held = (num_sequences - 1) * self.end.committed_bytes
        return held + max(self.peak_bytes, self.alone_bytes)

    def num_in(self, capacity_bytes: int) -> int:
        """How many sequences so many bytes hold."""
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
    """A strategy under a budget rule."""

    strategy: str
    ledger: Ledger
    course: Course
    max_num_seqs: int
    request: PlannedLengths

    @property
    def kv_bytes(self) -> int:
        """Zero where the rule refuses."""
        return 0 if self.ledger.refusal is not None else max(0, self.ledger.kv_bytes)

    @property
    def num_fitting(self) -> int:
        """Typical sequences that the bytes hold at once, each at its end."""
        return self.course.num_in(self.kv_bytes)

    @property
    def num_sequences(self) -> int:
        """… and that may run."""
        return min(self.num_fitting, self.max_num_seqs)

    @property
    def num_longest(self) -> float:
        """Sequences at the longest that the bytes hold."""
        return self.kv_bytes / self.course.longest_bytes

    @property
    def num_tokens(self) -> int:
        """Of typical sequences, at once."""
        return self.num_sequences * self.request.num_tokens

    @property
    def waste_fraction(self) -> float:
        """Of what they hold at their ends, all together, the part that no token uses."""
        count = max(1, self.num_sequences)
        held, used = count * self.course.end.committed_bytes, count * self.course.end.used_bytes
        if self.course.shares is not None:
            held = sum(align_up(count * share.end, share.granule) for share in self.course.shares)
        return 1 - used / held if held else 0.0

    @property
    def peak_bytes(self) -> int:
        """Committed at most, all of them at their ends and one still growing."""
        return self.course.together_bytes(self.num_sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """All that was asked, and the answers."""

    subject: Subject
    config: EngineConfig
    place: PlanTarget
    num_ranks: int
    divide: Divide  # among them
    request: PlannedLengths
    spec: ModelSpec  # of a rank, with keys and values as they are kept
    needs: Needs
    cell: Cell  # of the options
    cells: tuple[Cell, ...]  # each strategy under each rule

    @property
    def ledger(self) -> Ledger:
        return self.cell.ledger

    def page_table_bytes(self, num_sequences: int) -> int | None:
        """What the kernel's page tables take besides, with so many typical ones at their ends.

        As the engine's ``usage`` says it, of the options' strategy and its bytes. None of a page
        that sequences share, nor of a device, whose tables are the driver's.
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
        """Whether a rule says yes, and one sequence runs to the longest."""
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
    """``compare``: with all strategies and rules, not only those of the options.

    ``course``: that of the options' strategy, if it is known: it is the same on machines alike in
    pages, for as long a context and any number of sequences.

    Raises: ConfigError for longer sequences than the model's, or heads that no ranks divide.
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
        for strategy in STRATEGIES.own_names:
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


def typical(max_model_len: int) -> PlannedLengths:
    """A thousand tokens in, a quarter of that out; less where the model ends before."""
    output_tokens = max(1, min(256, max_model_len // 5))
    return PlannedLengths(
        input_tokens=min(1024, max_model_len - output_tokens), output_tokens=output_tokens
    )


def sizes_of(
    config: EngineConfig, spec: ModelSpec, place: PlanTarget, capacity_bytes: int
) -> CacheConfig:
    """The cache's numbers, as an engine in this place would have them."""
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
    """Follow one sequence, in a cache that has more room than it needs."""
    spec = stored_spec(config, on_rank)
    own = replace(config, cache=strategy, max_num_seqs=1)
    # What a sequence is counted with does not depend on the capacity, and tables of blocks do.
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
    """All of them; of a very long output some, its last ones each."""
    every = list(lengths(request, config.max_num_batched_tokens))
    if len(every) <= _SHORT_STEPS:
        return every
    stride = -(-len(every) // _SHORT_STEPS)
    return sorted({*every[::stride], *every[-_SHORT_STEPS // 4 :]})
