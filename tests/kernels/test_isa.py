"""What is read out of a CPU's name and features."""

import pytest

from quire.kernels.compile import isa


@pytest.mark.parametrize(
    ("cpu", "features", "locality"),
    [
        ("znver5", "+sse2,+avx2", 0),
        ("znver4", "+sse2,+avx2", None),
        ("sapphirerapids", "+sse2,+avx2", 2),
        ("apple-m1", "+neon", None),
    ],
)
def test_blocks_are_asked_for_where_and_as_it_pays(
    cpu: str, features: str, locality: int | None
) -> None:
    assert isa(cpu, features).block_prefetch == locality
