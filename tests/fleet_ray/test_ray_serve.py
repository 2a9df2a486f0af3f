"""What the door makes of Serve's lists, calls and errors: Ray's package, without its processes."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from fleet.scripted import Scripted
from quire import SamplingParams
from quire.engine.outputs import TextDelta
from quire.engine.sequence import Request
from quire.errors import RequestError
from quire.fleet.door_connection import DoorListener
from quire.fleet.placement import Load
from quire.fleet.ray_serve import ray_replica
from quire.fleet.ray_serve.ray_replica import RayReplica, RayReplicas
from quire.fleet.ray_serve.serve_policies import ChosenReplica, Roll
from quire.fleet.replica import ReplicaLost, ReplicaRefused, ReplicaReport
from quire.fleet.shared_stream import Outbox

pytestmark = pytest.mark.ray


class Call:
    """A call or a stream of Serve's, under way."""

    def __init__(self, yields: Iterable[Any] = (), error: Exception | None = None) -> None:
        self._yields, self._error = list(yields), error
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def __await__(self) -> Any:
        return self._result().__await__()

    async def _result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._yields[0]

    async def __aiter__(self) -> AsyncIterator[Any]:
        for each in self._yields:
            yield each
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()


class Connecting(Call):
    """An offer of a connection to a replica's outbox, which is there until it is left."""

    def __init__(self, replica: Any, reports: Any = None) -> None:
        super().__init__()
        self._replica, self._reports = replica, reports

    async def __aiter__(self) -> AsyncIterator[Any]:
        listener = DoorListener("127.0.0.1")
        try:
            async with aclosing(listener.serve(Outbox(self._replica), self._reports)) as offers:
                async for offer in offers:
                    yield offer
        finally:
            listener.close()


class Handle:
    """A deployment's handle, whose calls are ready-made, by method."""

    def __init__(self, **calls: Call) -> None:
        self.calls = {"connect": Connecting(Scripted()), **calls}
        self.asked: list[tuple[Any, ...]] = []  # the method, and its arguments
        self.keywords: list[dict[str, Any]] = []

    def options(self, *, method_name: str, stream: bool = False) -> Any:
        def remote(*args: Any, **keywords: Any) -> Call:
            self.asked.append((method_name, *args))
            self.keywords.append(keywords)
            return self.calls[method_name]

        return SimpleNamespace(remote=remote)


def listed(*names: str) -> Any:
    return [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]


REPORT = ReplicaReport(load=Load(num_running=3))
REQUEST = Request(request_id=1, prompt_token_ids=(5, 6), params=SamplingParams())
PIECE = TextDelta(index=0, text="a", token_ids=(1,), finish_reason=None)


# -- Serve's router --------------------------------------------------------------------------------


def chosen(candidates: Any, **keywords: Any) -> list[list[str]]:
    router = object.__new__(ChosenReplica)
    router.initialize_state()
    ranks = asyncio.run(router.choose_replicas(candidates, SimpleNamespace(kwargs=keywords)))
    return [[each.replica_id.unique_id for each in rank] for rank in ranks]


def test_a_call_goes_where_its_keyword_says() -> None:
    assert chosen(listed("a", "b", "c"), to="b") == [["b"]]


def test_a_call_for_one_that_is_gone_must_go_somewhere() -> None:
    assert chosen(listed("a", "b"), to="c") == [["a", "b"]]
    assert chosen(listed("a", "b")) == [["a", "b"]]


def test_the_roll_is_told_here_and_empty_elsewhere() -> None:
    told: list[list[str]] = []
    roll = Roll(lambda names: told.append(list(names)))
    chosen(listed("a", "b"), roll=roll)
    assert told == [["a", "b"]]
    pickle.loads(pickle.dumps(roll)).note(listed("c"))
    assert told == [["a", "b"]]


# -- who is there ----------------------------------------------------------------------------------


def test_replicas_join_and_leave_as_the_list_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_replica, "_UNLISTED_S", 0.05)

    async def follow() -> list[str]:
        said: list[str] = []
        replicas = RayReplicas(
            Handle(watch=Call()),
            lambda each: said.append(f"+{each.name}"),
            lambda each: said.append(f"-{each.name}"),
        )
        roll = replicas.roll
        roll.note(listed("a", "b"))
        await asyncio.sleep(0.01)
        roll.note(listed())  # a controller that has just begun anew
        await asyncio.sleep(0.1)
        roll.note(listed("b"))
        await asyncio.sleep(0.01)
        roll.note(listed("b", "a"))  # in time
        await asyncio.sleep(0.1)
        roll.note(listed("a", "c"))
        await asyncio.sleep(0.1)
        return said

    assert asyncio.run(follow()) == ["+a", "+b", "+c", "-b"]


