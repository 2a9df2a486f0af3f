"""After a capture that failed: torch's allocator is asked for no more than this torch can do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.models.failed_capture import is_shortage, put_in_order

DEVICE, POOL = torch.device("cuda", 1), (0, 7)
NAMES = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")


class Allocator:
    """Torch's, as far as it keeps books of captures."""

    def __init__(self, *, underway: bool, uses: int) -> None:
        self.underway, self.uses = underway, uses
        self.num_emptied = 0

    def empty_cache(self) -> None:
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self.num_emptied += 1

    def end(self, index: int, pool: Any) -> None:
        assert (index, pool) == (1, POOL)
        if not self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway = False

    def release(self, index: int, pool: Any) -> None:
        assert (index, pool) == (1, POOL)
        if not self.uses:
            raise RuntimeError("it != graph_pools.end() INTERNAL ASSERT FAILED")
        self.uses -= 1


def with_allocator(
    monkeypatch: pytest.MonkeyPatch, name: str, *, underway: bool, uses: int
) -> Allocator:
    made = Allocator(underway=underway, uses=uses)
    for each in NAMES:
        monkeypatch.delattr(torch._C, each, raising=False)
    monkeypatch.setattr(torch._C, name, made.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.empty_cache)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("underway", [True, False])
def test_memory_can_be_given_back_again(
    name: str, underway: bool, is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other graphs' uses of the pool are theirs; the last one's is nobody's any more."""
    uses = 1 if is_last else 3
    made = with_allocator(monkeypatch, name, underway=underway, uses=uses)
    put_in_order(DEVICE, None, POOL, is_last=is_last)
    assert not made.underway
    assert made.uses == (0 if is_last else 3)
    torch.cuda.empty_cache()


def test_a_torch_that_keeps_its_own_order_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = with_allocator(monkeypatch, NAMES[0], underway=False, uses=0)
    put_in_order(DEVICE, None, POOL, is_last=True)
    put_in_order(DEVICE, None, None, is_last=True)  # it failed before there was a pool
    assert made.uses == 0
    assert made.num_emptied


def test_a_capture_of_somebody_else_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    made = with_allocator(monkeypatch, NAMES[0], underway=True, uses=1)

    def of_others(index: int, pool: Any) -> None:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, NAMES[0], of_others)
    put_in_order(DEVICE, None, POOL, is_last=False)
    assert made.underway


def test_a_shortage_is_known_by_what_it_came_from() -> None:
    shortage = torch.OutOfMemoryError("no")
    other = RuntimeError("operation failed due to a previous error during capture")
    assert is_shortage(shortage)
    assert is_shortage(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_shortage(other)
    other.__context__ = shortage
    assert is_shortage(other)
