"""Who is in a fleet: replicas that join, report, drain, are lost and leave.

A replica whose report does not come in time is lost, and what ran there is broken off. It is asked
again and again, and comes back if it answers. All must have the model of the first one.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from statistics import fmean
from typing import Literal, Protocol, TypeAlias, final

from quire.engine.sequence import FinishReason
from quire.errors import ConfigError, QuireError, one_line
from quire.fleet.fleet_stream import Stream
from quire.fleet.placement import Load, Placement
from quire.fleet.replica import ReplicaFacts, ReplicaHandle, ReplicaReport
from quire.fleet.shared_evidence import TELL_S, SharedEvidence
from quire.kv.evidence import Evidence
from quire.kv.prefix_index import Medium

log = logging.getLogger(__name__)

CLOSE_S = 5.0  # that the end of one request at its replica may take
_ALIKE = 1.25  # a token's price at a replica over that at another, up to which both are equal

State: TypeAlias = Literal["joining", "up", "draining", "lost", "refused"]
# How a request ended at one replica. "refused": it was passed over; "lost": the replica, or what it
# was doing for the request, was; "left": the reader has gone; "wrong": it can never run there.
Outcome: TypeAlias = FinishReason | Literal["refused", "lost", "left", "wrong"]


class NoReplica(QuireError):
    """No replica can take a request at present."""


class EventFollower(Protocol):
    """Keeps what a placement knows of replicas' caches in step with their events."""

    def follow(self, replica: str, facts: ReplicaFacts) -> None:
        """Begin to follow a replica; what was known of it before is forgotten."""
        ...

    def forget(self, replica: str) -> None:
        """Follow a replica no longer."""
        ...

    @property
    def num_gaps(self) -> Mapping[str, int]:
        """How many times batches were missed, by replica."""
        ...

    async def close(self) -> None:
        """Follow none any longer."""
        ...


