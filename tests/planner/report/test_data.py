"""What is drawn is computed: over time by the timelines, against tokens by the accountings."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.fleets import BLOCK_BYTES, fleet_of, spec_of
from planner.reports import report
from quire.kv import CacheConfig
from quire.planner.report import held_by_batch, held_by_one
from quire.planner.report.content import Lengths, duration, rate
from quire.planner.report.memory_section import series_of
from quire.planner.simulation.timeline import FIGURES, State, Timeline
from quire.planner.subject import find_subject
from quire.units import ceil_div

NOTES = st.lists(
    st.tuples(st.floats(1e-3, 100), st.integers(0, 10**12), st.integers(0, 50)),
    min_size=1,
    max_size=40,
)


@given(st.lists(NOTES, min_size=1, max_size=3), st.integers(1, 50), st.floats(1, 3))
def test_resampling_loses_nothing(
    several: list[list[tuple[float, int, int]]], num_spans: int, longer: float
) -> None:
    lines = []
    for notes in several:
        line, now_s = Timeline(max_points=16), 0.0
        for seconds, held, running in notes:
            now_s += seconds
            line.note(now_s, State(held // 2, held, held // 4, running, running // 2))
        lines.append(line)
    result = replace(report().variants[0].result, timelines=tuple(tuple(x.points) for x in lines))
    duration_s = longer * max(line.duration_s for line in lines)
    series = series_of(result, num_spans, duration_s=duration_s)
    assert series.num_spans == num_spans
    for name in FIGURES:
        total = sum(series.figures[name]) * series.span_s
        assert total == pytest.approx(sum(line.integral(name) for line in lines), rel=1e-6)
    assert min(series.empty_bytes) >= 0


def test_one_sequence_in_blocks_and_in_a_range() -> None:
    """Seed 3: flat at the longest, against what is used and less than a block."""
    sizes = {name: fleet_of(name).sizes for name in ("contiguous", "paged")}
    contiguous, paged = held_by_one(spec_of(), sizes, Lengths(input_tokens=20, output_tokens=5))
    assert set(contiguous.committed_bytes) == {512 // 16 * BLOCK_BYTES}
    assert paged.num_tokens[0] == 0
    assert paged.num_tokens[-1] == 511 - 20
    for tokens, committed, used in zip(
        paged.num_tokens, paged.committed_bytes, paged.used_bytes, strict=True
    ):
        assert committed == ceil_div(20 + tokens, 16) * BLOCK_BYTES
        assert 0 <= committed - used < BLOCK_BYTES
        assert used == (20 + tokens) * BLOCK_BYTES // 16


def test_eight_thousand_tokens_are_a_gigabyte() -> None:
    """Seed 3: 8k of context at about 125 KB a token."""
    sizes = CacheConfig(max_model_len=8192, max_num_seqs=4, capacity_bytes=2**30)
    held = held_by_one(
        find_subject("Llama-3.1-8B").spec,
        {"contiguous": sizes, "paged": sizes},
        Lengths(input_tokens=1, output_tokens=1),
    )
    assert held[0].committed_bytes[0] == held[0].committed_bytes[-1] == 2**30
    assert held[1].committed_bytes[0] == 16 * 128 * 1024
    assert held[1].committed_bytes[-1] == 2**30


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 300)), min_size=1, max_size=5),
    st.sampled_from(["contiguous", "growing", "growing-staggered", "paged", "virtual-shared"]),
)
def test_a_batch_holds_what_its_sequences_hold(lengths: list[tuple[int, int]], case: str) -> None:
    batch = [Lengths(input_tokens=prompt, output_tokens=output) for prompt, output in lengths]
    name = case.partition("-")[0]
    (held,) = held_by_batch(spec_of(), {name: fleet_of(case).sizes}, batch)
    for step, committed, used in zip(
        held.num_tokens, held.committed_bytes, held.used_bytes, strict=True
    ):
        going = [each for each in batch if step <= each.output_tokens]
        tokens = sum(
            min(each.input_tokens + step, each.input_tokens + max(each.output_tokens, 1) - 1)
            for each in going
        )
        assert used == tokens * BLOCK_BYTES // 16
        assert committed >= used
        if name == "contiguous":
            assert committed == len(going) * 32 * BLOCK_BYTES


def test_a_request_longer_than_the_model_is_not_in_the_batch() -> None:
    sizes = {"paged": fleet_of().sizes}
    assert held_by_batch(spec_of(), sizes, [Lengths(input_tokens=600, output_tokens=1)]) == []
    one = held_by_one(spec_of(), sizes, Lengths(input_tokens=600, output_tokens=1))
    assert one[0].num_tokens == (0,)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        *((0, "0"), (2e-6, "2.00 µs"), (0.03, "30.0 ms"), (0.99996, "1.00 s"), (59.96, "60.0 s")),
        *((599.9, "600 s"), (1200, "20.0 min"), (5400, "1.50 h"), (172_800, "2.00 d")),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_rates() -> None:
    assert [rate(value) for value in (0, 0.000012, 0.0184, 2.357, 1234.5)] == [
        *("0", "1.2e-05", "0.0184", "2.36"),
        "1,234",
    ]
