"""Many arrays, one copy."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

import pretend
from quire.devices import give_back_unused, staged_bytes, to_device

CPU = torch.device("cpu")
SOME = st.lists(
    st.one_of(
        arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=1, max_dims=2, min_side=0))
        for dtype in (np.int32, np.int64, np.float32, np.uint8)
    ),
    min_size=1,
    max_size=6,
)


@given(SOME)
def test_arrays_come_as_they_are(several: list[np.ndarray]) -> None:
    room = torch.full((staged_bytes(several) + 3,), 7, dtype=torch.uint8)
    for into in (None, room):
        for array, found in zip(several, to_device(several, CPU, into), strict=True):
            assert np.array_equal(found.numpy(), array, equal_nan=array.dtype.kind == "f")
            assert found.dtype == torch.from_numpy(array).dtype
    assert room[-3:].tolist() == [7] * 3


def test_one_copy_and_no_wait() -> None:
    with pretend.cuda() as gpu:
        several = [np.arange(5), np.zeros((2, 3), np.int32), np.arange(6).reshape(2, 3)[:, 1:]]
        for _ in range(3):  # before the copies have ended
            found = to_device(several, torch.device("cuda", 0))
        assert gpu.num_uploads == 3
        assert not gpu.waits
        assert [x.tolist() for x in found] == [array.tolist() for array in several]


def test_the_same_shapes_have_the_same_addresses() -> None:
    with pretend.cuda():
        device = torch.device("cuda", 0)
        room = torch.zeros(256, dtype=torch.uint8, device=device)
        first = to_device([np.arange(3), np.zeros(5, np.int32)], device, room)
        again = to_device([np.arange(3) + 9, np.ones(5, np.int32)], device, room)
        assert [x.data_ptr() for x in first] == [x.data_ptr() for x in again]
        assert first[0].tolist() == [9, 10, 11]
        with pytest.raises(RuntimeError):
            to_device([np.zeros(100)], device, room)


def test_pinned_memory_goes_back_by_the_name_that_torch_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for owner, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        monkeypatch.setattr(owner, name, partial(called.append, name), raising=False)
    give_back_unused(torch.device("cpu"))
    assert called == []
    give_back_unused(torch.device("cuda", 0))
    monkeypatch.delattr(torch.accelerator, "empty_host_cache")
    give_back_unused(torch.device("cuda", 0))
    monkeypatch.delattr(torch._C, "_host_emptyCache")
    give_back_unused(torch.device("cuda", 0))
    assert called == ["empty_host_cache", "_host_emptyCache"]


def test_what_torch_does_not_give_back_now_is_said_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str] = []

    def refuses() -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED\nand much more")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuses)
    monkeypatch.setattr(
        torch.accelerator, "empty_host_cache", partial(called.append, "host"), raising=False
    )
    give_back_unused(torch.device("cuda", 0))
    assert called == ["host"]
    assert [record.message for record in caplog.records] == [
        "torch keeps unused memory: captures_underway.empty() INTERNAL ASSERT FAILED"
    ]
