"""FlashInfer's three wrappers, planned and run: what each is told, in the words of its own API.

A wrapper holds one plan in memory of its own. They share the memory for partial results, since the
kernels of one stream run one after the other. ``backend`` says what they cannot serve.

Source: FlashInfer 0.7.2, ``decode.py``, ``prefill.py``, ``mla``. Arguments that older releases lack
are not given.
"""

from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attention.attention_backend import AttentionBatch, Counts, PlacedBatch
from quire.attention.gather import output_width
from quire.kv import LayerView
from quire.spec import AttentionSpec, LatentAttention, SlidingWindow

# -- pages -----------------------------------------------------------------------------------------

# Which pages each sequence reads, as FlashInfer is told it. Arrays only: no kernel is known here.
#
# A page of FlashInfer is a block of ours. Of a range, which is one long entry of a table, any slot
# begins a row of the view, so a range is as many pages as it takes, each at its own slot.
#
# What a window has passed is left out: those tables have -1 there, and behind it nothing may be
# committed. The mask goes by the distance from a sequence's end, which that does not move.


RANGE_PAGE_TOKENS = 64  # of a range: what every kernel of FlashInfer takes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageTables:
    """Some of a step's sequences, R of them, on the host: where a plan is made."""

    query_starts: Tensor  # i32[R + 1], of these sequences alone
    page_starts: Tensor  # i32[R + 1]: sequence i's pages are page_ids[starts[i] : starts[i + 1]]
    page_ids: Tensor  # i32[all pages]
    last_page_tokens: Tensor  # i32[R], 1 … tokens of a page
    context_lens: Tensor  # i32[R], without what was left out
    page_tokens: int


def page_tokens_of(view: LayerView) -> int:
    """Return the tokens of a page of this view."""
    longest = view.k.shape[2]
    return min(longest, RANGE_PAGE_TOKENS) if view.slots_per_row == 1 else longest


def empty_tables(num_seqs: int, page_tokens: int) -> PageTables:
    """Make tables of one query each, and nothing to read."""
    zeros = torch.zeros(num_seqs, dtype=torch.int32)
    return PageTables(
        query_starts=torch.arange(num_seqs + 1, dtype=torch.int32),
        page_starts=torch.zeros(num_seqs + 1, dtype=torch.int32),
        page_ids=zeros[:0],
        last_page_tokens=zeros + 1,  # FlashInfer asks for one of a row without pages, too
        context_lens=zeros,
        page_tokens=page_tokens,
    )


