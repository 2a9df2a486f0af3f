"""Which pages each sequence reads, as FlashInfer is told it. Arrays only: no kernel is known here.

A page of FlashInfer is a block of ours. Of a range, which is one long entry of a table, any slot
begins a row of the view, so a range is as many pages as it takes, each at its own slot.

What a window has passed is left out: those tables have -1 there, and behind it nothing may be
committed. The mask goes by the distance from a sequence's end, which that does not move.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attention.base import AttentionBatch, Counts
from quire.kv import LayerView
from quire.spec import AttentionSpec

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
    """Tokens of a page of this view."""
    longest = view.k.shape[2]
    return min(longest, RANGE_PAGE_TOKENS) if view.slots_per_row == 1 else longest


def empty_tables(num_seqs: int, page_tokens: int) -> PageTables:
    """One query each, and nothing to read."""
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
    """The pages of the sequences ``rows``, each of which has a query and something to read."""
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
    """0 … counts[0] - 1, 0 … counts[1] - 1, and so on."""
    stops = counts.cumsum()
    return np.arange(stops[-1]) - np.repeat(stops - counts, counts)


def _starts(counts: Counts) -> Tensor:
    starts = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=starts[1:])
    return _i32(starts)


def _i32(x: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(x.astype(np.int32))
