"""Sizes are read and written the way people type them, and rounding is exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.units import (
    align_down,
    align_up,
    ceil_div,
    format_bytes,
    format_count,
    format_number_of,
    format_seconds,
    parse_bytes,
    parse_count,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("1k", 1024),
        ("1.5GiB", 3 * 2**29),
        ("16GB", 16 * 10**9),
        ("16G", 16 * 2**30),
        (" 2 mib ", 2 * 2**20),
        (77, 77),
    ],
)
def test_sizes_are_read(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "count"), [("0", 0), ("4M", 4 * 10**6), ("2.5k", 2500), (" 1 g ", 10**9), (77, 77)]
)
def test_counts_are_read(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "-1", "1 GB", "1KiB", "NaN"])
def test_what_is_no_count_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a count"):
        parse_count(text)


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 parsec", "1.2.3", "1e9", "NaN"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (14_745_600, "14.06 MiB"),  # seed 0: Qwen3-4B, 100 tokens
        (6_039_797_760, "5.62 GiB"),
        (2**50, "1024 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_sizes_are_written(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 2**62), st.integers(1, 2**31))
def test_rounding_brackets_the_value(value: int, step: int) -> None:
    low, high = align_down(value, step), align_up(value, step)
    assert low <= value <= high
    assert low % step == high % step == 0
    assert high - low in (0, step)
    assert ceil_div(value, step) * step == high


def test_counts_and_durations_read_well() -> None:
    assert format_count(40960) == "40,960"
    assert [format_number_of(count, "block") for count in (0, 1, 2000)] == [
        "0 blocks",
        "1 block",
        "2,000 blocks",
    ]
    assert [format_seconds(s) for s in (0.012, 3.44, 125)] == ["12 ms", "3.4 s", "2 m 05 s"]
