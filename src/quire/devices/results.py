"""Numbers from a device to the host: many tensors, one copy, and the host waits once.

They come to pinned memory, which a device can copy to by itself: so the host can prepare whatever
else is to be done, and waits when it needs them.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.devices.pinned import host_bytes

_MOST_BYTES = 64 * 2**20  # of results that wait on the device for a copy


def wait_for(device: torch.device) -> None:
    """Until all that was launched there is done; the host's own memory has nothing under way."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Results:
    """Tensors on their way to the host. Nothing is waited for before ``arrive``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: list[Tensor] = []  # for the next copy
        self._waiting_bytes = 0
        self._under_way: list[tuple[Tensor, list[tuple[torch.dtype, torch.Size]]]] = []
        self._num = 0

    def add(self, tensor: Tensor) -> int:
        """Its number among what arrives."""
        if self._waiting_bytes + tensor.nbytes > _MOST_BYTES:
            self._send()  # the device's memory is handed out again only after the copy
        self._waiting.append(tensor)
        self._waiting_bytes += tensor.nbytes
        self._num += 1
        return self._num - 1

    def arrive(self) -> list[NDArray[Any]]:
        """All that was added. The host waits for the device, once."""
        self._send()
        wait_for(self._device)
        found: list[NDArray[Any]] = []
        for staged, kinds in self._under_way:
            start = 0
            for dtype, shape in kinds:
                num_bytes = dtype.itemsize * shape.numel()
                own = staged[start : start + num_bytes].clone()  # aligned, and its own
                found.append(own.view(dtype).view(shape).numpy())
                start += num_bytes
        return found

    def _send(self) -> None:
        if not self._waiting:
            return
        packed = torch.cat([_bytes_of(tensor) for tensor in self._waiting])
        staged = host_bytes(len(packed), self._device)
        staged.copy_(packed, non_blocking=self._device.type == "cuda")
        kinds = [(tensor.dtype, tensor.shape) for tensor in self._waiting]
        self._under_way.append((staged, kinds))
        self._waiting, self._waiting_bytes = [], 0


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    if flat.stride() != (1,):  # of one element or none, which torch calls contiguous all the same
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
