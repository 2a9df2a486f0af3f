"""What a rank other than 0 holds, and what it does with it when it is told to.

It has the same storage, the same runner and the same place for saved entries as rank 0, each for
its own heads. Its accounting stays empty: it only says of which size everything is.
"""

import logging
import os
import pickle
import shutil
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, final

import torch

from quire.attention import AttentionBackend, AttentionBatch
from quire.devices import give_back_unused
from quire.engine.assembly import prepare
from quire.engine.kv_budget import named_memory
from quire.engine.kv_cache import KVCache, MakePair
from quire.engine.parallel.messages import (
    EXCHANGES,
    Answer,
    Apply,
    Asked,
    Assemble,
    CloseStorage,
    Compute,
    Disassemble,
    Done,
    DropSaved,
    Expect,
    Failed,
    Follow,
    Go,
    Heard,
    Join,
    Leave,
    LoadSaved,
    Look,
    MakeStorage,
    Message,
    OpenSwap,
    Prefault,
    PutBack,
    Read,
    Rest,
    SaveEntries,
    Tended,
    Unload,
)
from quire.engine.parallel.model_part import load_part
from quire.engine.parallel.process_group import compute_with, join, leave
from quire.engine.runner import ModelRunner
from quire.engine.swap.kv_mover import KVMover, make_mover
from quire.errors import QuireError
from quire.memory.by_device import gauge_for, machine_for, make_resident
from quire.memory.residency import Resident
from quire.models.loader import LoadedModel
from quire.models.step_inputs import HostInputs

# -- the worker ------------------------------------------------------------------------------------


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

    def make_storage(self) -> None:
        if self.kv is None:
            self.kv = KVCache(self.make_pair)
            self.runner = ModelRunner(self.loaded, self.kv, self.backend)
        else:  # rank 0 begins again
            self.kv.accounting, self.kv.storage = self.make_pair()

    def close(self) -> None:
        with ExitStack() as parts:  # all of them, whatever one raises
            parts.callback(self.resident.rest, short=True)  # what was kept for it is of no use now
            if self.kv is not None:
                parts.callback(self.kv.close)
            if self.mover is not None:
                parts.callback(self.mover.close)
            self.resident.close()


