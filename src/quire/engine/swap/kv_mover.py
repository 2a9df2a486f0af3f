"""Moves a sequence's entries from its slots to a store, and back into new slots."""

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import Tensor

from quire.devices import to_device
from quire.engine.kv_cache import KVCache
from quire.engine.kv_sizing import swap_buffer_bytes
from quire.engine.scheduling.step_costs import Clock
from quire.engine.swap.kv_store import FileKVStore, KVStore, MemoryKVStore, Parts, PinnedKVStore
from quire.errors import ConfigError, MemoryUnavailable, one_line
from quire.kv.interface import Slots
from quire.spec import Group, KeptWhole
from quire.units import format_bytes, format_count

# -- timing ----------------------------------------------------------------------------------------

Note: TypeAlias = Callable[[float], None]  # gets seconds


class Timer(Protocol):
    """Measures what lies between two calls."""

    def begin(self) -> Any:
        """Return a mark of this moment."""
        ...

    def end(self, begun: Any, note: Note) -> None:
        """Call ``note`` with the seconds since the mark, now or later."""
        ...

    def settle(self, *, wait: bool = False) -> None:
        """Call the notes that are due; with ``wait``, wait for all."""
        ...


@final
class HostTimer:
    """Measures by a clock what is done when a call returns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def begin(self) -> float:
        return self._clock()

    def end(self, begun: float, note: Note) -> None:
        note(self._clock() - begun)

    def settle(self, *, wait: bool = False) -> None:
        """Do nothing: every note has been called."""


@final
class DeviceTimer:
    """Measures by events what a device computes, and what it copies on another stream."""

    def __init__(self, device: torch.device, copying: Any) -> None:
        self._device, self._copying = device, copying
        self._pending: list[tuple[Any, Any, Note]] = []

    def begin(self) -> Any:
        self.settle()
        return self._recorded(torch.cuda.current_stream(self._device))

    def end(self, begun: Any, note: Note) -> None:
        self._copying.wait_stream(torch.cuda.current_stream(self._device))
        self._pending.append((begun, self._recorded(self._copying), note))

    def settle(self, *, wait: bool = False) -> None:
        pending, self._pending = self._pending, []
        for begun, ended, note in pending:
            if wait:
                ended.synchronize()
            if ended.query():
                note(begun.elapsed_time(ended) / 1e3)
            else:
                self._pending.append((begun, ended, note))

    def _recorded(self, stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


# -- the mover -------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class KVMover(Protocol):
    """Moves a sequence's entries between the cache and where they wait.

    Raises: OSError, MemoryError, RuntimeError where it cannot.
    """

    @property
    def timer(self) -> Timer:
        """Measures its moves."""
        ...

    def save(self, seq_id: int, slots: Several[Slots]) -> None:
        """Copy out what is in these slots i64[T] of each group."""
        ...

    def put_back(self, seq_id: int, slots: Several[Slots], num_skipped: Several[int]) -> int:
        """Copy it back into slots i64[T], without the first ones of a group; return the bytes."""
        ...

    def drop(self, seq_ids: Several[int]) -> None:
        """Drop the saved entries of these sequences."""
        ...

    def try_out(self, num_bytes: int, saved: Note, loaded: Note) -> None:
        """Save bytes and bring them back, and note the seconds of each. Raises: OSError."""
        ...

    def close(self) -> None:
        """Drop everything."""
        ...


@final
class StoreMover:
    """Moves entries between one process's cache on ``device`` and a store."""

    def __init__(
        self, kv: KVCache, shelf: KVStore, timer: Timer, device: torch.device = _CPU
    ) -> None:
        self._kv, self._shelf, self._device = kv, shelf, device
        self.timer = timer

    def save(self, seq_id: int, slots: Several[Slots]) -> None:
        layers = (
            parts
            for number, own in enumerate(slots)
            for parts in self._taken_out(number, self._on_device(own))
        )
        self._shelf.put(seq_id, layers)

    def put_back(self, seq_id: int, slots: Several[Slots], num_skipped: Several[int]) -> int:
        size, saved = 0, iter(self._shelf.get(seq_id))
        for number, group in enumerate(self._kv.accounting.groups):
            own = self._on_device(slots[number])
            for put_back in self._ways_back(number, group):
                parts = [part[num_skipped[number] :] for part in next(saved)]
                put_back(own, parts)
                size += sum(part.nbytes for part in parts)
        next(saved, None)  # the last ones are used, too
        return size

    def drop(self, seq_ids: Several[int]) -> None:
        for seq_id in seq_ids:
            self._shelf.drop(seq_id)

    def try_out(self, num_bytes: int, saved: Note, loaded: Note) -> None:
        trial = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        begun = self.timer.begin()
        self._shelf.put(-1, [[trial.clone()]])
        self.timer.end(begun, saved)
        begun = self.timer.begin()
        for (part,) in self._shelf.get(-1):
            trial.copy_(part)
        self.timer.end(begun, loaded)
        self.timer.settle(wait=True)
        self._shelf.drop(-1)

    def close(self) -> None:
        self._shelf.close()

    def _on_device(self, slots: Slots) -> Tensor:
        (there,) = to_device([slots], self._device)
        return there

    def _taken_out(self, number: int, slots: Tensor) -> Iterator[Parts]:
        """Yield what a group has in these slots i64[T]: of each layer, or all states at once."""
        group, storage = self._kv.accounting.groups[number], self._kv.storage
        if isinstance(group.spec, KeptWhole):
            yield storage.states(number).save(slots)
            return
        for layer in group.layers:
            yield storage.save(layer, slots)

    def _ways_back(
        self, number: int, group: Group
    ) -> Iterator[Callable[[Tensor, list[Tensor]], None]]:
        """Yield a function for each of the parts that ``_taken_out`` yields, to put it back."""
        if isinstance(group.spec, KeptWhole):
            yield self._kv.storage.states(number).load
            return
        for layer in group.layers:
            yield partial(self._kv.storage.load, layer)


def make_mover(
    kv: KVCache,
    swap_path: str | None,
    max_model_len: int,
    device: torch.device = _CPU,
    clock: Clock = time.perf_counter,
) -> StoreMover:
    """Make a mover for a cache on ``device``.

    Raises: ConfigError if no file can be made in the folder ``swap_path``; MemoryUnavailable where
    the device has no room for swap buffers.
    """
    if swap_path is None and device.type == "cuda":
        buffer_bytes = swap_buffer_bytes(kv.accounting.groups, max_model_len)
        try:
            pinned = PinnedKVStore(device, buffer_bytes)
        except torch.OutOfMemoryError as error:
            raise MemoryUnavailable(
                f"{device} has no memory for two swap buffers of {format_bytes(buffer_bytes)}: "
                f"lower kv_cache_memory_bytes or max_model_len={format_count(max_model_len)}, set "
                f"swap_path to go by files, or swap_space=0"
            ) from error
        except RuntimeError as error:
            log.warning(
                "swap_space: steps wait for what is saved and brought back, since no memory can be "
                "pinned for it (%s): raise the limit of locked memory, or set swap_space=0",
                one_line(error),
            )
        else:
            return StoreMover(kv, pinned, DeviceTimer(device, pinned.copying), device)
    timer = HostTimer(clock)
    if swap_path is None:
        return StoreMover(kv, MemoryKVStore(), timer, device)
    try:
        return StoreMover(kv, FileKVStore(Path(swap_path)), timer, device)
    except OSError as error:
        raise ConfigError(f"swap_path={swap_path!r}: {error}") from error
