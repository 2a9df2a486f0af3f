"""A step's items cover what its queries read, once and nothing else, whatever the batch is."""

import ctypes
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.machines import find_isa
from quire.attention import AttentionBatch
from quire.attention.cpu.backend import WorkPlan, make_plan
from quire.attention.cpu.call_frame import FRAME, GROUP, ITEM, MAX_PANELS, AttendShape, Layout
from quire.kernels.language import LANES, LINE_BYTES
from quire.spec import (
    AttentionSpec,
    ChunkedAttention,
    FullAttention,
    LatentAttention,
    SlidingWindow,
)

COMMON = {"num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}
specs: st.SearchStrategy[AttentionSpec] = st.one_of(
    st.just(FullAttention(**COMMON)),
    st.builds(lambda n: SlidingWindow(**COMMON, window=n), st.integers(1, 300)),
    st.builds(lambda n: ChunkedAttention(**COMMON, chunk=n), st.integers(1, 300)),
    st.just(LatentAttention(latent_dim=32, rope_dim=16, dtype="float32")),
)
# (history, tokens of this step): decodes, chunks, sequences with nothing to do.
lengths = st.one_of(
    st.tuples(st.integers(0, 900), st.just(1)),
    st.tuples(st.integers(0, 300), st.integers(0, 150)),
)
batches = st.lists(lengths, min_size=1, max_size=6)
ISA = find_isa("native")


class Seen:
    """A plan as the threads find it: through its addresses."""

    def __init__(self, plan: WorkPlan) -> None:
        names = FRAME[FRAME.index("items") : FRAME.index("block_size") + 1]
        self.words = dict(zip(names, plan.words, strict=True))
        self.items = self._numbers("items", ITEM, self.words["num_items"])
        self.num_groups = 1 + max((item["group"] for item in self.items), default=-1)
        self.groups = self._numbers("groups", GROUP, self.num_groups)
        self.plan = plan

    def _numbers(self, name: str, fields: tuple[str, ...], count: int) -> list[dict[str, int]]:
        if not count:
            return []
        found = (ctypes.c_int64 * (count * len(fields))).from_address(self.words[name])
        rows = np.array(found).reshape(count, len(fields)).tolist()
        return [dict(zip(fields, row, strict=True)) for row in rows]

    def numbers(self, name: str, count: int) -> list[int]:
        return list((ctypes.c_int64 * count).from_address(self.words[name])) if count else []


def make_batch(chunks: list[tuple[int, int]]) -> AttentionBatch:
    counts = np.array([length for _, length in chunks], np.int64)
    return AttentionBatch(
        query_starts=np.concatenate([[0], np.cumsum(counts)]),
        context_lens=np.array([sum(chunk) for chunk in chunks], np.int64),
        tables=torch.zeros(len(chunks), 8, dtype=torch.int64),
        slots=torch.zeros(int(counts.sum()), dtype=torch.int64),
        block_size=16,
    )


def planned(
    chunks: list[tuple[int, int]], spec: AttentionSpec, sharing: int, threads: int
) -> tuple[Seen, AttendShape, Layout]:
    assert not isinstance(ISA, str)
    latent = isinstance(spec, LatentAttention)
    shape = AttendShape(
        kv_heads=1 if latent else 2,
        sharing=sharing,
        key_dim=16,
        value_dim=32 if latent else 16,
        kind="f32",
        query_kind="f32",
        latent=latent,
    )
    layout = Layout(shape, ISA)
    return Seen(make_plan(make_batch(chunks), spec, shape, layout, threads)), shape, layout


def reading(seen: Seen, shape: AttendShape, total: int) -> npt.NDArray[np.int64]:
    """i64[queries, heads, tokens]: how often each token is read, as the threads go about it."""
    num_queries = len(seen.plan.kept[4])  # type: ignore[arg-type]
    lows, highs = (seen.numbers(name, num_queries) for name in ("lows", "highs"))
    found = np.zeros((num_queries, shape.kv_heads * shape.sharing, total), np.int64)
    for item in seen.items:
        tokens = slice(item["start"], item["stop"])
        if item["rows"] == 0:
            found[item["first_query"], :, tokens] += 1
            continue
        for row in range(item["first_row"], item["first_row"] + item["rows"]):
            query = item["first_query"] + row // shape.sharing
            head = item["head"] * shape.sharing + row % shape.sharing
            inside = slice(max(item["start"], lows[query]), min(item["stop"], highs[query] + 1))
            if inside.start < inside.stop:
                found[query, head, inside] += 1
    return found


@settings(max_examples=50)
@given(chunks=batches, spec=specs, sharing=st.sampled_from([1, 3, 8]), threads=st.integers(1, 5))
def test_each_query_reads_each_token_that_it_may_once(
    chunks: list[tuple[int, int]], spec: AttentionSpec, sharing: int, threads: int
) -> None:
    seen, shape, _ = planned(chunks, spec, sharing, threads)
    longest = max(map(sum, chunks))
    found = reading(seen, shape, longest)
    want = np.zeros_like(found)
    query = 0
    for history, length in chunks:
        for position in range(history, history + length):
            live = spec.live_range(position)
            want[query, :, live.start : position + 1] = 1
            query += 1
    np.testing.assert_array_equal(found, want)


@given(
    chunks=batches, spec=specs, sharing=st.sampled_from([1, 3, 8, 71]), threads=st.integers(1, 5)
)
def test_items_are_of_one_sequence_and_fit_a_thread(
    chunks: list[tuple[int, int]], spec: AttentionSpec, sharing: int, threads: int
) -> None:
    seen, shape, layout = planned(chunks, spec, sharing, threads)
    starts = np.concatenate([[0], np.cumsum([length for _, length in chunks])]).tolist()
    for item in seen.items:
        begin, end = starts[item["seq"] : item["seq"] + 2]
        assert 0 <= item["start"] < item["stop"] <= sum(chunks[item["seq"]])
        assert begin <= item["first_query"] < end
        assert 0 <= item["rows"] <= MAX_PANELS * LANES
        if item["rows"]:
            assert item["first_row"] + item["rows"] <= (end - begin) * shape.sharing
            assert 0 <= item["head"] < shape.kv_heads
        else:
            assert end - begin == 1
    # The longest come first, so that no thread is left with one when the others are done.
    rows = [-(-item["rows"] // LANES) * LANES or shape.num_rows for item in seen.items]
    costs = [n * (item["stop"] - item["start"]) for n, item in zip(rows, seen.items, strict=True)]
    assert costs == sorted(costs, reverse=True)
    assert 1 <= seen.plan.num_threads <= max(1, threads)
    assert layout.offsets["end"] % LINE_BYTES == 0


@given(
    chunks=batches, spec=specs, sharing=st.sampled_from([1, 3, 8, 71]), threads=st.integers(1, 5)
)
def test_the_parts_of_a_group_lie_side_by_side_and_are_the_same_queries(
    chunks: list[tuple[int, int]], spec: AttentionSpec, sharing: int, threads: int
) -> None:
    seen, shape, layout = planned(chunks, spec, sharing, threads)
    queries = ("rows", "seq", "first_query", "head", "first_row")
    ordered = sorted(seen.items, key=lambda item: (item["group"], item["start"]))
    used: list[tuple[int, int]] = []
    for number, members in groupby(ordered, key=lambda item: item["group"]):
        parts, group = list(members), seen.groups[number]
        assert group["remaining"] == group["num_parts"] == len(parts)
        assert len({tuple(part[name] for name in queries) for part in parts}) == 1
        if len(parts) == 1:
            assert parts[0]["area"] == -1
            continue
        rows = parts[0]["rows"]
        size = layout.area_bytes(-(-rows // LANES) * LANES if rows else shape.num_rows)
        # In the order of their tokens, as ``merge`` walks them; no token is skipped between.
        for n, part in enumerate(parts):
            assert part["area"] == group["first_area"] + n * size
            used.append((part["area"], part["area"] + size))
        assert all(a["stop"] == b["start"] for a, b in pairwise(parts))
    areas: Any = seen.plan.kept[2]
    used.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(used))
    assert not used or (used[0][0] >= 0 and used[-1][1] <= areas.numel())
    if threads == 1:
        assert not used, "one thread has nothing to gain from parts"


def test_one_long_sequence_is_work_for_every_thread() -> None:
    for chunk in ((20_000, 1), (3000, 40)):
        seen, _, _ = planned([chunk], FullAttention(**COMMON), 2, 4)
        assert seen.plan.num_threads == 4
        assert len(seen.items) >= 8
        longest = max(item["stop"] - item["start"] for item in seen.items)
        assert longest <= sum(chunk) / 4


def test_little_work_is_for_one_thread() -> None:
    seen, _, _ = planned([(30, 1)], FullAttention(**COMMON), 2, 4)
    assert seen.plan.num_threads == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_without_queries_has_no_items(threads: int) -> None:
    seen, _, _ = planned([(30, 0), (0, 0)], FullAttention(**COMMON), 2, threads)
    assert not seen.items
