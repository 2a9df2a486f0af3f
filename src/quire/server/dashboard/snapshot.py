"""The cache between two steps, as frames. The stepping thread takes them, so it is to be quick."""

import re
from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import fields
from typing import TypeAlias

import numpy as np
from msgspec.structs import replace

from quire.config import EngineConfig
from quire.engine.llm import LLM
from quire.engine.sequence import Sequence
from quire.kv import CellState, Census
from quire.server.dashboard.frames import (
    About,
    Counters,
    Frame,
    GroupAbout,
    Memory,
    SequenceFrame,
    State,
    Term,
)
from quire.server.dashboard.picture import Ids, Picture
from quire.server.dashboard.tenants import OwnCells, Tenant
from quire.server.guard.keys import tenant_of
from quire.spec import Group, LayerSpec

MOST_CELLS = 4000  # in all pictures together
_MOST_GROUPS = 4
_MOST_SEQUENCES = 64  # that are listed, each with its table
_MOST_RUNS = 4000  # in all their tables
_OTHERS_STEP = 5  # per cent


Shown: TypeAlias = Several[tuple[int, int]]  # a group, and how many layers are like its own


def shown_groups(groups: Several[Group]) -> Shown:
    """Which groups are drawn, one of each kind of layer, and how many layers are alike."""
    first: dict[LayerSpec, int] = {}
    layers: dict[LayerSpec, int] = {}
    for number, group in enumerate(groups):
        first.setdefault(group.spec, number)
        layers[group.spec] = layers.get(group.spec, 0) + group.num_layers
    return [(number, layers[spec]) for spec, number in first.items()][:_MOST_GROUPS]


def about(llm: LLM, *, chats: bool) -> About:
    """What does not change."""
    accounting, ledger = llm.accounting, llm.ledger
    groups = []
    for number, num_layers in shown_groups(accounting.groups):
        group, census = accounting.groups[number], accounting.census(number)
        groups.append(
            GroupAbout(
                label=_label(group, num_layers),
                cell_tokens=census.cell_tokens,
                cell_bytes=census.cell_bytes,
                in_rows=census.row_cells > 0,
            )
        )
    return About(
        model=llm.name,
        strategy=llm.config.cache,
        block_size=llm.config.block_size,
        max_model_len=llm.max_model_len,
        max_num_seqs=llm.config.max_num_seqs,
        chats=chats,
        rule=ledger.rule,
        bound=_typed(ledger.bound),
        ledger=tuple(
            Term(label=term.label, bytes=term.num_bytes, source=_typed(term.source))
            for term in ledger.terms
        ),
        groups=tuple(groups),
    )


def frames(
    llm: LLM, sequences: Several[Sequence], tenants: Iterable[Tenant]
) -> dict[Tenant, Frame]:
    """``sequences``: all that have not ended, in the order in which they came."""
    shown = shown_groups(llm.accounting.groups)
    censuses = [llm.accounting.census(number) for number, _ in shown]
    return {
        tenant: _all_of(llm, sequences, shown, censuses)
        if tenant is None
        else _own_of(llm, sequences, shown, censuses, tenant)
        for tenant in tenants
    }


def _all_of(
    llm: LLM, sequences: Several[Sequence], shown: Shown, censuses: Several[Census]
) -> Frame:
    usage, elastic, parts = llm.accounting.usage(), llm.elastic, map(OwnCells.all_of, censuses)
    memory = Memory(
        reserved=usage.reserved_bytes,
        committed=usage.committed_bytes,
        used=usage.used_bytes,
        cached=usage.cached_bytes,
        ceiling=elastic.ceiling_bytes,
        capacity=elastic.capacity_bytes,
    )
    whole = _frame(llm, sequences, shown, list(parts), memory)
    return replace(whole, counters=_counters(llm), elastic=elastic.reason)


def _own_of(
    llm: LLM, sequences: Several[Sequence], shown: Shown, censuses: Several[Census], tenant: str
) -> Frame:
    """All of it follows from the tenant's own sequences, but for one number in coarse steps.

    What is cached is left out, since its bytes could be weighed to a block by filling up a step.
    """
    capacity, parts, committed, used, others = llm.elastic.capacity_bytes, [], 0, 0, 0
    own = [each for each in sequences if tenant_of(each.request.keys) == tenant]
    for (number, num_layers), census in zip(shown, censuses, strict=True):
        part = OwnCells.of(census, {each.seq_id: _cells(llm, number, each) for each in own})
        alike = num_layers // llm.accounting.groups[number].num_layers
        num_others = int((census.states >= CellState.SPARE).sum()) - len(part.census.ids)
        committed += part.census.committed_bytes * alike
        used += part.census.used_bytes * alike
        others += num_others * census.cell_bytes * alike
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
    """Of a sequence, in its tokens' order."""
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
    pictures = [Picture.of(part.census, MOST_CELLS // len(parts)) for part in parts]
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
    """Options in them as they are typed: ``--max-num-seqs`` for ``max_num_seqs``."""
    names = "|".join(option.name for option in fields(EngineConfig) if "_" in option.name)
    return re.sub(rf"(?<!-)\b({names})\b", lambda found: f"--{found[0].replace('_', '-')}", words)


def _label(group: Group, num_layers: int) -> str:
    """What is drawn, and of how many layers; if each is kept apart, the first stands for all."""
    kind = type(group.spec).__name__
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind).strip()
    if group.num_layers < num_layers:
        return f"{words}, layer {group.layers[0]} of {num_layers} that are alike"
    return f"{words}, {num_layers} layer{'s' if num_layers > 1 else ''}"
