"""``DynamoPlacement``: Dynamo's ``SelectionService`` chooses, where the package ai-dynamo is.

It follows the replicas' events itself and scores overlaps and loads by its own rules. It knows
token ids alone: prompts that an adapter, an image, a tenant or a salt tells apart go by load.

Source: ai-dynamo 1.6.1, dynamo.llm.SelectionService.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Final, Protocol, TypeAlias, TypeVar, final

from quire.errors import ConfigError
from quire.fleet.placement import Clock, LeastLoaded, Load, Placed
from quire.fleet.prefix_directory import PromptTokens
from quire.fleet.replica import ReplicaFacts
from quire.kv import NO_KEYS, PrefixKeys

log = logging.getLogger(__name__)

_MODEL: Final = "fleet"
_ANSWER_S: Final = 0.25  # for a choice; it takes about a millisecond
_CHANGE_S: Final = 10.0  # for a replica that comes or goes
_JOIN_S: Final = 5.0
_Answer = TypeVar("_Answer")
Call: TypeAlias = Callable[[], Awaitable[_Answer]]


class Selecting(Protocol):
    """What is used of Dynamo's service."""

    async def upsert_worker(self, worker: Any) -> Any:
        """Follow a worker's events, and select it from now on."""
        ...

    async def delete_worker(self, worker_id: int) -> Any:
        """Follow and select a worker no longer."""
        ...

    async def select_and_reserve(self, request: Any) -> Any:
        """Select a worker for a prompt, and count its load."""
        ...

    async def prefill_complete(self, selection_id: str) -> None:
        """Count a prompt as computed."""
        ...

    async def free_reservation(self, selection_id: str) -> None:
        """Count a request as ended."""
        ...

    def shutdown(self) -> None:
        """End all that it follows."""
        ...


def selection_service() -> Selecting:
    """Make Dynamo's service. Raises: ConfigError where it is not installed."""
    try:
        from dynamo.llm import SelectionService
    except ImportError as error:
        raise ConfigError(
            f"placement by Dynamo needs its package ({error}): pip install ai-dynamo==1.6.1, or "
            "take prefix-aware, which needs none"
        ) from error
    service: Selecting = SelectionService(indexer_threads=1)
    return service


