"""A fleet's door finds the prefixes of tenants and of salts, each for itself alone."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from quire import AsyncLLM
from quire.config import FleetConfig, KVEventsConfig, ServerConfig
from quire.errors import ConfigError
from quire.fleet.door import WatchedReplica, open_door
from quire.fleet.fleet_engine import FleetEngine
from quire.fleet.fleet_plan import FleetPlan
from quire.fleet.replica import LocalReplica, ReplicaFacts
from quire.models.loader import load
from server.asking import Client, run

PROMPT = list(range(5, 101))  # six blocks
SALT = "a salt that no event may have"
CONFIG = ServerConfig(api_key=("alice", "bob"), admin_api_key=("root",))


class Here:
    """Replicas in this process, which stay."""

    def __init__(
        self, llms: list[AsyncLLM], joined: Callable[[WatchedReplica], None], left: Any
    ) -> None:
        self._llms, self._joined = llms, joined

    async def open(self) -> ReplicaFacts:
        replicas = [Watched(name, llm) for name, llm in zip("ab", self._llms, strict=True)]
        for each in replicas:
            self._joined(each)
        return await replicas[0].facts()


class Watched:
    """A replica that is always watched."""

    def __init__(self, name: str, llm: AsyncLLM) -> None:
        self._inner = LocalReplica(name, llm)

    def hang_up(self) -> None:
        raise AssertionError("these replicas stay")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@asynccontextmanager
async def opened(
    key: bytes, own_key: bytes | None, **options: Any
) -> AsyncIterator[tuple[Client, FleetEngine, list[AsyncLLM]]]:
    """A door with a key, over two replicas with one that may be another."""
    events = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint="tcp://127.0.0.1:0",
        replay_endpoint="tcp://127.0.0.1:0",
        name_key=own_key,
    )
    sizes: dict[str, Any] = dict(kv_cache_memory_bytes="24MiB", max_model_len=512)
    llms = [AsyncLLM(load(), kv_events_config=events, **sizes, **options) for _ in range(2)]
    members = partial(Here, llms)
    async with open_door(FleetConfig(), CONFIG, members, name_key=key) as (app, fleet):
        async with asyncio.timeout(20):
            while [each.state for each in fleet.members.values()] != ["up", "up"]:
                await asyncio.sleep(0.01)
        try:
            yield Client(app), fleet, llms
        finally:
            app.state.service.close()


def predicted(fleet: FleetEngine) -> int:
    return sum(each.counts.predicted_tokens for each in fleet.members.values())


async def ask(client: Client, **more: Any) -> None:
    body = {"prompt": [*PROMPT, 7], "max_tokens": 1, "temperature": 0, **more}
    assert (await client.post("/v1/completions", body)).status == 200


async def is_predicted(fleet: FleetEngine, client: Client, **more: Any) -> bool:
    """Ask until the door has been told of a prompt that was asked before."""
    before = predicted(fleet)
    for _ in range(400):
        await ask(client, **more)
        if predicted(fleet) > before:
            return True
        await asyncio.sleep(0.01)
    return False


def test_each_finds_its_own() -> None:
    async def scene() -> None:
        async with opened(b"k" * 32, b"k" * 32) as (keyless, fleet, llms):
            alice, bob = keyless.with_key("alice"), keyless.with_key("bob")
            heard = [subscribed(each) for each in llms]
            for more in ({}, {"cache_salt": SALT}):
                await ask(alice, **more)
                assert await is_predicted(fleet, alice, **more)
            before = predicted(fleet)
            await ask(bob)
            await ask(bob, cache_salt=SALT)
            await ask(alice, cache_salt="another")
            assert predicted(fleet) == before
            for found, real in [
                (each.counts.predicted_tokens, each.counts.found_tokens)
                for each in fleet.members.values()
            ]:
                assert found <= real
            told = b"".join(payload for socket in heard for payload in read(socket))
            assert b"BlockStored" in told
            assert SALT.encode() not in told
            for socket in heard:
                socket.close()

    run(scene())


@pytest.mark.parametrize("own_key", [None, b"o" * 32])
def test_under_another_key_nothing_is_found(own_key) -> None:
    async def scene() -> None:
        async with opened(b"k" * 32, own_key) as (keyless, fleet, _):
            alice, root = keyless.with_key("alice"), keyless.with_key("root")
            await ask(alice)
            # What the door is told later it knows, so what came before has been told, too.
            for _ in range(3):
                await ask(alice)
                await asyncio.sleep(0.05)
            assert predicted(fleet) == 0
            assert (await root.get("/fleet")).status == 200

    run(scene())


def subscribed(llm: AsyncLLM) -> "zmq.Socket[bytes]":
    assert llm.llm.kv_events is not None
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.linger = 0
    socket.subscribe(b"")
    socket.connect(llm.llm.kv_events.endpoint)
    return socket


def read(socket: "zmq.Socket[bytes]") -> list[bytes]:
    payloads = []
    while socket.poll(200):
        payloads.append(socket.recv_multipart()[2])
    return payloads


def test_the_key_is_a_files_or_drawn(tmp_path: Path) -> None:
    assert FleetPlan().name_key() != FleetPlan().name_key()
    path = tmp_path / "secret"
    path.write_bytes(b"s" * 32)
    first, second = (FleetPlan(fleet=FleetConfig(name_key=str(path))).name_key() for _ in range(2))
    assert first == second
    assert "name_key" not in repr(KVEventsConfig(name_key=first))
    plan = FleetPlan(fleet=FleetConfig(name_key=str(path)))
    args = plan.serve_config()["applications"][0]["args"]
    assert args["fleet"] == {"name_key": str(path)}
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"^name_key=.* has 5 bytes"):
        plan.name_key()
    with pytest.raises(ConfigError, match="must be the path of a file"):
        FleetConfig(name_key=3)  # type: ignore[arg-type]
