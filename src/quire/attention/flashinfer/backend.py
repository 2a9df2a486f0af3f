"""Attention by FlashInfer's kernels: a plan for each step and kind of layer, a run for each layer.

Sequences with one query and those with several go to different kernels. Sinks, which its general
kernels do not know, are put in afterwards by the sum of weights that they also return: a sink adds
to that sum and gives no value.

``wrappers`` has the pages that it reads and how it is called.
"""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attention.attention_backend import AttentionBackend, AttentionBatch
from quire.attention.flashinfer.wrappers import (
    CapturedPlans,
    Decode,
    Kind,
    Latent,
    PageTables,
    Prefill,
    Wrapper,
    is_padding,
    page_tables,
    page_tokens_of,
)
from quire.attention.gather import output_width
from quire.errors import ConfigError
from quire.kv import LayerView, MakeWriter
from quire.spec import AttentionSpec, ChunkedAttention, LatentAttention

# -- limits ----------------------------------------------------------------------------------------

# What FlashInfer cannot serve, in words: asked before anything of it is imported.


# What its kernels for Ampere and later are compiled for, and for latents DeepSeek's.
WIDTHS = (64, 128, 256)
LATENT_WIDTHS = (512, 64)
LATENT_ROWS = 128  # queries × heads of a tile, or half of that
_DTYPES = ("float16", "bfloat16", "float8_e4m3fn")
_QUERY_DTYPES = (torch.float16, torch.bfloat16)
# Strides are 32 bits there, in elements; offsets are 64.
_MAX_STRIDE = 2**32
_NVCC = Path("/usr/local/cuda/bin/nvcc")  # where it looks, too


def cannot_serve(spec: AttentionSpec) -> str | None:
    """Say why no kernel of it fits layers of ``spec``; None if one does."""
    if spec.dtype not in _DTYPES:
        return f"it has no kernel for {spec.dtype} entries, only for {', '.join(_DTYPES)}"
    match spec:
        case ChunkedAttention():
            return "it has no mask for attention in chunks"
        case LatentAttention(compress_ratio=ratio) if ratio != 1:
            return f"it reads one latent a token, and these stand for {ratio}"
        case LatentAttention(latent_dim=latent, rope_dim=rope):
            if (latent, rope) != LATENT_WIDTHS:
                return f"its latents are 512 and 64 wide, not {latent} and {rope}"
            if spec.dtype == "float8_e4m3fn":
                return "it reads latents in 16 bits only"
        case _:
            (_, key), (_, value) = spec.entry_shapes
            if key != value:
                return f"it wants keys and values of one width, not of {key} and {value}"
            if key not in WIDTHS:
                return f"its heads are {', '.join(map(str, WIDTHS))} wide, not {key}"
    return None


def cannot_run(device: torch.device) -> str | None:
    """Say why it does not run here; None if it does."""
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device.type}"
    if find_spec("flashinfer") is None:
        return "it is not installed (pip install 'quire-kv[flashinfer]')"
    if not torch.cuda.is_available():
        return "torch finds no GPU that it can use"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"it needs compute capability 8.0, and this GPU has {major}.{minor}"
    if not _has_kernels():
        return "it compiles its kernels, and there is no nvcc (nor flashinfer-jit-cache)"
    return None


def refused(q: Tensor, view: LayerView) -> str | None:
    """Say what of a call for queries [T, H, D] only shows when it comes; None if it can be served.

    The queries' dtype may be wrong, or addresses too far apart.
    """
    if q.dtype not in _QUERY_DTYPES:
        return f"its queries are float16 or bfloat16, not {str(q.dtype).removeprefix('torch.')}"
    if view.k.element_size() > 1 and q.dtype != view.k.dtype:
        return f"queries in {q.dtype} cannot meet entries in {view.k.dtype} there"
    for part in (view.k, view.v):
        if max(part.stride()) >= _MAX_STRIDE:
            return f"its strides have 32 bits, and heads lie {max(part.stride())} elements apart"
    return None


