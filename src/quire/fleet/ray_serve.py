"""A fleet on Ray Serve: the only module that knows Ray.

Serve starts a process a replica, finds places for them, replaces what dies and scales. Ours are
``ServedReplica``, an engine in such a process; ``ChosenReplica``, which makes Serve send a request
where the fleet's placement wants it; and ``RayReplicas``, which are there, as the door sees it.
``build`` makes the application of Serve's config file.
"""

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, final

from quire.config import (
    FleetConfig,
    KVEventsConfig,
    ServerConfig,
    keep_few_shapes,
    ray_address,
    wait_patiently,
)
from quire.config.keys import is_loopback
from quire.errors import ConfigError, QuireError, one_line
from quire.fleet.fleet_plan import (
    APP,
    BUSY,
    DOOR,
    PREFILL,
    PREFILL_APP,
    QUEUED_S,
    REPLICA,
    STORE_S,
    FleetPlan,
    wanted_replicas,
)
from quire.fleet.prefill import PrefillPlaces

RAY_VERSION: Final = "2.60"  # its routers are alpha: another minor version may differ
_EXTRA = "pip install 'quire-kv[fleet]'"

try:
    import ray
    from ray import serve
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
    from ray.serve.exceptions import RayServeException
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
except ImportError as error:
    raise ConfigError(
        f"a fleet runs on Ray Serve, which is not here ({error}): {_EXTRA}"
    ) from error
if not ray.__version__.startswith(f"{RAY_VERSION}."):
    raise ConfigError(
        f"ray {ray.__version__} is here, and a fleet needs {RAY_VERSION}.x: what it uses of Serve "
        f"(request routers, autoscaling policies) changes between versions: {_EXTRA}"
    )

if TYPE_CHECKING:
    from quire.engine.outputs import TextDelta
    from quire.engine.sequence import Request
    from quire.fleet.door_connection import Offer
    from quire.fleet.replica import LocalReplica, ReplicaFacts, ReplicaReport
    from quire.fleet.shared_stream import Inbox, Outbox
    from quire.server.metrics.family import Figures

log = logging.getLogger(__name__)

_REFUSED = "refused: "  # before the reason for which an engine cannot be loaded
_REASON = re.compile(rf"{_REFUSED}(.*)")
_WITHOUT_EVENTS = "--placement least-loaded, which asks no cache"
_POLL_S = 0.25  # between two looks at what is being started
_WATCH_S = 0.1  # between two looks at what a replica is busy with, told if it has changed …
_HEARTBEAT_S = 1.0  # … and at least so often
_SCALE_S = 1.0  # between two reports for scaling
_UPSCALE_DELAY_S = 5.0
_LOOK_BACK_S = 5.0
_UNLISTED_S = 2.0  # before a replica that Serve's router lists no longer counts as gone
_MOST_CALLS = 256  # at a time, at a replica: two that last for each door, and short ones
_MOST_REQUESTS = 100_000  # at one door
_OBJECT_STORE_BYTES = 100 * 2**20  # Ray's, for calls that are large


# -- which replica a call goes to ------------------------------------------------------------------


@final
class Roll:
    """Tells the door which replicas Serve's router knows, in the door's own process.

    It is a keyword of each call, since the router sees these alone. Where the call arrives it is
    empty.
    """

    def __init__(self, tell: Callable[[Iterable[str]], None] | None = None) -> None:
        self._tell = tell

    def note(self, replicas: Iterable[RunningReplica]) -> None:
        """Tell the replicas' names. Any thread may call."""
        if self._tell is not None:
            self._tell([each.replica_id.unique_id for each in replicas])

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
        # No look at its class: Serve may have brought this one here by value, and with it another
        # class of that name.
        if roll is not None and roll is not self._roll:
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
        return wanted_replicas(reports), {}


