"""``RayReplica``: a replica of Serve's as the door sees it, and which of them there are."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from quire.errors import QuireError, one_line
from quire.fleet.ray_serve.serve_policies import Roll

if TYPE_CHECKING:
    from quire.engine.outputs import TextDelta
    from quire.engine.sequence import Request
    from quire.fleet.replica import ReplicaFacts, ReplicaReport
    from quire.fleet.shared_stream import Inbox
    from quire.kv.evidence import Evidence
    from quire.server.metrics.family import Figures

_UNLISTED_S = 2.0  # before a replica that Serve's router lists no longer counts as gone


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
        return Inbox(self._name, ConnectedOutbox(self._name, offered, self._note))

    async def hear_evidence(self, others: "tuple[Evidence | None, ...]") -> None:
        if self._is_listed:  # else it is on its way out
            await self._calls.call("hear_evidence", others)

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

    def _note(self, report: "ReplicaReport") -> None:
        self._last = self._fresh = report
        self._told.set()

    async def _watch(self) -> None:
        from quire.fleet.replica import ReplicaLost

        try:
            async with aclosing(self._calls.stream("watch")) as reports:
                async for report in reports:
                    self._note(report)
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
