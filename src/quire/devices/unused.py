"""What torch keeps of memory, a device's and pinned memory of the host, for whoever comes next."""

import torch


def give_back_unused(device: torch.device) -> None:
    """Have it give back what nobody uses, of this whole process: to the device and the system."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    # The public name came with torch 2.12; the other one is that of CUDA builds since 2.5.
    public = getattr(torch.accelerator, "empty_host_cache", None)
    give_back = public or getattr(torch._C, "_host_emptyCache", None)
    if give_back is not None:
        give_back()