# -- what is deployed ------------------------------------------------------------------------------


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
            request_router_class=f"{__name__}:{ChosenReplica.__name__}"
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
            policy=AutoscalingPolicy(policy_function=f"{__name__}:{FollowWork.__name__}"),
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

        _log_beside_serve()
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
            raise RuntimeError(f"{_REFUSED}{error}{advice}") from error
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
            async with aclosing(self._listener.serve(outbox)) as offers:
                async for offer in offers:
                    yield offer
        finally:
            self._outboxes.discard(outbox)

    async def abort(
        self, request_ids: list[str] | None, *, to: str, roll: Roll | None = None
    ) -> None:
        """End these requests, or all (None)."""
        await self._here(to).abort(request_ids)

    async def figures(self, *, to: str, roll: Roll | None = None) -> "Mapping[str, Figures]":
        """Return the figures of the engine's metrics."""
        return await self._here(to).figures()

    async def begin_drain(self, *, to: str, roll: Roll | None = None) -> None:
        """Let no new request in."""
        await self._here(to).begin_drain()

    async def watch(self, *, to: str, roll: Roll | None = None) -> "AsyncIterator[ReplicaReport]":
        """Yield a report when it has changed, and every second; the door hangs up.

        A replica that no door watches any more is on its way out: Serve has taken it from the
        routers, and does not tell the replica. What still runs has ``shutdown_timeout`` then, and
        ends with a finish_reason before Serve ends the process.
        """
        local = self._here(to)
        self._num_watchers += 1
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        said, said_s = None, 0.0
        try:
            while True:
                report, now_s = await local.report(), time.monotonic()
                if report != said or now_s - said_s >= _HEARTBEAT_S:
                    said, said_s = report, now_s
                    yield report
                await asyncio.sleep(_WATCH_S)
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


def _log_beside_serve() -> None:
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


# -- as the door sees it ---------------------------------------------------------------------------


