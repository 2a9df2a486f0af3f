"""Numbers on their way between host and device: many arrays, one copy.

Host memory is pinned where the device can copy from and to it by itself. Torch keeps such memory
for the next step, and hands none out before the copies that use it are done.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes; a view of the bytes as numbers wants its beginning at a multiple of theirs
_MOST_BYTES = 64 * 2**20  # of results that wait on the device for a copy


def to_device(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Each array as a tensor of its shape and type. The host does not wait for the copy."""
    starts: dict[str, int] = {}
    end = 0
    for name, array in arrays.items():
        starts[name] = end
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    if not end:
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    staged = torch.empty(end, dtype=torch.uint8, pin_memory=_is_pinned(device))
    room = staged.numpy()
    for name, array in arrays.items():
        start = starts[name]
        room[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = staged.to(device, non_blocking=True)
    found: dict[str, Tensor] = {}
    for name, array in arrays.items():
        dtype = torch.from_numpy(array).dtype
        own = there[starts[name] : starts[name] + array.nbytes]
        found[name] = own.view(dtype).view(array.shape)
    return found


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
            self._send()  # the allocator gives the device's memory to whoever comes after the copy
        self._waiting.append(tensor)
        self._waiting_bytes += tensor.nbytes
        self._num += 1
        return self._num - 1

    def arrive(self) -> list[NDArray[Any]]:
        """All that was added. The host waits for the device, once."""
        self._send()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
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
        pins = _is_pinned(self._device)
        staged = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=pins)
        staged.copy_(packed, non_blocking=pins)
        kinds = [(tensor.dtype, tensor.shape) for tensor in self._waiting]
        self._under_way.append((staged, kinds))
        self._waiting, self._waiting_bytes = [], 0


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    if flat.stride() != (1,):  # of one element or none, which torch calls contiguous all the same
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _is_pinned(device: torch.device) -> bool:
    return device.type == "cuda"
