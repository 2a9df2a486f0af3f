"""``Worker``: what a rank other than 0 holds, and its process, which carries out rank 0's calls.

A worker has the same storage, runner and swap space as rank 0, each for its own heads. Its
accounting stays empty: it only has the sizes.
"""

import logging
import os
import pickle
import shutil
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import torch

from quire.attention import AttentionBackend, AttentionBatch
from quire.config import EngineConfig, sets_allocator
from quire.devices import give_back_unused
from quire.engine.assembly import prepare
from quire.engine.kv_budget import named_memory
from quire.engine.kv_cache import KVCache, MakePair
from quire.engine.parallel.messages import Answer, Call, Done, Failed, Heard, Leave
from quire.engine.parallel.model_part import load_part
from quire.engine.parallel.process_group import compute_with, join, leave
from quire.engine.runner import ModelRunner
from quire.engine.swap.kv_mover import KVMover, make_mover
from quire.errors import QuireError
from quire.kv import CacheConfig, StorageOp
from quire.kv.interface import Slots
from quire.memory.by_device import gauge_for, machine_for, make_resident
from quire.memory.machine import DeviceMemory
from quire.memory.machine.readings import MemoryReading
from quire.memory.residency import Residency, Resident
from quire.models.loader import LoadedModel
from quire.models.step_inputs import HostInputs
from quire.spec import ModelSpec

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Engine:
    """One engine's part in this rank."""

    loaded: LoadedModel
    backend: AttentionBackend
    make_pair: MakePair
    resident: Resident
    max_model_len: int
    kv: KVCache | None = None
    runner: ModelRunner | None = None
    mover: KVMover | None = None

    def close(self) -> None:
        with ExitStack() as parts:  # every part is closed, even if one raises
            parts.callback(self.resident.rest, short=True)
            if self.kv is not None:
                parts.callback(self.kv.close)
            if self.mover is not None:
                parts.callback(self.mover.close)
            self.resident.close()