@final
class RayCalls:
    """Calls of one replica's methods. Its errors are told as ours."""

    def __init__(self, name: str, handle: Any, roll: Roll) -> None:
        self.name = name
        self._handle, self._keywords = handle, {"to": name, "roll": roll}

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method there. Raises: what it raises; ReplicaLost."""
        call = self._handle.options(method_name=method).remote(*args, **self._keywords)
        try:
            with _told_as_ours(self.name):
                return await call
        except asyncio.CancelledError:
            call.cancel()
            raise

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        """Yield what a method yields there; end it if it is left. Raises: as ``call``."""
        handle = self._handle.options(method_name=method, stream=True)
        stream = handle.remote(*args, **self._keywords)
        is_over = False
        try:
            with _told_as_ours(self.name):
                async for each in stream:
                    yield each
            is_over = True
        finally:
            if not is_over:
                stream.cancel()


@final
class RayReplica:
    """A replica of Serve's, as a handle of the fleet's. It belongs to the door's event loop.

    While it is not ``listed`` by Serve's router, it takes no new requests. A connection that ends
    is the loss of what was under way; another one is made, since the replica may live on.
    """

    def __init__(self, name: str, handle: Any, roll: Roll) -> None:
        self._name, self._calls = name, RayCalls(name, handle, roll)
        self._inbox = self._connected()
        self._last: ReplicaReport | None = None
        self._fresh: ReplicaReport | None = None  # that has not been asked for
        self._lost: QuireError | None = None
        self._told = asyncio.Event()
        self._is_listed = True
        self._watching = asyncio.create_task(self._watch())

    @property
    def name(self) -> str:
        return self._name

    async def facts(self) -> "ReplicaFacts":
        facts: ReplicaFacts = await self._calls.call("facts")
        return facts

    def generate(self, request: "Request", *, request_id: str) -> "AsyncGenerator[TextDelta, None]":
        from quire.fleet.replica import ReplicaRefused

        if not self._is_listed:
            raise ReplicaRefused(f"replica {self._name} is not on Serve's list at present")
        return self._inbox.generate(request, request_id=request_id)

    async def abort(self, request_ids: Iterable[str] | None) -> None:
        if self._is_listed:  # else it cannot be asked, and ends by itself what runs
            await self._calls.call("abort", None if request_ids is None else list(request_ids))

    async def report(self) -> "ReplicaReport":
        """Return a report that has come since the last call, or wait for one.

        After the loss of the connection, which is told once, there is none without another one.
        """
        await self._until_open()
        while self._fresh is None and self._lost is None:
            self._told.clear()
            await self._told.wait()
        if self._lost is not None:
            raise self._lost
        await self._until_open()
        report, self._fresh = self._fresh, None
        assert report is not None
        return report if self._is_listed else replace(report, takes_requests=False)

    async def _until_open(self) -> None:
        """Wait for the connection. Raises: why there is none, and begins to make another one, but
        to a replica that is on its way out.
        """
        try:
            await self._inbox.opened()
        except Exception:
            if self._is_listed:
                broken, self._inbox = self._inbox, self._connected()
                await broken.close()
            raise

    def _connected(self) -> "Inbox":
        from quire.fleet.door_connection import ConnectedOutbox
        from quire.fleet.shared_stream import Inbox

        offered = partial(self._calls.stream, "connect")
        return Inbox(self._name, ConnectedOutbox(self._name, offered))

    async def figures(self) -> "Mapping[str, Figures]":
        from quire.fleet.replica import ReplicaLost

        if not self._is_listed:
            raise ReplicaLost(f"replica {self._name} is not on Serve's list at present")
        figures: Mapping[str, Figures] = await self._calls.call("figures")
        return figures

    async def begin_drain(self) -> None:
        if self._is_listed:
            await self._calls.call("begin_drain")

    @property
    def listed(self) -> bool:
        """Whether Serve's router sends calls there."""
        return self._is_listed

    @listed.setter
    def listed(self, is_listed: bool) -> None:
        if is_listed != self._is_listed:
            self._is_listed = is_listed
            self._fresh = self._last
            self._told.set()

    def hang_up(self) -> None:
        """Watch the replica no longer. So it learns that it is on its way out."""
        self._watching.cancel()

    async def close(self) -> None:
        """Give back what the handle holds. What runs there for this door ends."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._inbox.close()

    async def _watch(self) -> None:
        from quire.fleet.replica import ReplicaLost

        try:
            async with aclosing(self._calls.stream("watch")) as reports:
                async for report in reports:
                    self._last = self._fresh = report
                    self._told.set()
            self._lost = ReplicaLost(f"replica {self._name} reports no longer")
        except Exception as error:
            self._lost = ReplicaLost(f"replica {self._name} cannot be watched: {one_line(error)}")
        self._told.set()


@contextmanager
def _told_as_ours(name: str) -> Iterator[None]:
    """Raise errors of Ray as what they say of a replica, and Quire's own as they were there."""
    from quire.fleet.replica import ReplicaLost

    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, QuireError):
            raise error.cause from None
        raise ReplicaLost(f"replica {name} has failed: {error.cause!r}") from error
    except (RayError, RayServeException) as error:
        raise ReplicaLost(f"replica {name} has ended ({type(error).__name__})") from error


