"""Numbers from the host to a device: many arrays, and one copy that the host does not wait for.

They are gathered in pinned memory, which a device can copy from by itself. Torch keeps such memory
for the next step, and hands none out before the copies that use it are done.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.devices.pinned import host_bytes
from quire.units import align_up

Array: TypeAlias = npt.NDArray[Any]
_ALIGNMENT = 16  # bytes: of every dtype


def staged_bytes(arrays: Sequence[Array]) -> int:
    """What they take beside each other."""
    return sum(align_up(array.nbytes, _ALIGNMENT) for array in arrays)


def to_device(
    arrays: Sequence[Array], device: torch.device, into: Tensor | None = None
) -> list[Tensor]:
    """Each array as a tensor on the device, of its shape and type.

    ``into``: u8, of at least ``staged_bytes``, to hold them. Arrays of the same shapes and types
    come to lie at the same addresses in it; what was there is overwritten when the work that has
    been launched so far is done.
    """
    staged = host_bytes(staged_bytes(arrays), device)
    room, start = staged.numpy(), 0
    places: list[tuple[int, Array]] = []
    for array in arrays:
        room[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        places.append((start, array))
        start += align_up(array.nbytes, _ALIGNMENT)
    if into is None:
        there = staged.to(device, non_blocking=True)
    else:
        there = into[: len(staged)].copy_(staged, non_blocking=True)
    found: list[Tensor] = []
    for start, array in places:
        dtype = torch.from_numpy(array[:0]).dtype
        found.append(there[start : start + array.nbytes].view(dtype).view(array.shape))
    return found
