"""Memory that recordings work in."""

from weakref import finalize

import torch
from torch import Tensor


class Arena:
    """Lent piece by piece, and lent again as soon as no tensor in a piece is left.

    All recordings of a model share them, for two are never played at once.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}  # by size
        self._users: dict[int, int] = {}  # of each piece, by the address of its storage
        self._lent: dict[int, Tensor] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Of a tensor's shape, strides and dtype, in memory that only a recording uses."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
        nbytes = 1 << ((last + 1) * tensor.itemsize - 1).bit_length()
        free = self._free.setdefault(nbytes, [])
        piece = free.pop() if free else torch.empty(nbytes, dtype=torch.uint8)
        self._lent[piece.data_ptr()] = piece
        cut = piece[: (last + 1) * tensor.itemsize].view(tensor.dtype)
        made = cut.as_strided(tensor.shape, tensor.stride())
        self.saw(made)
        return made

    def holds(self, tensor: Tensor) -> bool:
        """Whether it lies in a piece."""
        return _place(tensor) in self._lent

    def saw(self, tensor: Tensor) -> None:
        """As long as that tensor lives, its piece is not lent again."""
        place = _place(tensor)
        self._users[place] = self._users.get(place, 0) + 1
        finalize(tensor, self._left, place)

    def _left(self, place: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            piece = self._lent.pop(place)
            self._free[piece.numel()].append(piece)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
