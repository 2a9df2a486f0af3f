"""``FleetEngine``: several replicas as one engine for the server.

A request goes to the replica that its ``Placement`` chooses. One that refuses is passed over. If a
replica is lost, a stream of it goes on at another one, once, after the tokens that its reader has:
the engine there computes them and goes on as if it had generated them. What cannot go on ends with
one error. Every reservation is given back, however its request ends.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf
from statistics import fmean
from typing import Any, Literal, Protocol, TypeAlias, final

from quire.engine.outputs import TextDelta
from quire.engine.prompts import Prompt
from quire.engine.request_maker import ModelFacts, RequestMaker
from quire.engine.sequence import FinishReason, Request
from quire.errors import ConfigError, QuireError, RequestError, one_line
from quire.fleet.placement import Load, Placed, Placement
from quire.fleet.prefill import Detours, Prefilled, can_be_apart, prompt_alone, with_blocks
from quire.fleet.replica import (
    ReplicaFacts,
    ReplicaHandle,
    ReplicaLost,
    ReplicaRefused,
    ReplicaReport,
)
from quire.kv import NO_KEYS, PrefixKeys
from quire.kv.prefix_index import Medium
from quire.sampling_params import Params, SamplingParams

log = logging.getLogger(__name__)

_LOOK_S = 0.05  # between two looks for a replica
_CLOSE_S = 5.0  # that the end of one request at its replica may take
_SEED_BITS = 63

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

    @property
    def name(self) -> str:
        return self.handle.name

    @property
    def is_prefill(self) -> bool:
        """Whether it computes prompts for others."""
        return self.facts is not None and self.facts.is_prefill


@dataclass(slots=True, eq=False)
class Stream:
    """A request until its reader has all, or has left."""

    request: Request
    name: str
    token_ids: list[int] = field(default_factory=list)  # that its reader has, of one choice
    has_begun: bool = False  # its reader has a piece
    num_lost: int = 0  # replicas
    passed: set[str] = field(default_factory=set)  # replicas that refused it
    open_choices: set[int] = field(default_factory=set)
    num_cached_tokens: int = 0  # of the prompt, where it began
    is_aborted: bool = False
    remote_id: str = ""  # its name at the replica
    patient_until_s: float | None = None  # since no replica could take it
    is_broken: bool = False  # no piece of this replica is waited for any more
    waits: asyncio.Timeout | None = None  # for a piece
    apart: "Stream | None" = None  # its prompt alone, at a prefill replica

    def break_off(self) -> None:
        """End the wait for the replica's next piece, now or when it begins, with ReplicaLost."""
        self.is_broken = True
        if self.waits is not None and not self.waits.expired():
            self.waits.reschedule(asyncio.get_running_loop().time())

    @property
    def can_go_on(self) -> bool:
        """Whether another replica can go on after a part of it."""
        request = self.request
        return request.params.n == 1 and request.beam is None and request.pooling is None

    def rest(self) -> Request:
        """Return what is left of the request: all, where its reader has nothing yet."""
        if not self.has_begun:
            return self.request
        # The reader has the prompt's logprobs already.
        params = replace(self.request.params, prompt_logprobs=None)
        outputs = (*self.request.output_token_ids, *self.token_ids)
        return replace(
            self.request, params=params, output_token_ids=outputs, resumption=None, remote=None
        )

    def note(self, delta: TextDelta) -> TextDelta:
        """Note a piece that its reader gets, and return it as that is to see it."""
        if self.num_lost and self.has_begun:
            delta = replace(delta, num_cached_tokens=self.num_cached_tokens)
        self.num_cached_tokens = delta.num_cached_tokens
        self.has_begun, self.patient_until_s = True, None
        self.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            self.open_choices.discard(delta.choice)
        return delta

    def ends(self, reason: FinishReason, detail: str) -> list[TextDelta]:
        """Return the last piece of each choice that has none."""
        return [
            TextDelta(
                index=0,
                choice=choice,
                text="",
                token_ids=(),
                finish_reason=reason,
                detail=detail,
                num_cached_tokens=self.num_cached_tokens,
            )
            for choice in sorted(self.open_choices)
        ]


