"""Bytes of a short sequence in large pages, by the arithmetic that chose the layout."""

import pytest

from benchmarks.gpu.packing import Packing
from quire.errors import ConfigError

MIB = 2**20


def qwen3_4b(layers_per_page: int, *, page_bytes: int = 2 * MIB, apart: bool = False) -> Packing:
    """36 layers of 8 heads of 128 in bfloat16."""
    return Packing(
        num_layers=36,
        layers_per_page=layers_per_page,
        entry_bytes=8 * 128 * 2,
        page_bytes=page_bytes,
        values_apart=apart,
    )


@pytest.mark.parametrize(
    ("layers", "apart", "tokens", "of_100_tokens", "waste"),
    [
        (36, False, 14.2, 16, 1),
        (12, False, 42.7, 18, 3),
        (6, False, 85.3, 24, 6),
        (4, False, 128, 18, 9),
        (1, False, 512, 72, 36),
        (1, True, 1024, 144, 72),
    ],
)
def test_a_hundred_tokens_in_pages_of_2_mib(
    layers: int, apart: bool, tokens: float, of_100_tokens: int, waste: int
) -> None:
    packing = qwen3_4b(layers, apart=apart)
    assert packing.tokens_per_page == pytest.approx(tokens, abs=0.05)
    assert packing.committed_bytes(100) == of_100_tokens * MIB
    assert packing.expected_waste_bytes == waste * MIB


def test_the_tokens_themselves() -> None:
    packing = qwen3_4b(36)
    assert packing.num_streams * packing.stream_bytes == 147_456
    assert round(100 * 147_456 / MIB, 2) == 14.06
    assert packing.committed_bytes(0) == 0


def test_smaller_pages() -> None:
    metal = qwen3_4b(1, page_bytes=256 * 2**10, apart=True)
    assert metal.tokens_per_page == 128
    assert metal.committed_bytes(100) == 18 * MIB
    assert metal.expected_waste_bytes == 9 * MIB
    assert qwen3_4b(1, page_bytes=16 * 2**10, apart=True).tokens_per_page == 8


def test_the_expected_waste_is_the_mean_over_lengths() -> None:
    packing = qwen3_4b(4)
    lengths = range(1, 128 * 8 + 1)  # whole pages at the end
    waste = sum(packing.committed_bytes(n) - n * 147_456 for n in lengths) / len(lengths)
    assert waste == pytest.approx(packing.expected_waste_bytes, rel=0.01)


@pytest.mark.parametrize("layers", [0, 5, 72])
def test_layers_that_do_not_divide_are_refused(layers: int) -> None:
    with pytest.raises(ConfigError, match="36 layers"):
        qwen3_4b(layers)