def test_one_that_is_not_listed_takes_nothing_new_and_says_so() -> None:
    async def ask() -> None:
        replica = RayReplica("a", Handle(watch=Call([REPORT])), Roll())
        assert (await replica.report()).takes_requests
        replica.listed = False
        report = await replica.report()
        assert not report.takes_requests
        assert report.load == REPORT.load
        with pytest.raises(ReplicaRefused, match="replica a is not on Serve's list"):
            await anext(replica.generate(None, request_id="x"))  # type: ignore[arg-type]
        replica.listed = True
        assert (await replica.report()).takes_requests
        await replica.close()

    asyncio.run(ask())


def test_a_report_is_told_once_and_then_waited_for() -> None:
    async def ask() -> None:
        replica = RayReplica("a", Handle(watch=Call([REPORT])), Roll())
        assert await replica.report() == REPORT
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(replica.report(), 0.05)
        await replica.close()

    asyncio.run(ask())


def test_a_report_of_the_connection_is_told_too() -> None:
    async def reports() -> AsyncIterator[ReplicaReport]:
        yield REPORT
        await asyncio.Event().wait()

    async def ask() -> None:
        handle = Handle(watch=Call(), connect=Connecting(Scripted(), reports()))
        replica = RayReplica("a", handle, Roll())
        assert await asyncio.wait_for(replica.report(), 10) == REPORT
        await replica.close()

    asyncio.run(ask())


# -- errors ----------------------------------------------------------------------------------------


def error_of(error: Exception) -> Exception:
    """What a call raises here that has raised ``error`` there."""

    async def ask() -> Exception:
        replica = RayReplica("a", Handle(watch=Call(), begin_drain=Call(error=error)), Roll())
        with pytest.raises(Exception) as caught:
            await replica.begin_drain()
        await replica.close()
        return caught.value

    return asyncio.run(ask())


def task_error(cause: Exception) -> Exception:
    return RayTaskError("generate", "a traceback", cause).as_instanceof_cause()


def test_our_errors_come_as_they_were_there() -> None:
    error = error_of(task_error(RequestError("the prompt is empty")))
    assert type(error) is RequestError
    assert str(error) == "the prompt is empty"


@pytest.mark.parametrize("error", [task_error(OSError("no device")), ActorDiedError()])
def test_others_are_the_loss_of_the_replica(error: Exception) -> None:
    found = error_of(error)
    assert type(found) is ReplicaLost
    assert str(found).startswith("replica a has ")


def test_a_watch_that_breaks_is_the_loss_of_the_replica() -> None:
    async def ask() -> None:
        replica = RayReplica("a", Handle(watch=Call([REPORT], ActorDiedError())), Roll())
        await asyncio.sleep(0.01)
        with pytest.raises(ReplicaLost):
            await replica.report()
        await replica.close()

    asyncio.run(ask())


def test_a_request_is_begun_and_left_at_its_replica() -> None:
    there = Scripted()
    connecting = Connecting(there)
    handle = Handle(watch=Call(), connect=connecting)

    async def ask() -> None:
        replica = RayReplica("a", handle, Roll())
        stream = replica.generate(REQUEST, request_id="x")
        there.put("x", PIECE)
        assert await anext(stream) == PIECE
        assert there.asked == {"x": REQUEST}
        await stream.aclose()
        while not there.left:
            await asyncio.sleep(0.01)
        assert there.left == ["x"]
        assert {each[0] for each in handle.asked} == {"watch", "connect"}
        assert all(each["to"] == "a" for each in handle.keywords)
        assert not connecting.is_cancelled
        await replica.close()

    asyncio.run(asyncio.wait_for(ask(), 10))
    assert connecting.is_cancelled


def test_a_connection_that_cannot_be_had_is_the_loss_of_the_replica() -> None:
    async def ask() -> None:
        handle = Handle(watch=Call([REPORT]), connect=Call(error=ActorDiedError()))
        replica = RayReplica("a", handle, Roll())
        with pytest.raises(ReplicaLost):
            await anext(replica.generate(REQUEST, request_id="x"))
        with pytest.raises(ReplicaLost):
            await replica.report()
        await replica.close()

    asyncio.run(asyncio.wait_for(ask(), 10))


def test_a_connection_that_breaks_is_made_again() -> None:
    """A firewall ends it, and both ends live on."""
    there = Scripted()
    handle = Handle(watch=Call([REPORT, REPORT, REPORT]), connect=Connecting(there))

    async def ask() -> None:
        replica = RayReplica("a", handle, Roll())
        assert await replica.report() == REPORT
        stream = replica.generate(REQUEST, request_id="x")
        there.put("x", PIECE)
        assert await anext(stream) == PIECE
        connection = replica._inbox._remote._connection  # type: ignore[attr-defined]
        connection.close()
        with pytest.raises(ReplicaLost, match="its connection has ended"):
            await anext(stream)
        while not there.left:
            await asyncio.sleep(0.01)
        with pytest.raises(ReplicaLost, match="its connection has ended"):
            await replica.report()
        replica.listed = False  # so that there is a new report
        replica.listed = True
        assert await replica.report() == REPORT
        again = replica.generate(REQUEST, request_id="y")
        there.put("y", PIECE)
        assert await anext(again) == PIECE
        await again.aclose()
        await replica.close()

    asyncio.run(asyncio.wait_for(ask(), 10))