@final
class RayReplicas:
    """The replicas of a fleet that Serve's router knows, from the door's event loop.

    ``joined`` is called with each new one, ``left`` with each that is gone or on its way out.
    """

    def __init__(
        self,
        handle: Any,
        joined: Callable[[RayReplica], None],
        left: Callable[[RayReplica], None],
    ) -> None:
        self._handle, self._joined, self._left = handle, joined, left
        self._loop = asyncio.get_running_loop()
        self.roll = Roll(self._take)  # a keyword of each call
        self._known: dict[str, RayReplica] = {}

    async def open(self) -> "ReplicaFacts":
        """Make Serve's router begin to tell, and return the facts of the first replica."""
        call = self._handle.options(method_name="facts").remote(roll=self.roll)
        facts: ReplicaFacts = await call
        return facts

    def _take(self, names: Iterable[str]) -> None:
        """Take the names from the router's thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._compare, frozenset(names))

    def _compare(self, names: frozenset[str]) -> None:
        if not names and self._known:
            # A controller that has just begun anew knows of no replica for a moment. Calls wait in
            # Serve's router until there is one again.
            return
        for name, replica in self._known.items():
            replica.listed = name in names
            if not replica.listed:
                self._loop.call_later(_UNLISTED_S, self._see_off, replica)
        for name in sorted(names - self._known.keys()):
            self._known[name] = replica = RayReplica(name, self._handle, self.roll)
            self._joined(replica)

    def _see_off(self, replica: RayReplica) -> None:
        """Tell that a replica has left, unless it has come back meanwhile."""
        if not replica.listed and self._known.get(replica.name) is replica:
            del self._known[replica.name]
            self._left(replica)


@final
class SeveralDeployments:
    """The replicas of several deployments, as one membership."""

    def __init__(
        self,
        handles: Iterable[Any],
        joined: Callable[[RayReplica], None],
        left: Callable[[RayReplica], None],
    ) -> None:
        self._each = [RayReplicas(handle, joined, left) for handle in handles]

    async def open(self) -> "ReplicaFacts":
        """Make Serve's routers begin to tell, and return the facts of the first replica."""
        return (await asyncio.gather(*(each.open() for each in self._each)))[0]


# -- the process that starts a fleet ---------------------------------------------------------------