# -- what is counted -------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class ReplicaCounts:
    """Counts of one replica, as the door sees it, since it joined first."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    routed_tokens: Counter[Medium | None] = field(default_factory=Counter)  # by where they were …
    # … thought to be found; None: nowhere. Of the prompts that have begun: all that were thought …
    predicted_tokens: int = 0
    found_tokens: int = 0  # … and those that the replica has found


@dataclass(slots=True, eq=False)
class Member:
    """A replica of the fleet."""

    handle: ReplicaHandle
    state: State = "joining"
    why: str = ""  # of the state, for people
    facts: ReplicaFacts | None = None
    report: ReplicaReport | None = None
    load: Load | None = None  # the report's, with what others have measured where it has not
    counts: ReplicaCounts = field(default_factory=ReplicaCounts)
    streams: "set[Stream]" = field(default_factory=set)
    watching: asyncio.Task[None] | None = None
    asked: asyncio.Event = field(default_factory=asyncio.Event)  # for a report, at once
    told_to_drain: bool = False
    heard: tuple[Evidence | None, ...] = ()  # what it was told last of the others' evidence …
    heard_s: float = -inf  # … and when

    @property
    def name(self) -> str:
        return self.handle.name

    @property
    def is_prefill(self) -> bool:
        """Whether it computes prompts for others."""
        return self.facts is not None and self.facts.is_prefill


# -- all of them -----------------------------------------------------------------------------------


@final
class Members:
    """The replicas of a fleet, in one event loop. ``by_name`` is read by others."""

    def __init__(
        self,
        placement: Placement,
        follower: EventFollower | None,
        *,
        replica_timeout_s: float,
        report_interval_s: float,
    ) -> None:
        """Raises: ConfigError."""
        for name, value in (
            ("replica_timeout_s", replica_timeout_s),
            ("report_interval_s", report_interval_s),
        ):
            if not value > 0:
                raise ConfigError(f"{name}={value!r} must be above 0 seconds")
        self._placement, self._follower = placement, follower
        self._replica_timeout_s, self._report_interval_s = replica_timeout_s, report_interval_s
        self._evidence = SharedEvidence()
        self.by_name: dict[str, Member] = {}
        self.first: ReplicaFacts | None = None  # of the first one that was ready
        self._up_s = -inf  # when one ceased to be up last

    async def join(self, handle: ReplicaHandle) -> None:
        """Wait until a replica is ready, check that its model is the fleet's, and route to it.

        Raises: ConfigError for a name in use or another model; what the replica failed with.
        """
        known = self.by_name.get(handle.name)
        if known is not None and known.state not in ("lost", "refused"):
            raise ConfigError(f"the fleet has a replica {handle.name!r}: give each its own name")
        member = Member(handle)
        if known is not None:
            await self._stop_watching(known)
            member.counts = known.counts
        self.by_name[handle.name] = member
        try:
            await self._bring_up(member)
        except Exception as error:
            if member.state != "refused":
                member.state, member.why = "lost", one_line(error)
            raise
        member.watching = asyncio.create_task(self._watch(member), name="quire-replica")

    async def drain(self, name: str, timeout_s: float) -> bool:
        """Send a replica nothing new, and wait until its streams have ended.

        Those that still run after ``timeout_s`` seconds go on elsewhere, or end with the
        finish_reason "abort" where they cannot. Returns: whether all had ended by themselves.
        """
        member = self._member(name)
        if member.state == "up":
            self._set(member, "draining", "it was told to")
        member.told_to_drain = True
        with suppress(Exception):  # its streams end in any case
            async with asyncio.timeout(self._replica_timeout_s):
                await member.handle.begin_drain()
        until_s = asyncio.get_running_loop().time() + timeout_s
        while member.streams and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(min(0.05, timeout_s))
        if not member.streams:
            return True
        stay = [each for each in member.streams if not each.may_move]
        for stream in member.streams.difference(stay):
            stream.break_off()
        await self.abort_at(member, stay)
        until_s = asyncio.get_running_loop().time() + CLOSE_S
        while member.streams and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(0.01)
        return False

    async def leave(self, name: str) -> None:
        """Forget a replica, whose streams go on elsewhere where they can, and close its handle."""
        member = self._member(name)
        await self._stop_watching(member)
        self.lose(member, "it has left the fleet")
        self.by_name.pop(name, None)
        await member.handle.close()

    async def abort_at(self, member: Member, streams: list[Stream]) -> None:
        """End streams at their replica; where it does not answer, they are broken off."""
        if not streams:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await member.handle.abort([each.remote_id for each in streams])
        except Exception as error:
            log.warning("replica %s cannot end requests: %s", member.name, one_line(error))
            for stream in streams:
                stream.break_off()

    async def _bring_up(self, member: Member) -> None:
        """Raises: ConfigError for another model; what the replica failed with."""
        member.facts = facts = await member.handle.facts()
        async with asyncio.timeout(self._replica_timeout_s):
            report = await member.handle.report()
        try:  # from here on without waiting, so that no other replica becomes the first meanwhile
            self._check(member.name, facts)
        except ConfigError as error:
            member.state, member.why = "refused", str(error)
            raise
        if self.first is None:
            self.first = facts
        if self._follower is not None:
            self._follower.follow(member.name, facts)
        if member.told_to_drain:
            self._set(member, "draining", "it was told to")
        else:
            self._set(member, "up", "")
        self._note(member, report)

    def _check(self, name: str, facts: ReplicaFacts) -> None:
        """Check that a replica continues texts as the fleet's others. Raises: ConfigError."""
        first = self.first
        if first is None:
            return
        ours, theirs = first.fingerprint, facts.fingerprint
        if ours is None or theirs is None:
            if ours is not theirs:
                raise ConfigError(
                    f"replica {name}: its model cannot be told from others, and the fleet's can"
                )
            log.warning("replica %s joins, though its model cannot be told from others", name)
        elif difference := ours.difference(theirs):
            raise ConfigError(
                f"replica {name} serves another model than the fleet, or with other options: "
                f"{'; '.join(difference)}"
            )
        for each in ("model_type", "vocab_size", "max_model_len", "eos_token_ids"):
            here, there = getattr(first.model, each), getattr(facts.model, each)
            if here != there:
                raise ConfigError(
                    f"replica {name} has {each}={there!r}, and the fleet {here!r}: start all "
                    f"replicas with the same options"
                )

    async def _watch(self, member: Member) -> None:
        """Ask a replica for reports until cancelled. One that is lost may come back."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(member.asked.wait(), self._report_interval_s)
            member.asked.clear()
            try:
                if member.state == "lost":
                    async with asyncio.timeout(self._replica_timeout_s):
                        await member.handle.report()
                    await self._bring_up(member)
                    continue
                async with asyncio.timeout(self._replica_timeout_s):
                    report = await member.handle.report()
                    await self._share_evidence(member, report)
            except TimeoutError:
                self.lose(member, f"it has not answered for {self._replica_timeout_s:g} s")
            except ConfigError as error:
                log.error("%s", error)
                return
            except Exception as error:
                self.lose(member, one_line(error))
            else:
                self._note(member, report)

    def _note(self, member: Member, report: ReplicaReport) -> None:
        member.report = report
        member.load = self._with_costs_of_others(report.load)
        self._placement.report(member.name, member.load)
        if not report.takes_requests and member.state == "up":
            self._set(member, "draining", "it takes no new requests")
        elif report.takes_requests and member.state == "draining" and not member.told_to_drain:
            self._set(member, "up", "")

    async def _share_evidence(self, member: Member, report: ReplicaReport) -> None:
        """Take what a replica has found of eviction orders, and tell it now and then what the
        others have. Prefill replicas see the prompts of the others once more: that is no evidence.

        Raises: what the replica raises.
        """
        if member.is_prefill:
            return
        self._evidence.note(member.name, report.evidence)
        now_s, others = time.monotonic(), self._evidence.of_others(member.name)
        is_news = others != member.heard and any((*others, *member.heard))
        if is_news and now_s - member.heard_s >= TELL_S:
            member.heard, member.heard_s = others, now_s
            await member.handle.hear_evidence(others)

    def _with_costs_of_others(self, load: Load) -> Load:
        """Return a load in which what the replica has not measured costs what others measured, in
        the mean: a prompt's token, and a block of each tier.

        A token that costs nearly as much as elsewhere costs the mean of both: what equal replicas
        measure differs by some hundredths, and must not send a prompt to one that is at work.
        """
        tokens: list[float] = []
        blocks: dict[Medium, list[float]] = {}
        for member in self.by_name.values():
            if member.report is not None and member.state == "up":
                theirs = member.report.load
                if theirs.compute_s_per_token is not None:
                    tokens.append(theirs.compute_s_per_token)
                for medium, seconds in theirs.load_s_per_block.items():
                    blocks.setdefault(medium, []).append(seconds)
        token_s = load.compute_s_per_token
        if token_s is not None:
            tokens = [each for each in tokens if token_s <= _ALIKE * each <= _ALIKE**2 * token_s]
        if tokens:
            token_s = fmean(tokens)
        costs = {medium: fmean(several) for medium, several in blocks.items()}
        return replace(
            load,
            compute_s_per_token=token_s,
            load_s_per_block={**costs, **load.load_s_per_block},
        )

    def lose(self, member: Member, why: str) -> None:
        """Note that a replica is lost: it gets nothing new, and its streams are broken off."""
        if member.state in ("up", "draining", "joining"):
            self._set(member, "lost", why)
            self._placement.forget(member.name)
            self._evidence.forget(member.name)
            if self._follower is not None:
                self._follower.forget(member.name)
        for stream in member.streams:
            stream.break_off()

    def _set(self, member: Member, state: State, why: str) -> None:
        level = logging.WARNING if state == "lost" else logging.INFO
        log.log(level, "replica %s is %s%s", member.name, state, f": {why}" if why else "")
        if member.state == "up":
            self._up_s = time.monotonic()
        member.state, member.why = state, why

    async def _stop_watching(self, member: Member) -> None:
        if member.watching is not None:
            member.watching.cancel()
            await asyncio.gather(member.watching, return_exceptions=True)

    def _member(self, name: str) -> Member:
        if name not in self.by_name:
            known = ", ".join(self.by_name) or "none"
            raise ConfigError(f"replica={name!r} is none of the fleet's: {known}")
        return self.by_name[name]

    @property
    def num_gaps(self) -> Mapping[str, int]:
        """How many times batches of events were missed, by replica."""
        return {} if self._follower is None else self._follower.num_gaps

    @property
    def out_s(self) -> float:
        """For how many seconds no replica has been up; 0 while one is."""
        if any(member.state == "up" for member in self.by_name.values()):
            return 0.0
        return time.monotonic() - self._up_s

    def no_replica(self) -> NoReplica:
        """Return the error that says of each replica why it takes no request."""
        states = "; ".join(
            f"{each.name} is {each.state}{f' ({each.why})' if each.why else ''}"
            for each in self.by_name.values()
        )
        return NoReplica(f"no replica can take a request at present: {states or 'there is none'}")

    async def stop_watching(self) -> None:
        """Ask none for reports any longer."""
        for member in list(self.by_name.values()):
            await self._stop_watching(member)

    async def close(self) -> None:
        """Follow no events any longer, and close the handles of all replicas."""
        if self._follower is not None:
            await self._follower.close()
        closing = (member.handle.close() for member in self.by_name.values())
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(error, Exception):
                log.warning("a replica cannot be closed: %s", one_line(error))
