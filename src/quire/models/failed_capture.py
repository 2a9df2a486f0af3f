"""What a capture that failed leaves behind in torch, put in order, and whether it may do later.

A capture that cannot be ended (a copy to the host in the middle of it is enough) stays on the books
of torch's allocator, until torch 2.13 at least: it then gives no memory back to the device, and
raises where it is asked to. Its share of the pool stays taken, too.

Source: pytorch pull requests 180395 and 190348
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


def put_in_order(device: torch.device, stream: Any, pool: Any, *, is_last: bool) -> None:
    """After a capture into ``pool`` that failed, and whose graph is gone.

    ``is_last``: no other graph is in that pool, which nobody captures into any more.
    """
    index = device.index or 0
    with suppress(RuntimeError):  # what the pass launched there may use what others get next
        torch.cuda.current_stream(device).wait_stream(stream)
    if pool is not None and not _gives_back():
        with suppress(RuntimeError):  # it is another one that is under way, of another engine
            _end_allocating()(index, pool)
    if pool is not None and is_last:
        with suppress(RuntimeError):  # a torch that has done so itself
            torch._C._cuda_releasePool(index, pool)
    _gives_back()


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
