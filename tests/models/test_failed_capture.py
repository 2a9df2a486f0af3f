"""After a capture that failed: torch's allocator is asked for no more than this torch can do."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.models.cuda_graphs import give_back_pool, is_shortage, put_in_order

DEVICE, POOL = torch.device("cuda", 1), (0, 7)
NAMES = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")


class Allocator:
    """Torch's, as far as it keeps books of captures and of one pool of graphs."""

    def __init__(self, *, underway: bool = False, uses: int = 0, live: bool = False) -> None:
        self.underway, self.uses = underway, uses
        self.keeps, self.live = True, live  # memory of the pool; and a tensor in it
        self.is_drawing = False  # the generator counts a capture as under way
        self.captured_on: list[Any] = []

    def empty_cache(self) -> None:
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        assert self.uses >= 0, "use_count == 0 INTERNAL ASSERT FAILED, from now on each time"
        self.keeps &= self.uses > 0 or self.live

    def end(self, index: int, pool: Any) -> None:
        assert (index, pool) == (1, POOL)
        if not self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway = False

    def release(self, index: int, pool: Any) -> None:
        assert (index, pool) == (1, POOL)
        self.uses -= 1

    def snapshot(self) -> list[dict[str, Any]]:
        others = {"segment_pool_id": (0, 0), "active_size": 0}
        own = {"segment_pool_id": POOL, "active_size": 512 * self.live}
        return [others, own] if self.keeps else [others]

    @contextmanager
    def graph(self, graph: Any, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
        self.empty_cache()
        self.is_drawing = True
        yield
        self.captured_on.append(stream)
        self.is_drawing = False


def with_allocator(
    monkeypatch: pytest.MonkeyPatch, made: Allocator, name: str = NAMES[0]
) -> Allocator:
    for each in NAMES:
        monkeypatch.delattr(torch._C, each, raising=False)
    monkeypatch.setattr(torch._C, name, made.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    for each, value in {
        "empty_cache": made.empty_cache,
        "memory_snapshot": made.snapshot,
        "current_stream": lambda device: stream,
        "stream": lambda stream: nullcontext(),
        "graph": made.graph,
        "CUDAGraph": object,
    }.items():
        monkeypatch.setattr(torch.cuda, each, value)
    return made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("underway", [True, False])
def test_memory_can_be_given_back_again(
    name: str, underway: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What graphs have of the pool is theirs."""
    made = with_allocator(monkeypatch, Allocator(underway=underway, uses=3), name)
    put_in_order(DEVICE, "a stream", POOL)
    assert not made.underway
    assert made.uses == 3
    torch.cuda.empty_cache()


@pytest.mark.parametrize("underway", [True, False])
def test_the_generator_of_random_numbers_draws_again(
    underway: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts no capture any more once one has ended."""
    made = with_allocator(monkeypatch, Allocator(underway=underway, uses=1))
    made.is_drawing = True
    put_in_order(DEVICE, "a stream", POOL)
    assert made.captured_on == ["a stream"]
    assert not made.is_drawing


@pytest.mark.parametrize("num_failed", [1, 3])
def test_a_pool_goes_back_though_captures_into_it_have_failed(
    num_failed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_allocator(monkeypatch, Allocator(uses=num_failed))
    give_back_pool(DEVICE, POOL, num_failed)
    assert (made.uses, made.keeps) == (0, False)


@pytest.mark.parametrize("live", [True, False])
def test_a_torch_that_keeps_its_own_order_is_left_alone(
    live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a tensor of the pool is there still, which a model has kept from the capture."""
    made = with_allocator(monkeypatch, Allocator(live=live))
    put_in_order(DEVICE, "a stream", POOL)
    put_in_order(DEVICE, "a stream", None)  # it failed before there was a pool
    give_back_pool(DEVICE, POOL, 2)
    assert (made.uses, made.keeps) == (0, live)
    torch.cuda.empty_cache()


def test_an_allocator_without_pools_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = with_allocator(monkeypatch, Allocator(uses=1))

    def none() -> None:
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", none)
    give_back_pool(DEVICE, POOL, 1)
    assert made.uses == 1


def test_a_capture_of_another_engine_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    made = with_allocator(monkeypatch, Allocator(underway=True, uses=1))

    def of_others(index: int, pool: Any) -> None:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, NAMES[0], of_others)
    put_in_order(DEVICE, "a stream", POOL)
    give_back_pool(DEVICE, POOL, 1)
    assert made.underway
    assert made.uses == 1


def test_a_shortage_is_known_by_what_it_came_from() -> None:
    shortage = torch.OutOfMemoryError("no")
    other = RuntimeError("operation failed due to a previous error during capture")
    assert is_shortage(shortage)
    assert is_shortage(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_shortage(other)
    other.__context__ = shortage
    assert is_shortage(other)
