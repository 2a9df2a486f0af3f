"""``AsyncLLM``: an ``LLM`` for event loops, which a thread of its own steps."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from quire.engine.llm import LLM, MOST_CLEAR_S, STILL_CLEARING, Observer, require_cleared
from quire.engine.outputs import CompletionOutput, TextDelta, completion
from quire.engine.prompts import Prompt
from quire.engine.request_maker import ModelFacts
from quire.engine.request_tracker import RequestState, RequestTracker
from quire.engine.scheduling.offload_policy import OffloadReport
from quire.engine.sequence import Request, Sequence
from quire.errors import RequestError
from quire.kv import NO_KEYS, PrefixKeys, Usage
from quire.sampling_params import Params, SamplingParams
from quire.tiers import TierError

T = TypeVar("T")


class AsyncLLM:
    """A model behind an engine for many readers at once, in one event loop or several.

        async with AsyncLLM() as llm:
            async for delta in llm.generate("def fibonacci(n):", SamplingParams(max_tokens=40)):
                print(delta.text, end="")

    Arguments are those of ``LLM``. ``observe`` is called with the cache's usage after each step, in
    the engine's thread. ``llm`` is for its statistics: do not step or close it. While requests run,
    do not call ``generate`` of a model in memory: it would run beside a step.

    A request that comes while a step runs joins the next one. A reader does not delay a step: a
    slow one gets its unread pieces as one. After an error of the engine all readers raise it, and
    later requests too.

    Raises: ConfigError, ModelNotLoadable, UnsupportedModel, MemoryUnavailable.
    """

    def __init__(
        self, model: Any = None, *, observe: Observer | None = None, **options: Any
    ) -> None:
        self.llm = LLM(model, **options)
        self._tracker = RequestTracker(self.llm, observe)
        # Two threads, so that no prompt waits for the compilation of another request's grammar.
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="quire-prompt")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")
        self._finalizer = weakref.finalize(self, self._tracker.close)

    async def request(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        priority: int = 0,
        keys: PrefixKeys = NO_KEYS,
        kv_transfer_params: Mapping[str, Any] | None = None,
        output_token_ids: tuple[int, ...] = (),
    ) -> Request:
        """Tokenize and check a prompt, in another thread, for ``generate`` and ``complete``.

        ``kv_transfer_params`` and ``output_token_ids`` are those of ``LLM.request``.

        Raises: RequestError; RequestTooLong.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, Params):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        make = partial(
            self.llm.request,
            prompt,
            params,
            priority=priority,
            keys=keys,
            kv_transfer_params=kv_transfer_params,
            output_token_ids=output_token_ids,
        )
        return await self._made(make, params)

    async def adopt(self, request: Request) -> Request:
        """Check a request of another process, in another thread where that takes long. Raises:
        RequestError.
        """
        if request.params.structured_outputs is None and not request.output_token_ids:
            return self.llm.adopt(request)  # two switches of threads would take longer
        return await self._made(partial(self.llm.adopt, request), request.params)

    async def _made(self, make: Callable[[], Request], params: Params) -> Request:
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
    ) -> AsyncGenerator[TextDelta, None]:
        """Continue a prompt, piece by piece. The last piece of each choice has a finish_reason.

        A ``Request`` has its params, priority and keys already. ``request_id`` is for ``abort``.

        Leaving the loop, or cancelling the task that waits here, ends the request before the next
        step: what it alone holds is freed, and what others may share stays in the cache.

        Raises: RequestError for a prompt that cannot run; RequestTooLong for one that never can;
        MemoryUnavailable where the system has no pages left.
        """
        state = self._tracker.open(request_id)
        try:
            request = await self._request(prompt, params, priority, keys)
            async for delta in self._pieces(state, request):
                yield delta
        finally:
            self._tracker.leave(state)

    async def complete(
        self,
        prompt: Prompt | Request,
        params: Params | None = None,
        *,
        priority: int = 0,
        keys: PrefixKeys = NO_KEYS,
        request_id: str | None = None,
    ) -> CompletionOutput:
        """Continue a prompt, and return all at once. Cancelling the task ends the request too."""
        state = self._tracker.open(request_id)
        try:
            request = await self._request(prompt, params, priority, keys)
            deltas = [delta async for delta in self._pieces(state, request)]
            return completion(request, state.sequences, deltas)
        finally:
            self._tracker.leave(state)

    async def abort(self, request_ids: str | Iterable[str] | None) -> None:
        """End these requests, or all (None), and free what they alone held.

        Their readers get a last piece with the finish_reason "abort". Unknown ids are ignored.
        """
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        await asyncio.wrap_future(self._tracker.abort(names))

    async def usage(self) -> Usage:
        """Return the bytes reserved, committed, used and wasted between two steps."""
        return await asyncio.wrap_future(self._tracker.call(self.llm.usage))

    async def resize(self, kv_cache_memory_bytes: int | str) -> None:
        """Resize as ``LLM.resize`` does, in bytes, between two steps."""
        await asyncio.wrap_future(
            self._tracker.call(partial(self.llm.resize, kv_cache_memory_bytes))
        )

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_external: bool = False
    ) -> bool:
        """Reset the prefix cache as ``LLM`` does, between two steps. No step waits for tiers.

        Raises: RequestError, TierError, as ``LLM.reset_prefix_cache``.
        """
        reset = partial(self.llm.begin_reset, reset_running_requests, reset_external)
        clearing = await asyncio.wrap_future(self._tracker.call(reset))
        if clearing is None:
            return False
        try:
            require_cleared(await asyncio.wait_for(asyncio.wrap_future(clearing), MOST_CLEAR_S))
        except TimeoutError:
            raise TierError(STILL_CLEARING) from None
        return True

    @property
    def facts(self) -> ModelFacts:
        """What can be known of the model without its weights."""
        return self.llm.facts

    @property
    def administration(self) -> "AsyncLLM":
        """What an operator may ask of this engine: all that is here."""
        return self

    @property
    def is_sleeping(self) -> bool:
        """Whether the LLM was put to sleep."""
        return self.llm.is_sleeping

    def check_sleep(self, level: int) -> None:
        """Check a level of ``sleep``. Raises: RequestError."""
        self.llm.check_sleep(level)

    def check_reset_external(self) -> None:
        """Check that all tiers can forget what they have of this model. Raises: RequestError."""
        self.llm.check_reset_external()

    @property
    def tiers(self) -> OffloadReport | None:
        """What tiers hold and have done, as ``LLM.tiers``."""
        return self.llm.tiers

    def trust_tiers(self, name: str | None = None) -> None:
        """Load from tiers again that gave bad records, as ``LLM`` does, and at once."""
        self.llm.trust_tiers(name)

    async def sleep(self, level: int = 1) -> bool:
        """Sleep as ``LLM.sleep`` does, between two steps."""
        return await asyncio.wrap_future(self._tracker.call(partial(self.llm.sleep, level)))

    async def store_hottest(self, seconds: float) -> int:
        """Store blocks as ``LLM.store_hottest`` does, between two steps, for so many seconds."""
        store = partial(self.llm.store_hottest, seconds)
        return await asyncio.wrap_future(self._tracker.call(store))

    async def wake_up(self) -> None:
        """Wake up as ``LLM.wake_up`` does. After an error the LLM stays asleep."""
        await asyncio.wrap_future(self._tracker.call(self.llm.wake_up, fatal=False))

    @property
    def failure(self) -> Exception | None:
        """Why no request can run any more; None while requests can."""
        return self._tracker.failure

    async def inspect(self, function: Callable[[LLM, list[Sequence]], T]) -> T:
        """Call a function of the LLM and its unfinished sequences between two steps.

        It runs in the engine's thread, delays all requests, and must change nothing.
        """
        return await asyncio.wrap_future(self._tracker.inspect(function))

    def close(self) -> None:
        """End what still runs, tell the readers, and give all KV memory back.

        It waits for the step under way. A second call does nothing.
        """
        self._finalizer()
        self._preparing.shutdown(wait=False)
        self._compiling.shutdown(wait=False)

    async def aclose(self) -> None:
        """Close without blocking the event loop."""
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

    async def _pieces(self, state: RequestState, request: Request) -> AsyncIterator[TextDelta]:
        self._tracker.start(state, request)
        num_left = request.num_choices
        while num_left:
            for delta in await state.collector.take():
                if delta.finish_reason is not None:
                    num_left -= 1
                    state.over = not num_left
                yield delta
