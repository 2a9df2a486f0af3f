"""What a capture that failed leaves behind in torch, put in order, and whether it may do later.

A capture that cannot be ended (a copy to the host in the middle of it is enough) stays on torch's
books, until torch 2.13 at least:

* on the allocator's, which then gives no memory back to the device, and raises where it is asked;
* on its pool's, which counts it among its graphs for ever, so that its memory never goes back;
* before torch 2.13 on those of the generator of random numbers, of the whole process. It then draws
  no number any more, and lets no graph of the process be replayed.

Source: pytorch pull requests 180395 and 190348; ``CUDAGeneratorState::increase`` of torch 2.12
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch


def is_shortage(error: BaseException) -> bool:
    """Whether memory was short at that moment: itself, or what it came from."""
    return any(
        isinstance(each, torch.OutOfMemoryError) or "out of memory" in str(each).lower()
        for each in _origins(error)
    )


def put_in_order(device: torch.device, stream: Any, pool: Any) -> None:
    """After a capture on ``stream`` into ``pool`` that failed, and whose graph is gone."""
    with suppress(RuntimeError):  # what the pass launched there may use what others get next
        torch.cuda.current_stream(device).wait_stream(stream)
    if pool is not None and not _gives_back():
        with suppress(RuntimeError):  # it is another one that is under way, of another engine
            _end_allocating()(device.index or 0, pool)
    with suppress(RuntimeError):
        _capture_one_number(device, stream)
    _gives_back()


def give_back_pool(device: torch.device, pool: Any, num_failed: int) -> None:
    """Of a pool all of whose graphs are gone: what ``num_failed`` captures still count for.

    A torch that does not count them has given the memory back. To count less than none would
    spoil its allocator for good, so it is done only where unused memory stays taken.
    """
    with suppress(RuntimeError):  # an allocator without pools
        for _ in range(num_failed):
            if not _gives_back() or not _keeps_unused(pool):
                return
            torch._C._cuda_releasePool(device.index or 0, pool)
        _gives_back()


def _capture_one_number(device: torch.device, stream: Any) -> None:
    """A capture that does end, after which the generator counts none as under way."""
    number, graph = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
    # Outside of the capture too: one that fails leaves its stream as the current one.
    with (
        torch.cuda.stream(stream),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        number.zero_()


def _keeps_unused(pool: Any) -> bool:
    """Whether a pool has memory of the device that is no tensor's."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    own = [segment for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool)]
    return any(not segment["active_size"] for segment in own)


def _gives_back() -> bool:
    """Have torch give back what it keeps; False where it counts a capture as under way."""
    try:
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def _end_allocating() -> Any:
    """By the name that this torch has for it."""
    older = getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", None)
    return older or torch._C._cuda_endAllocateToPool


def _origins(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
