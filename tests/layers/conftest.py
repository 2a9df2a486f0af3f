"""What this room's tests share."""

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def use_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
