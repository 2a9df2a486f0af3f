"""A census says what usage, tables and slots say, for any accounting at any moment."""

from collections import Counter
from collections.abc import Iterable

from quire.kv import Accounting, CellState
from quire.kv.virtual_shared import SharedVirtualAccounting
from quire.spec import KeptWhole


def check_census(accounting: Accounting, seq_ids: Iterable[int]) -> None:
    """``seq_ids``: all that are there."""
    usage, several = accounting.usage(), sorted(seq_ids)
    censuses = [accounting.census(group) for group in range(len(accounting.groups))]
    assert sum(each.committed_bytes for each in censuses) == usage.committed_bytes
    assert sum(each.used_bytes for each in censuses) == usage.used_bytes
    assert sum(each.cached_bytes for each in censuses) == usage.cached_bytes
    for number in range(len(accounting.groups)):
        _check_cells(accounting, number, several)


def _check_cells(accounting: Accounting, number: int, seq_ids: list[int]) -> None:
    census, group = accounting.census(number), accounting.groups[number]
    ids = census.ids.tolist()
    assert ids == sorted(set(ids)), "a cell is listed twice, or out of order"
    assert not ids or (ids[0] >= 0 and ids[-1] < census.num_cells), "there is no such cell"
    states = dict(zip(ids, census.states.tolist(), strict=True))
    holders = dict(zip(ids, census.holders.tolist(), strict=True))
    fills = dict(zip(ids, census.fills.tolist(), strict=True))

    tables = {s: [c for c in accounting.cells(number, s).tolist() if c >= 0] for s in seq_ids}
    held = Counter(cell for table in tables.values() for cell in table)
    came_first = {cell: s for s in reversed(seq_ids) for cell in tables[s]}
    assert held.keys() <= states.keys(), "a sequence's cell has no pages"
    # A window shows the slots of a pool, which is where they are counted.
    is_shown = isinstance(accounting, SharedVirtualAccounting)
    slots_of = accounting.block_slots if is_shown else accounting.slots
    live: set[int] = set()
    for seq_id in seq_ids:
        num_tokens = accounting.num_tokens(seq_id)
        if isinstance(group.spec, KeptWhole):
            live.update(tables[seq_id])
        else:
            start = group.live_range(num_tokens).start
            live.update(slots_of(number, seq_id, start, num_tokens).tolist())
    readable = Counter(slot // census.cell_tokens for slot in live)

    for cell in ids:
        state, first = states[cell], came_first.get(cell)
        if state == CellState.CACHED:
            assert fills[cell] == census.cell_tokens, "what is cached is full"
        else:
            assert fills[cell] == readable[cell], "tokens are miscounted"
        if state in (CellState.CACHED, CellState.EMPTY):
            assert first is None, "a cell that is held counts as free"
            assert holders[cell] == -1
        else:
            assert holders[cell] in seq_ids
            assert holders[cell] == first or first is None, "another one came first"
            assert (state == CellState.SPARE) == (fills[cell] == 0)
            assert state != CellState.HELD or held[cell] == 1
            assert state != CellState.SHARED or held[cell] > 1
