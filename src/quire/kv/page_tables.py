"""Compute the bytes of the kernel's page tables for a cache's pages, which no counter shows.

A table of 4 KiB has the entries of 2 MiB of addresses, and exists if one page of them does. Above
it are tables of 1 GiB and of 512 GiB. So pages side by side cost 8 bytes each, and a lone page
costs a whole table: a short sequence whose heads lie far apart has a table for each head.

The result follows from where an accounting's pages lie, with its regions one behind the other, each
from a multiple of 2 MiB on. The system may place a region otherwise: up to one table more for each
piece. A window counts the pages that it shows, once they have been read.

Source: Linux, Documentation/mm/page_tables.rst; ``VmPTE`` of /proc/self/status.
"""

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.kv.interface import Accounting, Usage
from quire.kv.layout import attention_spec, range_rows, row_bytes
from quire.kv.paged import PagedAccounting
from quire.kv.ranges import RangeAccounting
from quire.kv.virtual_shared import SharedVirtualAccounting
from quire.spec import Group, KeptWhole
from quire.units import ceil_div

Offsets: TypeAlias = npt.NDArray[np.int64]

_TABLE_BYTES = 4096
_SPANS = (2**21, 2**30, 2**39)  # addresses of a table, level by level
_NOTHING = np.zeros((2, 0), np.int64)


def usage_with_tables(accounting: Accounting, page_bytes: int) -> Usage:
    """Return an accounting's usage with the bytes of its page tables."""
    return replace(accounting.usage(), page_table_bytes=page_table_bytes(accounting, page_bytes))


def page_table_bytes(accounting: Accounting, page_bytes: int) -> int | None:
    """Count the bytes for the pages that are committed now; for windows, for those they show.

    ``page_bytes``: of the memory. Zero for a device, whose tables are the driver's. None for an
    accounting of another package which has neither ranges nor blocks: only it knows their places.
    """
    if not isinstance(accounting, PagedAccounting | RangeAccounting):
        return None
    if page_bytes >= _SPANS[0]:
        return 0
    leaf, above = _SPANS[0], []
    num_tables, end = 0, 0
    for number, group in enumerate(accounting.groups):
        pieces, region_bytes, num_regions = _pieces(accounting, number, group, page_bytes)
        tables = _spans(pieces, leaf)
        num_tables += num_regions * _num_in(tables)
        each = ceil_div(region_bytes, leaf)
        bases = end + each * np.arange(num_regions)
        above.append((bases[:, None] + tables[:, None]).reshape(2, -1))
        end += num_regions * each
    runs = np.concatenate([_NOTHING, *above], axis=1)
    for span, below in zip(_SPANS[1:], _SPANS, strict=False):
        runs = _spans(runs, span // below)
        num_tables += _num_in(runs)
    return _TABLE_BYTES * num_tables


def tables_of_one_piece(nbytes: int) -> int:
    """Count the bytes for ``nbytes`` of pages side by side, without the tables above them."""
    return _TABLE_BYTES * ceil_div(nbytes, _SPANS[0])


def _pieces(
    accounting: PagedAccounting | RangeAccounting[Any], number: int, group: Group, page_bytes: int
) -> tuple[Offsets, int, int]:
    """Find where a group's pages lie in each of its regions.

    Returns: (starts, stops) of pieces, i64[2, n]; a region's bytes; the number of regions.
    """
    slots = accounting.num_slots(number)
    if isinstance(accounting, SharedVirtualAccounting) and not isinstance(group.spec, KeptWhole):
        stacked = accounting.stacking(number)
        runs = _runs(accounting.shown(number)) * accounting.shown_slots
        return runs * stacked.token_bytes, slots * stacked.token_bytes, stacked.num_stacks
    census = accounting.census(number)
    runs = _runs(census.ids)
    if isinstance(group.spec, KeptWhole):
        size = accounting.slot_bytes(number)
        return runs * size, slots * size, 1
    if isinstance(accounting, PagedAccounting):
        row = row_bytes(group, census.cell_tokens, page_bytes)
        size = row or attention_spec(group).block_bytes(census.cell_tokens)
        return runs * size, census.num_cells * size, 1 if row else group.num_layers
    runs *= census.cell_tokens
    together = accounting.stacking(number)
    if together is not None:
        return runs * together.token_bytes, slots * together.token_bytes, together.num_stacks
    found, base = [], 0
    for pieces, row in range_rows(attention_spec(group)):  # of each head, or of the scales
        heads = base + slots * row * np.arange(pieces)
        found.append((heads[:, None] + row * runs[:, None]).reshape(2, -1))
        base += pieces * slots * row
    return np.concatenate(found, axis=1), base, group.num_layers


def _runs(ids: Offsets) -> Offsets:
    """Join ascending ids that follow one another: (starts, stops), i64[2, n]."""
    begins = (np.diff(ids, prepend=-2) != 1).nonzero()[0]
    lengths = np.diff(begins, append=len(ids))
    return np.stack((ids[begins], ids[begins] + lengths)).astype(np.int64)


def _spans(pieces: Offsets, span: int) -> Offsets:
    """Find the spans of addresses that have a byte of a piece: runs (starts, stops), i64[2, n]."""
    starts, stops = pieces[:, np.argsort(pieces[0], kind="stable")]
    first, end = starts // span, -(-stops // span)
    reached = np.maximum.accumulate(end)
    begins = np.append(True, first[1:] > reached[:-1]).nonzero()[0][: len(first)]
    return np.stack((first[begins], np.maximum.reduceat(end, begins) if len(begins) else end))


def _num_in(runs: Offsets) -> int:
    return int((runs[1] - runs[0]).sum())
