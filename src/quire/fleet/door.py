"""The door of a fleet on Ray: the server's app over replicas that Serve starts, moves and replaces.

``FleetEngine`` places requests and mends streams; this tells it who is there. It runs in the
process of ``quire fleet``, or in a deployment of Serve's own.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette

from quire.config import FleetConfig, ServerConfig
from quire.errors import QuireError
from quire.fleet.fleet_engine import FleetEngine
from quire.fleet.fleet_figures import FleetFigures, fleet_operation
from quire.fleet.placement import LeastLoaded
from quire.fleet.ray_serve import RayReplica, RayReplicas
from quire.server.app import make_app

log = logging.getLogger(__name__)

_BEFORE_S = 1.0  # that streams are moved before their replica ends those that cannot be
_AFTER_S = 3.0  # that it has for that
_POLL_S = 0.05


@asynccontextmanager
async def open_door(
    fleet: FleetConfig, config: ServerConfig, handle: Any
) -> AsyncIterator[tuple[Starlette, FleetEngine]]:
    """Make the app of a fleet once one replica is ready, and close it behind the block.

    ``handle`` is Serve's, of the replicas.
    """
    engine = FleetEngine(LeastLoaded(), replica_timeout_s=fleet.health_check_timeout)
    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Callable[[RayReplica], Any], replica: RayReplica) -> None:
        task = asyncio.create_task(work(replica), name=f"quire-{replica.name}")
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def join(replica: RayReplica) -> None:
        try:
            await engine.join(replica)
        except QuireError as error:
            log.error("a replica cannot join: %s", error)

    async def see_off(replica: RayReplica) -> None:
        """Let the streams of a replica that Serve takes away end, there or elsewhere."""
        replica.hang_up()
        with suppress(QuireError):
            left_s = max(0.0, config.shutdown_timeout - _BEFORE_S)
            if not await engine.drain(replica.name, left_s):
                await _until_left(engine, replica.name)
            await engine.leave(replica.name)

    replicas = RayReplicas(
        handle,
        joined=lambda replica: spawn(join, replica),
        left=lambda replica: spawn(see_off, replica),
    )
    try:
        await replicas.open()
        while engine.failure is not None:
            await asyncio.sleep(_POLL_S)
        app = make_app(
            engine,
            config,
            operations=(fleet_operation(engine),),
            figures=(FleetFigures(engine),),
        )
        yield app, engine
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.aclose()  # with the handles of all replicas


async def _until_left(engine: FleetEngine, name: str) -> None:
    """Wait until a replica has ended its streams, or should have."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_BEFORE_S + _AFTER_S):
            while engine.members[name].streams:
                await asyncio.sleep(_POLL_S)
