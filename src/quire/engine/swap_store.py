"""Where saved entries are while their sequences wait: host memory, or a file.

Entries are kept as they are stored, codes with their scales, so that they come back bit for bit.
Who is saved, and how much there may be, the scheduler decides (``scheduling.swap``). What fails
here costs a computation and is logged; it ends nothing.
"""

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias, final

import torch
from torch import Tensor

from quire.engine.kv_cache import KVCache
from quire.engine.plan import Chunk, Save
from quire.engine.scheduling.preemption import readable_tokens, slots_of
from quire.engine.scheduling.swap import Clock, Costs
from quire.engine.sequence import Sequence
from quire.errors import ConfigError
from quire.spec import Group, KeptWhole
from quire.strategies.base import Slots

log = logging.getLogger(__name__)

_TRIAL_BYTES = 2**20
Parts: TypeAlias = list[Tensor]  # of one layer, tokens first


class Shelf(Protocol):
    """Keeps the entries of a sequence. Raises: OSError, MemoryError where it cannot."""

    def put(self, seq_id: int, layers: list[Parts]) -> None: ...

    def get(self, seq_id: int) -> list[Parts]: ...

    def drop(self, seq_id: int) -> None: ...

    def close(self) -> None: ...


@final
class MemoryShelf:
    """In host memory."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Parts]] = {}

    def put(self, seq_id: int, layers: list[Parts]) -> None:
        self._kept[seq_id] = layers

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

    def put(self, seq_id: int, layers: list[Parts]) -> None:
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


class Mover(Protocol):
    """Moves a sequence's entries between the cache and where they wait.

    Raises: OSError, MemoryError, RuntimeError where it cannot.
    """

    def save(self, seq_id: int, slots: Several[Slots]) -> None:
        """Copy out what is in these slots of each group."""
        ...

    def put_back(self, seq_id: int, slots: Several[Slots], num_skipped: Several[int]) -> int:
        """Copy it back into these slots, but for the first ones of each group; how many bytes."""
        ...

    def drop(self, seq_ids: Several[int]) -> None:
        """Nobody needs what was saved of these."""
        ...

    def try_out(self, num_bytes: int) -> tuple[float, float]:
        """Seconds that it takes to save, and to bring back, so many bytes. Raises: OSError."""
        ...

    def close(self) -> None: ...


@final
class ShelfMover:
    """Of one process."""

    def __init__(self, kv: KVCache, shelf: Shelf, clock: Clock) -> None:
        self._kv, self._shelf, self._clock = kv, shelf, clock

    def save(self, seq_id: int, slots: Several[Slots]) -> None:
        layers = [
            parts
            for number, own in enumerate(slots)
            for parts in self._taken_out(number, torch.from_numpy(own))
        ]
        self._shelf.put(seq_id, layers)

    def put_back(self, seq_id: int, slots: Several[Slots], num_skipped: Several[int]) -> int:
        size, saved = 0, iter(self._shelf.get(seq_id))
        for number, group in enumerate(self._kv.accounting.groups):
            own = torch.from_numpy(slots[number])
            for put_back in self._ways_back(number, group):
                parts = [part[num_skipped[number] :] for part in next(saved)]
                put_back(own, parts)
                size += sum(part.nbytes for part in parts)
        return size

    def drop(self, seq_ids: Several[int]) -> None:
        for seq_id in seq_ids:
            self._shelf.drop(seq_id)

    def try_out(self, num_bytes: int) -> tuple[float, float]:
        trial = torch.zeros(num_bytes, dtype=torch.uint8)
        moments = [self._clock()]
        self._shelf.put(-1, [[trial.clone()]])
        moments.append(self._clock())
        trial.copy_(self._shelf.get(-1)[0][0])
        moments.append(self._clock())
        self._shelf.drop(-1)
        return moments[1] - moments[0], moments[2] - moments[1]

    def close(self) -> None:
        self._shelf.close()

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


@final
class SwapStore:
    """Which entries are saved and brought back, and how long that takes."""

    def __init__(self, kv: KVCache, mover: Mover, costs: Costs, clock: Clock) -> None:
        self._kv, self._mover, self._costs, self._clock = kv, mover, costs, clock
        self._firsts: dict[int, tuple[int, ...]] = {}  # of each sequence: first token, by group
        save_s, load_s = mover.try_out(_TRIAL_BYTES)  # a first guess at what a byte costs
        self._costs.note_saved(_TRIAL_BYTES, save_s)
        self._costs.note_loaded(_TRIAL_BYTES, load_s)

    def save(self, saves: Iterable[Save]) -> list[Sequence]:
        """Copy these out, before storage changes anything. Returns those that were not saved."""
        failed: list[Sequence] = []
        for save in saves:
            start_s = self._clock()
            try:
                self._mover.save(save.sequence.seq_id, save.slots)
            except (OSError, MemoryError, RuntimeError) as error:
                log.warning("sequence %d is not swapped out: %s", save.sequence.seq_id, error)
                failed.append(save.sequence)
                continue
            self._costs.note_saved(save.num_bytes, self._clock() - start_s)
            stop = save.sequence.num_saved_tokens
            self._firsts[save.sequence.seq_id] = tuple(stop - len(slots) for slots in save.slots)
        return failed

    def load(self, chunk: Chunk) -> bool:
        """Put back what a chunk counts on, where its sequence has room now. False: it is lost."""
        seq_id, start_s = chunk.sequence.seq_id, self._clock()
        accounting = self._kv.accounting
        wanted = readable_tokens(accounting.groups, chunk.start - chunk.num_restored, chunk.start)
        slots = [slots_of(accounting, number, seq_id, own) for number, own in enumerate(wanted)]
        firsts = self._firsts[seq_id]
        skipped = [own.start - first for own, first in zip(wanted, firsts, strict=True)]
        try:
            size = self._mover.put_back(seq_id, slots, skipped)
        except (OSError, MemoryError, RuntimeError) as error:
            log.warning("sequence %d is lost in swap, and computed again: %s", seq_id, error)
            return False
        if size:
            self._costs.note_loaded(size, self._clock() - start_s)
        return True

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Nobody needs what was saved of these."""
        several = list(seq_ids)
        for seq_id in several:
            self._firsts.pop(seq_id, None)
        self._mover.drop(several)

    def close(self) -> None:
        self._mover.close()


def make_mover(kv: KVCache, swap_path: str | None, clock: Clock = time.perf_counter) -> ShelfMover:
    """Raises: ConfigError if there can be no file in the folder ``swap_path``."""
    if swap_path is None:
        return ShelfMover(kv, MemoryShelf(), clock)
    try:
        return ShelfMover(kv, FileShelf(Path(swap_path)), clock)
    except OSError as error:
        raise ConfigError(f"swap_path={swap_path!r}: {error}") from error


def make_swap_store(
    kv: KVCache,
    swap_path: str | None,
    costs: Costs,
    clock: Clock = time.perf_counter,
    *,
    around: Callable[[Mover], Mover] | None = None,
) -> SwapStore:
    """``around`` makes of what moves entries here something that moves those of other ranks too.

    Raises: ConfigError if there can be no file in the folder ``swap_path``, or none is written.
    """
    mover: Mover = make_mover(kv, swap_path, clock)
    try:
        return SwapStore(kv, mover if around is None else around(mover), costs, clock)
    except OSError as error:
        raise ConfigError(f"swap_path={swap_path!r}: {error}") from error
