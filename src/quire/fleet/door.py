"""The door of a fleet: the server's app over replicas that come and go.

``FleetEngine`` places requests and mends streams; this tells it who is there, as a ``Membership``
says. It runs in the process of ``quire fleet``, or in a deployment of Serve's own.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeAlias, final

from starlette.applications import Starlette

from quire.config import FleetConfig, ServerConfig
from quire.errors import QuireError, one_line
from quire.fleet.dynamo_placement import DynamoPlacement
from quire.fleet.event_follower import ZmqFollower
from quire.fleet.fleet_engine import FleetEngine
from quire.fleet.fleet_figures import figures_of, fleet_operation
from quire.fleet.members import EventFollower
from quire.fleet.placement import LeastLoaded, Placement, PrefixAware
from quire.fleet.prefix_directory import PrefixDirectory
from quire.fleet.replica import ReplicaFacts, ReplicaHandle
from quire.server.app import make_app

log = logging.getLogger(__name__)

_BEFORE_S = 1.0  # that streams are moved before their replica ends those that cannot be
_AFTER_S = 3.0  # that it has for that
_PATIENCE_S = 30.0  # of requests, while the last replica's successor is being started
_POLL_S = 0.05


class WatchedReplica(ReplicaHandle, Protocol):
    """A replica that learns that it is on its way out by being watched no longer."""

    def hang_up(self) -> None:
        """Watch it no longer."""
        ...


class Membership(Protocol):
    """Tells which replicas there are."""

    async def open(self) -> ReplicaFacts:
        """Begin to tell, and return the facts of the first replica."""
        ...


# What makes a membership of two functions: one is called with each replica that comes, one with
# each that is gone or on its way out.
MakeMembership: TypeAlias = Callable[
    [Callable[[WatchedReplica], None], Callable[[WatchedReplica], None]], Membership
]


@asynccontextmanager
async def open_door(
    fleet: FleetConfig,
    config: ServerConfig,
    membership: MakeMembership,
    *,
    name_key: bytes | None = None,
    seed: int | None = None,
) -> AsyncIterator[tuple[Starlette, FleetEngine]]:
    """Make the app of a fleet once one replica is ready, and close it behind the block.

    ``name_key``: by which the replicas name blocks of tenants and salts; None: such prompts are
    placed by load. ``seed``: as in ``FleetEngine``.

    Raises: ConfigError for a placement that cannot be had.
    """
    members = _Members(config.shutdown_timeout)
    try:
        facts = await membership(members.join, members.leave).open()
        engine = _engine(fleet, facts, name_key, seed)
        try:
            members.begin(engine)
            while engine.failure is not None:
                await asyncio.sleep(_POLL_S)
            app = make_app(
                engine,
                config,
                operations=(fleet_operation(engine),),
                figures=figures_of(engine),
            )
            yield app, engine
        finally:
            await members.close()
            await engine.aclose()  # with the handles of all replicas
    finally:
        await members.close()


def _engine(
    fleet: FleetConfig, facts: ReplicaFacts, name_key: bytes | None, seed: int | None
) -> FleetEngine:
    """Make the engine, with the placement that the options name. Raises: ConfigError."""
    placement: Placement = LeastLoaded()
    follower: EventFollower | None = None
    if fleet.placement == "dynamo":
        placement = follower = DynamoPlacement()
    elif fleet.placement == "exact":
        directory = PrefixDirectory(facts.groups, facts.block_size, key=name_key)
        placement, follower = PrefixAware(directory), ZmqFollower(directory)
    return FleetEngine(
        placement,
        follower=follower,
        replica_timeout_s=fleet.health_check_timeout,
        patience_s=_PATIENCE_S,
        prefills_apart=fleet.prefill_replicas > 0,
        seed=seed,
    )


@final
class _Members:
    """Lets replicas in and out of an engine, as their membership says."""

    def __init__(self, shutdown_s: float) -> None:
        self._shutdown_s = shutdown_s
        self._engine: FleetEngine | None = None
        self._early: list[WatchedReplica] = []  # that came before the engine
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, engine: FleetEngine) -> None:
        """Let those in that have come, and all later ones."""
        self._engine = engine
        early, self._early = self._early, []
        for replica in early:
            self._spawn(self._join(engine, replica))

    def join(self, replica: WatchedReplica) -> None:
        """Let a replica in as soon as it is ready."""
        if self._engine is None:
            self._early.append(replica)
        else:
            self._spawn(self._join(self._engine, replica))

    def leave(self, replica: WatchedReplica) -> None:
        """Let the streams of a replica that is taken away end, there or elsewhere."""
        replica.hang_up()
        if self._engine is None:
            self._early.remove(replica)
        else:
            self._spawn(self._see_off(self._engine, replica))

    async def close(self) -> None:
        """Let go of what is under way, and of replicas that were never let in."""
        for task in self._tasks:
            task.cancel()
        early, self._early = self._early, []
        await asyncio.gather(
            *self._tasks, *(each.close() for each in early), return_exceptions=True
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="quire-member")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, engine: FleetEngine, replica: WatchedReplica) -> None:
        try:
            await engine.join(replica)
        except Exception as error:
            log.error("replica %s cannot join the fleet: %s", replica.name, one_line(error))

    async def _see_off(self, engine: FleetEngine, replica: WatchedReplica) -> None:
        with suppress(QuireError):  # it never was in
            if not await engine.drain(replica.name, max(0.0, self._shutdown_s - _BEFORE_S)):
                await _until_ended(engine, replica.name)
            await engine.leave(replica.name)


async def _until_ended(engine: FleetEngine, name: str) -> None:
    """Wait until a replica has ended the streams that cannot be moved, or should have."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_BEFORE_S + _AFTER_S):
            while engine.members[name].streams:
                await asyncio.sleep(_POLL_S)
