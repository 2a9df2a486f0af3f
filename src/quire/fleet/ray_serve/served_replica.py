"""``ServedReplica``: an engine in a process of Serve's, and the deployment of such engines."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, final

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from quire.config import KVEventsConfig, keep_few_shapes, wait_patiently
from quire.config.keys import is_loopback
from quire.errors import QuireError
from quire.fleet.fleet_plan import BUSY, PREFILL, QUEUED_S, REPLICA, STORE_S, FleetPlan
from quire.fleet.prefill import PrefillPlaces
from quire.fleet.ray_serve import serve_policies
from quire.fleet.ray_serve.serve_policies import ChosenReplica, FollowWork, Roll

if TYPE_CHECKING:
    from quire.fleet.door_connection import Offer
    from quire.fleet.replica import LocalReplica, ReplicaFacts, ReplicaReport
    from quire.fleet.shared_stream import Outbox
    from quire.kv.evidence import Evidence
    from quire.server.metrics.family import Figures

REFUSED: Final = "refused: "  # before the reason for which an engine cannot be loaded
_WITHOUT_EVENTS = "--placement least-loaded, which asks no cache"
_WATCH_S = 0.1  # between two looks at what a replica is busy with, told if it has changed
_HEARTBEAT_S = 1.0  # between two reports through Serve
_SCALE_S = 1.0  # between two reports for scaling
_UPSCALE_DELAY_S = 5.0
_LOOK_BACK_S = 5.0
_MOST_CALLS = 256  # at a time, at a replica: two that last for each door, and short ones


def replicas(
    plan: FleetPlan,
    name_key: bytes,
    *,
    num_cpus: float,
    generation: int = 0,
    places: PrefillPlaces | None = None,
    are_prefill: bool = False,
) -> Any:
    """Return the deployment of a plan's engines, bound to its arguments.

    ``name_key``: by which they name blocks of tenants and salts, the door's, too. Another
    ``generation`` has Serve replace the replicas that there are. ``places``: where prefill replicas
    give blocks away; ``are_prefill``: they are these. Raises: ConfigError.
    """
    fleet, grace_s = plan.fleet, plan.graceful_shutdown_s
    threads = str(max(1, int(num_cpus)))
    options: dict[str, Any] = {
        "name": PREFILL if are_prefill else REPLICA,
        # Requests are no calls of Serve's: they travel on the doors' own connections.
        "max_ongoing_requests": _MOST_CALLS,
        "graceful_shutdown_timeout_s": grace_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": min(2.0, fleet.health_check_timeout),
        "health_check_timeout_s": fleet.health_check_timeout,
        "request_router_config": RequestRouterConfig(
            request_router_class=f"{serve_policies.__name__}:{ChosenReplica.__name__}"
        ),
        "ray_actor_options": {
            "num_cpus": num_cpus,
            "num_gpus": fleet.gpus_per_replica,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}},
        },
    }
    if are_prefill:
        options["num_replicas"] = fleet.prefill_replicas
    elif fleet.scales:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=fleet.fewest,
            max_replicas=fleet.most,
            initial_replicas=fleet.replicas,
            upscale_delay_s=_UPSCALE_DELAY_S,
            downscale_delay_s=fleet.downscale_delay,
            look_back_period_s=_LOOK_BACK_S,
            metrics_interval_s=_SCALE_S,
            policy=AutoscalingPolicy(
                policy_function=f"{serve_policies.__name__}:{FollowWork.__name__}"
            ),
        )
    else:
        options["num_replicas"] = fleet.replicas
    # Only what a replica needs: a change of anything else must not restart it.
    return serve.deployment(**options)(ServedReplica).bind(
        plan.model,
        dict(plan.engine),
        generation=generation,
        name_key=name_key if fleet.placement != "least-loaded" else None,
        shutdown_s=plan.server_config().shutdown_timeout,
        places=places,
        is_prefill=are_prefill,
    )


@final
class ServedReplica:
    """An engine in a process of Serve's. Its methods are called through a handle, by name.

    Those for a door have the keywords ``to``, the replica that was chosen, and ``roll``.
    """

    _local: "LocalReplica | None" = None  # until it is made, and after its end

    def __init__(
        self,
        model: str | None,
        engine: Mapping[str, Any],
        *,
        generation: int,
        name_key: bytes | None,
        shutdown_s: float,
        places: PrefillPlaces | None = None,
        is_prefill: bool = False,
    ) -> None:
        """``name_key``: by which it names blocks in events; None: it publishes none."""
        self.name = serve.get_replica_context().replica_id.unique_id
        self._node = ray.util.get_node_ip_address()
        self._shutdown_s = shutdown_s
        self._num_watchers = 0
        self._leaving: asyncio.Task[None] | None = None
        self._outboxes: set[Outbox] = set()  # of doors
        wait_patiently()
        keep_few_shapes()
        from quire.engine.async_llm import AsyncLLM
        from quire.fleet.door_connection import DoorListener
        from quire.fleet.replica import LocalReplica

        log_beside_serve()
        own = dict(engine)
        if name_key is not None:
            own["kv_events_config"] = self._events(name_key)
        if places is not None:
            # The place is this process's until its end.
            own["kv_transfer_config"] = places.take()[0] if is_prefill else places.of_decoder()
        try:
            llm = AsyncLLM(model, **own)
        except QuireError as error:
            advice = f"; or {_WITHOUT_EVENTS}" if str(error).startswith("kv_events_config") else ""
            raise RuntimeError(f"{REFUSED}{error}{advice}") from error
        self._llm, self._local = llm, LocalReplica(self.name, llm)
        self._listener = DoorListener(self._node)

    def _events(self, name_key: bytes) -> KVEventsConfig:
        """Return where events are published: free ports, on loopback where the door is too."""
        host = "127.0.0.1" if is_loopback(self._node) else "*"
        return KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"tcp://{host}:0",
            replay_endpoint=f"tcp://{host}:0",
            name_key=name_key,
        )

    # -- asked by Serve ----------------------------------------------------------------------------

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return what doors are told of this replica beside its name."""
        return {"pid": os.getpid(), "node": self._node}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how busy this replica is, for ``FollowWork``."""
        load = (await self._here().report()).load
        busy = (load.num_waiting + load.num_running) / load.max_num_seqs
        return {BUSY: busy, QUEUED_S: load.queued_tokens * load.prompt_token_s}

    def check_health(self) -> None:
        """Raise what has ended the engine, so that Serve puts another replica in its place.

        Raises: RuntimeError.
        """
        if self._llm.failure is not None:
            raise RuntimeError(f"the engine has failed: {self._llm.failure}")

    def __del__(self) -> None:
        """Store the hottest blocks for those who come after, and end the engine.

        Serve calls it once no call is under way any more, and Python may call it again.
        """
        if self._local is None:
            return
        self._local = None
        if self._llm.failure is None:
            with suppress(QuireError):
                self._llm.llm.store_hottest(STORE_S)
        self._llm.close()

    # -- asked by a door ---------------------------------------------------------------------------

    async def facts(self, *, to: str | None = None, roll: Roll | None = None) -> "ReplicaFacts":
        """Return the facts of the replica, or of any one."""
        facts = await self._here(to).facts()
        events = facts.events
        if events is None:
            return facts
        events = replace(
            events,
            endpoint=self._reached(events.endpoint),
            replay_endpoint=self._reached(events.replay_endpoint),
        )
        return replace(facts, events=events)

    async def connect(self, *, to: str, roll: Roll | None = None) -> "AsyncIterator[Offer]":
        """Yield how a door connects for its requests and their answers, and end with that.

        So Serve knows that something is under way here, and waits for it.
        """
        from quire.fleet.shared_stream import Outbox

        outbox = Outbox(self._here(to))
        self._outboxes.add(outbox)
        try:
            reports = _changed(self._here(to))
            async with aclosing(self._listener.serve(outbox, reports)) as offers:
                async for offer in offers:
                    yield offer
        finally:
            self._outboxes.discard(outbox)

    async def abort(
        self, request_ids: list[str] | None, *, to: str, roll: Roll | None = None
    ) -> None:
        """End these requests, or all (None)."""
        await self._here(to).abort(request_ids)

    async def hear_evidence(
        self, others: "tuple[Evidence | None, ...]", *, to: str, roll: Roll | None = None
    ) -> None:
        """Tell the eviction policies what those of other replicas have found."""
        await self._here(to).hear_evidence(others)

    async def figures(self, *, to: str, roll: Roll | None = None) -> "Mapping[str, Figures]":
        """Return the figures of the engine's metrics."""
        return await self._here(to).figures()

    async def begin_drain(self, *, to: str, roll: Roll | None = None) -> None:
        """Let no new request in."""
        await self._here(to).begin_drain()

    async def watch(self, *, to: str, roll: Roll | None = None) -> "AsyncIterator[ReplicaReport]":
        """Yield a report every second; the door hangs up.

        What changes in between is told on the door's own connection, where it costs a hundredth.
        A replica that no door watches any more is on its way out: Serve has taken it from the
        routers, and does not tell the replica. What still runs has ``shutdown_timeout`` then, and
        ends with a finish_reason before Serve ends the process.
        """
        local = self._here(to)
        self._num_watchers += 1
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        try:
            while True:
                yield await local.report()
                await asyncio.sleep(_HEARTBEAT_S)
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                self._leaving = asyncio.create_task(self._end_what_runs())

    async def _end_what_runs(self) -> None:
        await asyncio.sleep(self._shutdown_s)
        await self._here().abort(None)
        for outbox in list(self._outboxes):  # Serve waits until no call is under way
            await outbox.close()

    def _here(self, to: str | None = None) -> "LocalReplica":
        """Return the engine. Raises: ReplicaRefused for a call that is meant for another replica.

        Serve sends such a call here if that one is gone.
        """
        from quire.fleet.replica import ReplicaRefused

        if self._local is None or to not in (None, self.name):
            raise ReplicaRefused(f"replica {to or self.name} is not on Serve's list any more")
        local: LocalReplica = self._local
        return local

    def _reached(self, endpoint: Any) -> Any:
        """Return an endpoint as other machines reach it."""
        return endpoint and endpoint.replace("tcp://0.0.0.0:", f"tcp://{self._node}:")


async def _changed(replica: "LocalReplica") -> "AsyncIterator[ReplicaReport]":
    """Yield a replica's reports, each where it differs from the last one."""
    said = None
    while True:
        await asyncio.sleep(_WATCH_S)
        report = await replica.report()
        if report != said:
            said = report
            yield report


def log_beside_serve() -> None:
    """Write what Quire logs to standard error, and touch nothing else of this process's logging.

    A new set-up of logging closes all handlers that there are. Serve's are among them, and its
    controller, when it has begun anew, ends a replica without them.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    quire = logging.getLogger("quire")
    quire.setLevel(logging.INFO)
    quire.addHandler(handler)
    quire.propagate = False
