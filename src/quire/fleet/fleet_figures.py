"""A fleet's figures: metrics for ``/metrics`` of the door, and ``GET /fleet`` for people."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, TypeAlias, final

from quire.errors import one_line
from quire.fleet.fleet_engine import FleetEngine
from quire.fleet.fleet_status import FleetStatus, ReplicaLoad, ReplicaStatus
from quire.fleet.members import Member
from quire.fleet.placement import Load
from quire.fleet.replica import ReplicaReport
from quire.kv.prefix_index import Medium
from quire.server.endpoints.answers import Json, as_json
from quire.server.metrics.definitions import ENGINE_FAMILIES
from quire.server.metrics.family import Figures, Kind, MetricFamily, MetricSource
from quire.server.request_context import RequestContext
from quire.server.routes import Operation

log = logging.getLogger(__name__)

# Where tokens are found, in a fleet's words. None: nowhere.
_PLACES: Mapping[Medium | None, str] = MappingProxyType(
    {"GPU": "device", "CPU": "host", "STORAGE": "store", None: "none"}
)

# -- metrics ---------------------------------------------------------------------------------------


def _of_each(figure: Callable[[Member], float | None]) -> Callable[[FleetEngine], Figures]:
    """Return a figure of each replica; None: it is not known."""

    def read(fleet: FleetEngine) -> Figures:
        found = {(name,): figure(member) for name, member in fleet.members.items()}
        return {labels: value for labels, value in found.items() if value is not None}

    return read


def _of_report(figure: Callable[[ReplicaReport], float]) -> Callable[[FleetEngine], Figures]:
    return _of_each(lambda own: None if own.report is None else figure(own.report))


def _of_load(figure: Callable[[Load], float]) -> Callable[[FleetEngine], Figures]:
    return _of_report(lambda report: figure(report.load))


def _outcomes(fleet: FleetEngine) -> Figures:
    return {
        (name, outcome): count
        for name, member in fleet.members.items()
        for outcome, count in member.counts.outcomes.items()
    }


def _found(fleet: FleetEngine) -> Figures:
    return {
        (name, _PLACES[medium]): tokens
        for name, member in fleet.members.items()
        if member.report is not None
        for medium, tokens in member.report.found_tokens.items()
    }


def _routed(fleet: FleetEngine) -> Figures:
    totals = dict.fromkeys(_PLACES.values(), 0)
    for member in fleet.members.values():
        for medium, tokens in member.counts.routed_tokens.items():
            totals[_PLACES[medium]] += tokens
    return {(place,): tokens for place, tokens in totals.items()}


def _family(
    kind: Kind,
    name: str,
    unit: str,
    meaning: str,
    read: Callable[[FleetEngine], Figures],
    *labels: str,
) -> MetricFamily:
    return MetricFamily(
        name=f"quire:fleet_{name}",
        kind=kind,
        unit=unit,
        meaning=meaning,
        labels=labels,
        of=("model_name",),
        read=read,
    )


FLEET_FAMILIES = (
    _family(
        "gauge",
        "replica_up",
        "1 or 0",
        "Whether the door sends a replica new requests.",
        _of_each(lambda own: own.state == "up"),
        "replica",
    ),
    _family(
        "gauge",
        "replica_requests_running",
        "sequences",
        "Sequences that run at a replica, as it has reported last.",
        _of_load(lambda load: load.num_running),
        "replica",
    ),
    _family(
        "gauge",
        "replica_requests_waiting",
        "sequences",
        "Sequences that wait at a replica, as it has reported last.",
        _of_load(lambda load: load.num_waiting),
        "replica",
    ),
    _family(
        "gauge",
        "replica_queued_tokens",
        "tokens",
        "Tokens of prompts that a replica has not computed yet, as it has reported last.",
        _of_load(lambda load: load.queued_tokens),
        "replica",
    ),
    _family(
        "gauge",
        "replica_kv_cache_usage_perc",
        "share",
        "KV memory that sequences hold at a replica, of its ceiling, as it has reported last.",
        _of_report(lambda report: report.kv_usage),
        "replica",
    ),
    _family(
        "gauge",
        "replica_streams",
        "requests",
        "Requests of this door that are under way at a replica.",
        _of_each(lambda own: len(own.streams)),
        "replica",
    ),
    _family(
        "counter",
        "requests_total",
        "requests",
        "Requests that a replica was sent, by how they ended there: a finish_reason; refused: it "
        "was passed over; lost: the replica was lost, or its work for the request; left: the "
        "client has gone; wrong: it can never run there.",
        _outcomes,
        "replica",
        "outcome",
    ),
    _family(
        "counter",
        "routed_tokens_total",
        "tokens",
        "Prompt tokens that were sent to replicas, by where they were thought to be found there: "
        "device, host, store, or none.",
        _routed,
        "found",
    ),
    _family(
        "counter",
        "predicted_found_tokens_total",
        "tokens",
        "Prompt tokens that were thought to be found, of the prompts that a replica has begun.",
        _of_each(lambda own: own.counts.predicted_tokens),
        "replica",
    ),
    _family(
        "counter",
        "found_tokens_total",
        "tokens",
        "Prompt tokens that the replica has found, of the same prompts.",
        _of_each(lambda own: own.counts.found_tokens),
        "replica",
    ),
    _family(
        "counter",
        "replica_found_tokens_total",
        "tokens",
        "Prompt tokens that a replica has found since it began, for whichever door, by where they "
        "were: device, host or store.",
        _found,
        "replica",
        "found",
    ),
    _family(
        "counter",
        "event_gaps_total",
        "gaps",
        "Times that batches of a replica's events were missed.",
        lambda fleet: {(name,): count for name, count in fleet.num_gaps.items()},
        "replica",
    ),
    _family(
        "counter",
        "resumed_streams_total",
        "streams",
        "Streams that went on at another replica after a part of them.",
        lambda fleet: {(): fleet.num_resumed},
    ),
    _family(
        "counter",
        "prefilled_prompts_total",
        "prompts",
        "Prompts of a fleet with prefill replicas, by what computed them. apart: a prefill "
        "replica; here: the replica that answered; failed: that replica too, since what a prefill "
        "replica computed did not come.",
        lambda fleet: {(what,): count for what, count in fleet.num_prefilled.items()},
        "outcome",
    ),
)


@final
class FleetFigures:
    """The metrics of a fleet, for ``make_app``."""

    families: Sequence[MetricFamily] = FLEET_FAMILIES

    def __init__(self, fleet: FleetEngine) -> None:
        self._fleet = fleet

    async def ask(self) -> None:
        """Do nothing: replicas report by themselves."""

    def reading(self) -> FleetEngine:
        """Return what each family's ``read`` is given."""
        return self._fleet


