"""Threads of ranks that share a machine's cores: each computes with its share of them."""

import logging
from collections.abc import Callable

import torch

from quire.config import names_threads

log = logging.getLogger(__name__)


def share_of_threads(num_ranks: int) -> int | None:
    """Of those that this process computes with; None where the user has named a number for each."""
    if names_threads():
        return None
    return max(1, torch.get_num_threads() // num_ranks)


def compute_with(num_threads: int) -> Callable[[], None]:
    """From now on, in this thread and those that begin later. What comes back undoes it, in the
    same way, unless another number has been set since.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    log.info("this rank computes with %d of %d threads", num_threads, before)

    def undo() -> None:
        if torch.get_num_threads() == num_threads:
            torch.set_num_threads(before)

    return undo
