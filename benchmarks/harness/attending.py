"""What each benchmark of attention needs: the backend that Quire chooses here, threads, errors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.attention import AttentionBackend, choose_backend
from quire.config import kernel_dir
from quire.spec import AttentionSpec
from quire.strategies import LayerView

Writer = Callable[[Tensor, Tensor, Tensor], None]  # slots, k, v


def make_backend(spec: AttentionSpec) -> AttentionBackend:
    return choose_backend("auto", [spec], torch.device("cpu"), kernel_dir=kernel_dir())


def writer_of(backend: AttentionBackend) -> Callable[[LayerView], Writer] | None:
    """What it gives to a storage to write with; None where torch's indexing does."""
    return getattr(backend, "make_writer", None)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's, in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def max_error(found: object, expected: Tensor) -> float:
    """The largest difference, of the first rows of what was found."""
    assert isinstance(found, Tensor)
    return float((found[: len(expected)].double() - expected.double()).abs().max())
