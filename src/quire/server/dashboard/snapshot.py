"""The cache between two steps, as frames. The engine's thread takes them, so it must be quick."""

import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, fields
from dataclasses import replace as changed
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from quire.config import EngineConfig
from quire.engine.llm import LLM
from quire.engine.sequence import Sequence
from quire.kv import CellState, Occupancy
from quire.kv.interface import found_block_size
from quire.server.dashboard.frames import (
    LETTERS,
    About,
    BudgetTerm,
    Cells,
    Counters,
    Frame,
    GroupAbout,
    Memory,
    SequenceFrame,
    State,
    TierFrame,
)
from quire.spec import Group, LayerSpec
from quire.units import ceil_div

# -- cells of a picture ----------------------------------------------------------------------------


Ids: TypeAlias = npt.NDArray[np.int64]

_KINDS = len(CellState)
_DIGITS = np.frombuffer(b"0123456789", np.uint8)
_LETTERS = np.frombuffer(LETTERS.encode(), np.uint8)


@dataclass(frozen=True, slots=True)
class Picture:
    """Where an occupancy's cells are drawn: several in one if there are too many.

    Of ranges only the rows that a sequence holds are drawn, one below the other.
    """

    occupancy: Occupancy
    rows: Ids | None  # the rows that are drawn, i64[rows], ascending; None: a pool without rows
    each: int  # cells of the occupancy in one that is drawn

    @classmethod
    def of(cls, occupancy: Occupancy, most_cells: int) -> "Picture":
        """Return the picture of an occupancy in at most ``most_cells`` cells."""
        if not occupancy.row_cells:
            return cls(occupancy, None, max(1, ceil_div(occupancy.num_cells, most_cells)))
        rows = np.unique(occupancy.ids // occupancy.row_cells)[:most_cells]
        in_row = max(1, most_cells // max(1, len(rows)))
        return cls(occupancy, rows, ceil_div(occupancy.row_cells, in_row))

    @property
    def row_cells(self) -> int:
        """Return the cells that are drawn for a row, or 0."""
        return ceil_div(self.occupancy.row_cells, self.each)

    @property
    def num_drawn(self) -> int:
        """Return how many cells are drawn."""
        if self.rows is None:
            return ceil_div(self.occupancy.num_cells, self.each)
        return len(self.rows) * self.row_cells

    def places(self, ids: Ids) -> Ids:
        """Return where cells are drawn, i64[cells], without those in rows that are not shown."""
        if self.rows is None:
            return ids // self.each
        row, column = np.divmod(ids, self.occupancy.row_cells)
        at = np.searchsorted(self.rows, row)
        shown = at < len(self.rows)
        shown[shown] = self.rows[at[shown]] == row[shown]
        places: Ids = (at * self.row_cells + column // self.each)[shown]
        return places

    def cells(self) -> Cells:
        """Return what is drawn: of several cells in one, what most of those with pages are."""
        occupancy, count = self.occupancy, self.num_drawn
        places = self.places(occupancy.ids)  # all of them, unless there are too many rows
        listed = len(places)
        states, holders = occupancy.states[:listed], occupancy.holders[:listed]
        if self.each == 1:
            drawn = np.full(count, _KINDS, np.int64)
            drawn[places] = states
            owners = np.full(count, -1, np.int64)
            owners[places] = holders
        else:
            votes = np.bincount(places * _KINDS + states, minlength=count * _KINDS)
            votes = votes.reshape(count, _KINDS)
            # Of equal votes the state that a sequence holds wins.
            drawn = _KINDS - 1 - votes[:, ::-1].argmax(axis=1)
            drawn[~votes.any(axis=1)] = _KINDS
            owners = np.full(count, -1, np.int64)
            alike = states == drawn[places]
            owners[places[alike][::-1]] = holders[alike][::-1]
        tokens = np.bincount(places, occupancy.fills[:listed], minlength=count)
        tenths = np.ceil(tokens * 9 / (self.each * occupancy.cell_tokens)).astype(np.int64)
        num_shown = (
            occupancy.num_cells if self.rows is None else len(self.rows) * occupancy.row_cells
        )
        counts = np.bincount(states, minlength=_KINDS).tolist()
        return Cells(
            num_cells=occupancy.num_cells,
            num_shown=num_shown,
            counts=(*counts, num_shown - listed),
            each=self.each,
            row_cells=self.row_cells,
            states=_LETTERS[drawn].tobytes().decode(),
            fills=_DIGITS[tenths.clip(0, 9)].tobytes().decode(),
            holders=_lengths(owners),
        )

    def table(self, ids: Ids) -> tuple[int, ...]:
        """Return a sequence's cells i64[cells], in order, as (first place, how many, …)."""
        places = self.places(ids if len(ids) and ids[0] >= 0 else ids[ids >= 0])
        if not len(places):
            return ()
        steps = places[1:] - places[:-1]
        cuts = (steps != 1).nonzero()[0] if self.each == 1 else ((steps >> 1) != 0).nonzero()[0]
        firsts = [0, *(cuts + 1).tolist()]
        lasts = [*cuts.tolist(), len(places) - 1]
        runs = zip(places[firsts].tolist(), places[lasts].tolist(), strict=True)
        return tuple(each for first, last in runs for each in (first, last - first + 1))


def _lengths(values: Ids) -> tuple[int, ...]:
    """Return run lengths: value, how many, value, …"""
    if not len(values):
        return ()
    starts = np.append(0, (np.diff(values) != 0).nonzero()[0] + 1)
    counts = np.diff(starts, append=len(values))
    return tuple(np.stack([values[starts], counts], axis=1).ravel().tolist())


# -- a tenant's own cells --------------------------------------------------------------------------


Tenant: TypeAlias = str | None  # its salt; None sees all


@dataclass(frozen=True, slots=True)
class OwnCells:
    """One tenant's cells, numbered anew. ``old`` → ``new``: their ids in the pool and here.

    Where a sequence's cells lie in the pool tells what lies between them: how long another tenant's
    prompt is, and how it grows. So a tenant's cells are numbered in the order of its own sequences,
    as if there were no others.
    """

    occupancy: Occupancy
    old: Ids | None  # ascending; None: all cells, with the ids that they have
    new: Ids | None

    @classmethod
    def all_of(cls, occupancy: Occupancy) -> "OwnCells":
        """Return all cells, with the ids that they have."""
        return cls(occupancy, None, None)

    @classmethod
    def of(cls, occupancy: Occupancy, tables: Mapping[int, Ids]) -> "OwnCells":
        """Return the cells of some sequences. ``tables``: readable cells i64[cells], by sequence
        id.
        """
        found = [np.zeros(0, np.int64)]
        for seq_id, table in tables.items():
            found += (table[table >= 0], occupancy.ids[occupancy.holders == seq_id])
        cells, in_row = np.concatenate(found), occupancy.row_cells or 1
        _, firsts, rows = np.unique(cells // in_row, return_index=True, return_inverse=True)
        numbers = firsts.argsort().argsort()[rows] * in_row + cells % in_row
        old, index = np.unique(cells, return_index=True)
        new = numbers[index]
        order = new.argsort()
        at = np.searchsorted(occupancy.ids, old[order])
        own = changed(
            occupancy,
            num_cells=len(firsts) * in_row,
            ids=new[order],
            states=occupancy.states[at],
            holders=occupancy.holders[at],
            fills=occupancy.fills[at],
        )
        return cls(own, old, new)

    def numbered(self, ids: Ids) -> Ids:
        """Return cells' own numbers i64[cells], given their ids in the pool."""
        if self.old is None or self.new is None:
            return ids
        return self.new[np.searchsorted(self.old, ids[ids >= 0])]


# -- frames ----------------------------------------------------------------------------------------


MOST_CELLS = 4000  # in all pictures together
_MOST_GROUPS = 4
_MOST_SEQUENCES = 64  # listed, each with its table
_MOST_RUNS = 4000  # in all their tables
_OTHERS_STEP = 5  # per cent


Shown: TypeAlias = Several[
    tuple[int, int]
]  # a group's number, and how many layers are like its own


def shown_groups(groups: Several[Group]) -> Shown:
    """Return the groups that are drawn, one of each kind of layer, and how many
    layers are alike.
    """
    first: dict[LayerSpec, int] = {}
    layers: dict[LayerSpec, int] = {}
    for number, group in enumerate(groups):
        first.setdefault(group.spec, number)
        layers[group.spec] = layers.get(group.spec, 0) + group.num_layers
    return [(number, layers[spec]) for spec, number in first.items()][:_MOST_GROUPS]


def about(llm: LLM, *, chats: bool) -> About:
    """Return what does not change while the engine lives."""
    accounting, ledger = llm.accounting, llm.ledger
    groups = []
    for number, num_layers in shown_groups(accounting.groups):
        group, occupancy = accounting.groups[number], accounting.census(number)
        groups.append(
            GroupAbout(
                label=_label(group, num_layers),
                cell_tokens=occupancy.cell_tokens,
                cell_bytes=occupancy.cell_bytes,
                in_rows=occupancy.row_cells > 0,
            )
        )
    return About(
        model=llm.name,
        strategy=llm.config.cache,
        block_size=found_block_size(accounting, llm.config.block_size),
        max_model_len=llm.max_model_len,
        max_num_seqs=llm.config.max_num_seqs,
        chats=chats,
        rule=ledger.rule,
        bound=_typed(ledger.bound),
        ledger=tuple(
            BudgetTerm(label=term.label, bytes=term.num_bytes, source=_typed(term.source))
            for term in ledger.terms
        ),
        groups=tuple(groups),
    )


def frames(
    llm: LLM, sequences: Several[Sequence], tenants: Iterable[Tenant]
) -> dict[Tenant, Frame]:
    """Return a frame for each tenant.

    ``sequences``: all that have not ended, in the order in which they came.
    """
    shown = shown_groups(llm.accounting.groups)
    occupancies = [llm.accounting.census(number) for number, _ in shown]
    return {
        tenant: _all_of(llm, sequences, shown, occupancies)
        if tenant is None
        else _own_of(llm, sequences, shown, occupancies, tenant)
        for tenant in tenants
    }


def _all_of(
    llm: LLM, sequences: Several[Sequence], shown: Shown, occupancies: Several[Occupancy]
) -> Frame:
    """Return the frame for those who see all."""
    usage, elastic, parts = llm.accounting.usage(), llm.elastic, map(OwnCells.all_of, occupancies)
    memory = Memory(
        reserved=usage.reserved_bytes,
        committed=usage.committed_bytes,
        used=usage.used_bytes,
        cached=usage.cached_bytes,
        ceiling=elastic.ceiling_bytes,
        capacity=elastic.capacity_bytes,
    )
    whole = _frame(llm, sequences, shown, list(parts), memory)
    return replace(whole, counters=_counters(llm), elastic=elastic.reason, tiers=_tiers(llm))


def _own_of(
    llm: LLM,
    sequences: Several[Sequence],
    shown: Shown,
    occupancies: Several[Occupancy],
    tenant: str,
) -> Frame:
    """Return the frame of one tenant: it follows from its own sequences, but for one coarse number.

    Cached memory is left out: a tenant could measure it to a block by filling up a step.
    """
    capacity, parts, committed, used, others = llm.elastic.capacity_bytes, [], 0, 0, 0
    own = [each for each in sequences if each.request.keys.tenant == tenant]
    for (number, num_layers), occupancy in zip(shown, occupancies, strict=True):
        part = OwnCells.of(occupancy, {each.seq_id: _cells(llm, number, each) for each in own})
        alike = num_layers // llm.accounting.groups[number].num_layers
        num_others = int((occupancy.states >= CellState.SPARE).sum()) - len(part.occupancy.ids)
        committed += part.occupancy.committed_bytes * alike
        used += part.occupancy.used_bytes * alike
        others += num_others * occupancy.cell_bytes * alike
        parts.append(part)
    memory = Memory(
        reserved=committed,
        committed=committed,
        used=used,
        cached=0,
        ceiling=capacity,
        capacity=capacity,
    )
    percent = _OTHERS_STEP * round(100 * others / max(1, capacity) / _OTHERS_STEP)
    return replace(_frame(llm, own, shown, parts, memory), others_percent=percent)


def _cells(llm: LLM, group: int, sequence: Sequence) -> Ids:
    """Return a sequence's cells i64[cells], in its tokens' order."""
    if not sequence.num_computed_tokens:
        return np.zeros(0, np.int64)
    return llm.accounting.cells(group, sequence.seq_id)


def _frame(
    llm: LLM,
    sequences: Several[Sequence],
    shown: Shown,
    parts: Several[OwnCells],
    memory: Memory,
) -> Frame:
    pictures = [Picture.of(part.occupancy, MOST_CELLS // len(parts)) for part in parts]
    running = [sequence for sequence in sequences if sequence.num_computed_tokens]
    waiting = [sequence for sequence in sequences if not sequence.num_computed_tokens]
    listed = sorted((running + waiting)[:_MOST_SEQUENCES], key=lambda s: s.seq_id)
    runs_left, rows = _MOST_RUNS, []
    for sequence in listed:
        tables: tuple[tuple[int, ...], ...] = ()
        if sequence.num_computed_tokens and runs_left > 0:
            tables = tuple(
                picture.table(part.numbered(_cells(llm, number, sequence)))
                for (number, _), part, picture in zip(shown, parts, pictures, strict=True)
            )
            runs_left -= sum(map(len, tables)) // 2
        rows.append(_sequence(sequence, tables))
    return Frame(
        cells=tuple(picture.cells() for picture in pictures),
        sequences=tuple(rows),
        num_running=len(running),
        num_waiting=len(waiting),
        num_more=len(sequences) - len(listed),
        memory=memory,
        counters=None,
        elastic="",
    )


def _counters(llm: LLM) -> Counters:
    counted = llm.statistics
    return Counters(
        queries=counted.prefix_query_tokens,
        hits=counted.prefix_hit_tokens,
        generated=counted.num_generation_tokens,
        preemptions=counted.num_preemptions,
        recomputed=counted.num_recomputed_tokens,
    )


def _tiers(llm: LLM) -> tuple[TierFrame, ...]:
    report = llm.tiers
    return tuple(
        TierFrame(
            name=tier.name,
            state=tier.state,
            records=tier.num_records,
            used=tier.used_bytes,
            capacity=tier.capacity_bytes,
            hits=tier.hit_tokens,
        )
        for tier in (() if report is None else report.tiers)
    )


def _sequence(sequence: Sequence, tables: tuple[tuple[int, ...], ...]) -> SequenceFrame:
    state: State = "running"
    if not sequence.num_computed_tokens:
        state = "preempted" if sequence.num_preemptions else "waiting"
    return SequenceFrame(
        id=sequence.seq_id,
        state=state,
        tokens=sequence.num_tokens,
        prompt=sequence.num_prompt_tokens,
        computed=sequence.num_computed_tokens,
        cached=sequence.num_cached_tokens,
        max_tokens=sequence.request.max_tokens,
        preemptions=sequence.num_preemptions,
        tables=tables,
    )


def _typed(words: str) -> str:
    """Write options as they are typed: ``--max-num-seqs`` for ``max_num_seqs``."""
    names = "|".join(option.name for option in fields(EngineConfig) if "_" in option.name)
    return re.sub(rf"(?<!-)\b({names})\b", lambda found: f"--{found[0].replace('_', '-')}", words)


def _label(group: Group, num_layers: int) -> str:
    """Return what is drawn, and of how many layers; where each layer is apart, the first stands for
    all.
    """
    kind = type(group.spec).__name__
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind).strip()
    if group.num_layers < num_layers:
        return f"{words}, layer {group.layers[0]} of {num_layers} that are alike"
    return f"{words}, {num_layers} layer{'s' if num_layers > 1 else ''}"
