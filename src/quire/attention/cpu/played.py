"""Writing and attending as calls that stay the same from step to step but for a few words."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.attention.base import AttentionBatch, FindWords, VaryingCall
from quire.attention.cpu.call import PLANNED, frame_of, shape_of
from quire.attention.cpu.frame import AttendShape, Layout
from quire.attention.cpu.plan import make_plan
from quire.attention.cpu.tensors import view_words
from quire.attention.cpu.write import STEP_WORDS, KernelWriter, token_bytes
from quire.kernels.machine import Kernels
from quire.kernels.threads import Call, Threads
from quire.kv import LayerView
from quire.spec import AttentionSpec

Compiled: TypeAlias = Callable[[AttendShape], tuple[int, Layout]]


class CpuPlays:
    """For tensors whose rows lie side by side."""

    def __init__(self, kernels: Kernels, threads: Threads, compiled: Compiled) -> None:
        self._kernels, self._threads, self._compiled = kernels, threads, compiled
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
            call=Call(work, frame, 1), words=PLANNED, find=find, kept=(q, out, view, sinks)
        )

    def _planned(self, spec: AttentionSpec, shape: AttendShape, layout: Layout) -> FindWords:
        thread_bytes = layout.offsets["end"]
        key = shape, id(spec)

        def find(batch: AttentionBatch) -> tuple[tuple[int, ...], int]:
            step: _Planned | None = batch.memo.get(key)
            if step is None:
                plan = make_plan(batch, spec, shape, layout, self._threads.most)
                # As the plan says, whatever torch's number of threads was or becomes.
                scratch = self._room(shape, thread_bytes * plan.num_threads)
                words = scratch.data_ptr(), thread_bytes, *plan.words
                step = batch.memo[key] = _Planned(words, plan.num_threads, (plan, scratch))
            return step.words, step.num_threads

        return find

    def _room(self, shape: AttendShape, nbytes: int) -> Tensor:
        """Memory that stays in the caches from layer to layer, and from step to step."""
        found = self._scratch.get(shape)
        if found is None or found.numel() < nbytes:
            found = self._scratch[shape] = torch.empty(nbytes, dtype=torch.uint8)
        return found


class _Planned(NamedTuple):
    """What a step says to the calls of one kind, and what its words point to."""

    words: tuple[int, ...]
    num_threads: int
    kept: object
