"""FlashInfer's three wrappers, planned and run: what each is told, in the words of its own API.

A wrapper holds one plan in memory of its own. They share the memory for partial results, since the
kernels of one stream run one after the other. Which pages are read, ``pages`` says; what may be
asked of them at all, ``limits``.

Source: FlashInfer 0.7.2, ``decode.py``, ``prefill.py``, ``mla``. Arguments that older releases lack
are not given.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.attention.flashinfer.pages import PageTables
from quire.attention.gather import output_width
from quire.spec import AttentionSpec, LatentAttention, SlidingWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the calls that one plan serves have in common."""

    spec: AttentionSpec
    num_heads: int
    scale: float
    softcap: float | None
    q_dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def window_left(self) -> int:
        """Tokens before its own that a query reads at most; -1 for all."""
        return self.spec.window - 1 if isinstance(self.spec, SlidingWindow) else -1


class Wrapper(Protocol):
    """One kind of call. ``run`` serves any layer until the next ``plan``."""

    def plan(self, tables: PageTables) -> None: ...

    def run(
        self,
        q: Tensor,  # [Q, H, D]
        k: Tensor,  # [N, K, B, D]
        v: Tensor,  # [N, K, B, Dv]
        *,
        out: Tensor | None,  # [Q, H, Dv]: where the result goes, if given
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The result, and with ``with_lse`` log2 of the sum of weights, f32[Q, H]."""
        ...


class Decode:
    """One query a sequence.

    On tensor cores: the query heads that share a key-value head are rows of one product. For few of
    them it reads no slower, and the kernel is the prefill's, so there is one less to compile.
    """

    def __init__(self, library: Any, workspace: Tensor, kind: Kind, **arrays: Any) -> None:
        """``arrays``: where the plan's numbers are put, for a graph that looks for them there."""
        self._kind = kind
        self._wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, kv_layout="HND", use_tensor_cores=True, **arrays
        )

    def plan(self, tables: PageTables) -> None:
        (heads, width), _ = self._kind.spec.entry_shapes
        self._wrapper.plan(
            tables.page_starts,
            tables.page_ids,
            tables.last_page_tokens,
            self._kind.num_heads,
            heads,
            width,
            tables.page_tokens,
            **_common(self._kind),
        )

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        return _pair(self._wrapper.run(q, (k, v), out=out, return_lse=with_lse))


def captured_decode(
    library: Any, workspace: Tensor, kind: Kind, num_seqs: int, num_pages: int
) -> Decode:
    """For a graph of ``num_seqs`` sequences that have at most ``num_pages`` pages together."""

    def room(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=workspace.device)

    return Decode(
        library,
        workspace,
        kind,
        use_cuda_graph=True,
        paged_kv_indptr_buffer=room(num_seqs + 1),
        paged_kv_indices_buffer=room(num_pages),
        paged_kv_last_page_len_buffer=room(num_seqs),
    )


class Prefill:
    """Any number of queries a sequence: the last ones of its context, each up to itself."""

    def __init__(self, library: Any, workspace: Tensor, kind: Kind) -> None:
        self._kind = kind
        self._wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND")

    def plan(self, tables: PageTables) -> None:
        (heads, width), _ = self._kind.spec.entry_shapes
        self._wrapper.plan(
            tables.query_starts,
            tables.page_starts,
            tables.page_ids,
            tables.last_page_tokens,
            self._kind.num_heads,
            heads,
            width,
            tables.page_tokens,
            causal=True,
            **_common(self._kind),
        )

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        return _pair(self._wrapper.run(q, (k, v), out=out, return_lse=with_lse))


class Latent:
    """Queries of any number on latents as they are kept: keys latent and rotary, values latent."""

    def __init__(self, library: Any, workspace: Tensor, kind: Kind) -> None:
        self._kind = kind
        self._wrapper = library.BatchMLAPagedAttentionWrapper(workspace)

    def plan(self, tables: PageTables) -> None:
        spec = self._kind.spec
        assert isinstance(spec, LatentAttention)
        self._wrapper.plan(
            qo_indptr=tables.query_starts,
            kv_indptr=tables.page_starts,
            kv_indices=tables.page_ids,
            kv_len_arr=tables.context_lens,
            num_heads=self._kind.num_heads,
            head_dim_ckv=spec.latent_dim,
            head_dim_kpe=spec.rope_dim,
            page_size=tables.page_tokens,
            causal=True,
            sm_scale=self._kind.scale,
            q_data_type=self._kind.q_dtype,
            kv_data_type=self._kind.kv_dtype,
        )

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        width = output_width(self._kind.spec)
        return _pair(
            self._wrapper.run(
                q_nope=q[..., :width],
                q_pe=q[..., width:],
                ckv_cache=k[:, 0],
                kpe_cache=v[:, 0],
                out=out,
                return_lse=with_lse,
            )
        )


def _common(kind: Kind) -> dict[str, Any]:
    return dict(
        pos_encoding_mode="NONE",  # keys are stored after RoPE
        window_left=kind.window_left,
        logits_soft_cap=kind.softcap,
        sm_scale=kind.scale,
        q_data_type=kind.q_dtype,
        kv_data_type=kind.kv_dtype,
    )


def _pair(found: Any) -> tuple[Tensor, Tensor | None]:
    return found if isinstance(found, tuple) else (found, None)