@final
class Worker:
    """One rank."""

    def __init__(self) -> None:
        self.rank, self._num_ranks = -1, 0
        self._models: dict[int, LoadedModel] = {}
        self._engines: dict[int, _Engine] = {}

    def do(self, message: Message) -> Any:
        """What comes of it. Raises: whatever it is that keeps it from being done."""
        match message:
            case Join():
                self.rank, self._num_ranks = message.rank, message.num_ranks
                if message.num_threads is not None:
                    compute_with(message.num_threads)
                join(message)
            case LoadSaved():
                self._models[message.model] = load_part(
                    message.name, dtype=message.dtype, rank=self.rank, num_ranks=self._num_ranks
                )
            case Look():
                device = self._models[message.model].model.device
                give_back_unused(device)  # of a step that was tried
                return machine_for(device).device
            case Unload():
                give_back_unused(self._models.pop(message.model).device)
            case Assemble():
                self._engines[message.engine] = self._assemble(message)
            case Disassemble():
                self._disassemble(message)
            case OpenSwap():
                engine = self._engines[message.engine]
                engine.mover = make_mover(
                    _there(engine.kv), message.path, engine.max_model_len, engine.loaded.device
                )
            case Heard() | Leave():
                raise AssertionError(f"{message} is not to be done")
            case _:
                return self._step(self._engines[message.engine], message)
        return None

    def go_on(self, message: Message) -> None:
        """After the answer: have pages for the next step, while the device computes this one."""
        if isinstance(message, Compute) and (engine := self._engines.get(message.engine)):
            engine.resident.prepare()

    def committed_bytes(self, message: Message) -> int:
        """Of the engine that a message is for."""
        engine = self._engines.get(getattr(message, "engine", -1))
        return 0 if engine is None or engine.kv is None else engine.kv.committed_bytes

    def close(self) -> None:
        """Give back all that is held."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
        self._models.clear()

    def _step(self, engine: _Engine, message: Asked | Tended) -> Any:
        if isinstance(message, Tended):
            return _tend(engine, message)
        if isinstance(message, MakeStorage):
            engine.make_storage()
            return None
        kv, runner = _there(engine.kv), _there(engine.runner)
        match message:
            case Apply():
                kv.storage.apply(message.changes)
                return kv.committed_bytes
            case CloseStorage():
                kv.storage.close()
            case Go():
                runner.go(message.way)
            case Expect():
                runner.make_trial(message.max_tokens).expect()
            case Compute():
                self._compute(runner, message)
            case SaveEntries():
                _there(engine.mover).save(message.seq_id, message.slots)
            case PutBack():
                _there(engine.mover).put_back(message.seq_id, message.slots, message.num_skipped)
            case DropSaved():
                _there(engine.mover).drop(message.seq_ids)
        return None

    def _disassemble(self, message: Disassemble) -> None:
        closed = self._engines.pop(message.engine, None)
        if closed is not None:
            device = closed.loaded.device
            closed.close()
            del closed  # what attends in it keeps memory, too
            give_back_unused(device)

    def _assemble(self, message: Assemble) -> _Engine:
        loaded = self._models[message.model]
        sizes, config = message.sizes, message.config
        provider = named_memory(config, loaded.model.device)
        resident = make_resident(provider, message.residency, sizes.capacity_bytes)
        backend, make_pair = prepare(
            loaded, message.spec, message.strategy, sizes, resident.provider, config
        )
        return _Engine(loaded, backend, make_pair, resident, sizes.max_model_len)

    def _compute(self, runner: ModelRunner, step: Compute) -> None:
        batches = [
            AttentionBatch(
                query_starts=batch.query_starts,
                context_lens=batch.context_lens,
                tables=torch.from_numpy(batch.tables),
                slots=torch.from_numpy(batch.slots),
                block_size=batch.block_size,
            )
            for batch in step.batches
        ]
        given = HostInputs(
            token_ids=step.token_ids, positions=step.positions, logits_at=step.logits_at
        )
        runner.compute(batches, given)


def _tend(engine: _Engine, message: Tended) -> Any:
    match message:
        case Prefault():
            engine.resident.prefault()
            engine.resident.watch()
        case Follow():
            engine.resident.follow(message.ceiling_bytes)
        case Rest():
            engine.resident.rest(short=message.short)
        case Read():
            return gauge_for(engine.loaded.device).read()
    return None


def _there(part: Any) -> Any:
    """What rank 0 has asked for before."""
    assert part is not None, "a message came before the one that it needs"
    return part


# -- its process -----------------------------------------------------------------------------------

# The process of a rank other than 0: it does one thing after the other, until it may leave.
#
# ``crew`` starts it and speaks with it; what it does is in ``follower``.


log = logging.getLogger(__name__)

_NOT_HEARD = 70  # the exit code of a rank that has failed alone, for which others may wait


def main(channel: int, lifeline: int, folder: str, grace_s: float) -> None:
    """``lifeline`` is a pipe that ends with rank 0, whose ``folder`` is cleared away then."""
    threading.Thread(
        target=_end_with, args=(lifeline, folder), name="quire-lifeline", daemon=True
    ).start()
    logging.basicConfig(level=logging.ERROR)  # what rank 0 logs too need not be said twice
    if not follow(Connection(channel), grace_s):
        shutil.rmtree(folder, ignore_errors=True)


def follow(channel: "Connection[Any, Any]", grace_s: float) -> bool:
    """Answer messages until one says to leave; False if rank 0 is gone without a word."""
    follower = Worker()
    _tell(channel, Done())  # it is there
    while True:
        try:
            message = pickle.loads(channel.recv_bytes())
        except (EOFError, OSError):
            return False
        if isinstance(message, Leave):
            follower.close()
            leave()
            return True
        if isinstance(message, Heard):
            continue
        answer = _answer(follower, message)
        _tell(channel, answer)
        failed = isinstance(answer, Failed) and isinstance(message, EXCHANGES)
        # If it failed in all ranks at the same place, rank 0 says so at once. If not, the others
        # wait in an exchange that will never be: they are freed by the end of this one.
        if failed and not channel.poll(grace_s):
            log.error("%s failed in this rank alone, which ends", type(message).__name__)
            os._exit(_NOT_HEARD)
        follower.go_on(message)


def _answer(follower: Worker, message: Any) -> Answer:
    try:
        return Done(follower.do(message))
    except Exception as error:
        own = isinstance(error, QuireError)
        told = error if own else RuntimeError(f"rank {follower.rank}: {error!r}")
        return Failed(told, follower.committed_bytes(message))


def _tell(channel: "Connection[Any, Any]", answer: Answer) -> None:
    try:
        channel.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
    except OSError:  # rank 0 is gone
        os._exit(1)


def _end_with(lifeline: int, folder: str) -> None:
    os.read(lifeline, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
