"""Writing and attending as calls that stay the same from step to step but for a few words."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from quire.attention.base import AttentionBatch, FindWords, VaryingCall
from quire.attention.cpu.call import PLANNED, frame_of, shape_of
from quire.attention.cpu.frame import AttendShape, Layout
from quire.attention.cpu.plan import Plan, make_plan
from quire.attention.cpu.tensors import view_words
from quire.attention.cpu.write import STEP_WORDS, KernelWriter, token_bytes
from quire.kernels.machine import Kernels
from quire.kernels.threads import Call, Threads
from quire.spec import AttentionSpec
from quire.strategies import LayerView

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
        if shape not in self._scratch:
            nbytes = layout.offsets["end"] * self._threads.most
            self._scratch[shape] = torch.empty(nbytes, dtype=torch.uint8)
        scratch = self._scratch[shape]
        frame = frame_of(
            q,
            out,
            view_words(view),
            plan=(0,) * len(PLANNED),
            scratch=scratch,
            scratch_bytes=layout.offsets["end"],
            kind=shape.kind,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        key = shape, id(spec)
        find = self._finds.setdefault(key, _planned(key, spec, shape, layout, self._threads))
        return VaryingCall(
            call=Call(work, frame, 1), words=PLANNED, find=find, kept=(scratch, q, out, view, sinks)
        )


def _planned(
    key: object, spec: AttentionSpec, shape: AttendShape, layout: Layout, threads: Threads
) -> FindWords:
    def find(batch: AttentionBatch) -> tuple[tuple[int, ...], int]:
        plan: Plan | None = batch.memo.get(key)
        if plan is None:
            plan = batch.memo[key] = make_plan(batch, spec, shape, layout, threads.most)
        return plan.words, plan.num_threads

    return find
