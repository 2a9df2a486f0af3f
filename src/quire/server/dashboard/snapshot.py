"""The cache between two steps, as a frame. Whoever steps takes it, so it is to be quick."""

from collections.abc import Sequence as Several

from quire.engine.llm import LLM
from quire.engine.sequence import Sequence
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
from quire.server.dashboard.picture import Picture
from quire.spec import Group, LayerSpec

MOST_CELLS = 4000  # in all pictures together
_MOST_GROUPS = 4
_MOST_SEQUENCES = 64  # that are listed, each with its table
_MOST_RUNS = 4000  # in all their tables


def shown_groups(groups: Several[Group]) -> list[tuple[int, int]]:
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
        bound=ledger.bound,
        ledger=tuple(
            Term(label=term.label, bytes=term.num_bytes, source=term.source)
            for term in ledger.terms
        ),
        groups=tuple(groups),
    )


def frame(llm: LLM, sequences: Several[Sequence]) -> Frame:
    """``sequences``: all that have not ended, in the order in which they came."""
    accounting, usage, elastic = llm.accounting, llm.accounting.usage(), llm.elastic
    shown = [number for number, _ in shown_groups(accounting.groups)]
    pictures = [Picture.of(accounting.census(number), MOST_CELLS // len(shown)) for number in shown]
    running = [sequence for sequence in sequences if sequence.num_computed_tokens]
    waiting = [sequence for sequence in sequences if not sequence.num_computed_tokens]
    listed = sorted((running + waiting)[:_MOST_SEQUENCES], key=lambda s: s.seq_id)
    runs_left, frames = _MOST_RUNS, []
    for sequence in listed:
        tables: tuple[tuple[int, ...], ...] = ()
        if sequence.num_computed_tokens and runs_left > 0:
            tables = tuple(
                picture.table(accounting.cells(number, sequence.seq_id))
                for number, picture in zip(shown, pictures, strict=True)
            )
            runs_left -= sum(map(len, tables)) // 2
        frames.append(_sequence(sequence, tables))
    return Frame(
        cells=tuple(picture.cells() for picture in pictures),
        sequences=tuple(frames),
        num_running=len(running),
        num_waiting=len(waiting),
        num_more=len(sequences) - len(listed),
        memory=Memory(
            reserved=usage.reserved_bytes,
            committed=usage.committed_bytes,
            used=usage.used_bytes,
            cached=usage.cached_bytes,
            ceiling=elastic.ceiling_bytes,
            capacity=elastic.capacity_bytes,
        ),
        counters=_counters(llm),
        elastic=elastic.reason,
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


def _label(group: Group, num_layers: int) -> str:
    """What is drawn, and of how many layers; if each is kept apart, the first stands for all."""
    kind = type(group.spec).__name__
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind).strip()
    if group.num_layers < num_layers:
        return f"{words}, layer {group.layers[0]} of {num_layers} that are alike"
    return f"{words}, {num_layers} layer{'s' if num_layers > 1 else ''}"
