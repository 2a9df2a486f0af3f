"""Where saved entries are while their sequences wait: host memory or a file. A GPU's is ``pinned``.

Entries are kept as they are stored, codes with their scales, so that they come back bit for bit.
"""

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, final

import torch
from torch import Tensor

Parts: TypeAlias = list[Tensor]  # of one layer, tokens first


class KVStore(Protocol):
    """Keeps the entries of a sequence. Raises: OSError, MemoryError where it cannot."""

    def put(self, seq_id: int, layers: Iterable[Parts]) -> None:
        """Keep these, which are taken out of the cache one by one as they are asked for."""
        ...

    def get(self, seq_id: int) -> Iterable[Parts]:
        """The same, each to be used before the next is asked for."""
        ...

    def drop(self, seq_id: int) -> None: ...

    def close(self) -> None: ...


@final
class MemoryKVStore:
    """In host memory."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Parts]] = {}

    def put(self, seq_id: int, layers: Iterable[Parts]) -> None:
        self._kept[seq_id] = _on_host(layers)

    def get(self, seq_id: int) -> list[Parts]:
        return self._kept[seq_id]

    def drop(self, seq_id: int) -> None:
        self._kept.pop(seq_id, None)

    def close(self) -> None:
        self._kept.clear()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where a tensor is in the file, and what it was."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@final
class FileKVStore:
    """In a file that has no name any more once it is open, so that it never outlives the process.

    It is as large as the most that was saved at once: what is dropped is written over.
    """

    def __init__(self, folder: Path) -> None:
        """Raises: OSError."""
        self._file, path = tempfile.mkstemp(dir=folder, prefix="quire-swap-")
        os.unlink(path)
        self._kept: dict[int, list[list[_Piece]]] = {}
        self._holes: list[range] = []
        self._end = 0

    def put(self, seq_id: int, layers: Iterable[Parts]) -> None:
        layers = _on_host(layers)
        size = sum(part.nbytes for parts in layers for part in parts)
        offset = place = self._reserve(size)
        kept: list[list[_Piece]] = []
        try:
            for parts in layers:
                kept.append([])
                for part in parts:
                    self._write(offset, part)
                    kept[-1].append(_Piece(offset, part.shape, part.dtype))
                    offset += part.nbytes
        except OSError:
            self._give_back(range(place, place + size))
            raise
        self._kept[seq_id] = kept

    def get(self, seq_id: int) -> list[Parts]:
        return [[self._read(piece) for piece in pieces] for pieces in self._kept[seq_id]]

    def drop(self, seq_id: int) -> None:
        pieces = [piece for pieces in self._kept.pop(seq_id, []) for piece in pieces]
        if pieces:
            last = pieces[-1]
            self._give_back(range(pieces[0].offset, last.offset + last.num_bytes))

    def close(self) -> None:
        self._kept.clear()
        os.close(self._file)

    def _write(self, offset: int, part: Tensor) -> None:
        data = part.contiguous().view(-1).view(torch.uint8).numpy().data
        while len(data):  # the system may take less at once
            written = os.pwrite(self._file, data, offset)
            data, offset = data[written:], offset + written

    def _read(self, piece: _Piece) -> Tensor:
        data = torch.empty(piece.num_bytes, dtype=torch.uint8)
        rest, offset = data.numpy().data, piece.offset
        while len(rest):
            count = os.preadv(self._file, [rest], offset)
            if not count:
                raise OSError("the swap file ends too early")
            rest, offset = rest[count:], offset + count
        return data.view(piece.dtype).view(piece.shape)

    def _reserve(self, size: int) -> int:
        """The first hole that is large enough, or the end."""
        for place, hole in enumerate(self._holes):
            if len(hole) >= size:
                self._holes[place] = range(hole.start + size, hole.stop)
                return hole.start
        self._end += size
        return self._end - size

    def _give_back(self, hole: range) -> None:
        """Make one hole of it and its neighbours; the file ends before the last one."""
        holes = sorted([*(h for h in self._holes if h), hole], key=lambda h: h.start)
        self._holes = []
        for each in holes:
            if self._holes and self._holes[-1].stop == each.start:
                each = range(self._holes.pop().start, each.stop)
            self._holes.append(each)
        if self._holes[-1].stop == self._end:
            self._end = self._holes.pop().start
            os.ftruncate(self._file, self._end)


def _on_host(layers: Iterable[Parts]) -> list[Parts]:
    return [[part.cpu() for part in parts] for parts in layers]