@final
class Worker:
    """One rank. ``LeaderGroup``, ``PartedModel`` and ``WorkerGroup`` call its methods."""

    def __init__(self) -> None:
        self.rank, self._num_ranks = -1, 0
        self._models: dict[int, LoadedModel] = {}
        self._engines: dict[int, _Engine] = {}

    def join(
        self,
        rank: int,
        num_ranks: int,
        store: Path,
        device_type: str,
        timeout_s: float,
        num_threads: int | None,
    ) -> None:
        """Meet the other ranks. ``num_threads`` compute here; None: as many as torch takes."""
        self.rank, self._num_ranks = rank, num_ranks
        if num_threads is not None:
            compute_with(num_threads)
        join(rank, num_ranks, store, device_type, timeout_s)

    # -- models ----------------------------------------------------------------------------------

    def load(self, model: int, name: str, dtype: str) -> None:
        """Load this rank's part of a model, and call it ``model``."""
        self._models[model] = load_part(
            name, dtype=dtype, rank=self.rank, num_ranks=self._num_ranks
        )

    def read_device(self, model: int) -> DeviceMemory | None:
        """Return how much memory a model's device has, and has left; None for a CPU."""
        device = self._models[model].model.device
        give_back_unused(device)  # after a trial step
        return machine_for(device).device

    def unload(self, model: int) -> None:
        """Drop a model that no engine needs."""
        give_back_unused(self._models.pop(model).device)

    # -- an engine -------------------------------------------------------------------------------

    def assemble(
        self,
        engine: int,
        model: int,
        spec: ModelSpec,
        strategy: str,
        sizes: CacheConfig,
        config: EngineConfig,
        residency: Residency,
    ) -> None:
        """Prepare to run a model over a cache. ``spec`` is a rank's, with its stored dtypes."""
        loaded = self._models[model]
        provider = named_memory(config, loaded.model.device)
        resident = make_resident(
            provider, residency, sizes.capacity_bytes, keeps_freed=not sets_allocator()
        )
        backend, make_pair = prepare(loaded, spec, strategy, sizes, resident.provider, config)
        self._engines[engine] = _Engine(loaded, backend, make_pair, resident, sizes.max_model_len)

    def disassemble(self, engine: int) -> None:
        """Close an engine's part, if there is one."""
        closed = self._engines.pop(engine, None)
        if closed is not None:
            device = closed.loaded.device
            closed.close()
            del closed  # its attention backend keeps memory, too
            give_back_unused(device)

    def make_storage(self, engine: int) -> None:
        """Reserve a cache's memory, for the first time or again. Raises: MemoryUnavailable."""
        own = self._engines[engine]
        if own.kv is None:
            own.kv = KVCache(own.make_pair)
            own.runner = ModelRunner(own.loaded, own.kv, own.backend)
        else:
            own.kv.accounting, own.kv.storage = own.make_pair()

    def close_storage(self, engine: int) -> None:
        """Give every page of a cache back."""
        self._kv(engine).storage.close()

    def apply(self, engine: int, changes: Iterable[StorageOp]) -> int:
        """Carry out what accounting decided. Return the bytes that are committed then."""
        self._kv(engine).storage.apply(changes)
        return self.committed_bytes(engine)

    def committed_bytes(self, engine: int) -> int:
        """Return the bytes that a cache has committed; 0 if it has no storage."""
        kv = self._engines[engine].kv
        return 0 if kv is None else kv.committed_bytes

    def go(self, engine: int, way: str) -> None:
        """Run the model in this way. Raises: UnsupportedModel."""
        self._runner(engine).go(way)

    def expect(self, engine: int, max_tokens: int) -> None:
        """Compute what the model itself says of the trial's tokens."""
        self._runner(engine).make_trial(max_tokens).expect()

    def compute(self, engine: int, batches: Iterable[Any], given: HostInputs) -> None:
        """Run one forward pass. Rank 0 takes the logits.

        Shapes of a batch: query_starts i64[S + 1], context_lens i64[S], tables i64[S, P],
        slots i64[T], and the block size.
        """
        several = [
            AttentionBatch(
                query_starts=query_starts,
                context_lens=context_lens,
                tables=torch.from_numpy(tables),
                slots=torch.from_numpy(slots),
                block_size=block_size,
            )
            for query_starts, context_lens, tables, slots, block_size in batches
        ]
        self._runner(engine).compute(several, given)

    def go_on(self, call: Call) -> None:
        """Prepare pages for the next step after the answer, while the device computes."""
        if call.method == "compute" and call.args[0] in self._engines:
            self._engines[call.args[0]].resident.prepare()

    # -- swap, and memory around the cache -------------------------------------------------------

    def open_swap(self, engine: int, path: str | None) -> None:
        """Have swap space in host memory, or in a file of that folder. Raises: ConfigError."""
        own = self._engines[engine]
        own.mover = make_mover(self._kv(engine), path, own.max_model_len, own.loaded.device)

    def save(self, engine: int, seq_id: int, slots: Sequence[Slots]) -> None:
        """Copy out a sequence's entries in these slots i64[T] of each group."""
        self._mover(engine).save(seq_id, slots)

    def put_back(
        self, engine: int, seq_id: int, slots: Sequence[Slots], num_skipped: Sequence[int]
    ) -> None:
        """Copy entries back into slots i64[T] of each group, without the first ``num_skipped``."""
        self._mover(engine).put_back(seq_id, slots, num_skipped)

    def drop(self, engine: int, seq_ids: Sequence[int]) -> None:
        """Drop the saved entries of these sequences."""
        self._mover(engine).drop(seq_ids)

    def prefault(self, engine: int) -> None:
        """Back the capacity with pages, and keep them in use. Raises: MemoryUnavailable."""
        self._engines[engine].resident.prefault()
        self._engines[engine].resident.watch()

    def follow(self, engine: int, ceiling_bytes: int) -> None:
        """Keep nothing above the ceiling (bytes)."""
        self._engines[engine].resident.follow(ceiling_bytes)

    def rest(self, engine: int, short: bool) -> None:
        """Give back what is kept around the cache: the engine is idle, or memory is short."""
        self._engines[engine].resident.rest(short=short)

    def read_memory(self, engine: int) -> MemoryReading:
        """Return how much memory is left where the cache lies."""
        return gauge_for(self._engines[engine].loaded.device).read()

    def close(self) -> None:
        """Give back all that is held."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
        self._models.clear()

    def _kv(self, engine: int) -> KVCache:
        kv = self._engines[engine].kv
        assert kv is not None, "make_storage comes first"
        return kv

    def _runner(self, engine: int) -> ModelRunner:
        runner = self._engines[engine].runner
        assert runner is not None, "make_storage comes first"
        return runner

    def _mover(self, engine: int) -> KVMover:
        mover = self._engines[engine].mover
        assert mover is not None, "open_swap comes first"
        return mover


# -- its process -----------------------------------------------------------------------------------


_NOT_HEARD = 70  # the exit code of a rank that failed alone in an exchange


def main(channel: int, lifeline: int, folder: str, grace_s: float) -> None:
    """Run a worker. ``lifeline`` is a pipe that ends with rank 0; ``folder`` is removed then."""
    threading.Thread(
        target=_end_with, args=(lifeline, folder), name="quire-lifeline", daemon=True
    ).start()
    logging.basicConfig(level=logging.ERROR)  # rank 0 logs the rest
    if not follow(Connection(channel), grace_s):
        shutil.rmtree(folder, ignore_errors=True)


def follow(channel: "Connection[Any, Any]", grace_s: float) -> bool:
    """Answer calls until ``Leave``. Return False if rank 0 ended without it."""
    worker = Worker()
    _tell(channel, Done())  # the process is ready
    while True:
        try:
            message = pickle.loads(channel.recv_bytes())
        except (EOFError, OSError):
            return False
        if isinstance(message, Leave):
            worker.close()
            leave()
            return True
        if isinstance(message, Heard):
            continue
        answer = _answer(worker, message)
        _tell(channel, answer)
        failed = isinstance(answer, Failed) and message.is_exchange
        # If all ranks failed at the same place, rank 0 sends ``Heard`` at once. If not, the others
        # wait in an exchange without this rank: the end of its process frees them.
        if failed and not channel.poll(grace_s):
            log.error("%s failed in this rank alone, which ends", message.method)
            os._exit(_NOT_HEARD)
        worker.go_on(message)


def _answer(worker: Worker, call: Call) -> Answer:
    try:
        return Done(getattr(worker, call.method)(*call.args))
    except Exception as error:
        told = (
            error
            if isinstance(error, QuireError)
            else RuntimeError(f"rank {worker.rank}: {error!r}")
        )
        committed = worker.committed_bytes(call.args[0]) if call.method == "apply" else None
        return Failed(told, committed)


def _tell(channel: "Connection[Any, Any]", answer: Answer) -> None:
    try:
        channel.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
    except OSError:  # rank 0 is gone
        os._exit(1)


def _end_with(lifeline: int, folder: str) -> None:
    os.read(lifeline, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
