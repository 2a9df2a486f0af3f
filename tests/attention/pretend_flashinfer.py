"""FlashInfer's documented behaviour in plain torch: it checks what it is told, and is slow.

``pretend_flashinfer()`` stands for the module. Its signatures are the package's, with which
``test_flashinfer`` compares them where it is installed. Memory is read by address, so a page may
begin anywhere, and reading outside of the tensor's own storage fails.
"""

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pretend import PretendTensor
from quire.attention.flashinfer import FlashInferAttention
from quire.kv import MakeWriter

WIDTHS = (64, 128, 256, 512)
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Wants:
    """What is enforced beside the rules of a call. Off: any width, any float."""

    real: bool = True

    def check(self, q: Tensor, width: int) -> None:
        if self.real:
            assert width in WIDTHS, f"no kernel for heads of {width}"
            assert q.dtype in HALVES, f"no kernel for queries in {q.dtype}"
        assert q.is_contiguous()


class Decode:
    """BatchDecodeWithPagedKVCacheWrapper."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        *,
        wants: Wants,
    ) -> None:
        _check_workspace(float_workspace_buffer)
        assert kv_layout == "HND"
        assert use_tensor_cores, "the other kernel serves few numbers of shared heads"
        self._wants, self._plan = wants, None
        self._graph = _Graph(
            use_cuda_graph,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> None:
        assert pos_encoding_mode == "NONE"
        starts = torch.arange(len(indptr), dtype=torch.int32)
        indptr, indices, last_page_len = self._graph.kept(indptr, indices, last_page_len)
        self._plan = _Plan(
            starts,
            _lengths(indptr, last_page_len, page_size),
            _pages(indptr, indices, may_be_empty=self._graph.is_used),
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            window_left,
            logits_soft_cap,
            sm_scale,
            q_data_type,
            kv_data_type,
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        k, v = paged_kv_cache
        return _launched(self, q, k, v, out, return_lse)

    def compute(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert self._plan is not None, "run came before plan"
        return self._plan.run(q, k, v, self._wants)


class Prefill:
    """BatchPrefillWithPagedKVCacheWrapper."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, wants: Wants
    ) -> None:
        _check_workspace(float_workspace_buffer)
        assert kv_layout == "HND"
        self._wants, self._plan = wants, None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        assert causal, "a query reads nothing that comes after it"
        assert pos_encoding_mode == "NONE"
        self._plan = _Plan(
            qo_indptr,
            _lengths(paged_kv_indptr, paged_kv_last_page_len, page_size),
            _pages(paged_kv_indptr, paged_kv_indices),
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            window_left,
            logits_soft_cap,
            sm_scale,
            q_data_type,
            kv_data_type,
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        k, v = paged_kv_cache
        return _launched(self, q, k, v, out, return_lse)

    def compute(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert self._plan is not None, "run came before plan"
        return self._plan.run(q, k, v, self._wants)


class Latent:
    """BatchMLAPagedAttentionWrapper."""

    def __init__(self, float_workspace_buffer: Tensor, *, wants: Wants) -> None:
        _check_workspace(float_workspace_buffer)
        self._wants, self._plan, self._widths = wants, None, (0, 0)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert not self._wants.real or (head_dim_ckv, head_dim_kpe) == (512, 64)
        self._widths = (head_dim_ckv, head_dim_kpe)
        pages = _pages(kv_indptr, kv_indices)
        assert [-(-n // page_size) for n in kv_len_arr.tolist()] == list(map(len, pages))
        self._plan = _Plan(
            qo_indptr,
            kv_len_arr.tolist(),
            pages,
            num_heads,
            1,
            head_dim_ckv,
            page_size,
            -1,
            None,
            sm_scale,
            q_data_type,
            kv_data_type,
        )

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        assert (q_nope.shape[-1], q_pe.shape[-1]) == self._widths
        assert (ckv_cache.shape[-1], kpe_cache.shape[-1]) == self._widths
        assert ckv_cache.stride(-1) == kpe_cache.stride(-1) == 1
        q = torch.cat([q_nope, q_pe], -1)
        if out is None:
            out = torch.empty_like(q_nope)
        return _launched(self, q, ckv_cache[:, None], kpe_cache[:, None], out, return_lse)

    def compute(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert self._plan is not None, "run came before plan"
        return self._plan.attend(q, lambda i: _gather(self._plan, i, k, v))


@dataclass(frozen=True)
class _Plan:
    query_starts: Tensor
    context_lens: list[int]
    pages: list[list[int]]
    num_qo_heads: int
    num_kv_heads: int
    width: int
    page_size: int
    window_left: int
    softcap: float | None
    scale: float | None
    q_dtype: torch.dtype
    kv_dtype: torch.dtype

    def run(self, q: Tensor, k: Tensor, v: Tensor, wants: Wants) -> tuple[Tensor, Tensor]:
        wants.check(q, self.width)
        assert k.dtype == v.dtype == self.kv_dtype
        for part in (k, v):
            assert part.shape[1:3] == (self.num_kv_heads, self.page_size)
            assert part.stride(-1) == 1
            assert max(part.stride()) < 2**32
        if wants.real:
            assert k.stride() == v.stride(), "keys and values must have equal strides"
            assert k.shape == v.shape
            assert k.shape[-1] == self.width
        return self.attend(q, lambda i: _gather(self, i, k, v, joined=False))

    def attend(self, q: Tensor, read: Any) -> tuple[Tensor, Tensor]:
        """The result, and log2 of the sum of weights."""
        assert q.dtype == self.q_dtype
        assert q.shape[:2] == (int(self.query_starts[-1]), self.num_qo_heads)
        results, sums = [], []
        starts = self.query_starts.tolist()
        for i, (begin, end) in enumerate(pairwise(starts)):
            if not self.pages[i]:  # padding, in a step that was recorded: garbage comes out
                results.append(torch.full((end - begin, self.num_qo_heads, self.width), 7.0))
                sums.append(torch.full((end - begin, self.num_qo_heads), 7.0))
                continue
            k, v = (x.double() for x in read(i))  # [K, L, D]
            length = k.shape[1]
            assert 0 < end - begin <= length
            some = q[begin:end].double().transpose(0, 1).unflatten(0, (self.num_kv_heads, -1))
            scores = torch.einsum("kgqd,kld->kgql", some, k) * self.scale
            if self.softcap:
                scores = torch.tanh(scores / self.softcap) * self.softcap
            at = torch.arange(length - (end - begin), length)[:, None]
            tokens = torch.arange(length)
            hidden = tokens > at
            if self.window_left >= 0:
                hidden |= tokens < at - self.window_left
            scores = scores.masked_fill(hidden, -torch.inf)
            total = torch.logsumexp(scores, -1)
            weights = (scores - total[..., None]).exp()
            values = torch.einsum("kgql,kld->kgqd", weights, v.nan_to_num())
            # A NaN is for those who see it. (The real kernels may spread it behind a window.)
            seen = torch.einsum("ql,kld->kqd", (~hidden).double(), v.isnan().double()) > 0
            values = values.masked_fill(seen[:, None], torch.nan)
            results.append(values.flatten(0, 1).transpose(0, 1))
            sums.append(total.flatten(0, 1).T / torch.log(torch.tensor(2.0)))
        return torch.cat(results).to(q.dtype), torch.cat(sums).float()


def _launched(
    wrapper: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
) -> Any:
    """Computed at once; on the pretended GPU as a kernel, which a graph plays with later plans."""
    if out is None:
        out = q.new_empty(*q.shape[:2], v.shape[-1])
    assert out.shape[:2] == q.shape[:2]
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)

    def flashinfer(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        result, sums = wrapper.compute(q, k, v)
        out.copy_(result)
        lse.copy_(sums)

    if isinstance(q, PretendTensor):
        q.gpu.kernel(flashinfer, out, lse, q, k, v)
    else:
        flashinfer(out, lse, q, k, v)
    return (out, lse) if return_lse else out


class _Graph:
    """Arrays that a recorded step reads: plans are copied there, and nothing may outgrow them."""

    def __init__(self, used: bool, *arrays: Tensor | None) -> None:
        self.is_used = used
        self._arrays = [each for each in arrays if each is not None]
        assert len(self._arrays) == (3 if used else 0)

    def kept(self, *given: Tensor) -> tuple[Tensor, ...]:
        if not self.is_used:
            return given
        (starts, pages, last), (own_starts, own_pages, own_last) = given, self._arrays
        assert len(starts) == len(own_starts), "the number of sequences is a graph's for good"
        assert len(last) == len(own_last)
        assert len(pages) <= len(own_pages)
        own_starts.copy_(starts)
        own_last.copy_(last)
        own_pages[: len(pages)].copy_(pages)
        return given


def _check_workspace(buffer: Tensor) -> None:
    assert buffer.dtype == torch.uint8
    if not isinstance(buffer, PretendTensor):  # where to look is to wait
        assert not buffer.any(), "the workspace is to be zero at first"


def _pages(indptr: Tensor, indices: Tensor, *, may_be_empty: bool = False) -> list[list[int]]:
    assert indptr.dtype == indices.dtype == torch.int32
    starts = indptr.tolist()
    assert starts[0] == 0
    assert starts[-1] == len(indices)
    pages = [indices[a:b].tolist() for a, b in pairwise(starts)]
    assert may_be_empty or all(pages), "a sequence has no page"
    assert not len(indices) or int(indices.min()) >= 0
    return pages


def _lengths(indptr: Tensor, last: Tensor, page_size: int) -> list[int]:
    assert last.dtype == torch.int32
    assert len(last) == len(indptr) - 1
    assert all(1 <= n <= page_size for n in last.tolist())
    counts = indptr[1:] - indptr[:-1]
    return torch.where(counts == 0, 0, (counts - 1) * page_size + last).tolist()


def _gather(
    plan: "_Plan", index: int, k: Tensor, v: Tensor, *, joined: bool = True
) -> tuple[Tensor, Tensor]:
    """Sequence ``index``'s entries, by address: [K, L, D]; of latents (latent and key, latent)."""

    def read(part: Tensor) -> Tensor:
        _, heads, _, width = part.shape
        page, head, token, _ = part.stride()
        pieces, left = [], plan.context_lens[index]
        for number in plan.pages[index]:
            tokens = min(left, plan.page_size)
            start = part.storage_offset() + number * page
            pieces.append(part.as_strided((heads, tokens, width), (head, token, 1), start).double())
            left -= tokens
        return torch.cat(pieces, 1)

    keys, values = read(k), read(v)
    return (torch.cat([keys, values], -1), keys) if joined else (keys, values)


def pretended_backend(
    *, real: bool = True, make_writer: MakeWriter | None = None
) -> FlashInferAttention:
    return FlashInferAttention(pretend_flashinfer(real=real), make_writer, workspace_bytes=2**12)


def pretend_flashinfer(*, real: bool = True) -> Any:
    """The module. ``real``: with its limits on widths, dtypes and strides."""
    wants = Wants(real=real)

    def bound(wrapper: Any) -> Any:
        return lambda *args, **given: wrapper(*args, **given, wants=wants)

    return SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=bound(Decode),
        BatchPrefillWithPagedKVCacheWrapper=bound(Prefill),
        BatchMLAPagedAttentionWrapper=bound(Latent),
    )