# -- the engine ------------------------------------------------------------------------------------


@final
class FleetEngine:
    """An engine of several replicas, in the event loop that serves it. ``start`` makes one.

    A replica whose report does not come within ``replica_timeout_s`` is lost, and its streams are;
    it is asked every ``report_interval_s``. So a stream waits for a replica that does not answer
    for the sum of both at most, and for one that is busy as long as it takes. Where all replicas
    are out for a moment, requests wait up to ``patience_s`` for one.
    """

    administration = None  # what an operator asks, he asks a replica
    llm = None

    def __init__(
        self,
        placement: Placement,
        *,
        follower: EventFollower | None = None,
        replica_timeout_s: float = 30.0,
        report_interval_s: float = 0.5,
        patience_s: float = 0.0,
        prefills_apart: bool = False,
    ) -> None:
        """``prefills_apart``: prefill replicas, which leave blocks for others, compute prompts
        first where that pays. Clients cannot say what is left where then.
        """
        for name, value in (
            ("replica_timeout_s", replica_timeout_s),
            ("report_interval_s", report_interval_s),
        ):
            if not value > 0:
                raise ConfigError(f"{name}={value!r} must be above 0 seconds")
        self._placement, self._follower = placement, follower
        self._replica_timeout_s, self._report_interval_s = replica_timeout_s, report_interval_s
        self._patience_s, self._up_s = patience_s, -inf  # when one ceased to be up last
        self._prefills_apart, self._detours = prefills_apart, Detours()
        self.members: dict[str, Member] = {}
        self.num_resumed = 0  # streams that went on elsewhere
        self.num_prefilled = Counter[Prefilled]()  # prompts
        self._maker: RequestMaker | None = None  # of the first replica's model
        self._first: ReplicaFacts | None = None
        self._streams: dict[str, Stream] = {}
        self._numbers = count(1)
        self._id = secrets.token_hex(4)  # two doors may use one replica
        self._joining: set[asyncio.Task[None]] = set()
        self._is_closed = False
        # Two threads, so that no prompt waits for the compilation of another request's grammar.
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="quire-prompt")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")

    @classmethod
    async def start(
        cls, handles: Iterable[ReplicaHandle], placement: Placement, **options: Any
    ) -> "FleetEngine":
        """Make an engine as soon as one replica is ready; the others join when they are.

        ``options`` are the constructor's. Raises: ConfigError; the first replica's error where none
        becomes ready.
        """
        fleet = cls(placement, **options)
        try:
            joins = [asyncio.create_task(fleet.join(handle)) for handle in handles]
            if not joins:
                raise ConfigError("a fleet needs at least one replica")
            fleet._joining.update(joins)
            for join in joins:
                join.add_done_callback(fleet._note_joined)
            left: set[asyncio.Task[None]] = set(joins)
            while left and fleet._first is None:
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            if fleet._first is None:
                joins[0].result()
        except BaseException:
            await fleet.aclose()
            raise
        return fleet

    # -- replicas ----------------------------------------------------------------------------------

    async def join(self, handle: ReplicaHandle) -> None:
        """Wait until a replica is ready, check that its model is the fleet's, and route to it.

        Raises: ConfigError for a name in use or another model; what the replica failed with.
        """
        known = self.members.get(handle.name)
        if known is not None and known.state not in ("lost", "refused"):
            raise ConfigError(f"the fleet has a replica {handle.name!r}: give each its own name")
        member = Member(handle)
        if known is not None:
            await self._stop_watching(known)
            member.counts = known.counts
        self.members[handle.name] = member
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
        stay = [each for each in member.streams if not self._may_move(each)]
        for stream in member.streams.difference(stay):
            stream.break_off()
        await self._abort_at(member, stay)
        until_s = asyncio.get_running_loop().time() + _CLOSE_S
        while member.streams and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(0.01)
        return False

    async def leave(self, name: str) -> None:
        """Forget a replica, whose streams go on elsewhere where they can, and close its handle."""
        member = self._member(name)
        await self._stop_watching(member)
        self._lose(member, "it has left the fleet")
        self.members.pop(name, None)
        await member.handle.close()

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
        if self._first is None:
            model = facts.model
            if self._prefills_apart:
                model = replace(model, takes_blocks=False)
            self._first, self._maker = facts, RequestMaker(model)
        if self._follower is not None:
            self._follower.follow(member.name, facts)
        if member.told_to_drain:
            self._set(member, "draining", "it was told to")
        else:
            self._set(member, "up", "")
        self._note(member, report)

    def _check(self, name: str, facts: ReplicaFacts) -> None:
        """Check that a replica continues texts as the fleet's others. Raises: ConfigError."""
        first = self._first
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
            except TimeoutError:
                self._lose(member, f"it has not answered for {self._replica_timeout_s:g} s")
            except ConfigError as error:
                log.error("%s", error)
                return
            except Exception as error:
                self._lose(member, one_line(error))
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

    def _with_costs_of_others(self, load: Load) -> Load:
        """Return a load in which what the replica has not measured costs what others measured, in
        the mean: a prompt's token, and a block of each tier.
        """
        tokens: list[float] = []
        blocks: dict[Medium, list[float]] = {}
        for member in self.members.values():
            if member.report is not None and member.state == "up":
                theirs = member.report.load
                if theirs.compute_s_per_token is not None:
                    tokens.append(theirs.compute_s_per_token)
                for medium, seconds in theirs.load_s_per_block.items():
                    blocks.setdefault(medium, []).append(seconds)
        token_s = load.compute_s_per_token
        if token_s is None and tokens:
            token_s = fmean(tokens)
        costs = {medium: fmean(several) for medium, several in blocks.items()}
        return replace(
            load,
            compute_s_per_token=token_s,
            load_s_per_block={**costs, **load.load_s_per_block},
        )

    def _lose(self, member: Member, why: str) -> None:
        """Route nothing to a replica that is lost, and let its streams know."""
        if member.state in ("up", "draining", "joining"):
            self._set(member, "lost", why)
            self._placement.forget(member.name)
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

    def _note_joined(self, join: "asyncio.Task[None]") -> None:
        self._joining.discard(join)
        if not join.cancelled() and (error := join.exception()) is not None:
            log.error("a replica cannot join: %s", one_line(error))

    async def _stop_watching(self, member: Member) -> None:
        if member.watching is not None:
            member.watching.cancel()
            await asyncio.gather(member.watching, return_exceptions=True)

    def _member(self, name: str) -> Member:
        if name not in self.members:
            known = ", ".join(self.members) or "none"
            raise ConfigError(f"replica={name!r} is none of the fleet's: {known}")
        return self.members[name]

    # -- what the server asks ----------------------------------------------------------------------

    @property
    def facts(self) -> ModelFacts:
        """What can be known of the model without its weights: the first replica's."""
        assert self._maker is not None, "start() waits for the first replica"
        return self._maker.facts

    @property
    def failure(self) -> Exception | None:
        """Why no request can run at present; None while one replica is up, or was a moment ago."""
        if self._is_closed:
            return RequestError("this fleet is closed: make a new one")
        return None if self._out_s <= self._patience_s else self._no_replica()

    @property
    def _out_s(self) -> float:
        """Return for how many seconds no replica has been up; 0 while one is."""
        if any(member.state == "up" for member in self.members.values()):
            return 0.0
        return time.monotonic() - self._up_s

    async def request(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        priority: int = 0,
        keys: PrefixKeys = NO_KEYS,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> Request:
        """Tokenize and check a prompt here, in another thread.

        Whether a replica has the memory for it, that replica says. Raises: as ``AsyncLLM.request``.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, Params):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        assert self._maker is not None, "start() waits for the first replica"
        make = partial(
            self._maker.make,
            prompt,
            params,
            priority=priority,
            keys=keys,
            kv_transfer_params=kv_transfer_params,
        )
        slow = isinstance(params, SamplingParams) and params.structured_outputs is not None
        thread = self._compiling if slow else self._preparing
        return await asyncio.get_running_loop().run_in_executor(thread, make)

    async def generate(
        self, prompt: Prompt | Request, *, request_id: str | None = None
    ) -> AsyncGenerator[TextDelta, None]:
        """Continue a prompt at a replica, piece by piece; at another one where that is lost.

        Leaving the loop, or cancelling the task that waits here, ends the request.

        Raises: RequestError for a request that cannot run; NoReplica; ReplicaLost where a replica
        is lost and what it had begun cannot go on elsewhere.
        """
        request = prompt if isinstance(prompt, Request) else await self.request(prompt)
        stream = self._open(request, request_id)
        try:
            async with aclosing(self._pieces(stream)) as pieces:
                async for delta in pieces:
                    yield delta
        finally:
            self._streams.pop(stream.name, None)

    async def abort(self, request_ids: str | Iterable[str] | None) -> None:
        """End these requests, or all (None). Their readers get a last piece ("abort")."""
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        several = set(self._streams if names is None else names)
        for stream in [self._streams[name] for name in several if name in self._streams]:
            for each in filter(None, (stream, stream.apart)):
                each.is_aborted = True
        await asyncio.gather(
            *(
                self._abort_at(member, [each for each in member.streams if each.is_aborted])
                for member in self.members.values()
            )
        )

    async def aclose(self) -> None:
        """End what still runs, and close the handles of all replicas."""
        self._is_closed = True
        tasks = [*self._joining, *(each.watching for each in self.members.values())]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)
        await self.abort(None)
        if self._follower is not None:
            await self._follower.close()
        closing = (member.handle.close() for member in self.members.values())
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(error, Exception):
                log.warning("a replica cannot be closed: %s", one_line(error))
        self._preparing.shutdown(wait=False)
        self._compiling.shutdown(wait=False)

    @property
    def num_gaps(self) -> Mapping[str, int]:
        """How many times batches of events were missed, by replica."""
        return {} if self._follower is None else self._follower.num_gaps

    # -- streams -----------------------------------------------------------------------------------

    def _open(self, request: Request, name: str | None) -> Stream:
        if self._is_closed:
            raise RequestError("this fleet is closed: make a new one")
        if name is None:
            name = f"{self._id}-{next(self._numbers)}"
        elif name in self._streams:
            raise RequestError(f"request_id {name!r} is in use: give each request its own")
        stream = Stream(_seeded(request), name)
        stream.open_choices = set(range(request.num_choices))
        self._streams[name] = stream
        return stream

    async def _pieces(self, stream: Stream) -> AsyncGenerator[TextDelta, None]:
        """Yield all pieces of a stream. Raises: as ``generate``."""
        while stream.open_choices:
            if stream.is_aborted:
                for delta in stream.ends("abort", "aborted"):
                    yield stream.note(delta)
                return
            choice, member = await self._placed(stream)
            outcome: Outcome = "left"
            stream.is_broken, is_first = False, True
            member.streams.add(stream)
            try:
                await self._compute_apart(stream, member, choice)
                async with aclosing(self._of_replica(stream, member)) as pieces:
                    async for delta in pieces:
                        if is_first:
                            self._note_first(stream, member, choice, delta)
                            is_first = False
                        delta = stream.note(delta)
                        if delta.finish_reason is not None and not stream.open_choices:
                            outcome = delta.finish_reason
                        yield delta
            except ReplicaRefused as error:
                outcome = "refused"
                stream.passed.add(member.name)
                log.info("%s: the request goes elsewhere", error)
            except RequestError:
                outcome = "wrong"
                raise
            except ReplicaLost as error:
                outcome = "lost"
                if not stream.is_aborted:
                    self._move(stream, member, error)
            finally:
                member.streams.discard(stream)
                member.counts.outcomes[outcome] += 1
                self._placement.note_end(choice)

    async def _of_replica(self, stream: Stream, member: Member) -> AsyncGenerator[TextDelta, None]:
        """Yield the pieces of one replica. Raises: RequestError, ReplicaRefused, ReplicaLost."""
        if stream.is_aborted:
            for delta in stream.ends("abort", "aborted"):
                yield delta
            return
        stream.remote_id = f"{self._id}-{next(self._numbers)}"
        source = member.handle.generate(stream.rest(), request_id=stream.remote_id)
        try:
            has_begun = False
            while stream.open_choices:
                try:
                    delta = await self._next(stream, member, source)
                except ReplicaRefused as error:
                    if has_begun:
                        raise ReplicaLost(str(error)) from error
                    raise
                has_begun = True
                yield delta
        finally:
            with suppress(Exception):
                async with asyncio.timeout(_CLOSE_S):
                    await source.aclose()

    async def _next(
        self, stream: Stream, member: Member, source: AsyncGenerator[TextDelta, None]
    ) -> TextDelta:
        """Return a replica's next piece. Raises: as ``_of_replica``."""
        broken_off = asyncio.timeout(0 if stream.is_broken else None)
        try:
            async with broken_off:
                stream.waits = broken_off
                try:
                    delta = await anext(source)
                finally:
                    stream.waits = None
        except (RequestError, ReplicaRefused):
            raise
        except ReplicaLost as error:
            self._lose(member, one_line(error))
            raise
        except StopAsyncIteration:
            raise ReplicaLost(f"replica {member.name} ended its answer early") from None
        except Exception as error:
            if stream.is_broken:
                why = f": {member.why}" if member.why else ""
                raise ReplicaLost(f"replica {member.name} is {member.state}{why}") from None
            member.asked.set()  # its next report says whether it is lost
            raise ReplicaLost(f"replica {member.name} has failed: {one_line(error)}") from error
        if delta.choice not in stream.open_choices:
            raise ReplicaLost(f"replica {member.name} has answered with a choice that is not open")
        return delta

    async def _placed(self, stream: Stream) -> tuple[Placed, Member]:
        """Choose a replica as soon as there is one. Raises: NoReplica where none comes in time."""
        now_s = asyncio.get_running_loop().time
        while True:
            try:
                return self._place(stream)
            except NoReplica:
                if stream.patient_until_s is None:
                    stream.patient_until_s = now_s() + self._patience_s
                if now_s() >= stream.patient_until_s or stream.is_aborted:
                    raise
            await asyncio.sleep(_LOOK_S)
            stream.passed.clear()  # one that was on its way out may be back

    def _place(self, stream: Stream) -> tuple[Placed, Member]:
        """Choose a replica, and count the request there. Raises: NoReplica."""
        # Without another one a prefill replica does the whole of it.
        candidates = self._candidates(stream, are_prefill=False)
        candidates = candidates or self._candidates(stream, are_prefill=True)
        if not candidates:
            raise self._no_replica()
        return self._place_at(stream, candidates)

    def _candidates(self, stream: Stream, *, are_prefill: bool) -> list[str]:
        return [
            member.name
            for member in self.members.values()
            if member.state == "up"
            and member.name not in stream.passed
            and member.is_prefill == are_prefill
        ]

    def _place_at(self, stream: Stream, candidates: list[str]) -> tuple[Placed, Member]:
        request, token_ids = stream.request, stream.request.prompt_token_ids
        if request.output_token_ids or stream.token_ids:
            token_ids = (*token_ids, *request.output_token_ids, *stream.token_ids)
        choice = self._placement.place(token_ids, request.keys, candidates, session=request.session)
        member = self.members[choice.replica]
        member.counts.routed_tokens.update(choice.found_tokens)
        member.counts.routed_tokens[None] += choice.computed_tokens
        return choice, member

    async def _compute_apart(self, stream: Stream, member: Member, here: Placed) -> None:
        """Have a prefill replica compute a stream's prompt for the replica that goes on with it.

        Nothing is done where that does not pay. If it fails, the prompt is computed as any other.
        """
        if not self._prefills_apart or stream.apart is not None or stream.has_begun:
            return
        request = stream.request
        names = [] if member.is_prefill else self._candidates(stream, are_prefill=True)
        if not names or not can_be_apart(request):
            return
        own = stream.apart = Stream(prompt_alone(request), f"{stream.name}, its prompt")
        own.open_choices, own.is_aborted = {0}, stream.is_aborted
        if not self._pays(here, member, names):
            self.num_prefilled["here"] += 1
            return
        choice, other = self._place_at(own, names)
        outcome: Outcome = "left"
        began_s, left = time.monotonic(), None
        other.streams.add(own)
        try:
            async with aclosing(self._of_replica(own, other)) as pieces:
                async for delta in pieces:
                    self._note_first(own, other, choice, delta)
                    own.note(delta)
                    left = delta.kv_transfer_params or left
                    outcome = delta.finish_reason or outcome
            stream.request = with_blocks(request, left)
        except (ReplicaLost, ReplicaRefused, RequestError) as error:
            outcome = "refused" if isinstance(error, ReplicaRefused) else "lost"
            log.info("%s: the prompt is computed where its answer is", error)
        finally:
            other.streams.discard(own)
            other.counts.outcomes[outcome] += 1
            self._placement.note_end(choice)
        self.num_prefilled["failed" if stream.request.remote is None else "apart"] += 1
        if other.load is not None:
            computing_s = choice.computed_tokens * other.load.prompt_token_s
            self._detours.note(time.monotonic() - began_s, computing_s)

    def _pays(self, here: Placed, member: Member, names: Iterable[str]) -> bool:
        """Tell whether one of these prefill replicas is to compute a prompt first."""
        assert self._first is not None, "start() waits for the first replica"
        block_size = self._first.block_size
        if member.load is None or here.computed_tokens < block_size:
            return False
        # What was sent since the last reports counts, too.
        begun = sum(len(each.open_choices) for each in member.streams if each.has_begun)
        for other in (self.members[name] for name in names):
            if other.load is None:
                continue
            sent = sum(len(each.request.prompt_token_ids) for each in other.streams)
            if self._detours.pays(
                here,
                member.load,
                other.load,
                num_running=max(begun, member.load.num_running),
                queued_tokens=max(sent, other.load.queued_tokens),
                block_size=block_size,
            ):
                return True
        return False

    def _note_first(self, stream: Stream, member: Member, choice: Placed, delta: TextDelta) -> None:
        self._placement.note_first_token(choice)
        if not (stream.has_begun or stream.is_aborted):
            member.counts.predicted_tokens += sum(choice.found_tokens.values())
            member.counts.found_tokens += delta.num_cached_tokens

    def _move(self, stream: Stream, member: Member, error: ReplicaLost) -> None:
        """Let a stream go on elsewhere. Raises: ReplicaLost where it cannot."""
        stream.passed.add(member.name)
        if not self._may_move(stream):
            reason = "it has been moved once" if stream.num_lost else "it has several continuations"
            raise ReplicaLost(f"{error}; this answer cannot go on elsewhere: {reason}") from error
        stream.num_lost += 1
        if stream.has_begun:
            self.num_resumed += 1
        log.info("%s: its request goes on elsewhere", error)

    def _may_move(self, stream: Stream) -> bool:
        return not stream.num_lost and (stream.can_go_on or not stream.has_begun)

    async def _abort_at(self, member: Member, streams: list[Stream]) -> None:
        """End streams at their replica; where it does not answer, they are broken off."""
        if not streams:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await member.handle.abort([each.remote_id for each in streams])
        except Exception as error:
            log.warning("replica %s cannot end requests: %s", member.name, one_line(error))
            for stream in streams:
                stream.break_off()

    def _no_replica(self) -> NoReplica:
        states = "; ".join(
            f"{each.name} is {each.state}{f' ({each.why})' if each.why else ''}"
            for each in self.members.values()
        )
        return NoReplica(f"no replica can take a request at present: {states or 'there is none'}")


def _seeded(request: Request) -> Request:
    """Give a request that samples without a seed one, so that another replica draws the same."""
    params = request.params
    is_greedy = params.temperature == 0 or params.top_k == 1
    if is_greedy or params.seed is not None or request.pooling is not None:
        return request
    return replace(request, params=replace(params, seed=secrets.randbits(_SEED_BITS)))
