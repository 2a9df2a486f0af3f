"""``AsyncLLM``: ``LLM`` for event loops. It steps in a thread of its own; readers only wait."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from quire.engine.llm import LLM, Observer
from quire.engine.outputs import CompletionOutput, TextDelta, completion
from quire.engine.prompts import Prompt
from quire.engine.request_tracker import RequestState, RequestTracker
from quire.engine.sequence import Request, Sequence
from quire.errors import RequestError
from quire.kv import NO_KEYS, PrefixKeys, Usage
from quire.sampling_params import Params, SamplingParams

T = TypeVar("T")


class AsyncLLM:
    """A model behind an engine for many readers at once, in one event loop or several.

        async with AsyncLLM() as llm:
            async for delta in llm.generate("def fibonacci(n):", SamplingParams(max_tokens=40)):
                print(delta.text, end="")

    Arguments are those of ``LLM``; ``observe`` is called with the cache's usage after each step, in
    the thread that steps. ``llm`` is for its figures: leave stepping and closing to this. While
    requests run, a model in memory is this engine's: its own ``generate`` would meet a step.

    A request that comes while a step runs joins the next one. A reader costs the step nothing: a
    slow one gets what has come meanwhile as one piece. An engine that fails raises the reason in
    all readers, and in those that come later.

    Raises: ConfigError, ModelNotLoadable, UnsupportedModel, MemoryUnavailable.
    """

    def __init__(
        self, model: Any = None, *, observe: Observer | None = None, **options: Any
    ) -> None:
        self.llm = LLM(model, **options)
        self._desk = RequestTracker(self.llm, observe)
        # Apart, so that no prompt waits for the compilation of another request's grammar.
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="quire-prompt")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")
        self._finalizer = weakref.finalize(self, self._desk.close)

    async def request(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        priority: int = 0,
        keys: PrefixKeys = NO_KEYS,
    ) -> Request:
        """A prompt tokenized and checked, as a request that ``generate`` and ``complete`` take.

        Neither here nor in the stepping thread. Raises: RequestError; RequestTooLong.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, Params):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        make = partial(self.llm.request, prompt, params, priority=priority, keys=keys)
        slow = isinstance(params, SamplingParams) and params.structured_outputs is not None
        thread = self._compiling if slow else self._preparing
        return await asyncio.get_running_loop().run_in_executor(thread, make)

    async def generate(
        self,
        prompt: Prompt | Request,
        params: Params | None = None,
        *,
        priority: int = 0,
        keys: PrefixKeys = NO_KEYS,
        request_id: str | None = None,
    ) -> AsyncIterator[TextDelta]:
        """Continue a prompt, piece by piece; of each of its choices the last has a finish_reason.

        A ``Request`` has its params, priority and keys already.

        Leaving the loop, and cancelling the task that waits here, ends the request before the next
        step: what only it holds is given back, what others may share stays in the cache.

        ``request_id`` is for ``abort``.

        Raises: RequestError for a prompt that cannot run; RequestTooLong for one that never can;
        MemoryUnavailable where the system has no pages left.
        """
        ticket = self._desk.open(request_id)
        try:
            request = await self._request(prompt, params, priority, keys)
            async for delta in self._pieces(ticket, request):
                yield delta
        finally:
            self._desk.leave(ticket)

    async def complete(
        self,
        prompt: Prompt | Request,
        params: Params | None = None,
        *,
        priority: int = 0,
        keys: PrefixKeys = NO_KEYS,
        request_id: str | None = None,
    ) -> CompletionOutput:
        """Like ``generate``, all at once. Cancelling it ends the request too."""
        ticket = self._desk.open(request_id)
        try:
            request = await self._request(prompt, params, priority, keys)
            deltas = [delta async for delta in self._pieces(ticket, request)]
            return completion(request, ticket.sequences, deltas)
        finally:
            self._desk.leave(ticket)

    async def abort(self, request_ids: str | Iterable[str] | None) -> None:
        """End these requests, or all (None); when it returns, what only they held is given back.

        Their readers get a last piece with the finish_reason "abort". Unknown ids are nothing.
        """
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        await asyncio.wrap_future(self._desk.abort(names))

    async def usage(self) -> Usage:
        """Bytes reserved, committed, used and wasted between two steps."""
        return await asyncio.wrap_future(self._desk.call(self.llm.usage))

    async def resize(self, kv_cache_memory_bytes: int | str) -> None:
        """As ``LLM.resize``, between two steps."""
        await asyncio.wrap_future(self._desk.call(partial(self.llm.resize, kv_cache_memory_bytes)))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As ``LLM.reset_prefix_cache``, between two steps."""
        reset = partial(self.llm.reset_prefix_cache, reset_running_requests)
        return await asyncio.wrap_future(self._desk.call(reset))

    async def sleep(self, level: int = 1) -> bool:
        """As ``LLM.sleep``, between two steps."""
        return await asyncio.wrap_future(self._desk.call(partial(self.llm.sleep, level)))

    async def wake_up(self) -> None:
        """As ``LLM.wake_up``. What it raises leaves the LLM asleep."""
        await asyncio.wrap_future(self._desk.call(self.llm.wake_up, fatal=False))

    @property
    def failure(self) -> Exception | None:
        """Why no request can run any more, as they will be told; None while they can."""
        return self._desk.failure

    async def inspect(self, function: Callable[[LLM, list[Sequence]], T]) -> T:
        """What a function of the LLM and its unfinished sequences gives, between two steps.

        It runs in the thread that steps, holds all requests up, and is to change nothing.
        """
        return await asyncio.wrap_future(self._desk.inspect(function))

    def close(self) -> None:
        """End what still runs, tell its readers, and give all KV memory back.

        It waits for the step under way. A second call does nothing.
        """
        self._finalizer()
        self._preparing.shutdown(wait=False)
        self._compiling.shutdown(wait=False)

    async def aclose(self) -> None:
        """``close``, without holding up the event loop."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _request(
        self,
        prompt: Prompt | Request,
        params: Params | None,
        priority: int,
        keys: PrefixKeys,
    ) -> Request:
        if isinstance(prompt, Request):
            return prompt
        return await self.request(prompt, params, priority=priority, keys=keys)

    async def _pieces(self, ticket: RequestState, request: Request) -> AsyncIterator[TextDelta]:
        self._desk.start(ticket, request)
        num_left = request.num_choices
        while num_left:
            for delta in await ticket.mailbox.take():
                if delta.finish_reason is not None:
                    num_left -= 1
                    ticket.over = not num_left
                yield delta
