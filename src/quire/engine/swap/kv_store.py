"""Stores of saved entries: host memory, a file, or pinned memory for a GPU.

Entries are saved as they are stored, codes with their scales, and come back bit for bit.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import Tensor

from quire.units import align_up

# -- memory and files ------------------------------------------------------------------------------


Parts: TypeAlias = list[Tensor]  # of one layer, tokens first


class KVStore(Protocol):
    """Keeps the entries of a sequence. Raises: OSError, MemoryError where it cannot."""

    def put(self, seq_id: int, layers: Iterable[Parts]) -> None:
        """Keep the parts of each layer, which are taken out of the cache as they are iterated."""
        ...

    def get(self, seq_id: int) -> Iterable[Parts]:
        """Return the parts of each layer. A layer is valid until the next one is asked for."""
        ...

    def drop(self, seq_id: int) -> None:
        """Forget a sequence, if it is kept."""
        ...

    def close(self) -> None:
        """Forget all sequences, and give the store's memory back."""
        ...


@final
class MemoryKVStore:
    """Keeps entries in host memory."""

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
    """A tensor in the file: its place, shape and dtype."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@final
class FileKVStore:
    """Keeps entries in a file without a name, which never outlives the process.

    The file is as large as the most that was saved at once: the space of dropped entries is reused.
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
        while len(data):  # the system may write less at once
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
        """Return the offset of the first hole that is large enough, or of the end."""
        for place, hole in enumerate(self._holes):
            if len(hole) >= size:
                self._holes[place] = range(hole.start + size, hole.stop)
                return hole.start
        self._end += size
        return self._end - size

    def _give_back(self, hole: range) -> None:
        """Join a hole with its neighbours. The file is cut before the last one."""
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


# -- pinned memory ---------------------------------------------------------------------------------

_CHUNK_BYTES = 8 * 2**20  # of pinned memory, which torch rounds up to a power of two
_ALIGNMENT = 16  # of every dtype


@dataclass(frozen=True, slots=True)
class _Form:
    """A part of a layer in a piece: its place, shape and dtype."""

    start: int
    shape: torch.Size
    dtype: torch.dtype

    def within(self, buffer: Tensor) -> Tensor:
        """Return the part's view of a buffer u8[bytes]."""
        nbytes = self.shape.numel() * self.dtype.itemsize
        return buffer[self.start : self.start + nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class _PinnedPiece:
    chunks: list[Tensor]  # u8, pinned
    num_bytes: int
    layers: list[list[_Form]]


@final
class PinnedKVStore:
    """Keeps entries in pinned memory of the host, which a GPU copies there and back by itself.

    Layers go in pieces: gathered into a buffer on the device, and copied from there on another
    stream while the device computes. Two buffers of ``buffer_bytes``, each as large as any layer,
    take turns, so that no sequence needs more of the device's memory. The host waits for nothing.

    Raises: OutOfMemoryError, and RuntimeError where no memory of the host can be pinned.
    """

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self._device = device
        self.copying: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [
            torch.empty(buffer_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        # Events after which each may be written to again. Torch gives memory to the stream that
        # last had it, which may still read it: the other stream waits for that.
        self._spare = [_event() for _ in self._buffers]
        for spare in self._spare:
            spare.record(torch.cuda.current_stream(device))
        _pinned(_CHUNK_BYTES)  # raises here if the host refuses
        self._turn = 0
        self._kept: dict[int, tuple[list[_PinnedPiece], Any]] = {}

    def put(self, seq_id: int, layers: Iterable[Parts]) -> None:
        most = len(self._buffers[0])
        pieces = [self._copy_out(several) for several in _in_pieces(layers, most)]
        saved = _event()
        saved.record(self.copying)
        self._kept[seq_id] = pieces, saved

    def get(self, seq_id: int) -> Iterator[Parts]:
        """Yield each layer's parts on the device, which are valid until the next ones."""
        pieces, saved = self._kept[seq_id]
        saved.synchronize()  # as a rule it was saved steps ago
        for piece in pieces:
            yield from self._copied_in(piece)

    def drop(self, seq_id: int) -> None:
        self._kept.pop(seq_id, None)

    def close(self) -> None:
        self._kept.clear()
        self.copying.synchronize()
        self._buffers = [buffer[:0].clone() for buffer in self._buffers]

    def _copy_out(self, layers: list[Parts]) -> _PinnedPiece:
        forms, num_bytes = _forms(layers)
        assert num_bytes <= len(self._buffers[0]), "a layer is larger than a buffer"
        computing = torch.cuda.current_stream(self._device)
        buffer, spare = self._next_buffer()
        computing.wait_event(spare)
        for parts, places in zip(layers, forms, strict=True):
            for part, form in zip(parts, places, strict=True):
                form.within(buffer).copy_(part)
        self.copying.wait_event(computing.record_event())
        piece = _PinnedPiece(_pinned(num_bytes), num_bytes, forms)
        with torch.cuda.stream(self.copying):
            for chunk, there in _both(piece, buffer):
                chunk.copy_(there, non_blocking=True)
        spare.record(self.copying)
        return piece

    def _copied_in(self, piece: _PinnedPiece) -> Iterator[Parts]:
        buffer, spare = self._next_buffer()
        self.copying.wait_event(spare)
        with torch.cuda.stream(self.copying):
            for chunk, there in _both(piece, buffer):
                there.copy_(chunk, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(self.copying.record_event())
        try:
            for forms in piece.layers:
                yield [form.within(buffer) for form in forms]
        finally:
            spare.record(computing)

    def _next_buffer(self) -> tuple[Tensor, Any]:
        self._turn ^= 1
        return self._buffers[self._turn], self._spare[self._turn]


def _in_pieces(layers: Iterable[Parts], most_bytes: int) -> Iterator[list[Parts]]:
    """Yield as many layers together as a buffer holds."""
    several: list[Parts] = []
    for parts in layers:
        if several and _forms([*several, parts])[1] > most_bytes:
            yield several
            several = []
        several.append(parts)
    if several:
        yield several


def _forms(layers: list[Parts]) -> tuple[list[list[_Form]], int]:
    """Return the place of each part in a piece, and the piece's bytes."""
    end = 0
    found: list[list[_Form]] = []
    for parts in layers:
        found.append([])
        for part in parts:
            found[-1].append(_Form(end, part.shape, part.dtype))
            end = align_up(end + part.nbytes, _ALIGNMENT)
    return found, end


def _pinned(num_bytes: int) -> list[Tensor]:
    sizes = [min(_CHUNK_BYTES, num_bytes - start) for start in range(0, num_bytes, _CHUNK_BYTES)]
    return [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _both(piece: _PinnedPiece, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each chunk u8[bytes] with its part of the buffer u8[bytes] on the device."""
    start = 0
    for chunk in piece.chunks:
        yield chunk, buffer[start : start + len(chunk)]
        start += len(chunk)
