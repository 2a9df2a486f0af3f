"""Many tensors, one copy, one wait."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pretend
from quire import devices as results
from quire.devices import Results, wait_for

HAS_GPU = torch.cuda.is_available()
DEVICES = [
    torch.device("cpu"),
    *([pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)] if HAS_GPU else []),
]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from([np.int32, np.int64, np.float32, np.float64, np.uint8]),
            st.lists(st.integers(0, 5), min_size=1, max_size=3),
        ),
        max_size=6,
    ),
    most_bytes=st.sampled_from([1, 50, 10**9]),
)
def test_tensors_arrive_as_they_are(
    device: torch.device, kinds: list[tuple[Any, list[int]]], most_bytes: int
) -> None:
    numbers = np.random.default_rng(0)
    arrays = [numbers.integers(0, 200, shape).astype(dtype) for dtype, shape in kinds]
    under_way = Results(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "_MOST_BYTES", most_bytes)
        numbered = [under_way.add(torch.from_numpy(each).to(device)) for each in arrays]
        arrived = under_way.arrive()
    assert numbered == list(range(len(arrays)))
    for found, want in zip(arrived, arrays, strict=True):
        assert found.dtype == want.dtype
        assert np.array_equal(found, want)


def test_one_copy_and_one_wait() -> None:
    with pretend.cuda() as gpu:
        device = torch.device("cuda", 0)
        several = [torch.arange(5, device=device), torch.ones(2, 3, device=device)]
        under_way = Results(device)
        gpu.reset()
        for tensor in several:
            under_way.add(tensor)
        assert not gpu.waits
        assert [found.tolist() for found in under_way.arrive()] == [list(range(5)), [[1.0] * 3] * 2]
        assert (gpu.waits, gpu.num_downloads) == (["event"], 1)


def test_several_copies_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_MOST_BYTES", 100)
    with pretend.cuda() as gpu:
        under_way = Results(torch.device("cuda", 0))
        for number in range(5):
            under_way.add(torch.full((20,), number, device="cuda"))
        gpu.reset()
        assert [found[0] for found in under_way.arrive()] == list(range(5))
        assert gpu.waits == ["event"]


def test_the_host_has_nothing_to_wait_for() -> None:
    wait_for(torch.device("cpu"))