# What each replica has said of its engine's metrics, by its name.
_Answers: TypeAlias = Mapping[str, Mapping[str, Figures]]

_ANSWER_S: Final = 2.0


def _at_each(family: MetricFamily) -> MetricFamily:
    """Return a metric of an engine as a fleet has it: ``engine`` is the replica's name."""

    def read(answers: _Answers) -> Figures:
        return {
            (replica, *labels): figure
            for replica, figures in answers.items()
            for labels, figure in figures.get(family.name, {}).items()
        }

    others = tuple(label for label in family.of if label != "engine")
    return replace(family, of=others, labels=("engine", *family.labels), read=read)


async def _answer_of(member: Member) -> Mapping[str, Figures] | None:
    """Return a replica's answer; None: it gives none, or not in time."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await member.handle.figures()
    except Exception as error:
        log.info("replica %s tells no figures: %s", member.name, one_line(error))
        return None


@final
class EnginesFigures:
    """The metrics of all replicas' engines, for ``make_app``."""

    families: Sequence[MetricFamily] = tuple(map(_at_each, ENGINE_FAMILIES))

    def __init__(self, fleet: FleetEngine) -> None:
        self._fleet = fleet
        self._answers: _Answers = {}

    async def ask(self) -> None:
        """Ask all replicas at once. One that does not answer in time is left out."""
        there = [each for each in self._fleet.members.values() if each.state in ("up", "draining")]
        answers = await asyncio.gather(*map(_answer_of, there))
        self._answers = {
            member.name: answer
            for member, answer in zip(there, answers, strict=True)
            if answer is not None
        }

    def reading(self) -> _Answers:
        """Return what each family's ``read`` is given."""
        return self._answers


def figures_of(fleet: FleetEngine) -> tuple[MetricSource, ...]:
    """Return all metrics of a fleet, for ``make_app``."""
    return FleetFigures(fleet), EnginesFigures(fleet)


# -- GET /fleet ------------------------------------------------------------------------------------


def fleet_operation(fleet: FleetEngine) -> Operation:
    """Return the operation ``GET /fleet``, for ``make_app``."""

    async def fleet_status(context: RequestContext) -> Json[FleetStatus]:
        """Return the state and load of each replica, and what it finds of what was predicted."""
        service = context.service
        chats = bool(service.chat.template.source)
        return as_json(context, status_of(fleet, service.model_name, chats=chats))

    return Operation("/fleet", fleet_status, ("GET",), access="admin")


def status_of(fleet: FleetEngine, model: str, *, chats: bool) -> FleetStatus:
    """Return what ``GET /fleet`` says. ``model``: its name for clients; ``chats``: it takes
    messages.
    """
    gaps = fleet.num_gaps
    return FleetStatus(
        model=model,
        chats=chats,
        num_resumed_streams=fleet.num_resumed,
        prefilled_prompts={str(what): count for what, count in fleet.num_prefilled.items()},
        replicas=[_status(member, gaps.get(member.name, 0)) for member in fleet.members.values()],
    )


def _status(member: Member, num_gaps: int) -> ReplicaStatus:
    counts, load = member.counts, None
    if member.report is not None and member.load is not None:
        said = member.load
        load = ReplicaLoad(
            num_running=said.num_running,
            num_waiting=said.num_waiting,
            queued_tokens=said.queued_tokens,
            kv_usage=member.report.kv_usage,
            max_num_seqs=said.max_num_seqs,
            compute_s_per_token=said.prompt_token_s,
        )
    found = {} if member.report is None else member.report.found_tokens
    return ReplicaStatus(
        name=member.name,
        state=member.state,
        why=member.why,
        is_prefill=member.is_prefill,
        num_streams=len(member.streams),
        load=load,
        found_tokens={_PLACES[medium]: tokens for medium, tokens in found.items()},
        routed_tokens={_PLACES[each]: tokens for each, tokens in counts.routed_tokens.items()},
        predicted_found_tokens=counts.predicted_tokens,
        real_found_tokens=counts.found_tokens,
        requests={str(outcome): number for outcome, number in counts.outcomes.items()},
        num_event_gaps=num_gaps,
    )
