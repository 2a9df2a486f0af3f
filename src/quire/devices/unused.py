"""What torch keeps of memory for later use: a device's, and pinned memory of the host."""

import logging

import torch

log = logging.getLogger(__name__)


def give_back_unused(device: torch.device) -> None:
    """Have torch give unused memory of this whole process back to the device and the system.

    Never fails: torch refuses while a graph is captured in another thread, and says so.
    """
    if device.type != "cuda":
        return
    # The public name came with torch 2.12; the other one is that of CUDA builds since 2.5.
    public = getattr(torch.accelerator, "empty_host_cache", None)
    of_host = public or getattr(torch._C, "_host_emptyCache", None)
    for give_back in (torch.cuda.empty_cache, of_host):
        try:
            if give_back is not None:
                give_back()
        except RuntimeError as error:
            log.warning("torch keeps unused memory: %s", str(error).partition("\n")[0])
