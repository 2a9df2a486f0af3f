"""The CPU's own attention: one ragged, paged kernel for every strategy.

``decode_kernel`` is what it runs for one query a sequence, ``prefill_kernel`` for several;
``thread_loop`` hands them the items of a step, which are made here.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attention.attention_backend import (
    AttentionBackend,
    AttentionBatch,
    FindWords,
    VaryingCall,
)
from quire.attention.cpu.call_frame import (
    FRAME,
    GROUP,
    ITEM,
    KEYS,
    MAX_PANELS,
    WORD_BYTES,
    AttendShape,
    Layout,
)
from quire.attention.cpu.thread_loop import write_worker
from quire.attention.cpu.write_kernel import STEP_WORDS, KernelWriter, token_bytes, view_words
from quire.attention.gather import query_sharing
from quire.kernels.compile import KINDS, Kernels, source_hash, usable_isa, with_dense_rows, words
from quire.kernels.language import LANES, LOG2_E, Isa
from quire.kernels.number_formats import kind_factor
from quire.kernels.threads import KernelCall, Scratch, Threads
from quire.kv import LayerView
from quire.spec import AttentionSpec, LatentAttention
from quire.units import align_up, ceil_div

_FOLDER = Path(__file__).parent
source_hash(_FOLDER)  # of what is imported here, not of what may lie there later

# -- items for threads -----------------------------------------------------------------------------

# A step's work, cut into items for threads: made once, used by every layer of a group.
#
# Decodes go by ranges of a sequence's tokens, so that each thread reads long pieces of memory and
# no thread is left with a long sequence at the end; chunks go by panels of queries. A range is
# split only where there would be too few items for the threads.
#
# A step that is to be ``batch_invariant`` knows no decodes: the two kinds of items add up in other
# orders. Tokens are taken in tiles that begin at multiples of ``KEYS`` of a sequence, and in parts
# that begin at multiples of ``_FIXED_TOKENS``, whatever else is in the step and however many
# threads there are. So a query's sums have one order: what it may not read adds exactly nothing.


_ITEMS_A_THREAD = 4  # of decodes: threads end at about the same time, and there is little to merge
_LEAST_TOKENS = KEYS  # of a decode's part: less is not worth its merging
_CHUNKS_A_THREAD = 4  # items of a chunk: each reads all the keys and values again
_LEAST_ROWS = 8 * LANES
_FIXED_TOKENS = 2**14  # of a part, where parts depend on nothing: a multiple of KEYS
_SMALL = 2**15  # rows times tokens below which threads cost more than they bring

_ITEM = np.dtype([(name, np.int64) for name in ITEM])
_GROUP = np.dtype([(name, np.int64) for name in GROUP])
Numbers = npt.NDArray[np.int64]
Records = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """A frame's words about the step, and the arrays whose addresses they are."""

    words: tuple[int, ...]  # of a frame, from "items" to "block_size"
    num_threads: int
    kept: tuple[object, ...]


def make_plan(
    batch: AttentionBatch,
    spec: AttentionSpec,
    shape: AttendShape,
    layout: Layout,
    threads: int,
    *,
    batch_invariant: bool = False,
) -> WorkPlan:
    """Cut a step into items for layers of one shape.

    Raises: ValueError for tables of another kind.
    """
    if batch.tables.dtype != torch.int64 or batch.tables.stride(1) != 1:
        raise ValueError(f"block tables must be rows of int64, not {batch.tables.dtype}")
    ends = batch.context_lens
    lengths = np.diff(batch.query_starts)
    positions = np.repeat(ends - lengths, lengths) + _counted(lengths)
    lows = np.ascontiguousarray(spec.live_start(positions), np.int64)
    if batch.padding is not None:
        lows = np.maximum(lows, np.repeat(batch.padding, lengths))
    if batch_invariant:
        found = [_fixed(batch, lows, positions, shape, threads)]
    else:
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
    return WorkPlan(words, num_threads, kept)


def _counted(lengths: Numbers) -> Numbers:
    """Count 0 … n - 1 for each length n, one after another: i64[sum]."""
    starts = np.cumsum(lengths) - lengths
    counted: Numbers = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    return counted


