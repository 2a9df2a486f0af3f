"""``serve_fleet``: the process of ``quire fleet``, the door over replicas that Ray Serve keeps.

It is ``quire serve``'s process (``server/run.py``, ``server/loop.py``) with a fleet in the engine's
place: the same sockets, signals, keys and limits.
"""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from quire.config import ServerConfig, ray_address
from quire.fleet.fleet_plan import FleetPlan
from quire.fleet.ray_serve.started_fleet import StartedFleet
from quire.server.listen import Listeners
from quire.server.run import frozen_objects, prepared
from quire.server.stop import StopSignals


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStartUp:
    """What a fleet says of itself when clients are let in."""

    url: str
    model: str  # the name for clients
    num_replicas: int
    num_prefill: int  # of further ones, that compute prompts for them
    placement: str
    max_model_len: int
    num_keys: int
    is_local: bool
    ray_address: str | None  # None: it was started for this fleet


def serve_fleet(
    plan: FleetPlan,
    config: ServerConfig,
    load: Callable[[], StartedFleet],
    *,
    announce: Callable[[FleetStartUp], None],
) -> int:
    """Serve a fleet until a signal stops it. Return the exit code.

    ``load`` starts the replicas of the plan once the sockets are bound; ``announce`` is called when
    clients are let in. Raises: ConfigError for an address that cannot be bound; what ``load``
    raises.
    """
    with prepared(config) as (listeners, signals):
        started = load()
        try:
            with frozen_objects():
                return asyncio.run(_serve(plan, config, started, listeners, signals, announce))
        finally:
            started.close()


async def _serve(
    plan: FleetPlan,
    config: ServerConfig,
    started: StartedFleet,
    listeners: Listeners,
    signals: StopSignals,
    announce: Callable[[FleetStartUp], None],
) -> int:
    from quire.fleet.door import open_door
    from quire.server.loop import drain, open_server

    async with (
        open_door(
            plan.fleet,
            config,
            started.members,
            name_key=started.name_key,
            seed=plan.engine_config().seed,
        ) as (app, engine),
        open_server(app, config, listeners, signals) as server,
    ):
        announce(
            FleetStartUp(
                url=listeners.url,
                model=app.state.service.model_name,
                num_replicas=plan.fleet.replicas,
                num_prefill=plan.fleet.prefill_replicas,
                placement=plan.fleet.placement,
                max_model_len=engine.facts.max_model_len,
                num_keys=len(set(config.api_key)),
                is_local=config.is_local,
                ray_address=ray_address(),
            )
        )
        # As many servers read their options anew at this signal: here replicas load the model anew.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, partial(loop.run_in_executor, None, started.roll))
        await server.until_over()
        if server.is_asked:
            await drain(app.state.service, config.shutdown_timeout)
        await engine.aclose()  # what is left ends with the finish_reason "abort"
    return 0
