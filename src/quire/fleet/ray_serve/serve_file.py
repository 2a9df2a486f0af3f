"""``build``: the application of Serve's config file, a door and its replicas."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, final

from ray import serve

from quire.config import FleetConfig, ServerConfig
from quire.fleet.fleet_plan import DOOR, REPLICA, FleetPlan
from quire.fleet.ray_serve.ray_replica import RayReplicas
from quire.fleet.ray_serve.served_replica import log_beside_serve, replicas

_MOST_REQUESTS: Final = 100_000  # at one door


def build(args: Mapping[str, Any]) -> Any:
    """Make the application of a Serve config file: a door, which Serve's proxies ask, and replicas.

    ``args`` are the file's, as ``quire fleet --print-config`` writes it. Raises: ConfigError.
    """
    plan = FleetPlan.from_args(args)
    plan.require_no_places("a Serve file")
    config, name_key = plan.server_config(), plan.name_key()
    door = serve.deployment(
        name=DOOR,
        max_ongoing_requests=_MOST_REQUESTS,  # it refuses by itself what is too much
        graceful_shutdown_timeout_s=config.shutdown_timeout,
        ray_actor_options={"num_cpus": 1},
    )(serve.ingress(DoorApp(plan.fleet, config, name_key))(Door))
    return door.bind(replicas(plan, name_key, num_cpus=plan.fleet.cpus_per_replica or 1))


class Door:
    """The deployment of ``DoorApp``. It holds the replicas' handle, so that Serve starts them."""

    def __init__(self, engines: Any) -> None:
        self.engines = engines


@final
class DoorApp:
    """The door as an ASGI app that Serve sends to a process, where it opens."""

    def __init__(self, fleet: FleetConfig, config: ServerConfig, name_key: bytes) -> None:
        self._fleet, self._config, self._name_key = fleet, config, name_key
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or open at the start and close at the end."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        from quire.fleet.door import open_door

        log_beside_serve()
        await receive()
        engines = serve.get_deployment_handle(REPLICA, serve.get_replica_context().app_name)
        async with (
            open_door(
                self._fleet,
                self._config,
                partial(RayReplicas, engines),
                name_key=self._name_key,
            ) as (app, _),
            app.router.lifespan_context(app),
        ):
            self._app = app
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})
