"""Up to ``steady_tokens`` a sequence may go token by token or at once: nothing tells them apart."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.covering import examples
from quire.kv import Accounting, CacheConfig, Copy, Fits, Release, build_accounting
from quire.spec import FullAttention, Layer, LayerSpec, ModelSpec, SlidingWindow

FULL = FullAttention(num_kv_heads=2, head_dim=64, dtype="float32")
WINDOW = SlidingWindow(num_kv_heads=2, head_dim=64, dtype="float32", window=40)
CASES = {
    "contiguous": {},
    "growing": {"growth_tokens": 64},
    "growing-staggered": {"growth": "staggered", "growth_tokens": 32},
    "paged": {},
    "virtual": {},
    "virtual-shared": {"shares_pages": True},
}


def made(case: str, *kinds: LayerSpec) -> Accounting:
    layers = tuple(Layer(specs=(kind,)) for kind in kinds)
    spec = ModelSpec(model_type="test", layers=layers, max_model_len=512, dtype="float32")
    sizes = CacheConfig(max_model_len=512, max_num_seqs=4, capacity_bytes=2**26, **CASES[case])
    return build_accounting(case.partition("-")[0], spec, sizes)


@settings(max_examples=examples(30, of=80), deadline=None)
@given(
    case=st.sampled_from(sorted(CASES)),
    starts=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    count=st.integers(1, 150),
)
def test_token_by_token_or_at_once(case: str, starts: list[int], count: int) -> None:
    one_by_one, at_once = made(case, FULL, FULL), made(case, FULL, FULL)
    seq_ids = list(range(len(starts)))
    for cache in (one_by_one, at_once):
        for seq_id, start in enumerate(starts):
            cache.add(seq_id, max_tokens=500)
            assert isinstance(cache.try_extend(seq_id, start), Fits)
        cache.drain()
    steady = [at_once.steady_tokens(seq_id) for seq_id in seq_ids]
    assert all(tokens >= start for tokens, start in zip(steady, starts, strict=True))
    count = min(count, *(tokens - start for tokens, start in zip(steady, starts, strict=True)))
    if not count:
        return
    changes = []
    for more in range(1, count + 1):
        ends = [start + more for start in starts]
        assert one_by_one.try_extend_each(seq_ids, ends) == len(seq_ids)
        changes += one_by_one.drain()
    assert at_once.try_extend_each(seq_ids, [start + count for start in starts]) == len(seq_ids)
    changes += at_once.drain()
    assert not [change for change in changes if isinstance(change, Copy | Release)]
    assert at_once.usage() == one_by_one.usage()
    assert at_once.held_bytes == one_by_one.held_bytes
    at_once.check()


@pytest.mark.parametrize("case", ["paged", "virtual", "virtual-shared"])
def test_where_windows_pass_nothing_is_steady(case: str) -> None:
    cache = made(case, FULL, WINDOW)
    cache.add(0)
    assert isinstance(cache.try_extend(0, 100), Fits)
    assert cache.steady_tokens(0) == 100