def page_tables(
    spec: AttentionSpec,
    batch: AttentionBatch,
    rows: npt.NDArray[np.intp],
    *,
    page_tokens: int,
    of_ranges: bool,
) -> PageTables:
    """Make page tables of the sequences ``rows``, i64[R], which all have a query and a context."""
    query_lens = np.diff(batch.query_starts)[rows]
    context_lens = batch.context_lens[rows]
    starts: Counts = np.asarray(spec.live_start(context_lens - query_lens))
    table = batch.tables.numpy()[rows]
    if of_ranges:
        context_lens = context_lens - starts
        counts = -(-context_lens // page_tokens)
        # Page j of a sequence begins j pages after its range's first slot that is read.
        first, nth = np.repeat(table[:, 0] + starts, counts), _counted(counts)
        page_ids = first + nth * page_tokens
    else:
        firsts = starts // page_tokens
        counts = -(-context_lens // page_tokens) - firsts
        context_lens = context_lens - firsts * page_tokens
        which = np.repeat(np.arange(len(rows)), counts)
        page_ids = table[which, np.repeat(firsts, counts) + _counted(counts)]
    assert (page_ids >= 0).all(), "a table ends before its sequence"
    return PageTables(
        query_starts=_starts(query_lens),
        page_starts=_starts(counts),
        page_ids=_i32(page_ids),
        last_page_tokens=_i32((context_lens - 1) % page_tokens + 1),
        context_lens=_i32(context_lens),
        page_tokens=page_tokens,
    )


def _counted(counts: Counts) -> Counts:
    """Count 0 … counts[0] - 1, 0 … counts[1] - 1, and so on: i64[sum]."""
    stops = counts.cumsum()
    return np.arange(stops[-1]) - np.repeat(stops - counts, counts)


def _starts(counts: Counts) -> Tensor:
    starts = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=starts[1:])
    return _i32(starts)


def _i32(x: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(x.astype(np.int32))


# -- wrappers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """All that the calls which one plan serves have in common."""

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

    def plan(self, tables: PageTables) -> None:
        """Plan for the sequences of these tables."""
        ...

    def run(
        self,
        q: Tensor,  # [Q, H, D]
        k: Tensor,  # [N, K, B, D]
        v: Tensor,  # [N, K, B, Dv]
        *,
        out: Tensor | None,  # [Q, H, Dv]: where the result goes, if given
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend. Return the result, and ``with_lse`` log2 of the sum of weights, f32[Q, H]."""
        ...


class _Paged:
    """Keys and values in pages, by either of the two wrappers for them."""

    _wrapper: Any
    _kind: Kind

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        return _pair(self._wrapper.run(q, (k, v), out=out, return_lse=with_lse))

    def _plan(self, tables: PageTables, *query_starts: Tensor, **options: Any) -> None:
        (heads, width), _ = self._kind.spec.entry_shapes
        self._wrapper.plan(
            *query_starts,
            tables.page_starts,
            tables.page_ids,
            tables.last_page_tokens,
            self._kind.num_heads,
            heads,
            width,
            tables.page_tokens,
            pos_encoding_mode="NONE",  # keys are stored after RoPE
            window_left=self._kind.window_left,
            logits_soft_cap=self._kind.softcap,
            sm_scale=self._kind.scale,
            q_data_type=self._kind.q_dtype,
            kv_data_type=self._kind.kv_dtype,
            **options,
        )


class Decode(_Paged):
    """One query a sequence.

    On tensor cores: the query heads that share a key-value head are rows of one product. For few of
    them it reads no slower, and the kernel is the prefill's, so there is one less to compile.
    """

    def __init__(self, library: Any, workspace: Tensor, kind: Kind, **arrays: Any) -> None:
        """Make a wrapper. ``arrays``: where a graph looks for the plan's numbers."""
        self._kind = kind
        self._wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, kv_layout="HND", use_tensor_cores=True, **arrays
        )

    def plan(self, tables: PageTables) -> None:
        self._plan(tables)


def captured_decode(
    library: Any, workspace: Tensor, kind: Kind, num_seqs: int, num_pages: int
) -> Decode:
    """Make a wrapper for a graph of ``num_seqs`` sequences, ``num_pages`` pages together at most.

    ``workspace``: u8[bytes].
    """

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


class Prefill(_Paged):
    """Any number of queries a sequence: the last ones of its context, each up to itself."""

    def __init__(self, library: Any, workspace: Tensor, kind: Kind) -> None:
        self._kind = kind
        self._wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND")

    def plan(self, tables: PageTables) -> None:
        self._plan(tables, tables.query_starts, causal=True)


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


def _pair(found: Any) -> tuple[Tensor, Tensor | None]:
    return found if isinstance(found, tuple) else (found, None)


# -- steps that are captured -----------------------------------------------------------------------

# Decode steps that are captured as CUDA graphs: plans over memory that stays.
#
# A graph plays kernels and no plan. So a captured size of a group has a wrapper for each kind of
# layer, whose arrays lie where the graph found them, and before each replay the plan is made
# again. Rows of padding have no page.
#
# Which size and group a step is of, the address of its placed tables says: those of a captured
# step never move.


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A wrapper that a graph plays, and what its plans need."""

    wrapper: Decode
    kind: Kind
    page_tokens: int
    of_ranges: bool


@final
class CapturedPlans:
    """The plans for graphs: an implementation of ``Replays``."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], dict[Kind, _Held]] = {}
        self._devices: set[torch.device] = set()

    def wrapper(
        self, library: Any, workspace: Tensor, kind: Kind, view: LayerView, placed: PlacedBatch
    ) -> Decode:
        """Return the wrapper of a step of padding, which is about to be captured.

        The run before made it. ``workspace``: u8[bytes].

        Raises: RuntimeError for what is not captured.
        """
        if isinstance(kind.spec, LatentAttention):
            raise RuntimeError("FlashInfer's kernels for latents are not captured")
        self._devices.add(workspace.device)
        kinds = self._held.setdefault(_place_of(placed), {})
        held = kinds.get(kind)
        if held is None:
            num_seqs, page_tokens = len(placed.context_lens), page_tokens_of(view)
            tables = empty_tables(num_seqs, page_tokens)
            most = -(-max(placed.max_context_len, 1) // page_tokens) + 1  # pages of a sequence
            made = captured_decode(library, workspace, kind, num_seqs, num_seqs * most)
            made.plan(tables)
            held = _Held(made, kind, page_tokens, view.slots_per_row == 1)
            kinds[kind] = held
        return held.wrapper

    @torch.inference_mode()  # as when its arrays were made: else torch refuses to write there
    def prepare(self, batch: AttentionBatch) -> None:
        """Plan a step that is about to be replayed."""
        for device in self._devices:
            for held in self._held.get(_place_of(batch.on(device)), {}).values():
                held.wrapper.plan(_padded_tables(batch, held))


def is_padding(batch: AttentionBatch) -> bool:
    """Return whether a step has no sequence, as the step that a graph is captured with."""
    return not batch.context_lens.any() and bool((np.diff(batch.query_starts) == 1).all())


def _place_of(placed: PlacedBatch) -> tuple[int, int]:
    return placed.tables.data_ptr(), len(placed.context_lens)


def _padded_tables(batch: AttentionBatch, held: _Held) -> PageTables:
    """Make the page tables of a padded step, in which the padding lies behind the sequences."""
    live = np.flatnonzero(batch.context_lens)
    if not len(live):
        return empty_tables(batch.num_seqs, held.page_tokens)
    found = page_tables(
        held.kind.spec, batch, live, page_tokens=held.page_tokens, of_ranges=held.of_ranges
    )
    missing = batch.num_seqs - len(live)
    zeros = torch.zeros(missing, dtype=torch.int32)
    assert live[-1] == len(live) - 1, "padding comes last"
    return PageTables(
        query_starts=torch.arange(batch.num_seqs + 1, dtype=torch.int32),
        page_starts=torch.cat([found.page_starts, found.page_starts[-1:].expand(missing)]),
        page_ids=found.page_ids,
        # FlashInfer asks for one token of a row without pages, too.
        last_page_tokens=torch.cat([found.last_page_tokens, zeros + 1]),
        context_lens=torch.cat([found.context_lens, zeros]),
        page_tokens=held.page_tokens,
    )