def _decodes(batch: AttentionBatch, lows: Numbers, seqs: Numbers, threads: int) -> Records:
    """Cut the tokens of one query a sequence into parts, none much above the average."""
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
    """Cut the queries of a sequence into panels of each key-value head, or parts of panels."""
    begin, end = batch.query_starts[seq : seq + 2].tolist()
    num_rows = (end - begin) * shape.sharing
    size = _panel_rows(num_rows, shape, threads)
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
    return _of_each_head(found, shape)


def _fixed(
    batch: AttentionBatch, lows: Numbers, positions: Numbers, shape: AttendShape, threads: int
) -> Records:
    """Cut all queries into panels, and those into parts at the same tokens in every step."""
    begins = batch.query_starts[:-1]
    num_rows = np.diff(batch.query_starts) * shape.sharing
    size = _panel_rows(int(num_rows.sum()), shape, threads)
    panels = -(-num_rows // size)
    seqs = np.repeat(np.arange(len(num_rows)), panels)
    first_rows = _counted(panels) * size
    rows = np.minimum(size, num_rows[seqs] - first_rows)
    starts = lows[begins[seqs] + first_rows // shape.sharing] // KEYS * KEYS
    stops = positions[begins[seqs] + (first_rows + rows - 1) // shape.sharing] + 1
    first_parts = starts // _FIXED_TOKENS
    parts = (stops - 1) // _FIXED_TOKENS + 1 - first_parts
    which = np.repeat(np.arange(len(parts)), parts)
    part_starts = (first_parts[which] + _counted(parts)) * _FIXED_TOKENS
    found = np.zeros(len(which), _ITEM)
    found["start"] = np.maximum(part_starts, starts[which])
    found["stop"] = np.minimum(part_starts + _FIXED_TOKENS, stops[which])
    found["seq"], found["first_query"] = seqs[which], begins[seqs][which]
    found["rows"], found["first_row"] = rows[which], first_rows[which]
    return _of_each_head(found, shape)


def _panel_rows(num_rows: int, shape: AttendShape, threads: int) -> int:
    """Return the rows of an item, at most, of so many rows of each head."""
    # Long items read keys and values less often, but each thread should get some.
    share = ceil_div(num_rows * shape.kv_heads, _CHUNKS_A_THREAD * threads)
    return min(MAX_PANELS * LANES, align_up(max(share, _LEAST_ROWS), LANES))


def _of_each_head(items: Records, shape: AttendShape) -> Records:
    """Repeat the items of a key-value head for all of them."""
    heads = np.tile(items, shape.kv_heads)
    heads["head"] = np.repeat(np.arange(shape.kv_heads), len(items))
    return heads


def _split(starts: Numbers, stops: Numbers, parts: Numbers, step: int) -> tuple[Records, Numbers]:
    """Cut ranges of tokens, each into ``parts`` at most, at multiples of ``step``.

    Return the items, and the number of each item's range.
    """
    which = np.repeat(np.arange(len(parts)), parts)
    size = -(-(stops - starts) // (parts * step)) * step
    found = np.zeros(len(which), _ITEM)
    found["start"] = starts[which] + _counted(parts) * size[which]
    found["stop"] = np.minimum(found["start"] + size[which], stops[which])
    some = found["start"] < found["stop"]
    return found[some], which[some]


def _with_areas(items: Records, shape: AttendShape, layout: Layout) -> tuple[Records, Records, int]:
    """Return items with their places among the areas, the groups of parts, and all areas' bytes.

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


# -- one call --------------------------------------------------------------------------------------

# The words that differ from step to step: memory to work in, and a plan's.
PLANNED = range(FRAME.index("scratch"), FRAME.index("block_size") + 1)
_WORDS = struct.Struct(f"{len(FRAME) - 3}q" + "f4x" * 3)


def frame_of(
    q: Tensor,  # [T, H, D], rows side by side
    out: Tensor,  # [T, H, Dv], contiguous
    place: tuple[int, ...],  # ``view_words``
    *,
    planned: tuple[int, ...],  # the words of ``PLANNED``
    kind: str,  # of keys and values
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # f32[H], contiguous
) -> bytes:
    """Pack a call's frame: q [T, H, D] and out [T, H, Dv] lie as their comments say."""
    factor, cap_in = LOG2_E * kind_factor(kind) * scale, 0.0
    if softcap is not None:
        factor, cap_in = LOG2_E, 2 * factor / softcap
    return _WORDS.pack(
        0, 0, *planned,
        *words(out, 2), *words(q, 2), *place,
        0 if sinks is None else sinks.data_ptr(), factor, cap_in, softcap or 0.0,
    )  # fmt: skip


def shape_of(
    q: Tensor, view: LayerView, spec: AttentionSpec, *, softcap: bool, sinks: bool
) -> AttendShape:
    """Describe the kind of layer that queries [T, H, D] meet.

    Raises: ValueError where queries do not fit the view.
    """
    latent = isinstance(spec, LatentAttention)
    sharing = query_sharing(q, view, spec)
    (_, kv_heads, _, key_dim), value_dim = view.k.shape, view.v.shape[-1]
    if latent:
        key_dim, value_dim = value_dim, key_dim
    return AttendShape(
        kv_heads=kv_heads,
        sharing=sharing,
        key_dim=key_dim,
        value_dim=value_dim,
        kind=KINDS[view.k.dtype],
        query_kind=KINDS[q.dtype],
        latent=latent,
        sinks=sinks,
        softcap=softcap,
    )


# -- recorded calls --------------------------------------------------------------------------------

# Writing and attending as calls that stay the same from step to step but for a few words.

Compiled: TypeAlias = Callable[[AttendShape], tuple[int, Layout]]


class CpuPlays:
    """Makes calls that can be played again, for tensors whose rows lie side by side."""

    def __init__(
        self, kernels: Kernels, threads: Threads, compiled: Compiled, *, batch_invariant: bool
    ) -> None:
        self._kernels, self._threads, self._compiled = kernels, threads, compiled
        self._batch_invariant = batch_invariant
        self._finds: dict[object, FindWords] = {}
        self._scratch: dict[AttendShape, Tensor] = {}  # of all threads; one call at a time uses it

    def write(self, view: LayerView, k: Tensor, v: Tensor) -> VaryingCall | None:
        writer = KernelWriter(view, self._kernels, self._threads)
        call = writer.call(k, v)
        if call is None:
            return None
        size = token_bytes(k, v)
        find = self._finds.setdefault(size, lambda batch: writer.words(batch.slots, size))
        return VaryingCall(call=call, words=STEP_WORDS, find=find, kept=(writer, k, v))

    def attend(
        self,
        q: Tensor,
        out: Tensor,
        view: LayerView,
        *,
        spec: AttentionSpec,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> VaryingCall | None:
        if q.stride(-1) != 1 or not out.is_contiguous() or out.dtype != q.dtype:
            return None
        if sinks is not None and (sinks.dtype != torch.float32 or not sinks.is_contiguous()):
            return None
        shape = shape_of(q, view, spec, softcap=softcap is not None, sinks=sinks is not None)
        work, layout = self._compiled(shape)
        frame = frame_of(
            q,
            out,
            view_words(view),
            planned=(0,) * len(PLANNED),
            kind=shape.kind,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        find = self._finds.setdefault((shape, id(spec)), self._planned(spec, shape, layout))
        return VaryingCall(
            call=KernelCall(work, frame, 1), words=PLANNED, find=find, kept=(q, out, view, sinks)
        )

    def _planned(self, spec: AttentionSpec, shape: AttendShape, layout: Layout) -> FindWords:
        thread_bytes = layout.offsets["end"]
        key = shape, id(spec)

        def find(batch: AttentionBatch) -> tuple[tuple[int, ...], int]:
            step: _Planned | None = batch.memo.get(key)
            if step is None:
                plan = make_plan(
                    batch,
                    spec,
                    shape,
                    layout,
                    self._threads.most,
                    batch_invariant=self._batch_invariant,
                )
                # As the plan says, whatever torch's number of threads was or becomes.
                scratch = self._room(shape, thread_bytes * plan.num_threads)
                words = scratch.data_ptr(), thread_bytes, *plan.words
                step = batch.memo[key] = _Planned(words, plan.num_threads, (plan, scratch))
            return step.words, step.num_threads

        return find

    def _room(self, shape: AttendShape, nbytes: int) -> Tensor:
        """Return memory u8[n] that stays in the caches from layer to layer and step to step."""
        found = self._scratch.get(shape)
        if found is None or found.numel() < nbytes:
            found = self._scratch[shape] = torch.empty(nbytes, dtype=torch.uint8)
        return found


class _Planned(NamedTuple):
    """A step's words for the calls of one kind, and the memory that they point to."""

    words: tuple[int, ...]
    num_threads: int
    kept: object


# -- the backend -----------------------------------------------------------------------------------


class CpuAttention(AttentionBackend):
    """Kernels compiled for this machine on their first use, and kept for the next process."""

    name = "cpu"

    def __init__(
        self,
        isa: Isa | None = None,
        cache_dir: Path | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._kernels = Kernels(usable_isa(isa), cache_dir, sources=_FOLDER)
        self._threads = Threads()
        self._scratch = Scratch()
        self._shapes: dict[AttendShape, tuple[int, Layout]] = {}
        self.batch_invariant = batch_invariant
        self.plays = CpuPlays(
            self._kernels, self._threads, self._compiled, batch_invariant=batch_invariant
        )

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it reads memory of the CPU, not of {device}"
        if getattr(torch, spec.dtype) not in KINDS:
            return f"it has no kernel for {spec.dtype}"
        return None

    def attend(
        self,
        q: Tensor,  # [T, H, D]
        view: LayerView,
        batch: AttentionBatch,
        *,
        spec: AttentionSpec,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [H]
    ) -> Tensor:
        key = (q.shape, q.dtype, softcap is None, sinks is None, id(spec))
        step = batch.memo.get(key)
        if step is None:
            step = batch.memo[key] = self._prepare(q, view, batch, spec, softcap, sinks)
        place = view.memo.get("cpu")
        if place is None:
            place = view.memo["cpu"] = view_words(view)
        q = with_dense_rows(q)
        out = torch.empty(step.out_shape, dtype=q.dtype)
        if sinks is not None:
            sinks = sinks.float().contiguous()
        num_threads = step.plan.num_threads
        scratch = self._scratch.take(step.scratch_bytes * num_threads)
        frame = frame_of(
            q,
            out,
            place,
            planned=(scratch.data_ptr(), step.scratch_bytes, *step.plan.words),
            kind=step.kind,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        self._threads.run(step.work, frame, num_threads)
        self._scratch.give_back(scratch)
        return out

    def make_writer(self, view: LayerView) -> KernelWriter:
        """Make what writes a layer's entries, for its storage."""
        return KernelWriter(view, self._kernels, self._threads)

    def _prepare(
        self,
        q: Tensor,
        view: LayerView,
        batch: AttentionBatch,
        spec: AttentionSpec,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> "_CpuStep":
        """Work out what a group's layers have in common.

        Raises: ValueError for shapes that disagree.
        """
        shape = shape_of(q, view, spec, softcap=softcap is not None, sinks=sinks is not None)
        num_tokens = int(batch.query_starts[-1])
        if q.shape[0] != num_tokens:
            raise ValueError(f"{q.shape[0]} queries were given, and the batch has {num_tokens}")
        work, layout = self._compiled(shape)
        plan = make_plan(
            batch, spec, shape, layout, self._threads.most, batch_invariant=self.batch_invariant
        )
        return _CpuStep(
            spec=spec,
            work=work,
            plan=plan,
            scratch_bytes=layout.offsets["end"],
            kind=shape.kind,
            out_shape=(num_tokens, q.shape[1], shape.value_dim),
        )

    def _compiled(self, shape: AttendShape) -> tuple[int, Layout]:
        if shape not in self._shapes:
            isa = self._kernels.isa
            work = self._kernels.address(f"attend {shape}", lambda m: write_worker(m, shape, isa))
            self._shapes[shape] = work, Layout(shape, isa)
        return self._shapes[shape]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CpuStep:
    """A step's work, planned once for all layers of a group."""

    spec: AttentionSpec  # kept, so that its id stays its own
    work: int  # address of the compiled code
    plan: WorkPlan
    scratch_bytes: int  # of a thread
    kind: str  # of keys and values
    out_shape: tuple[int, int, int]
