"""What each benchmark of attention needs: Quire's choice of a backend, threads, errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.attention import AttentionBackend, choose_backend
from quire.config import kernel_dir
from quire.spec import AttentionSpec


def make_backend(spec: AttentionSpec) -> AttentionBackend:
    return choose_backend("auto", [spec], torch.device("cpu"), kernel_dir=kernel_dir())


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
