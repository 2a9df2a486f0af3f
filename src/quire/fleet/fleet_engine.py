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
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random
from typing import Any, final

from quire.engine.outputs import TextDelta
from quire.engine.prompts import Prompt
from quire.engine.request_maker import ModelFacts, RequestMaker
from quire.engine.sequence import Request
from quire.errors import ConfigError, RequestError, one_line
from quire.fleet.detours import Detours, Prefilled, can_be_apart, prompt_alone
from quire.fleet.fleet_stream import Stream, seeded
from quire.fleet.members import CLOSE_S, EventFollower, Member, Members, NoReplica, Outcome
from quire.fleet.placement import Placed, Placement
from quire.fleet.prefill import with_blocks
from quire.fleet.replica import ReplicaFacts, ReplicaHandle, ReplicaLost, ReplicaRefused
from quire.kv import NO_KEYS, PrefixKeys
from quire.sampling_params import Params, SamplingParams

log = logging.getLogger(__name__)

_LOOK_S = 0.05  # between two looks for a replica


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
        seed: int | None = None,
    ) -> None:
        """``prefills_apart``: prefill replicas, which leave blocks for others, compute prompts
        first where that pays. Clients cannot say what is left where then.

        ``seed``: of requests that set none, in the order in which they come. None: their draws are
        new at each start, and unlike those of another door.
        """
        self._placement = placement
        self._members = Members(
            placement,
            follower,
            replica_timeout_s=replica_timeout_s,
            report_interval_s=report_interval_s,
        )
        self._patience_s = patience_s
        self._prefills_apart, self._detours = prefills_apart, Detours()
        self.num_resumed = 0  # streams that went on elsewhere
        self.num_prefilled = Counter[Prefilled]()  # prompts
        self._maker: RequestMaker | None = None
        self._streams: dict[str, Stream] = {}
        self._numbers, self._seeds = count(1), Random(seed)
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
            while left and fleet._members.first is None:
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            if fleet._members.first is None:
                joins[0].result()
        except BaseException:
            await fleet.aclose()
            raise
        return fleet

    # -- replicas ----------------------------------------------------------------------------------

    @property
    def members(self) -> Mapping[str, Member]:
        """The replicas of the fleet, by name."""
        return self._members.by_name

    async def join(self, handle: ReplicaHandle) -> None:
        """Wait until a replica is ready, check that its model is the fleet's, and route to it.

        Raises: ConfigError for a name in use or another model; what the replica failed with.
        """
        await self._members.join(handle)

    async def drain(self, name: str, timeout_s: float) -> bool:
        """Send a replica nothing new, and wait until its streams have ended.

        Those that still run after ``timeout_s`` seconds go on elsewhere, or end with the
        finish_reason "abort" where they cannot. Returns: whether all had ended by themselves.
        """
        return await self._members.drain(name, timeout_s)

    async def leave(self, name: str) -> None:
        """Forget a replica, whose streams go on elsewhere where they can, and close its handle."""
        await self._members.leave(name)

    def _note_joined(self, join: "asyncio.Task[None]") -> None:
        self._joining.discard(join)
        if not join.cancelled() and (error := join.exception()) is not None:
            log.error("a replica cannot join: %s", one_line(error))

    @property
    def _request_maker(self) -> RequestMaker:
        """What makes requests of the first replica's model."""
        if self._maker is None:
            model = self._first.model
            if self._prefills_apart:
                model = replace(model, takes_blocks=False)
            self._maker = RequestMaker(model)
        return self._maker

    @property
    def _first(self) -> ReplicaFacts:
        assert self._members.first is not None, "start() waits for the first replica"
        return self._members.first

    # -- what the server asks ----------------------------------------------------------------------

    @property
    def facts(self) -> ModelFacts:
        """What can be known of the model without its weights: the first replica's."""
        return self._request_maker.facts

    @property
    def failure(self) -> Exception | None:
        """Why no request can run at present; None while one replica is up, or was a moment ago."""
        if self._is_closed:
            return RequestError("this fleet is closed: make a new one")
        is_out = self._members.out_s > self._patience_s
        return self._members.no_replica() if is_out else None

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
        make = partial(
            self._request_maker.make,
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
                self._members.abort_at(member, [each for each in member.streams if each.is_aborted])
                for member in self.members.values()
            )
        )

    async def aclose(self) -> None:
        """End what still runs, and close the handles of all replicas."""
        self._is_closed = True
        for joining in self._joining:
            joining.cancel()
        await asyncio.gather(*self._joining, return_exceptions=True)
        await self._members.stop_watching()
        await self.abort(None)
        await self._members.close()
        self._preparing.shutdown(wait=False)
        self._compiling.shutdown(wait=False)

    @property
    def num_gaps(self) -> Mapping[str, int]:
        """How many times batches of events were missed, by replica."""
        return self._members.num_gaps

    # -- streams -----------------------------------------------------------------------------------

    def _open(self, request: Request, name: str | None) -> Stream:
        if self._is_closed:
            raise RequestError("this fleet is closed: make a new one")
        if name is None:
            name = f"{self._id}-{next(self._numbers)}"
        elif name in self._streams:
            raise RequestError(f"request_id {name!r} is in use: give each request its own")
        stream = Stream(seeded(request, self._seeds), name)
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
                async with asyncio.timeout(CLOSE_S):
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
            self._members.lose(member, one_line(error))
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
            raise self._members.no_replica()
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
        block_size = self._first.block_size
        if member.load is None:
            return False
        # What was sent since the last reports counts, too.
        begun = sum(len(each.open_choices) for each in member.streams if each.has_begun)
        for other in (self.members[name] for name in names):
            if other.load is None:
                continue
            sent = sum(len(each.request.prompt_token_ids) for each in other.streams)
            trade = self._detours.weigh(
                here,
                member.load,
                other.load,
                num_running=max(begun, member.load.num_running),
                queued_tokens=max(sent, other.load.queued_tokens),
                block_size=block_size,
            )
            if trade.pays:
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
        if not stream.may_move:
            reason = "it has been moved once" if stream.num_lost else "it has several continuations"
            raise ReplicaLost(f"{error}; this answer cannot go on elsewhere: {reason}") from error
        stream.num_lost += 1
        if stream.has_begun:
            self.num_resumed += 1
        log.info("%s: its request goes on elsewhere", error)
