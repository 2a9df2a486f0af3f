"""Dynamo's selection as a placement: a pretended service, and its own where it is installed."""

import asyncio
import importlib.util
from types import SimpleNamespace

import pytest

from engine.test_event_publisher import SIZE, world
from fleet.test_event_follower import facts, until
from quire.errors import ConfigError
from quire.fleet.dynamo_placement import DynamoPlacement
from quire.fleet.placement import Load
from quire.kv import PrefixKeys

NAMES = ("a", "b")
FACTS = SimpleNamespace(
    events=SimpleNamespace(endpoint="tcp://127.0.0.1:1", replay_endpoint=None), block_size=16
)


class Pretended:
    """It selects what it is told to, and notes what it is asked."""

    def __init__(self) -> None:
        self.selects: int | Exception = 1
        self.calls: list[tuple] = []

    async def upsert_worker(self, worker):
        self.calls.append(("upsert", worker["worker_id"]))

    async def delete_worker(self, worker_id):
        self.calls.append(("delete", worker_id))

    async def select_and_reserve(self, request):
        self.calls.append(("select", request["allowed_worker_ids"]))
        if isinstance(self.selects, Exception):
            raise self.selects
        return {"worker_id": self.selects, "effective_prefill_tokens": 40}

    async def prefill_complete(self, selection_id):
        self.calls.append(("prefill", selection_id))

    async def free_reservation(self, selection_id):
        self.calls.append(("free", selection_id))
        raise RuntimeError("reservation not found")

    def shutdown(self):
        self.calls.append(("shutdown",))


@pytest.fixture
def placed():
    service = Pretended()
    placement = DynamoPlacement(service)
    for name in NAMES:
        placement.follow(name, FACTS)
    yield placement, service
    asyncio.run(placement.close())
    assert service.calls[-1] == ("shutdown",)


def test_it_takes_what_is_selected_and_gives_it_back_once(placed) -> None:
    placement, service = placed
    service.selects = 2
    choice = placement.place((1,) * 100, PrefixKeys(), NAMES)
    assert (choice.replica, choice.found_tokens) == ("b", {"GPU": 60})
    for _ in range(2):
        placement.note_first_token(choice)
        placement.note_end(choice)
    number = str(choice.number)
    until(lambda: ("free", number) in service.calls)
    assert service.calls.count(("free", number)) == 1
    assert ("select", [1, 2]) in service.calls


def test_without_an_answer_the_least_loaded_is_taken(placed, caplog) -> None:
    placement, service = placed
    service.selects = RuntimeError("not ready")
    placement.report("a", Load(num_running=5))
    for _ in range(3):
        assert placement.place((1,) * 100, PrefixKeys(), NAMES).replica == "b"
    assert caplog.text.count("not ready") == 1


def test_what_it_cannot_tell_apart_goes_by_load(placed) -> None:
    placement, service = placed
    placement.report("a", Load(num_running=5))
    assert placement.place((1,) * 100, PrefixKeys(tenant="ann"), NAMES).replica == "b"
    assert not [call for call in service.calls if call[0] == "select"]


def test_a_replica_that_is_gone_is_asked_for_no_more(placed) -> None:
    placement, service = placed
    placement.forget("a")
    until(lambda: ("delete", 1) in service.calls)
    service.selects = 2
    assert placement.place((1,) * 100, PrefixKeys(), NAMES).replica == "b"
    assert service.calls[-1] == ("select", [2])


@pytest.mark.skipif(
    importlib.util.find_spec("dynamo") is not None, reason="Dynamo is installed here"
)
def test_without_the_package_it_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="pip install ai-dynamo"):
        DynamoPlacement()


@pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="Dynamo is not installed")
def test_dynamo_finds_what_a_replica_has() -> None:
    with (
        world(replay_endpoint="tcp://127.0.0.1:0") as one,
        world(replay_endpoint="tcp://127.0.0.1:0") as two,
    ):
        for _ in range(4):
            two.note()
        placement = DynamoPlacement()
        placement.follow("a", facts(one.publisher))
        placement.follow("b", facts(two.publisher))

        def is_found() -> bool:
            two.note()
            prompt = tuple(range(two.next_id * 2 * SIZE - 2 * SIZE, two.next_id * 2 * SIZE))
            choice = placement.place(prompt, PrefixKeys(), NAMES)
            placement.note_end(choice)
            return (choice.replica, choice.found_tokens) == ("b", {"GPU": SIZE})

        until(is_found)
        asyncio.run(placement.close())
