"""What attention is given: packed queries, one layer's view, and where each sequence's tokens lie.

The letters of every shape comment in Quire:

    T  tokens of a step, all sequences packed        D   width of a key (Dv: of a value)
    S  sequences of a step                           B   tokens of a block
    H  query heads                                   P   entries of a block table
    K  key-value heads                               N   rows of a layer's view
    G  query heads that share a key-value head       L   tokens that one sequence can read
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.spec import AttentionSpec
from quire.strategies import Accounting, LayerView


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """One step, as the layers of one group see it.

    Sequence i's chunk is tokens [query_starts[i], query_starts[i + 1]) of the packed queries: the
    last ones of its context_lens[i] tokens.
    """

    query_starts: tuple[int, ...]  # [S + 1]
    context_lens: tuple[int, ...]  # [S], the chunk included
    tables: Tensor  # i64[S, P], -1 where a window has passed or a table has ended
    slots: Tensor  # i64[T]: where the chunk's own entries go
    block_size: int

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)

    def chunks(self) -> list[tuple[int, int, int]]:
        """(first query, one past the last, context length) of each sequence."""
        return [
            (*ends, n)
            for ends, n in zip(pairwise(self.query_starts), self.context_lens, strict=True)
        ]


class AttentionBackend(Protocol):
    """One way to attend. Implementations differ in speed, not in results beyond rounding."""

    @property
    def name(self) -> str: ...

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        """Why this backend cannot serve layers of ``spec`` on ``device``; None if it can."""
        ...

    def attend(
        self,
        q: Tensor,  # [T, H, D]
        view: LayerView,  # k [N, K, B, D], v [N, K, B, Dv]
        batch: AttentionBatch,
        *,
        spec: AttentionSpec,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [H]: a logit that takes weight and gives no value
    ) -> Tensor:
        """[T, H, Dv]: each query over the tokens of its own sequence that its spec lets it read."""
        ...


def make_batch(
    accounting: Accounting, group: int, chunks: list[tuple[int, int, int]]
) -> AttentionBatch:
    """A step's batch for one group. ``chunks``: (sequence id, start, stop) of what is computed."""
    starts = [0, *np.cumsum([stop - start for _, start, stop in chunks]).tolist()]
    tables = [accounting.table(group, seq_id) for seq_id, _, _ in chunks]
    padded: npt.NDArray[np.int64] = np.full((len(chunks), max(map(len, tables))), -1, np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    slots = np.concatenate([accounting.slots(group, *chunk) for chunk in chunks])
    return AttentionBatch(
        query_starts=tuple(starts),
        context_lens=tuple(stop for _, _, stop in chunks),
        tables=torch.from_numpy(padded),
        slots=torch.from_numpy(slots),
        block_size=accounting.block_size(group),
    )


def read_sequence(
    view: LayerView, batch: AttentionBatch, index: int, start: int
) -> tuple[Tensor, Tensor]:
    """Sequence ``index``'s entries from token ``start`` on: k [K, L, D], v [K, L, Dv].

    A view where one table entry holds them all, else a copy.
    """
    stop, size = batch.context_lens[index], batch.block_size
    first, last = start // size, (stop - 1) // size
    if first == last:
        block = int(batch.tables[index, first])
        inside = slice(start - first * size, stop - first * size)
        return view.k[block, :, inside], view.v[block, :, inside]
    blocks = batch.tables[index, first : last + 1]
    inside = slice(start - first * size, stop - first * size)
    # [P, K, B, D] → [K, P * B, D]
    k, v = (x[blocks].transpose(0, 1).flatten(1, 2)[:, inside] for x in (view.k, view.v))
    return k, v


def readable(
    spec: AttentionSpec, num_queries: int, context_len: int, start: int, device: torch.device
) -> Tensor | None:
    """bool[num_queries, context_len - start]: which tokens each query may read; None if all.

    The queries are the last ones of the context; the tokens are those from ``start`` on.
    """
    first = context_len - num_queries
    if num_queries == 1 and spec.live_range(first).start <= start:
        return None
    lows = torch.tensor(
        [spec.live_range(i).start for i in range(first, context_len)], device=device
    )
    queries = torch.arange(first, context_len, device=device)
    tokens = torch.arange(start, context_len, device=device)
    return (tokens >= lows[:, None]) & (tokens <= queries[:, None])
