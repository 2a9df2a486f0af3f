"""From the option ``device`` to a device that can be used, or to a sentence why not.

How much of its memory there is for a model and its cache, ``quire.memory`` says.
"""

import logging
from contextlib import AbstractContextManager, nullcontext

import torch

from quire.errors import ConfigError
from quire.memory.by_device import why_no_memory

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")


def choose_device(name: str) -> torch.device:
    """``auto`` is the first GPU that can be used, else the CPU, and the log says why.

    Raises: ConfigError for a GPU that was asked for and cannot be used.
    """
    if name == "cpu":
        return _CPU
    asked = torch.device("cuda" if name == "auto" else name)
    index = asked.index or 0
    reason = why_no_cuda(index) or why_no_memory(torch.device("cuda", index))
    if reason is None:
        log.info("device: cuda:%d (%s)", index, torch.cuda.get_device_name(index))
        return torch.device("cuda", index)
    if name == "auto":
        log.info("device: cpu, for %s", reason)
        return _CPU
    raise ConfigError(f"device={name}: {reason}; or leave it out, for the CPU")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """While it lasts, kernels that are launched without asking go there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def refuse_other_device(name: str, found: torch.device) -> None:
    """Raises: ConfigError for a model that is not on the device that was asked for."""
    asked = torch.device("cpu" if name == "auto" else name)
    same_index = asked.index is None or asked.index == (found.index or 0)
    if name != "auto" and (asked.type != found.type or not same_index):
        raise ConfigError(
            f"device={name} is not where the model is, {found}: move it (model.to({name!r})), or "
            f"leave device auto"
        )


def why_no_cuda(index: int = 0) -> str | None:
    """Why that GPU cannot be used, and what to do; None if it can."""
    if not torch.cuda.is_available():
        return _why_none()
    count = torch.cuda.device_count()
    if index >= count:
        there = ", ".join(f"cuda:{number}" for number in range(count))
        return f"there is no cuda:{index}, only {there}: choose one that is there"
    try:
        torch.cuda.mem_get_info(index)  # the first thing that needs some of its memory
    except RuntimeError as error:
        return (
            f"cuda:{index} gives no memory, not even to begin ({_first_line(error)}): end what "
            f"else uses it (nvidia-smi lists it)"
        )
    return None


def _why_none() -> str:
    """Why torch has no GPU at all."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} was built without CUDA: install one that has it "
            f"(https://pytorch.org/get-started)"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return (
            f"CUDA does not start ({_first_line(error)}): see what nvidia-smi says of the driver, "
            f"and whether CUDA_VISIBLE_DEVICES hides the GPU"
        )
    return "torch finds no GPU: see whether nvidia-smi does"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(" .:")
