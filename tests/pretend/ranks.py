"""Ranks of a model on devices that are not there: each on its own, and NCCL is gloo.

A rank is a process. What it exchanges lies in tensors that say they are on its device, and is sent
from inside of them. The test's process enters ``cuda_ranks``; a crew that is started then has
processes that enter it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

# Before names of torch.cuda are replaced: it does not like two that are one object.
import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pretend.attention import PretendAttention
from pretend.memory import PretendMemory
from pretend.runtime import Gpu, cuda
from pretend.tensor import PretendTensor
from quire import devices as choice
from quire.engine import assembly
from quire.engine.parallel import process_group as group
from quire.engine.parallel import worker as child
from quire.engine.parallel import worker_group as crew
from quire.memory import MemoryProvider, by_device
from quire.memory.residency import Residency

_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from pretend.ranks import main; "
    "main({channel}, {lifeline}, {folder!r}, {grace_s!r})"
)


def main(channel: int, lifeline: int, folder: str, grace_s: float) -> None:
    """The process of a rank other than 0."""
    with cuda_ranks():
        child.main(channel, lifeline, folder, grace_s)


@contextmanager
def cuda_ranks(num_ranks: int = 2) -> Iterator[Gpu]:
    """``cuda``, and all that ranks need on such devices beside it."""
    joined = dist.init_process_group

    def init_process_group(*args: Any, device_id: torch.device, **kwargs: Any) -> None:
        assert device_id == torch.device("cuda", gpu.current), "NCCL would use another device"
        joined(*args, **kwargs)  # gloo is bound to none

    memory_for, choose_backend = by_device.memory_for, assembly.choose_backend

    def pretended_memory(device: torch.device, residency: Residency) -> MemoryProvider:
        if device.type == "cpu":
            return memory_for(device, residency)
        return PretendMemory(gpu, index=device.index)

    def pretended_attention(name: str, specs: Any, device: torch.device, **rest: Any) -> Any:
        if device.type == "cpu":
            return choose_backend(name, specs, device, **rest)
        return PretendAttention()

    with cuda(num_devices=num_ranks) as gpu, ExitStack() as undo:

        def replace(where: object, name: str, value: object) -> None:
            undo.enter_context(mock.patch.object(where, name, value))

        replace(crew, "_START", _START)
        replace(group, "_BACKENDS", (("cpu", "gloo"), ("cuda", "gloo")))
        replace(dist, "init_process_group", init_process_group)
        # What Transformers asks for a rank's device.
        replace(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))
        replace(torch.accelerator, "set_device_index", torch.cuda.set_device)
        replace(DTensor, "device", property(lambda self: self._local_tensor.device))
        replace(choice, "why_no_memory", lambda _: None)
        replace(by_device, "memory_for", pretended_memory)
        # Pretending is for one thread: weights are not read by several.
        undo.enter_context(mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
        undo.enter_context(_made_without_asking(gpu))
        replace(assembly, "choose_backend", pretended_attention)
        yield gpu


@contextmanager
def _made_without_asking(gpu: Gpu) -> Iterator[None]:
    """Memory that torch itself asks for while it handles a ``DTensor``: no mode hears of it.

    A number that is assigned (``x[mask] = 0``) stays with the host, as on CUDA.
    """

    def empty(size: list[int], *, device: torch.device, **kwargs: Any) -> torch.Tensor:
        made = torch.empty(size, **{**kwargs, "pin_memory": False}, device="cpu")
        return PretendTensor(made, gpu, device) if size else made

    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    try:
        yield
    finally:
        library._destroy()