@final
class StartedFleet:
    """A fleet's replicas, as the process that has started them has them."""

    def __init__(
        self, plan: FleetPlan, name_key: bytes, *, num_cpus: float, stops_ray: bool
    ) -> None:
        """``name_key``: of all its replicas, as ``FleetPlan.name_key`` says."""
        self._plan, self.name_key, self._num_cpus = plan, name_key, num_cpus
        self._stops_ray = stops_ray  # it was started for this fleet
        self._generation = 0
        self._is_closed = False
        self._folder: TemporaryDirectory[str] | None = None
        self._places: PrefillPlaces | None = None
        if num_prefill := plan.fleet.prefill_replicas:
            self._folder = TemporaryDirectory(prefix="quire-fleet-")  # no other user's
            self._places = PrefillPlaces.made(self._folder.name, num_prefill)

    def members(
        self, joined: Callable[[RayReplica], None], left: Callable[[RayReplica], None]
    ) -> SeveralDeployments:
        """Return who is in the fleet, for a door."""
        names = [(REPLICA, APP)]
        if self._places is not None:
            names.append((PREFILL, PREFILL_APP))
        handles = [serve.get_deployment_handle(*each) for each in names]
        return SeveralDeployments(handles, joined, left)

    def deploy(self) -> None:
        """Have Serve start the replicas, and return at once."""
        deployed = partial(
            replicas,
            self._plan,
            self.name_key,
            num_cpus=self._num_cpus,
            generation=self._generation,
            places=self._places,
        )
        apps = {APP: deployed()}
        if self._places is not None:
            apps[PREFILL_APP] = deployed(are_prefill=True)
        serve.run_many(
            [serve.RunTarget(each, name=name, route_prefix=None) for name, each in apps.items()],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def roll(self) -> None:
        """Have Serve replace the replicas, some after the others, and return at once."""
        self._generation += 1
        self.deploy()

    def close(self) -> None:
        """Let the replicas store their blocks and end, and Ray with them. It takes seconds."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(RayError, RayServeException, RuntimeError, TimeoutError):
            serve.delete(APP)
            if self._places is not None:
                serve.delete(PREFILL_APP)
            if self._stops_ray:
                serve.shutdown()
        ray.shutdown()
        if self._folder is not None:
            self._folder.cleanup()


def start_fleet(plan: FleetPlan, tell: Callable[[int, int, str], None]) -> StartedFleet:
    """Start the replicas of a plan, on this machine or on the cluster at RAY_ADDRESS, and wait.

    ``tell`` is called with the number of replicas that are ready, that of all, and what is being
    waited for. Raises: ConfigError with the reason for which no replica can be started.
    """
    address, name_key = ray_address(), plan.name_key()
    if address is not None:
        plan.require_no_places(f"RAY_ADDRESS={address}")
    with _own_signals():
        try:
            if address is None:
                cores = len(os.sched_getaffinity(0))
                ray.init(
                    address="local",
                    # Twice what there is: a replica's successor does not wait for its end.
                    num_cpus=2 * cores,
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                    # 127.0.0.1 would be replaced by an address that other machines reach.
                    _node_ip_address="127.0.0.2",
                )
            else:
                ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"RAY_ADDRESS={address}: {error}" if address else f"Ray cannot be started: {error}"
            ) from error
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # its own lines are in its log files
    if address is not None and APP in serve.status().applications:
        ray.shutdown()
        raise ConfigError(
            f"RAY_ADDRESS={address}: the cluster has an application {APP!r} already: of another "
            "fleet, or of one whose door has died. serve shutdown ends it"
        )
    has = dict(ray.cluster_resources())
    if address is None:
        has["CPU"] = cores
    num_cpus = plan.fleet.cpus_per_replica
    if num_cpus is None:
        most = plan.fleet.most + plan.fleet.prefill_replicas
        num_cpus = 1 if address else max(1, int(has["CPU"]) // most)
    fleet = StartedFleet(plan, name_key, num_cpus=num_cpus, stops_ray=address is None)
    try:
        _require_room(plan, num_cpus, has)
        serve.start(proxy_location="Disabled")
        fleet.deploy()
        _until_ready(plan, tell)
    except BaseException:
        fleet.close()
        raise
    return fleet


def _require_room(plan: FleetPlan, num_cpus: float, has: Mapping[str, float]) -> None:
    """Refuse what this machine or the cluster can never hold. Raises: ConfigError."""
    count = plan.fleet.replicas + plan.fleet.prefill_replicas
    for name, flag, each in (
        ("CPU", "--cpus-per-replica", num_cpus),
        ("GPU", "--gpus-per-replica", plan.fleet.gpus_per_replica),
    ):
        if count * each > has.get(name, 0) + 1e-9:
            raise ConfigError(
                f"{count} replicas need {count * each:g} {name}s ({flag} {each:g}), and there are "
                f"{has.get(name, 0):g}: fewer --replicas, or less {flag}"
            )


def _until_ready(plan: FleetPlan, tell: Callable[[int, int, str], None]) -> None:
    """Wait until all replicas are ready. Raises: ConfigError if they cannot be."""
    deployments = {APP: REPLICA}
    if plan.fleet.prefill_replicas:
        deployments[PREFILL_APP] = PREFILL
    count = plan.fleet.replicas + plan.fleet.prefill_replicas
    while True:
        apps, ready, waits_for = serve.status().applications, 0, ""
        for name, deployment_name in deployments.items():
            app = apps.get(name)
            deployment = None if app is None else app.deployments.get(deployment_name)
            said = "" if deployment is None else deployment.message
            # A reason of ours holds for each further try, too.
            if app is not None and (app.status == "DEPLOY_FAILED" or _REFUSED in said):
                raise ConfigError(f"no replica can be started: {_reason(said or app.message)}")
            if deployment is not None:
                ready += deployment.replica_states.get("RUNNING", 0)
                waits_for = waits_for or said
        if any(name in apps for name in deployments):
            tell(ready, count, waits_for)
        if all(name in apps and apps[name].status == "RUNNING" for name in deployments):
            return
        time.sleep(_POLL_S)


def _reason(message: str) -> str:
    """Return the reason in Serve's message about a replica that failed, without its traceback."""
    refused = _REASON.findall(message)
    if refused:
        return str(refused[-1])
    lines = [line for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "Ray Serve gives no reason"


@contextmanager
def _own_signals() -> Iterator[None]:
    """Put this process's signal handlers back, in whose place Ray sets its own."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


# -- Serve's config file ---------------------------------------------------------------------------


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

        _log_beside_serve()
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
