"""What Serve asks where it decides: which replica a call goes to, and how many there are to be."""

from collections.abc import Callable, Iterable
from typing import Any, final

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from quire.fleet.fleet_plan import BUSY, QUEUED_S, wanted_replicas


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
