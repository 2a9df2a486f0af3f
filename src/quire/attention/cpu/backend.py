"""The CPU's own attention: one ragged, paged kernel for every strategy."""

import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.attention.base import AttentionBatch
from quire.attention.cpu.frame import FRAME, AttendShape, Layout
from quire.attention.cpu.plan import Plan, make_plan
from quire.attention.cpu.tensors import view_words
from quire.attention.cpu.worker import write_worker
from quire.attention.cpu.write import KernelWriter
from quire.kernels import amx
from quire.kernels.formats import kind_factor
from quire.kernels.isa import Isa
from quire.kernels.language import LOG2_E
from quire.kernels.machine import Kernels, native_isa
from quire.kernels.tensors import KINDS, with_dense_rows
from quire.kernels.threads import Scratch, Threads
from quire.spec import AttentionSpec, LatentAttention
from quire.strategies import LayerView

_FRAME = struct.Struct(f"{len(FRAME) - 3}q" + "f4x" * 3)


class CpuAttention:
    """Kernels compiled for this machine on their first use, and kept for the next process."""

    name = "cpu"

    def __init__(self, isa: Isa | None = None, cache_dir: Path | None = None) -> None:
        found = native_isa() if isa is None else isa
        if found.amx and not amx.allow():
            found = found.without_amx()
        self._kernels = Kernels(found, cache_dir, sources=Path(__file__).parent)
        self._threads = Threads()
        self._scratch = Scratch()
        self._shapes: dict[AttendShape, tuple[int, Layout]] = {}

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
        token, head, _ = q.stride()
        out = torch.empty(step.out_shape, dtype=q.dtype)
        if sinks is not None:
            sinks = sinks.float().contiguous()
        factor, cap_in = step.factor * scale, 0.0
        if softcap is not None:
            factor, cap_in = LOG2_E, 2 * factor / softcap
        num_threads = step.plan.num_threads
        scratch = self._scratch.take(step.scratch_bytes * num_threads)
        frame = _FRAME.pack(
            0, 0, scratch.data_ptr(), step.scratch_bytes, *step.plan.words,
            out.data_ptr(), *step.out_strides,
            q.data_ptr(), token * q.itemsize, head * q.itemsize, *place,
            0 if sinks is None else sinks.data_ptr(), factor, cap_in, softcap or 0.0,
        )  # fmt: skip
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
        shape = _shape(q, view, spec, softcap is not None, sinks is not None)
        num_tokens = int(batch.query_starts[-1])
        if q.shape[0] != num_tokens:
            raise ValueError(f"{q.shape[0]} queries given, the batch has {num_tokens}")
        work, layout = self._shapes.get(shape) or self._compile(shape)
        plan = make_plan(batch, spec, shape, layout, self._threads.most)
        row_bytes = shape.value_dim * q.itemsize
        return _Step(
            spec=spec,
            work=work,
            plan=plan,
            scratch_bytes=layout.offsets["end"],
            factor=LOG2_E * kind_factor(shape.kind),
            out_shape=(num_tokens, q.shape[1], shape.value_dim),
            out_strides=(q.shape[1] * row_bytes, row_bytes),
        )

    def _compile(self, shape: AttendShape) -> tuple[int, Layout]:
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
    factor: float  # of scores, besides the model's scale
    out_shape: tuple[int, int, int]
    out_strides: tuple[int, int]  # bytes from one token to the next, from one head to the next


def _shape(
    q: Tensor, view: LayerView, spec: AttentionSpec, softcap: bool, sinks: bool
) -> AttendShape:
    """Raises: ValueError where queries do not fit the view."""
    latent = isinstance(spec, LatentAttention)
    (_, kv_heads, _, key_dim), value_dim = view.k.shape, view.v.shape[-1]
    width = key_dim + value_dim if latent else key_dim
    if q.shape[1] % kv_heads or q.shape[2] != width:
        raise ValueError(
            f"queries of {q.shape[1]} heads of {q.shape[2]} do not fit {kv_heads} heads of {width}"
        )
    if latent:
        key_dim, value_dim = value_dim, key_dim
    return AttendShape(
        kv_heads=kv_heads,
        sharing=q.shape[1] // kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        kind=KINDS[view.k.dtype],
        query_kind=KINDS[q.dtype],
        latent=latent,
        sinks=sinks,
        softcap=softcap,
    )