def _has_kernels() -> bool:
    return (
        find_spec("flashinfer_jit_cache") is not None
        or shutil.which("nvcc") is not None
        or _NVCC.exists()
    )


# -- backend ---------------------------------------------------------------------------------------


# For the partial results of sequences that are split among blocks of threads. FlashInfer says 128
# MiB; many query heads on one key-value head have been seen to need more than twice that.
WORKSPACE_BYTES = 384 * 2**20

MakeWrapper: TypeAlias = Callable[[Any, Tensor, Kind], Wrapper]


@dataclass(frozen=True, slots=True, eq=False)
class _PlannedPart:
    """The sequences of a step that one wrapper serves."""

    make: MakeWrapper
    tables: PageTables
    queries: slice | Tensor  # which of the packed ones: in a row, or i64[Q]


@dataclass(frozen=True, slots=True, eq=False)
class _FlashInferStep:
    parts: tuple[_PlannedPart, ...]
    serves_all: bool  # else some queries are of no sequence, as in a batch that was padded


@dataclass(slots=True, eq=False)
class _PlannedStep:
    """A wrapper, and what it was planned for last."""

    wrapper: Wrapper
    part: _PlannedPart | None = None


class FlashInferAttention(AttentionBackend):
    """FlashInfer, where it is installed; see ``unsupported``."""

    name = "flashinfer"
    replays: CapturedPlans | None = None

    def __init__(
        self,
        library: Any = None,
        make_writer: MakeWriter | None = None,
        *,
        captures: bool = True,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        """``library``: the module ``flashinfer``; None: imported when first needed.

        ``captures``: steps of its layers may become CUDA graphs. Those of latents may not.
        """
        self.make_writer = make_writer
        self._library = library
        self._workspace_bytes = workspace_bytes
        # Without a writer torch writes, and torch would write padding too.
        self.replays = CapturedPlans() if captures and make_writer is not None else None
        self._workspaces: dict[torch.device, Tensor] = {}
        self._wrappers: dict[tuple[torch.device, Kind, MakeWrapper], _PlannedStep] = {}

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        return cannot_run(device) or cannot_serve(spec)

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
        kind = self._kind(q, view, spec, scale, softcap)
        k, v = (part[:, :, : page_tokens_of(view)] for part in (view.k, view.v))
        if self.replays is not None and is_padding(batch):
            planned = self.replays.wrapper(
                self._imported(), self._workspace(q.device), kind, view, batch.on(q.device)
            )
            return _captured(planned, q, k, v, batch, sinks)
        step = _step_of(batch, kind, view, len(q), q.device)
        shape = (*q.shape[:2], output_width(spec))
        out = q.new_empty(shape) if step.serves_all else q.new_zeros(shape)
        for part in step.parts:
            wrapper = self._planned(part, kind, q.device)
            some = q[part.queries].contiguous()
            in_place = out[part.queries] if isinstance(part.queries, slice) else None
            found, lse = wrapper.run(some, k, v, out=in_place, with_lse=sinks is not None)
            if sinks is not None:
                assert lse is not None
                found = _with_sinks(found, lse, sinks)
            if sinks is not None or in_place is None:
                out[part.queries] = found
        return out

    def _kind(
        self, q: Tensor, view: LayerView, spec: AttentionSpec, scale: float, softcap: float | None
    ) -> Kind:
        reason = refused(q, view)
        if isinstance(spec, LatentAttention):
            if softcap is not None:
                reason = "it caps no scores of latents"
            elif LATENT_ROWS % q.shape[1]:
                reason = (
                    f"its kernels for latents serve numbers of heads that divide {LATENT_ROWS}, "
                    f"not {q.shape[1]}: at the end of a tile they would lose a query's last key"
                )
        if reason is not None:
            raise ConfigError(
                f"attention backend 'flashinfer' cannot serve this model: {reason}."
                " Choose attention_backend='triton'"
            )
        return Kind(
            spec=spec,
            num_heads=q.shape[1],
            scale=scale,
            softcap=softcap,
            q_dtype=q.dtype,
            kv_dtype=view.k.dtype,
        )

    def _planned(self, part: _PlannedPart, kind: Kind, device: torch.device) -> Wrapper:
        """Return a wrapper whose plan is of this part; a step's first layer of a kind plans."""
        key = (device, kind, part.make)
        held = self._wrappers.get(key)
        if held is None:
            held = _PlannedStep(part.make(self._imported(), self._workspace(device), kind))
            self._wrappers[key] = held
        if held.part is not part:
            held.part = None
            held.wrapper.plan(part.tables)
            held.part = part
        return held.wrapper

    def _imported(self) -> Any:
        if self._library is None:
            self._library = import_module("flashinfer")
        return self._library

    def _workspace(self, device: torch.device) -> Tensor:
        if device not in self._workspaces:
            # Some of its kernels count in it, from zero.
            empty = torch.zeros(self._workspace_bytes, dtype=torch.uint8, device=device)
            self._workspaces[device] = empty
        return self._workspaces[device]


def _step_of(
    batch: AttentionBatch, kind: Kind, view: LayerView, num_tokens: int, device: torch.device
) -> _FlashInferStep:
    """Return a step's parts, worked out for its first layer of a kind."""
    key = ("flashinfer", kind.spec, page_tokens_of(view), device)
    step: _FlashInferStep | None = batch.memo.get(key)
    if step is None:
        step = batch.memo[key] = _split(batch, kind.spec, view, num_tokens, device)
    return step


def _split(
    batch: AttentionBatch,
    spec: AttentionSpec,
    view: LayerView,
    num_tokens: int,
    device: torch.device,
) -> _FlashInferStep:
    query_lens = np.diff(batch.query_starts)
    live = (query_lens > 0) & (batch.context_lens > 0)
    sorts: tuple[tuple[MakeWrapper, npt.NDArray[np.bool_]], ...]
    if isinstance(spec, LatentAttention):
        sorts = ((Latent, live),)
    else:
        sorts = ((Decode, live & (query_lens == 1)), (Prefill, live & (query_lens > 1)))
    parts = []
    for make, mask in sorts:
        rows = np.flatnonzero(mask)
        if len(rows):
            tables = page_tables(
                spec,
                batch,
                rows,
                page_tokens=page_tokens_of(view),
                of_ranges=view.slots_per_row == 1,
            )
            parts.append(_PlannedPart(make, tables, _queries(batch, rows, device)))
    return _FlashInferStep(tuple(parts), int(query_lens[live].sum()) == num_tokens)


def _queries(
    batch: AttentionBatch, rows: npt.NDArray[np.intp], device: torch.device
) -> slice | Tensor:
    """Return the packed queries of these sequences: a slice, or i64[Q]."""
    starts = batch.query_starts
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(int(starts[rows[0]]), int(starts[rows[-1] + 1]))
    each = [np.arange(starts[row], starts[row + 1]) for row in rows]
    return torch.from_numpy(np.concatenate(each)).to(device)


def _captured(
    wrapper: Wrapper,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: AttentionBatch,
    sinks: Tensor | None,
) -> Tensor:
    """Attend in a step that is captured, or about to be: a replay knows its sequences."""
    out, lse = wrapper.run(q.contiguous(), k, v, out=None, with_lse=sinks is not None)
    if sinks is not None:
        assert lse is not None
        out = _with_sinks(out, lse, sinks)
    return out.masked_fill((batch.on(q.device).context_lens == 0)[:, None, None], 0)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Where weights sum up to s, a sink e leaves s / (s + exp e) of the values' sum."""
    share = torch.sigmoid(lse * math.log(2) - sinks.float())
    return (out.float() * share[..., None]).to(out.dtype)
