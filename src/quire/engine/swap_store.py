"""Where saved entries are while their sequences wait: host memory, pinned of a GPU's, or a file.

Entries are kept as they are stored, codes with their scales, so that they come back bit for bit.
Who is saved, and how much there may be, the scheduler decides (``scheduling.swap``). What fails
here costs a computation and is logged; it ends nothing.
"""

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor

from quire.devices.staging import to_device
from quire.engine.kv_cache import KVCache
from quire.engine.pinned_shelf import DeviceTimer, Parts, PinnedShelf
from quire.engine.plan import Chunk, Save
from quire.engine.scheduling.preemption import readable_tokens, slots_of
from quire.engine.scheduling.swap import Clock, Costs
from quire.engine.sequence import Sequence
from quire.errors import ConfigError
from quire.spec import Group, KeptWhole
from quire.strategies.base import Slots

log = logging.getLogger(__name__)

_TRIAL_BYTES = 2**20
_CPU = torch.device("cpu")


class Shelf(Protocol):
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
class MemoryShelf:
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
class FileShelf:
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


class Timer(Protocol):
    """Measures what lies between two calls, and tells it when it is known."""

    def begin(self) -> Any: ...

    def end(self, begun: Any, note: Callable[[float], None]) -> None:
        """``note`` gets the seconds, now or later."""
        ...

    def settle(self, *, wait: bool = False) -> None:
        """Tell what is known by now; with ``wait``, all."""
        ...


@final
class HostTimer:
    """By a clock: what it measures is done when the call returns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def begin(self) -> float:
        return self._clock()

    def end(self, begun: float, note: Callable[[float], None]) -> None:
        note(self._clock() - begun)

    def settle(self, *, wait: bool = False) -> None:
        """All is told already."""


@final
class SwapStore:
    """Moves entries between the cache and a shelf, and measures how long that takes."""

    def __init__(
        self,
        kv: KVCache,
        shelf: Shelf,
        costs: Costs,
        timer: Timer,
        device: torch.device = _CPU,  # of the cache
    ) -> None:
        self._kv, self._shelf, self._costs = kv, shelf, costs
        self._timer, self._device = timer, device
        self._firsts: dict[int, tuple[int, ...]] = {}  # of each sequence: first token, by group
        self._measure()

    def save(self, saves: Iterable[Save]) -> list[Sequence]:
        """Copy these out, before storage changes anything. Returns those that were not saved."""
        failed: list[Sequence] = []
        for save in saves:
            begun = self._timer.begin()
            try:
                layers = (
                    parts
                    for number, slots in enumerate(save.slots)
                    for parts in self._taken_out(number, self._on_device(slots))
                )
                self._shelf.put(save.sequence.seq_id, layers)
            except (OSError, MemoryError, RuntimeError) as error:
                log.warning("sequence %d is not swapped out: %s", save.sequence.seq_id, error)
                failed.append(save.sequence)
                continue
            self._timer.end(begun, partial(self._costs.note_saved, save.num_bytes))
            stop = save.sequence.num_saved_tokens
            self._firsts[save.sequence.seq_id] = tuple(stop - len(slots) for slots in save.slots)
        return failed

    def load(self, chunk: Chunk) -> bool:
        """Put back what a chunk counts on, where its sequence has room now. False: it is lost."""
        seq_id, begun, size = chunk.sequence.seq_id, self._timer.begin(), 0
        groups = self._kv.accounting.groups
        wanted = readable_tokens(groups, chunk.start - chunk.num_restored, chunk.start)
        try:
            saved = iter(self._shelf.get(seq_id))
            for number, (group, tokens) in enumerate(zip(groups, wanted, strict=True)):
                slots = self._on_device(slots_of(self._kv.accounting, number, seq_id, tokens))
                skipped = tokens.start - self._firsts[seq_id][number]
                for put_back in self._ways_back(number, group):
                    parts = [part[skipped:] for part in next(saved)]
                    put_back(slots, parts)
                    size += sum(part.nbytes for part in parts)
            next(saved, None)  # the last ones are used, too
        except (OSError, MemoryError, RuntimeError) as error:
            log.warning("sequence %d is lost in swap, and computed again: %s", seq_id, error)
            return False
        if size:
            self._timer.end(begun, partial(self._costs.note_loaded, size))
        return True

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Nobody needs what was saved of these."""
        for seq_id in seq_ids:
            self._firsts.pop(seq_id, None)
            self._shelf.drop(seq_id)

    def close(self) -> None:
        self._shelf.close()

    def _on_device(self, slots: Slots) -> Tensor:
        (there,) = to_device([slots], self._device)
        return there

    def _taken_out(self, number: int, slots: Tensor) -> Iterator[Parts]:
        """What a group has in these slots: of each layer, or of all of them where it is states."""
        group, storage = self._kv.accounting.groups[number], self._kv.storage
        if isinstance(group.spec, KeptWhole):
            yield storage.states(number).save(slots)
            return
        for layer in group.layers:
            yield storage.save(layer, slots)

    def _ways_back(
        self, number: int, group: Group
    ) -> Iterator[Callable[[Tensor, list[Tensor]], None]]:
        """What puts back each of the parts that were ``_taken_out``."""
        if isinstance(group.spec, KeptWhole):
            yield self._kv.storage.states(number).load
            return
        for layer in group.layers:
            yield partial(self._kv.storage.load, layer)

    def _measure(self) -> None:
        """A first guess at what a byte costs. Raises: OSError."""
        trial = torch.zeros(_TRIAL_BYTES, dtype=torch.uint8, device=self._device)
        begun = self._timer.begin()
        self._shelf.put(-1, [[trial.clone()]])
        self._timer.end(begun, partial(self._costs.note_saved, _TRIAL_BYTES))
        begun = self._timer.begin()
        for (part,) in self._shelf.get(-1):
            trial.copy_(part)
        self._timer.end(begun, partial(self._costs.note_loaded, _TRIAL_BYTES))
        self._timer.settle(wait=True)
        self._shelf.drop(-1)


def make_swap_store(
    kv: KVCache, swap_path: str | None, costs: Costs, device: torch.device = _CPU
) -> SwapStore:
    """``device``: where the cache is.

    Raises: ConfigError if there can be no file in the folder ``swap_path``.
    """
    timer = HostTimer(time.perf_counter)
    if swap_path is None and device.type == "cuda":
        pinned = PinnedShelf(device)
        return SwapStore(kv, pinned, costs, DeviceTimer(device, pinned.copying), device)
    if swap_path is None:
        return SwapStore(kv, MemoryShelf(), costs, timer, device)
    try:
        return SwapStore(kv, FileShelf(Path(swap_path)), costs, timer, device)
    except OSError as error:
        raise ConfigError(f"swap_path={swap_path!r}: {error}") from error


def _on_host(layers: Iterable[Parts]) -> list[Parts]:
    return [[part.cpu() for part in parts] for parts in layers]
