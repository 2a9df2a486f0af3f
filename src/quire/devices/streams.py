"""The stream that an engine's work goes to: the device's default one, whichever thread steps.

Each thread has its own current stream, and the caller may have chosen another. Memory that is taken
back while kernels use it, and a cache that is read where it was just written, are right only if all
of an engine's work is in one order.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_default_stream(device: torch.device) -> Iterator[None]:
    """While it lasts, what is launched goes there.

    It comes after what the caller has launched on a stream of its own, and before what it launches
    on that later.
    """
    if device.type != "cuda":
        yield
        return
    callers, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    is_other = callers != default
    if is_other:
        default.wait_stream(callers)
    try:
        # The device first: a stream of another one than the current would make that one the
        # current device again at the end, which takes a context there where none was.
        with torch.cuda.device(device), torch.cuda.stream(default):
            yield
    finally:
        if is_other:
            callers.wait_stream(default)
