"""A step's batch: what all sequences are together is what each of them is."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.geometry import MIB, config, spec_of
from quire.attention import make_batch, packed_tokens
from quire.kv import STRATEGIES, Fits, build_accounting
from quire.kv.packed_slots import packed_positions
from quire.spec import FullAttention, SlidingWindow

FULL = FullAttention(num_kv_heads=1, head_dim=16, dtype="bfloat16")
WINDOW = SlidingWindow(num_kv_heads=1, head_dim=16, dtype="bfloat16", window=20)

spans = st.tuples(st.integers(0, 90), st.integers(0, 40))


def stops(chunks: list[tuple[int, int, int]]) -> list[int]:
    return [stop for _, _, stop in chunks]


@given(spans=st.lists(spans, max_size=9))
def test_tokens_side_by_side(spans: list[tuple[int, int]]) -> None:
    starts, stops = [first for first, _ in spans], [first + count for first, count in spans]
    owners, positions = packed_positions(starts, stops)
    each = enumerate(zip(starts, stops, strict=True))
    want = [(i, token) for i, span in each for token in range(*span)]
    assert list(zip(owners.tolist(), positions.tolist(), strict=True)) == want
    assert owners.dtype == positions.dtype == np.int64


@pytest.mark.parametrize(
    ("strategy", "shares_pages"), [*((name, False) for name in STRATEGIES), ("virtual", True)]
)
@settings(max_examples=25)
@given(spans=st.lists(spans.filter(lambda span: span[1] > 0), min_size=1, max_size=9))
def test_a_batch_is_its_sequences(
    strategy: str, shares_pages: bool, spans: list[tuple[int, int]]
) -> None:
    cache = build_accounting(
        strategy,
        spec_of(FULL, WINDOW),
        config(
            max_model_len=256, max_num_seqs=9, capacity_bytes=4 * MIB, shares_pages=shares_pages
        ),
    )
    chunks = [(7 * i, start, start + count) for i, (start, count) in enumerate(spans)][::-1]
    for seq_id, start, stop in chunks:
        cache.add(seq_id)
        for reached in (start, stop):  # in two steps, as a window passes what was before the last
            assert isinstance(cache.try_extend(seq_id, reached), Fits)
            cache.drain()
    for group in range(len(cache.groups)):
        batch = make_batch(cache, group, chunks)
        lengths = [stop - start for _, start, stop in chunks]
        assert batch.query_starts.tolist() == [0, *np.cumsum(lengths)]
        assert batch.context_lens.tolist() == [stop for _, _, stop in chunks]
        assert batch.block_size == cache.block_size(group)
        assert batch.slots.tolist() == [s for c in chunks for s in cache.slots(group, *c).tolist()]
        placed = batch.on(torch.device("cpu"))
        assert batch.on(torch.device("cpu")) is placed, "the same for every layer"
        assert (placed.max_query_len, placed.max_context_len) == (max(lengths), max(stops(chunks)))
        for name in ("query_starts", "context_lens", "tables", "slots"):
            assert getattr(placed, name).tolist() == getattr(batch, name).tolist()
        for row, (seq_id, _, _) in zip(batch.tables.tolist(), chunks, strict=True):
            table = cache.table(group, seq_id).tolist()
            assert row == table + [-1] * (len(row) - len(table))
        assert batch.tables.dtype == batch.slots.dtype == torch.int64
    positions = [token for _, start, stop in chunks for token in range(start, stop)]
    assert packed_tokens(chunks).tolist() == positions
