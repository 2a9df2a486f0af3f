"""``start_fleet``: have Serve start a fleet's replicas, on a Ray of its own or on a cluster."""

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import final

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from quire.config import ray_address
from quire.errors import ConfigError
from quire.fleet.fleet_plan import APP, PREFILL, PREFILL_APP, REPLICA, FleetPlan
from quire.fleet.prefill import PrefillPlaces
from quire.fleet.ray_serve.ray_replica import RayReplica, SeveralDeployments
from quire.fleet.ray_serve.served_replica import REFUSED, replicas

_REASON = re.compile(rf"{REFUSED}(.*)")
_POLL_S = 0.25  # between two looks at what is being started
_OBJECT_STORE_BYTES = 100 * 2**20  # Ray's, for calls that are large


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
            if app is not None and (app.status == "DEPLOY_FAILED" or REFUSED in said):
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
