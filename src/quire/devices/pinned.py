"""Memory of the host that a device copies to and from by itself: pinned, where any can be had."""

import logging

import torch
from torch import Tensor

from quire.errors import one_line

log = logging.getLogger(__name__)

_TRIAL_BYTES = 2**20


def host_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """u8[num_bytes], pinned for a GPU. Of pageable memory it waits for each copy, as torch does."""
    if device.type == "cuda":
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # which an engine has been told of at its start
            pass
    return torch.empty(num_bytes, dtype=torch.uint8)


def warn_if_none(device: torch.device) -> None:
    """Say aloud that a step's copies will be waited for, where no memory can be pinned."""
    if device.type != "cuda":
        return
    try:
        torch.empty(_TRIAL_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log.warning(
            "no memory can be pinned (%s), so that each copy to and from %s is waited for: raise "
            "the limit of locked memory (ulimit -l; docker run --ulimit memlock=-1)",
            one_line(error),
            device,
        )
