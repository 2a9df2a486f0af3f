"""Fleets in this process: replicas that can be lost, frozen and asked to lie, and their doors."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from quire import AsyncLLM
from quire.config import ServerConfig
from quire.engine.outputs import TextDelta
from quire.engine.sequence import Request
from quire.fleet.event_follower import ZmqFollower
from quire.fleet.fleet_engine import FleetEngine
from quire.fleet.fleet_figures import figures_of, fleet_operation
from quire.fleet.placement import (
    LeastLoaded,
    Load,
    Placed,
    Placement,
    PrefixAware,
    RoundRobin,
)
from quire.fleet.prefix_directory import PrefixDirectory
from quire.fleet.replica import (
    LocalReplica,
    ReplicaFacts,
    ReplicaHandle,
    ReplicaLost,
    ReplicaReport,
    facts_of,
)
from quire.kv.evidence import Evidence
from quire.models.loader import load
from quire.server.app import make_app
from quire.server.metrics.family import Figures
from server.asking import Client

SIZES: dict[str, Any] = dict(kv_cache_memory_bytes="24MiB", max_model_len=512)
# A text is compared with that of another batch, so that one order of sums is needed.
OPTIONS: dict[str, Any] = dict(**SIZES, max_num_seqs=32, batch_invariant=True)
EVENTS = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://127.0.0.1:0",
    "replay_endpoint": "tcp://127.0.0.1:0",
}


async def until(holds: Callable[[], object], *, within_s: float = 10.0) -> None:
    """Raises: TimeoutError."""
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.001)


@cache
def engine(name: str) -> AsyncLLM:
    """An engine for all tests that need one of this name, which none of them ends."""
    return AsyncLLM(load(), **OPTIONS)


class BreakableReplica:
    """A replica over an engine that outlives it."""

    def __init__(self, name: str, llm: AsyncLLM | None = None) -> None:
        self._name, self.llm = name, llm or engine(name)
        self._inner = LocalReplica(name, self.llm)
        self.mode: Literal["works", "dead", "frozen"] = "works"
        self.num_pieces = 0
        self.dies_at: int | None = None  # at this piece, of all streams
        self.requests: list[Request] = []  # that it was sent
        self.aborted: list[str] = []
        self.heard: list[tuple[Evidence | None, ...]] = []
        self.load_changes: dict[str, Any] = {}
        self.piece_changes: dict[str, Any] = {}
        self.freezes_at: int | None = None  # at this piece, of all streams
        self.holds: asyncio.Event | None = None  # streams begin once it is set

    @property
    def name(self) -> str:
        return self._name

    async def _live(self) -> None:
        if self.mode == "dead":
            raise ReplicaLost(f"replica {self._name} was killed")
        if self.mode == "frozen":
            await asyncio.Event().wait()

    async def facts(self) -> ReplicaFacts:
        await self._live()
        return await self._inner.facts()

    async def generate(
        self, request: Request, *, request_id: str
    ) -> AsyncGenerator[TextDelta, None]:
        self.requests.append(request)
        await self._live()
        if self.holds is not None:
            await self.holds.wait()
        async with aclosing(self._inner.generate(request, request_id=request_id)) as pieces:
            async for delta in pieces:
                self.num_pieces += 1
                if self.dies_at is not None and self.num_pieces >= self.dies_at:
                    self.mode = "dead"
                if self.freezes_at is not None and self.num_pieces >= self.freezes_at:
                    self.mode = "frozen"
                await self._live()
                yield replace(delta, **self.piece_changes)

    async def abort(self, request_ids: Iterable[str] | None) -> None:
        await self._live()
        names = list(request_ids or ())
        self.aborted += names
        await self._inner.abort(names)

    async def report(self) -> ReplicaReport:
        await self._live()
        report = await self._inner.report()
        return replace(report, load=replace(report.load, **self.load_changes))

    async def hear_evidence(self, others: tuple[Evidence | None, ...]) -> None:
        await self._live()
        self.heard.append(others)
        await self._inner.hear_evidence(others)

    async def figures(self) -> Mapping[str, Figures]:
        await self._live()
        return await self._inner.figures()

    async def begin_drain(self) -> None:
        await self._inner.begin_drain()

    def begin_anew(self) -> None:
        """Take requests again."""
        self._inner = LocalReplica(self._name, self.llm)

    async def close(self) -> None:
        """Leave the engine to the next test."""


class CountedPlacement:
    """A placement whose reservations are counted."""

    def __init__(self, inner: Placement) -> None:
        self._inner = inner
        self.open: dict[int, Placed] = {}
        self.forgotten: list[str] = []
        self.sessions: list[str | None] = []
        self.loads: dict[str, Load] = {}

    def place(self, token_ids: Any, keys: Any, candidates: Any, *, session: Any = None) -> Placed:
        choice = self._inner.place(token_ids, keys, candidates, session=session)
        self.open[choice.number] = choice
        self.sessions.append(session)
        return choice

    def note_first_token(self, choice: Placed) -> None:
        assert choice.number in self.open
        self._inner.note_first_token(choice)

    def note_end(self, choice: Placed) -> None:
        del self.open[choice.number]
        self._inner.note_end(choice)

    def report(self, replica: str, load: Load) -> None:
        self.loads[replica] = load
        self._inner.report(replica, load)

    def forget(self, replica: str) -> None:
        self.forgotten.append(replica)
        self._inner.forget(replica)


class Fleet:
    """Two replicas or more behind a door."""

    def __init__(
        self, engine: FleetEngine, replicas: list[BreakableReplica], placement: CountedPlacement
    ) -> None:
        self.engine, self.replicas, self.placement = engine, replicas, placement

    async def is_idle(self) -> None:
        """Until nothing is left of any request, here or there. Raises: TimeoutError."""
        async with asyncio.timeout(30):
            while any([(await each.llm.usage()).num_sequences for each in self.replicas]):
                await asyncio.sleep(0.005)
        assert not self.placement.open
        assert not self.engine._streams
        assert not any(member.streams for member in self.engine.members.values())

    def outcomes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for member in self.engine.members.values():
            for outcome, count in member.counts.outcomes.items():
                found[outcome] = found.get(outcome, 0) + count
        return found


@asynccontextmanager
async def fleet_of(
    *names: str,
    placement: Placement | None = None,
    llms: Mapping[str, AsyncLLM] = MappingProxyType({}),
    **options: Any,
) -> AsyncIterator[Fleet]:
    """A fleet of replicas of these names, all up; nothing is left of its requests.

    ``llms``: engines of their own for some.
    """
    replicas = [BreakableReplica(name, llms.get(name)) for name in names or ("a", "b")]
    counted = CountedPlacement(placement or LeastLoaded(seed=1))
    handles: list[ReplicaHandle] = [*replicas]
    options = {"report_interval_s": 0.02, "seed": 0, **options}
    engine = await FleetEngine.start(handles, counted, **options)
    try:
        async with asyncio.timeout(30):
            while any(each.state == "joining" for each in engine.members.values()) or len(
                engine.members
            ) < len(replicas):
                await asyncio.sleep(0.005)
        fleet = Fleet(engine, replicas, counted)
        yield fleet
        for each in replicas:
            each.mode = "works"
        await fleet.is_idle()
    finally:
        for each in replicas:
            each.mode = "works"
        await engine.aclose()


@asynccontextmanager
async def placed_by_prefixes(**options: Any) -> AsyncIterator[tuple[FleetEngine, PrefixDirectory]]:
    """Two replicas, both up, and what their events tell the door. ``options``: the engines'."""
    llms = [AsyncLLM(load(), kv_events_config=EVENTS, **SIZES, **options) for _ in range(2)]
    facts = facts_of(llms[0].llm)
    directory = PrefixDirectory(facts.groups, facts.block_size)
    fleet = await FleetEngine.start(
        [LocalReplica(name, llm) for name, llm in zip("ab", llms, strict=True)],
        PrefixAware(directory, seed=1),
        follower=ZmqFollower(directory),
        report_interval_s=0.02,
        seed=0,
    )
    try:
        await until(
            lambda: [each.state for each in fleet.members.values()] == ["up", "up"], within_s=30
        )
        yield fleet, directory
    finally:
        await fleet.aclose()


@asynccontextmanager
async def door(fleet: Fleet, config: ServerConfig | None = None) -> AsyncIterator[Client]:
    """The server in front of a fleet."""
    app = make_app(
        fleet.engine,
        config or ServerConfig(),
        operations=[fleet_operation(fleet.engine)],
        figures=figures_of(fleet.engine),
    )
    try:
        yield Client(app)
    finally:
        app.state.service.close()


__all__ = [
    "BreakableReplica",
    "Fleet",
    "RoundRobin",
    "door",
    "engine",
    "fleet_of",
    "placed_by_prefixes",
    "until",
]
