"""A step's work, cut into items for threads: made once, used by every layer of a group.

Decodes go by ranges of a sequence's tokens, so that each thread reads long pieces of memory and no
thread is left with a long sequence at the end; chunks go by panels of queries. A range is split
only where there would be too few items for the threads.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.attention.base import AttentionBatch
from quire.attention.cpu.frame import GROUP, ITEM, MAX_PANELS, WORD_BYTES, AttendShape, Layout
from quire.attention.cpu.panels import KEYS
from quire.kernels.language import LANES
from quire.spec import AttentionSpec
from quire.units import align_up, ceil_div

_ITEMS_A_THREAD = 4  # of decodes: threads end at about the same time, and there is little to merge
_LEAST_TOKENS = KEYS  # of a decode's part: less is not worth its merging
_CHUNKS_A_THREAD = 4  # items of a chunk: each reads all the keys and values again
_LEAST_ROWS = 8 * LANES
_SMALL = 2**15  # rows times tokens below which threads cost more than they bring

_ITEM = np.dtype([(name, np.int64) for name in ITEM])
_GROUP = np.dtype([(name, np.int64) for name in GROUP])
Numbers = npt.NDArray[np.int64]
Records = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a frame says about the step. It keeps the arrays alive whose addresses it gives away."""

    words: tuple[int, ...]  # of a frame, from "items" to "block_size"
    num_threads: int
    kept: tuple[object, ...]


def make_plan(
    batch: AttentionBatch, spec: AttentionSpec, shape: AttendShape, layout: Layout, threads: int
) -> Plan:
    """A step's items for layers of one shape. Raises: ValueError for tables of another kind."""
    if batch.tables.dtype != torch.int64 or batch.tables.stride(1) != 1:
        raise ValueError(f"block tables must be rows of int64, not {batch.tables.dtype}")
    ends = batch.context_lens
    lengths = np.diff(batch.query_starts)
    positions = np.repeat(ends - lengths, lengths) + _counted(lengths)
    lows = np.ascontiguousarray(spec.live_start(positions), np.int64)
    if batch.padding is not None:
        lows = np.maximum(lows, np.repeat(batch.padding, lengths))
    single = (lengths == 1) & (not shape.latent)
    found = [_decodes(batch, lows, single.nonzero()[0], threads)]
    for seq in (~single & (lengths > 0)).nonzero()[0].tolist():
        found.append(_chunk(batch, lows, positions, seq, shape, threads))
    items, groups, area_bytes = _with_areas(np.concatenate(found), shape, layout)
    work = (items["stop"] - items["start"]) * np.maximum(items["rows"], shape.num_rows)
    num_threads = 1 if work.sum() < _SMALL else max(1, min(threads, len(items)))
    areas = torch.empty(area_bytes, dtype=torch.uint8)
    words = (
        items.ctypes.data, len(items), groups.ctypes.data, areas.data_ptr(),
        lows.ctypes.data, positions.ctypes.data,
        batch.tables.data_ptr(), batch.tables.stride(0) * WORD_BYTES, batch.block_size,
    )  # fmt: skip
    kept = (items, groups, areas, lows, positions, batch.tables)
    return Plan(words, num_threads, kept)


def _counted(lengths: Numbers) -> Numbers:
    """0 … n - 1 for each length n, one after another."""
    starts = np.cumsum(lengths) - lengths
    counted: Numbers = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    return counted


def _decodes(batch: AttentionBatch, lows: Numbers, seqs: Numbers, threads: int) -> Records:
    """One query a sequence: its tokens in nearly equal parts, none much above the average."""
    queries = batch.query_starts[seqs]
    starts, stops = lows[queries], batch.context_lens[seqs]
    parts = np.ones_like(starts)
    if threads > 1:
        total = int((stops - starts).sum())
        longest = max(_LEAST_TOKENS, align_up(ceil_div(total, _ITEMS_A_THREAD * threads), KEYS))
        parts = -(-(stops - starts) // longest)
    found, which = _split(starts, stops, parts, LANES)
    found["seq"], found["first_query"] = seqs[which], queries[which]
    return found


def _chunk(
    batch: AttentionBatch,
    lows: Numbers,
    positions: Numbers,
    seq: int,
    shape: AttendShape,
    threads: int,
) -> Records:
    """Several queries of a sequence: panels of each key-value head, split if they are few."""
    begin, end = batch.query_starts[seq : seq + 2].tolist()
    num_rows = (end - begin) * shape.sharing
    # Long items read keys and values less often, but each thread should get some.
    share = ceil_div(num_rows * shape.kv_heads, _CHUNKS_A_THREAD * threads)
    size = min(MAX_PANELS * LANES, align_up(max(share, _LEAST_ROWS), LANES))
    first_rows = np.arange(0, num_rows, size)
    rows = np.minimum(size, num_rows - first_rows)
    starts = lows[begin + first_rows // shape.sharing]
    stops = positions[begin + (first_rows + rows - 1) // shape.sharing] + 1
    parts = np.ones_like(stops)
    if len(rows) * shape.kv_heads < 2 * threads > 2:
        wanted = ceil_div(_ITEMS_A_THREAD * threads, len(rows) * shape.kv_heads)
        parts = np.clip((stops - starts) // (4 * KEYS), 1, wanted)
    found, which = _split(starts, stops, parts, KEYS)
    found["seq"], found["first_query"] = seq, begin
    found["rows"], found["first_row"] = rows[which], first_rows[which]
    heads = np.tile(found, shape.kv_heads)
    heads["head"] = np.repeat(np.arange(shape.kv_heads), len(found))
    return heads


def _split(starts: Numbers, stops: Numbers, parts: Numbers, step: int) -> tuple[Records, Numbers]:
    """Items for ranges of tokens, each cut into so many parts at most, at multiples of ``step``.

    And the number of the range that each item is of.
    """
    which = np.repeat(np.arange(len(parts)), parts)
    size = -(-(stops - starts) // (parts * step)) * step
    found = np.zeros(len(which), _ITEM)
    found["start"] = starts[which] + _counted(parts) * size[which]
    found["stop"] = np.minimum(found["start"] + size[which], stops[which])
    some = found["start"] < found["stop"]
    return found[some], which[some]


def _with_areas(items: Records, shape: AttendShape, layout: Layout) -> tuple[Records, Records, int]:
    """Items with their places among the areas, the groups of parts, and bytes of all areas.

    The parts of a group follow one another among the areas. The longest items come first.
    """
    new = np.ones(len(items), bool)
    for name in ("seq", "head", "first_row"):
        new[1:] &= items[name][1:] == items[name][:-1]
    new[1:] = ~new[1:]
    group = np.cumsum(new) - 1
    sizes = np.bincount(group, minlength=1)
    rows = np.where(items["rows"] == 0, shape.num_rows, -(-items["rows"] // LANES) * LANES)
    is_part = sizes[group] > 1
    area_bytes = np.where(is_part, layout.area_bytes(rows), 0)
    offsets = np.cumsum(area_bytes) - area_bytes
    items["area"] = np.where(is_part, offsets, -1)
    items["group"] = group
    groups = np.zeros(len(sizes), _GROUP)
    groups["remaining"] = groups["num_parts"] = sizes
    groups["first_area"][: int(new.sum())] = offsets[new]
    order = np.argsort(-(items["stop"] - items["start"]) * rows, kind="stable")
    return items[order], groups, max(1, int(area_bytes.sum()))
