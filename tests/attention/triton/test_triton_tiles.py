"""The table of tiles: everything fits, every query is served, and long walks are split."""

from hypothesis import given
from hypothesis import strategies as st

from attention.triton.interpreter import tiles
from quire.attention.triton.launch import Gpu

WIDTHS = st.sampled_from([8, 24, 64, 80, 96, 128, 192, 256, 512])
GPUS = st.builds(
    Gpu,
    num_processors=st.integers(1, 200),
    shared_bytes=st.sampled_from([99 * 1024, 163 * 1024, 227 * 1024]),
    fp8_converts=st.booleans(),
    products_from_shared=st.booleans(),
    emulated=st.just(False),
)


@given(WIDTHS, WIDTHS, st.sampled_from([1, 2, 4]), st.booleans(), st.integers(1, 128), GPUS)
def test_a_tile_fits_and_has_all_heads(
    key: int, value: int, entry_bytes: int, plain: bool, sharing: int, gpu: Gpu
) -> None:
    common = dict(key=key, value=value, entry_bytes=entry_bytes, plain=plain, gpu=gpu)
    few, many = tiles.few_queries(**common, sharing=sharing), tiles.many_queries(**common)
    width = tiles.room(key) + tiles.room(value)
    for tile in (few, many):
        assert 16 <= tile.rows <= 128
        heads = tile.heads(sharing)
        parts = -(-sharing // tile.rows)
        assert (parts - 1) * heads < sharing <= parts * heads
        assert 1 <= tile.queries(sharing) * heads <= tile.rows
        held = tile.rows * width * max(entry_bytes, 2)
        on_the_way = tile.buffers * tile.tokens * width * entry_bytes
        assert tile.buffers == 0 or held + on_the_way <= gpu.shared_bytes
        assert tile.num_stages(looked_up=True) >= tile.num_stages(looked_up=False) >= 1


@given(st.integers(0, 10**5), st.integers(0, 10**6), st.integers(1, 2000))
def test_splits_keep_processors_busy_and_are_worth_it(
    num_programs: int, num_tokens: int, wanted: int
) -> None:
    tile = tiles.Tile(rows=16, tokens=64, num_warps=4, buffers=2)
    splits = tiles.num_splits(num_programs, num_tokens, tile, wanted)
    assert 1 <= splits <= tiles.MOST_SPLITS
    if splits > 1:
        assert num_programs * (splits - 1) < wanted
        assert (splits - 1) * tiles.LEAST_STEPS * tile.tokens < num_tokens


def test_room_is_a_power_of_two() -> None:
    assert [tiles.room(n) for n in (1, 16, 17, 64, 80, 128, 129, 512)] == [
        *(16, 16, 32, 64, 128, 128, 256, 512)
    ]
