"""The CPU's own attention: one ragged, paged kernel for every strategy."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.attention.base import AttentionBatch
from quire.attention.cpu.call import frame_of, shape_of
from quire.attention.cpu.frame import AttendShape, Layout
from quire.attention.cpu.plan import Plan, make_plan
from quire.attention.cpu.played import CpuPlays
from quire.attention.cpu.tensors import view_words
from quire.attention.cpu.worker import write_worker
from quire.attention.cpu.write import KernelWriter
from quire.kernels import amx
from quire.kernels.isa import Isa
from quire.kernels.machine import Kernels, native_isa
from quire.kernels.tensors import KINDS, with_dense_rows
from quire.kernels.threads import Scratch, Threads
from quire.kv import LayerView
from quire.spec import AttentionSpec


class CpuAttention:
    """Kernels compiled for this machine on their first use, and kept for the next process."""

    name = "cpu"
    replays = None

    def __init__(self, isa: Isa | None = None, cache_dir: Path | None = None) -> None:
        found = native_isa() if isa is None else isa
        if found.amx and not amx.allow():
            found = found.without_amx()
        self._kernels = Kernels(found, cache_dir, sources=Path(__file__).parent)
        self._threads = Threads()
        self._scratch = Scratch()
        self._shapes: dict[AttendShape, tuple[int, Layout]] = {}
        self.plays = CpuPlays(self._kernels, self._threads, self._compiled)

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
        """What writes a layer's entries, for its storage."""
        return KernelWriter(view, self._kernels, self._threads)

    def _prepare(
        self,
        q: Tensor,
        view: LayerView,
        batch: AttentionBatch,
        spec: AttentionSpec,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> "_Step":
        """What a group's layers have in common. Raises: ValueError for shapes that disagree."""
        shape = shape_of(q, view, spec, softcap=softcap is not None, sinks=sinks is not None)
        num_tokens = int(batch.query_starts[-1])
        if q.shape[0] != num_tokens:
            raise ValueError(f"{q.shape[0]} queries given, the batch has {num_tokens}")
        work, layout = self._compiled(shape)
        plan = make_plan(batch, spec, shape, layout, self._threads.most)
        return _Step(
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
class _Step:
    """What is worked out once a step for all layers of a group."""

    spec: AttentionSpec  # kept, so that its id stays its own
    work: int  # address of the compiled code
    plan: Plan
    scratch_bytes: int  # of a thread
    kind: str  # of keys and values
    out_shape: tuple[int, int, int]