@final
class DynamoPlacement:
    """Takes the replica that Dynamo selects, and the least loaded one where it does not answer.

    It is also what follows the replicas (``follow``, ``close``), in place of a ``ZmqFollower``.
    Dynamo's calls run on a loop of their own, in a thread that starts with the first replica.
    """

    def __init__(self, service: Selecting | None = None, *, clock: Clock = time.monotonic) -> None:
        """``service``: Dynamo's own if None. Raises: ConfigError where it is not installed."""
        self._service = service or selection_service()
        self._by_load = LeastLoaded(clock=clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._workers: dict[str, int] = {}
        self._numbers = count(1)
        self._reserved: set[int] = set()  # choices that Dynamo has counted
        self._fails = False

    # -- choosing --------------------------------------------------------------------------------

    def place(
        self,
        token_ids: PromptTokens,
        keys: PrefixKeys = NO_KEYS,
        candidates: Sequence[str] = (),
        *,
        session: str | None = None,
    ) -> Placed:
        known = {self._workers[each]: each for each in candidates if each in self._workers}
        if not known or keys != NO_KEYS:
            return self._by_load.place(token_ids, keys, candidates)
        placed = self._by_load.thought(token_ids, candidates)
        chosen = self._select(placed.number, token_ids, list(known))
        if chosen is not None and (first := known.get(chosen["worker_id"])) is not None:
            self._reserved.add(placed.number)
            tokens = len(token_ids) - int(chosen["effective_prefill_tokens"])
            placed = replace(
                placed,
                replica=first,
                found_tokens={"GPU": tokens} if 0 < tokens < len(token_ids) else {},
            )
        self._by_load.reserve(placed)
        return placed

    def note_first_token(self, placed: Placed) -> None:
        self._by_load.note_first_token(placed)
        if placed.number in self._reserved:
            self._begin(partial(self._service.prefill_complete, str(placed.number)))

    def note_end(self, placed: Placed) -> None:
        self._by_load.note_end(placed)
        if placed.number in self._reserved:
            self._reserved.remove(placed.number)
            self._begin(partial(self._service.free_reservation, str(placed.number)))

    def report(self, replica: str, load: Load) -> None:
        """Take a report for the choices by load. Dynamo counts what it has selected itself."""
        self._by_load.report(replica, load)

    def forget(self, replica: str) -> None:
        self._by_load.forget(replica)
        worker = self._workers.pop(replica, None)
        if worker is not None:
            self._begin(partial(self._service.delete_worker, worker))

    def _select(
        self, number: int, token_ids: PromptTokens, workers: list[int]
    ) -> Mapping[str, Any] | None:
        asked = {
            "selection_id": str(number),
            "model_name": _MODEL,
            "tenant_id": "default",
            "token_ids": list(map(int, token_ids)),
            "allowed_worker_ids": workers,
        }
        try:
            chosen: Mapping[str, Any] = self._wait(
                partial(self._service.select_and_reserve, asked), _ANSWER_S
            )
        except Exception as error:  # its errors have no type that is there without it
            if not self._fails:
                log.warning(
                    "Dynamo selects no replica (%s): requests go by load until it does", error
                )
            self._fails = True
            # It may have been counted nevertheless.
            self._begin(partial(self._service.free_reservation, str(number)))
            return None
        self._fails = False
        return chosen

    # -- following -------------------------------------------------------------------------------

    @property
    def num_gaps(self) -> Mapping[str, int]:
        """Return nothing: Dynamo closes gaps itself, and does not say so."""
        return {}

    def follow(self, replica: str, facts: ReplicaFacts) -> None:
        """Have Dynamo follow a replica; without events it is chosen by load.

        Raises: ConfigError with what Dynamo says.
        """
        if facts.events is None:
            log.info("replica %s publishes no KV-cache events: it is chosen by its load", replica)
            return
        worker = next(self._numbers)
        described = {
            "worker_id": worker,
            "model_name": _MODEL,
            "tenant_id": "default",
            "endpoint": f"quire://{worker}",
            "block_size": facts.block_size,
            "max_num_batched_tokens": Load().max_num_batched_tokens,
            "data_parallel_start_rank": 0,
            "data_parallel_size": 1,
            "kv_events_endpoints": {0: facts.events.endpoint},
            "replay_endpoint": facts.events.replay_endpoint,
        }
        try:
            self._wait(partial(self._service.upsert_worker, described), _CHANGE_S)
        except Exception as error:  # its errors have no type that is there without it
            raise ConfigError(f"Dynamo does not take replica {replica}: {error}") from error
        self._workers[replica] = worker

    async def close(self) -> None:
        """Follow none any longer. A second call does nothing."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._finish(), loop)
        await asyncio.to_thread(thread.join, 2 * _JOIN_S)

    async def _finish(self) -> None:
        """End Dynamo's service once the calls that were begun are over, or take too long."""
        begun = asyncio.all_tasks() - {asyncio.current_task()}
        if begun:
            await asyncio.wait(begun, timeout=_JOIN_S)
        self._service.shutdown()
        asyncio.get_running_loop().stop()

    # -- the loop --------------------------------------------------------------------------------

    # Calls are begun on the loop: Dynamo's look for one that runs.

    def _wait(self, call: Call[_Answer], most_s: float) -> _Answer:
        """Run a call on the loop, and wait. Raises: TimeoutError, and what the call raises."""

        async def carry_out() -> _Answer:
            return await call()

        done = asyncio.run_coroutine_threadsafe(carry_out(), self._running())
        try:
            return done.result(most_s)
        finally:
            done.cancel()

    def _begin(self, call: Call[Any]) -> None:
        """Run a call on the loop, whose end and error are of no interest."""

        async def carry_out() -> None:
            with suppress(Exception):  # what is to be taken back may be gone already
                await call()

        asyncio.run_coroutine_threadsafe(carry_out(), self._running())

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run, args=(self._loop,), name="quire-dynamo", daemon=True
            )
            self._thread.start()
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(_end(asyncio.all_tasks(loop)))  # begun in the moment of the end
        loop.close()


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
