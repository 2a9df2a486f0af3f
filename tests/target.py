"""Where the suites run that follow ``pytest --device``: on the CPU, or on a GPU for real.

A suite that makes its tensors and its memory by what is here is marked ``device``. Whatever the
device: tables, lengths and the formula stay on the CPU, for that is where they are in the engine.

``--device emulated`` has tensors of the CPU in a GPU's memory, as its driver is emulated: large
pages, and nothing to be read where nothing is committed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memory.cuda.emulator import TENSOR_DEVICE, EmulatedDriver
from quire.memory import HostMemory, MemoryProvider
from quire.memory.cuda import CudaMemory

OPTION = "QUIRE_TEST_DEVICE"  # also for processes that a test starts
EMULATED = "emulated"


def name() -> str:
    return os.environ.get(OPTION, "cpu")


def device() -> torch.device:
    """Where tensors lie."""
    return torch.device("cpu" if name() == EMULATED else name())


def on_gpu() -> bool:
    return device().type == "cuda"


def has_cuda_memory() -> bool:
    """Where nothing is committed, nothing may be read or written."""
    return on_gpu() or name() == EMULATED


def memory(*, keep_bytes: int = 0) -> MemoryProvider:
    """A provider of the device's memory."""
    if on_gpu():
        return CudaMemory(device=device().index or 0, keep_bytes=keep_bytes)
    if name() == EMULATED:
        return CudaMemory(
            driver=EmulatedDriver(),
            tensor_device=TENSOR_DEVICE,
            keep_bytes=keep_bytes,
        )
    return HostMemory()


def why_no_gpu() -> str | None:
    """In words; None where there is one that torch can use."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no GPU that it can use (is there one, and a driver? see nvidia-smi)"
    return None


@contextmanager
def waited_for() -> Iterator[None]:
    """What a kernel did wrong is said in this test, not in the next one."""
    yield
    if on_gpu():
        torch.cuda.synchronize(device())
