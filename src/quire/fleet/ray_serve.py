"""A fleet on Ray Serve: the only module that knows Ray.

Serve starts a process a replica, finds places for them, replaces what dies and scales. Ours are
``Replica``, an engine in such a process; ``ChosenReplica``, which makes Serve send a request where
the fleet's placement wants it; and ``RayFleet``, the replicas as the door sees them. ``build``
makes the application of Serve's config file.
"""

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

from quire.config import KVEventsConfig, ray_address
from quire.config.keys import is_loopback
from quire.errors import ConfigError, QuireError
from quire.fleet.fleet_plan import APP, REPLICA, STORE_S, FleetPlan
from quire.fleet.scaling import BUSY, QUEUED_S, wanted_replicas

RAY_VERSION: Final = "2.60"  # its routers are alpha: another minor version may differ
_EXTRA = "pip install 'quire[fleet]'"

try:
    import ray
    from ray import serve
    from ray.exceptions import RayActorError, RayError, RayTaskError
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
except ImportError as error:
    raise ConfigError(f"a fleet runs on Ray Serve, which is not here ({error}): {_EXTRA}") from error
if not ray.__version__.startswith(f"{RAY_VERSION}."):
    raise ConfigError(
        f"ray {ray.__version__} is here, and a fleet needs {RAY_VERSION}.x: what it uses of Serve "
        f"(request routers, autoscaling policies) changes between versions: {_EXTRA}"
    )

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

_REFUSED = "refused: "  # before the reason for which an engine cannot be loaded
_REASON = re.compile(rf"{_REFUSED}(.*)")
_POLL_S = 0.25  # between two looks at what is being started
_WATCH_S = 0.1  # between two looks at what a replica is busy with, told if it has changed …
_HEARTBEAT_S = 1.0  # … and at least so often
_SCALE_S = 1.0  # between two reports for scaling
_UPSCALE_DELAY_S = 5.0
_LOOK_BACK_S = 5.0
_MORE_CALLS = 64  # at a time, beside requests

# -- which replica a call goes to ------------------------------------------------------------------


@final
class Roll:
    """Tells the door which replicas Serve's router knows, in the door's own process.

    It is a keyword of each call, since the router sees these alone. Where the call arrives it is
    empty.
    """

    def __init__(self, tell: Callable[[dict[str, dict[str, Any]]], None] | None = None) -> None:
        self._tell = tell

    def note(self, replicas: Iterable[RunningReplica]) -> None:
        """Tell the replicas by name, each with what it says of itself. Any thread may call."""
        if self._tell is not None:
            self._tell({each.replica_id.unique_id: each.replica_metadata for each in replicas})

    def __reduce__(self) -> Any:
        return Roll, ()


class ChosenReplica(RequestRouter):  # type: ignore[misc]
    """Serve's router: a call goes to the replica that its keyword ``to`` names.

    Where that one is gone, Serve must be given another; it refuses what is not for it.
    """

    def initialize_state(self, **_: Any) -> None:
        """Begin without a roll, which comes with the first call."""
        self._roll = Roll()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica alone, or all."""
        keywords = {} if pending_request is None else pending_request.kwargs
        roll, to = keywords.get("roll"), keywords.get("to")
        if isinstance(roll, Roll) and roll is not self._roll:
            self._roll = roll
            roll.note(candidate_replicas)
        chosen = [each for each in candidate_replicas if each.replica_id.unique_id == to]
        return [chosen or list(candidate_replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas that can be used from now on, and tell the roll."""
        super().update_replicas(replicas)
        self._roll.note(self.curr_replicas.values())

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Drop a replica that has died before Serve's controller says so, and tell the roll."""
        super().on_replica_actor_died(replica_id)
        self._roll.note(self.curr_replicas.values())


@final
class FollowWork:
    """Serve's autoscaling policy: as many replicas as the work wants. It runs in the controller."""

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and no state."""
        told = context.aggregated_metrics or {}
        reports = {name: list(told.get(name, {}).values()) for name in (BUSY, QUEUED_S)}
        return wanted_replicas(reports, context.target_num_replicas), {}


# -- what is deployed ------------------------------------------------------------------------------


def replicas(plan: FleetPlan, *, num_cpus: float) -> Any:
    """Return the deployment of a plan's engines, bound to its arguments. Raises: ConfigError."""
    fleet, own = plan.fleet, plan.engine_config()
    grace_s = plan.graceful_shutdown_s
    num_requests = own.max_num_seqs + plan.server_config().max_num_queued_reqs
    threads = str(max(1, int(num_cpus)))
    options: dict[str, Any] = {
        "name": REPLICA,
        "max_ongoing_requests": num_requests + _MORE_CALLS,
        "graceful_shutdown_timeout_s": grace_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": min(2.0, fleet.health_check_timeout),
        "health_check_timeout_s": fleet.health_check_timeout,
        "max_constructor_retry_count": 1,
        "request_router_config": RequestRouterConfig(
            request_router_class=f"{__name__}:{ChosenReplica.__name__}"
        ),
        "ray_actor_options": {
            "num_cpus": num_cpus,
            "num_gpus": fleet.gpus_per_replica,
            "runtime_env": {
                "env_vars": {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
            },
        },
    }
    if fleet.scales:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=fleet.fewest,
            max_replicas=fleet.most,
            initial_replicas=fleet.replicas,
            upscale_delay_s=_UPSCALE_DELAY_S,
            downscale_delay_s=fleet.downscale_delay,
            look_back_period_s=_LOOK_BACK_S,
            metrics_interval_s=_SCALE_S,
            policy=AutoscalingPolicy(policy_function=f"{__name__}:{FollowWork.__name__}"),
        )
    else:
        options["num_replicas"] = fleet.replicas
    # Only what a replica needs: a change of anything else must not restart it.
    return serve.deployment(**options)(Replica).bind(
        plan.model,
        dict(plan.engine),
        publishes=fleet.placement != "least-loaded",
        shutdown_s=plan.server_config().shutdown_timeout,
    )


@final
class Replica:
    """An engine in a process of Serve's. Its methods are called through a handle, by name.

    Each has the keywords ``to``, the replica that was chosen, and ``roll``.
    """

    def __init__(
        self,
        model: str | None,
        engine: Mapping[str, Any],
        *,
        publishes: bool,
        shutdown_s: float,
    ) -> None:
        self.name = serve.get_replica_context().replica_id.unique_id
        self._shutdown_s = shutdown_s
        self._num_watchers = 0
        self._leaving: asyncio.Task[None] | None = None
        host = "127.0.0.1" if is_loopback(ray.util.get_node_ip_address()) else "*"
        events = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"tcp://{host}:0",
            replay_endpoint=f"tcp://{host}:0",
        )
        from quire.engine.async_llm import AsyncLLM

        own = {**engine, "kv_events_config": events} if publishes else dict(engine)
        try:
            self._llm = AsyncLLM(model, **own)
        except QuireError as error:
            raise RuntimeError(f"{_REFUSED}{error}") from error
