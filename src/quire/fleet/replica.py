"""``ReplicaHandle``: what a fleet's door knows of a replica, wherever it runs, and asks of it.

``LocalReplica`` is one over an engine in this process. What is sent to a replica and what comes
back can be pickled, but for a request's grammar and resumption, which ``to_send`` leaves out and
the replica's engine makes again.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Protocol, final

from quire.engine.async_llm import AsyncLLM
from quire.engine.llm import LLM
from quire.engine.outputs import TextDelta
from quire.engine.request_maker import ModelFacts
from quire.engine.sequence import Request, Sequence
from quire.errors import QuireError, RequestError
from quire.fleet.placement import Load
from quire.kv.evidence import Evidence, EvidenceSource
from quire.kv.interface import found_block_size
from quire.kv.prefix_index import Medium
from quire.server.metrics.definitions import engine_figures
from quire.server.metrics.family import Figures
from quire.spec import Group
from quire.tiers import TierAddress
from quire.tiers.files import folder_of
from quire.tiers.fingerprint import Fingerprint

# -- what a replica says ---------------------------------------------------------------------------


class ReplicaRefused(QuireError):
    """A replica takes no new request: it drains, or sleeps. It has done nothing for this one."""


class ReplicaLost(QuireError):
    """A replica has ended, or does not answer. What it was doing is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventEndpoints:
    """Where a replica publishes the events of its prefix cache, as ``kv_events_config`` says."""

    endpoint: str
    replay_endpoint: str | None
    topic: str = ""
    # What tells the place of its copies in storage from others, of other replicas or none; None:
    # no other replica reaches it.
    store: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """What does not change while a replica lives. It can be pickled."""

    model: ModelFacts
    # What its tokens and cache entries mean: model, weights and options. None: it cannot be told.
    fingerprint: Fingerprint | None
    groups: tuple[Group, ...]  # of layers, as its events number them
    block_size: int  # tokens
    events: EventEndpoints | None = None  # None: it publishes none
    is_prefill: bool = False  # it leaves the blocks of prompts for others


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A replica at one moment, as it says itself. It can be pickled."""

    load: Load
    takes_requests: bool = True  # False while it drains or sleeps
    # Prompt tokens that it has found since it began, by where they were.
    found_tokens: Mapping[Medium, int] = field(default_factory=dict)
    kv_usage: float = 0.0  # the share of its KV memory that sequences hold
    evidence: tuple[Evidence | None, ...] = ()  # what its eviction policies have found, by group


# -- the protocol ----------------------------------------------------------------------------------


class ReplicaHandle(Protocol):
    """One replica, as seen from the door's event loop.

    A call that raises anything but RequestError and ReplicaRefused, or that does not answer within
    the fleet's ``replica_timeout_s``, is taken for the loss of the replica.
    """

    @property
    def name(self) -> str:
        """The name that tells it from the others, also after a restart."""
        ...

    async def facts(self) -> ReplicaFacts:
        """Return its facts, once its model is loaded. Raises: ReplicaLost."""
        ...

    def generate(self, request: Request, *, request_id: str) -> AsyncGenerator[TextDelta, None]:
        """Continue a prompt, and after its ``output_token_ids`` if it has some.

        A piece may have several tokens. The last of each choice has a finish_reason. Closing the
        generator, or cancelling the task that waits in it, ends the request there.

        Raises: ReplicaRefused before the first piece; ReplicaLost; RequestError for a request that
        this engine cannot run.
        """
        ...

    async def abort(self, request_ids: Iterable[str] | None) -> None:
        """End these requests, or all (None). Their readers get a last piece."""
        ...

    async def report(self) -> ReplicaReport:
        """Return its load. The answer is also the sign that it lives. Raises: ReplicaLost."""
        ...

    async def hear_evidence(self, others: tuple[Evidence | None, ...]) -> None:
        """Tell its eviction policies what those of other replicas have found, by group.

        Raises: ReplicaLost.
        """
        ...

    async def figures(self) -> Mapping[str, Figures]:
        """Return what ``engine_figures`` reads of its engine. Raises: ReplicaLost."""
        ...

    async def begin_drain(self) -> None:
        """Let no new request in. Those inside go on to their ends. A second call does nothing."""
        ...

    async def close(self) -> None:
        """Give back what the handle holds. What still runs there ends."""
        ...


def to_send(request: Request) -> Request:
    """Return a request as it can be pickled. The engine that adopts it makes the rest again."""
    return replace(request, grammar=None, resumption=None)


# -- in this process -------------------------------------------------------------------------------


@final
class LocalReplica:
    """A replica over an ``AsyncLLM`` of this process, which it closes in the end."""

    def __init__(self, name: str, llm: AsyncLLM) -> None:
        self._name, self._llm = name, llm
        self._drains = False
        self._aborted: set[str] = set()  # of those under way

    @property
    def name(self) -> str:
        return self._name

    async def facts(self) -> ReplicaFacts:
        return await asyncio.to_thread(facts_of, self._llm.llm)

    async def generate(
        self, request: Request, *, request_id: str
    ) -> AsyncGenerator[TextDelta, None]:
        self._refuse_if_out()
        try:
            own = await self._llm.adopt(request)
        except RequestError:
            self._refuse_if_out()  # the request is not at fault
            raise
        try:
            async with aclosing(self._llm.generate(own, request_id=request_id)) as pieces:
                async for delta in pieces:
                    if delta.finish_reason == "abort" and request_id not in self._aborted:
                        self._refuse_if_lost()
                    yield delta
        except Exception:
            self._refuse_if_lost()
            raise
        finally:
            self._aborted.discard(request_id)

    async def abort(self, request_ids: Iterable[str] | None) -> None:
        names = None if request_ids is None else list(request_ids)
        if names is not None:
            self._aborted.update(names)
        await self._llm.abort(names)

    async def report(self) -> ReplicaReport:
        self._refuse_if_lost()
        load = await self._llm.inspect(load_of)
        return ReplicaReport(
            load=load,
            takes_requests=not (self._drains or self._llm.is_sleeping),
            found_tokens=found_tokens_of(self._llm.llm),
            kv_usage=kv_usage_of(self._llm.llm),
            evidence=evidence_of(self._llm.llm),
        )

    async def hear_evidence(self, others: tuple[Evidence | None, ...]) -> None:
        self._refuse_if_lost()
        accounting = self._llm.llm.accounting
        if isinstance(accounting, EvidenceSource):
            accounting.hear_evidence(others)

    async def figures(self) -> Mapping[str, Figures]:
        return engine_figures(self._llm.llm)

    async def begin_drain(self) -> None:
        self._drains = True

    async def close(self) -> None:
        await self._llm.aclose()

    def _refuse_if_out(self) -> None:
        """Raises: ReplicaLost, ReplicaRefused."""
        self._refuse_if_lost()
        if self._drains:
            raise ReplicaRefused(f"replica {self._name} drains, and takes no new requests")
        if self._llm.is_sleeping:
            raise ReplicaRefused(f"replica {self._name} is asleep")

    def _refuse_if_lost(self) -> None:
        """Raises: ReplicaLost."""
        if (failure := self._llm.failure) is not None:
            raise ReplicaLost(f"replica {self._name} has ended: {failure}") from failure


# -- read from an engine, where it runs ------------------------------------------------------------


def facts_of(llm: LLM) -> ReplicaFacts:
    """Return the facts of an engine. Its weights are hashed, if they have not been."""
    events, config = llm.kv_events, llm.config.kv_events_config
    transfer, endpoints = llm.config.kv_transfer_config, None
    if events is not None and config is not None:
        endpoints = EventEndpoints(
            endpoint=events.endpoint,
            replay_endpoint=events.replay_endpoint,
            topic=config.topic,
            store=_store_of(llm),
        )
    return ReplicaFacts(
        model=llm.facts,
        fingerprint=llm.fingerprint(),
        groups=tuple(llm.accounting.groups),
        block_size=found_block_size(llm.accounting, llm.config.block_size),
        events=endpoints,
        is_prefill=transfer is not None and transfer.gives and not transfer.takes,
    )


def _store_of(llm: LLM) -> str | None:
    """Return what tells the places where an engine keeps records in storage from those of others;
    None if it has none, or one that no other engine reaches: events do not say which of several.
    """
    places = []
    reports = () if llm.tiers is None else llm.tiers.tiers
    for address, report in zip(llm.config.tiers, reports, strict=False):  # behind them: peers
        if report.medium != "STORAGE":
            continue
        place = _place_of(address, is_shared=report.is_shared)
        if place is None:
            return None
        places.append(place)
    return " and ".join(places) or None


def _place_of(address: TierAddress, *, is_shared: bool) -> str | None:
    if is_shared:
        whole = blake2b(address.url.geturl().encode(), digest_size=8)  # may hold a password
        return f"{address} {whole.hexdigest()}"
    if address.kind == "file":
        found = folder_of(address).stat()
        return f"{address.kind} on {os.uname().nodename}, {found.st_dev}:{found.st_ino}"
    return None


def load_of(llm: LLM, sequences: list[Sequence]) -> Load:
    """Return an engine's load, between two steps: what ``AsyncLLM.inspect`` calls."""
    scheduler = llm.engine.scheduler
    prices = scheduler.costs.prices
    # Not told before the first prompt, nor where steps with prompts took no longer than others: the
    # prompts were too short to tell, and a long one is not free.
    known = prices.token_s if prices.tokens_are_told else None
    # A sequence that decodes has one token that is not computed: its last one.
    queued = (own.num_tokens - own.num_computed_tokens for own in sequences)
    return Load(
        num_waiting=scheduler.num_waiting,
        num_running=scheduler.num_running,
        queued_tokens=sum(tokens for tokens in queued if tokens > 1),
        compute_s_per_token=known,
        load_s_per_block=_load_s_per_block(llm),
        decode_s_per_step=prices.step_s + scheduler.num_running * (known or 0.0),
        max_num_batched_tokens=llm.config.max_num_batched_tokens,
        max_num_seqs=llm.config.max_num_seqs,
    )


