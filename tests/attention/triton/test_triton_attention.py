"""Every kind of layer in every kind of step gives what the formula gives, in the interpreter.

``make test`` runs some rows in which every level is, ``make test-all`` those in which pairs meet.
What a step may not read is NaN. On a GPU: ``tests/conformance/test_attention_gpu.py``.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from attention.triton.interpreter import backend, shrink_tiles
from conformance.attention_cases import (
    STORED,
    TOLERANCE,
    error,
    formula,
    make_case,
    make_spec,
    same_bits,
)
from conformance.attention_grid import DTYPES, EXTRAS, MIXES, build
from conformance.covering import Row, cover
from quire.attention import AttentionBatch

FACTORS = {
    "dtypes": (*DTYPES, ("float16", "int8"), ("float16", "float8_e4m3fn")),
    "widths": ((64, 64), (40, 40), (24, 16), (40, 96), (8, 8), (40, 24, "latent")),
    "sharing": (1, 3, 4, 7),
    "extras": EXTRAS,
    "kind": (("full", 0), ("sliding", 9), ("sliding", 70), ("chunked", 6), ("chunked", 50)),
    "mix": tuple(MIXES),
    "block_size": (16, 4, 5, 32),
    "strategy": STORED,
    "scores": ("usual", "large"),
    "tiles": ("small", "as shipped"),
}
# As many heads as need several tiles, and latents as wide as they are.
_LARGE: Row = {
    "dtypes": ("bfloat16", "bfloat16"),
    "extras": EXTRAS[3],
    "mix": "decodes",
    "block_size": 16,
    "strategy": "paged",
    "scores": "usual",
    "kind": ("full", 0),
    "tiles": "as shipped",
}
LARGE: tuple[Row, ...] = (
    {**_LARGE, "widths": (24, 16), "sharing": 71},
    {**_LARGE, "widths": (512, 64, "latent"), "sharing": 40},
)


def with_new_levels(rows: list[Row]) -> Iterator[Row]:
    seen: set[Any] = set()
    for row in rows:
        if not seen.issuperset(row.items()):
            seen.update(row.items())
            yield row


ROWS = cover(FACTORS)
SAMPLE = (*with_new_levels(ROWS), *LARGE)


def check(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    if row["tiles"] == "small":
        shrink_tiles(monkeypatch)
    if (built := build(row, row)) is None:
        return
    case, options = built
    got, want = case.attend(backend(), **options), formula(case, **options)
    assert got.shape == want.shape
    assert got.dtype == case.q.dtype
    assert error(got, want) <= TOLERANCE[got.dtype]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("number", range(len(SAMPLE)))
def test_the_kernels_give_what_the_formula_gives(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(SAMPLE[number], monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_and_in_all_pairs(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(ROWS[number], monkeypatch)


def test_a_sequence_is_not_disturbed_by_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by how its walk is split: each alone has more programs to spare."""
    shrink_tiles(monkeypatch)
    spec = make_spec("sliding", kv_heads=2, dims=(16, 16), dtype="float32", reach=40)
    case = make_case(spec, sharing=3, chunks=((0, 13), (90, 1), (40, 12)))
    together = case.attend(backend(), scale=1.0)
    assert same_bits(case.attend(backend(), scale=1.0), together)
    for index, (begin, end) in enumerate(pairwise(case.batch.query_starts.tolist())):
        alone = AttentionBatch(
            query_starts=np.array([0, end - begin]),
            context_lens=case.batch.context_lens[index : index + 1],
            tables=case.batch.tables[index : index + 1],
            slots=case.batch.slots[begin:end],
            block_size=case.batch.block_size,
        )
        got = backend().attend(case.q[begin:end], case.view, alone, spec=spec, scale=1.0)
        assert error(got, together[begin:end]) <= TOLERANCE[torch.float32]


def test_a_query_may_lie_anywhere() -> None:
    """Cut out of a wider tensor, as a fused projection leaves it; sinks of any dtype."""
    spec = make_spec("full", kv_heads=1, dims=(16, 16), dtype="float32")
    case = make_case(spec, sharing=3, chunks=((20, 1), (0, 3)))
    tokens, heads, width = case.q.shape
    want = formula(case, scale=0.5)
    wide = torch.full((tokens, 3 * heads + 1, width + 5), torch.nan)
    cut = wide[:, heads : 2 * heads, 2 : 2 + width]
    cut.copy_(case.q)
    for q in (cut, case.q.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
        got = backend().attend(q, case.view, case.fresh_batch(), spec=spec, scale=0.5)
        assert error(got, want) <= TOLERANCE[torch.float32]
    sinks = torch.tensor([0.5, -1.0, 3.0], dtype=torch.bfloat16)
    want = formula(case, scale=0.5, sinks=sinks)
    for other in (sinks, sinks.double(), sinks.float().repeat_interleave(2)[::2]):
        assert error(case.attend(backend(), scale=0.5, sinks=other), want) <= 5e-6


@pytest.mark.parametrize("num_splits", ["one", "several"])
def test_a_nan_is_seen_by_those_who_read_it(
    num_splits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken entry must not look like a good one, and stays in its sequence and head."""
    if num_splits == "several":
        shrink_tiles(monkeypatch)
    spec = make_spec("full", kv_heads=2, dims=(16, 16), dtype="float32")
    case = make_case(spec, sharing=3, chunks=((50, 1), (40, 3), (0, 2)))
    clean = case.attend(backend(), scale=1.0)
    slot, size = int(case.slots[1][5]), case.view.slots_per_row
    for part in (case.view.k, case.view.v):
        entry = part[slot // size, 0, slot % size]
        before = entry.clone()
        entry[:] = torch.nan
        got = case.attend(backend(), scale=1.0)
        entry.copy_(before)
        assert got[1:4, :3].isnan().all()
        got[1:4, :3] = clean[1:4, :3]
        assert same_bits(got, clean)


@pytest.mark.parametrize("size", [1e-4, 1e-2, 100.0])
def test_codes_of_small_and_large_values_keep_their_precision_in_float16(size: float) -> None:
    """Its range is short: a weight times a scale may be below it."""
    spec = make_spec("full", kv_heads=1, dims=(16, 16), dtype="int8")
    case = make_case(spec, sharing=2, chunks=((100, 1), (0, 3)), q_dtype=torch.float16)
    for values in case.values:
        values *= size
    case.write_live()
    got = case.attend(backend(), scale=0.5)
    assert error(got, formula(case, scale=0.5)) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize(
    ("kind", "reach"), [("full", 0), ("sliding", 90), ("sliding", 130), ("chunked", 100)]
)
def test_a_long_chunk_is_masked_where_not_all_of_its_queries_read(
    kind: str, reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most steps of its walk have no mask: those before and behind them must."""
    shrink_tiles(monkeypatch)
    spec = make_spec(kind, kv_heads=1, dims=(16, 16), dtype="bfloat16", reach=reach)
    case = make_case(spec, sharing=2, chunks=((0, 200), (77, 130)), block_size=16)
    case.poison()
    got = case.attend(backend(), scale=0.3)
    assert error(got, formula(case, scale=0.3)) <= TOLERANCE[torch.bfloat16]
