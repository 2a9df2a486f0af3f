"""Decode steps that are captured as CUDA graphs: plans over memory that stays.

A graph plays kernels and no plan. So a captured size of a group has a wrapper for each kind of
layer, whose arrays lie where the graph found them, and before each replay the plan is made again.
Rows of padding have no page.

Which size and group a step is of, the address of its placed tables says: those of a captured step
never move.
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import AttentionBatch, PlacedBatch
from quire.attention.flashinfer.pages import PageTables, empty_tables, page_tables, page_tokens_of
from quire.attention.flashinfer.wrappers import Decode, Kind, captured_decode
from quire.kv import LayerView
from quire.spec import LatentAttention


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A wrapper that a graph plays, and what its plans need."""

    wrapper: Decode
    kind: Kind
    page_tokens: int
    of_ranges: bool


@final
class CapturedPlans:
    """What is planned for graphs. An implementation of ``Replays``."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], dict[Kind, _Held]] = {}
        self._devices: set[torch.device] = set()

    def wrapper(
        self, library: Any, workspace: Tensor, kind: Kind, view: LayerView, placed: PlacedBatch
    ) -> Decode:
        """Of a step of padding, which is about to be captured; made by the run before.

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

    def prepare(self, batch: AttentionBatch) -> None:
        """The plans of a step that is about to be replayed."""
        for device in self._devices:
            for held in self._held.get(_place_of(batch.on(device)), {}).values():
                held.wrapper.plan(_padded_tables(batch, held))


def is_padding(batch: AttentionBatch) -> bool:
    """Whether a step has no sequence: a graph is captured with such a step."""
    return not batch.context_lens.any() and bool((np.diff(batch.query_starts) == 1).all())


def _place_of(placed: PlacedBatch) -> tuple[int, int]:
    return placed.tables.data_ptr(), len(placed.context_lens)


def _padded_tables(batch: AttentionBatch, held: _Held) -> PageTables:
    """The pages of a padded step, in which the padding lies behind the sequences."""
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