def _load_s_per_block(llm: LLM) -> dict[Medium, float]:
    """Return the mean seconds for a record of each medium that has been loaded from."""
    report = llm.tiers
    seconds: dict[Medium, float] = {}
    records: dict[Medium, int] = {}
    for tier in () if report is None else report.tiers:
        seconds[tier.medium] = seconds.get(tier.medium, 0.0) + tier.load_s
        records[tier.medium] = records.get(tier.medium, 0) + tier.num_loaded
    return {medium: seconds[medium] / count for medium, count in records.items() if count}


def found_tokens_of(llm: LLM) -> dict[Medium, int]:
    """Return the prompt tokens that an engine has found since it began, by where they were.

    Those that tiers had are inserted before a prompt is admitted, and are taken off the device's.
    """
    found: dict[Medium, int] = {}
    report = llm.tiers
    for tier in () if report is None else report.tiers:
        found[tier.medium] = found.get(tier.medium, 0) + tier.hit_tokens
    on_device = llm.statistics.prefix_hit_tokens - sum(found.values())
    return {"GPU": max(0, on_device), **found}


def kv_usage_of(llm: LLM) -> float:
    """Return the share of the KV memory that sequences hold. What is only cached is free."""
    usage, ceiling_bytes = llm.usage(wait=False), llm.elastic.ceiling_bytes
    return (usage.committed_bytes - usage.cached_bytes) / ceiling_bytes if ceiling_bytes else 0.0


def evidence_of(llm: LLM) -> tuple[Evidence | None, ...]:
    """Return what an engine's eviction policies have found, by group; nothing without blocks."""
    accounting = llm.accounting
    return accounting.evidence() if isinstance(accounting, EvidenceSource) else ()
