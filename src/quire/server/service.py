"""What every endpoint needs: the engine, the model's names, tokens and texts, the queue's gate."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from importlib.metadata import version

from quire.chat.conversation import Chat
from quire.chat.token_texts import TokenTexts
from quire.config import ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.outputs import TextDelta
from quire.engine.prompts import Prompt
from quire.engine.sequence import Request
from quire.errors import RequestError
from quire.sampling_params import Params, SamplingParams, StructuredOutputsParams
from quire.server.admission_control import AdmissionControl, Bodies, Bounds, Permit, TextThreads
from quire.server.api_keys import Caller, Keys, Origins
from quire.server.logs import RequestWriter
from quire.server.metrics.exposition import Metrics
from quire.server.request_params import sampling_defaults, sampling_params
from quire.server.response_store import Background, Store
from quire.server.schemas.request_fields import Routed, Sampling, Searching
from quire.server.tracing import Tracer
from quire.server.wire.body import MOST_VALUES
from quire.server.wire.error_responses import Refused
from quire.units import format_count

log = logging.getLogger(__name__)
_BODIES = 16  # of the longest that there may be, in memory at once
_POLL_S = 0.05


class Service:
    """Of one app. It belongs to the event loop that serves it."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.llm, self.config = llm, config
        self.names = config.served_model_name or (llm.llm.name,)
        self.keys = Keys(config.api_key, config.admin_api_key)
        self.origins = Origins(
            config.allowed_origins,
            is_private=config.is_local and config.uds is None and not config.api_key,
        )
        self.metrics = Metrics(llm, self.model_name)
        self.tracer = (
            Tracer(config.otlp_traces_endpoint, version=version("quire"))
            if config.otlp_traces_endpoint
            else None
        )
        self.request_log = RequestWriter(config.request_log) if config.request_log else None
        self.gate = AdmissionControl(
            Bounds(
                num_queued_reqs=config.max_num_queued_reqs,
                num_queued_tokens=config.max_num_queued_tokens,
                num_reqs_per_key=config.max_num_reqs_per_key,
            )
        )
        self.bodies = Bodies(_BODIES * config.max_request_bytes)
        # Prompts are token ids too, as many as the context has.
        self.most_values = max(MOST_VALUES, 2 * llm.llm.max_model_len)
        self.created = int(time.time())
        self._sampling_defaults = sampling_defaults(
            config.generation_config, own=llm.llm.sampling_defaults
        )
        self.texts = TokenTexts(llm.llm.tokenizer, llm.llm.max_model_len)
        self.chat = Chat(
            llm.llm.tokenizer,
            self.texts,
            chat_template=config.chat_template,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            model_type=llm.llm.spec.model_type,
        )
        self.responses = Store(config.max_stored_response_bytes)
        self.background = Background(config.max_background_responses)
        self.text_threads = TextThreads()
        self._changing_sleep = asyncio.Lock()
        self._num_aborting = 0  # that are to fall asleep, and wait for no request

    @property
    def model_name(self) -> str:
        return self.names[0]

    @property
    def max_model_len(self) -> int:
        return self.llm.llm.max_model_len

    def refuse_unknown_model(self, name: str | None) -> None:
        """Raises: Refused (404)."""
        if name is not None and name not in self.names:
            raise Refused(
                404,
                f"the model {name[:200]!r} is not served here: there is {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    # -- from a request's fields to the engine's ---------------------------------------------------

    def params(
        self,
        asked: Sampling,
        *,
        max_tokens: int,
        logprobs: int | None,
        form: StructuredOutputsParams | None = None,
    ) -> SamplingParams:
        """Raises: Refused; RequestError."""
        searches = isinstance(asked, Searching) and asked.use_beam_search
        return sampling_params(
            asked,
            defaults={} if searches else self._sampling_defaults,
            max_tokens=max_tokens,
            logprobs=logprobs,
            max_logprobs=self.config.max_logprobs,
            form=form,
        )

    def room_for(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Tokens that may be generated: as many as asked for, or as the context leaves.

        Raises: Refused for more than the context, or all the KV memory, could ever hold.
        """
        left = self.max_model_len - num_prompt_tokens
        if max_tokens is None:
            return max(1, left)
        if left >= 1 and max_tokens > left:
            raise Refused(
                400,
                f"max_tokens={format_count(max_tokens)} is too large: the prompt has "
                f"{format_count(num_prompt_tokens)} tokens, together "
                f"{format_count(num_prompt_tokens + max_tokens)}, and the context ends at "
                f"{format_count(self.max_model_len)} (max_model_len): ask for up to "
                f"{format_count(left)}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return max_tokens

    def shortened(self, token_ids: list[int], most: int | None, *, leaves: int = 1) -> list[int]:
        """The last ``most`` tokens; -1 is vLLM's word for what the context takes, but for what a
        prompt ``leaves`` to its continuation.
        """
        if most == -1:
            most = self.max_model_len - leaves
        return token_ids if most is None else token_ids[max(0, len(token_ids) - most) :]

    async def request(
        self,
        caller: Caller,
        prompt: Prompt,
        params: Params,
        asked: Routed,
    ) -> Request:
        """Checked, and ready to wait for its turn. Raises: Refused; RequestError."""
        self.refuse_without_engine()
        try:
            return await self.llm.request(
                prompt,
                params,
                priority=asked.priority or 0,
                keys=caller.keys(asked.cache_salt),
            )
        except RequestError:
            self.refuse_without_engine()  # which is not the client's error
            if self.gate.sleeping:
                raise self.gate.refused("sleeping") from None
            raise

    def refuse_without_engine(self) -> None:
        """Raises: Refused (503)."""
        if self.llm.failure is not None:
            raise Refused(503, "the engine has failed", code="engine_dead")

    # -- running -----------------------------------------------------------------------------------

    async def run(
        self, requests: Sequence[Request], passes: Sequence[Permit]
    ) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """What comes of these, as it comes: (which of them, piece). Leaving it ends them.

        Raises: what the engine failed with.
        """
        if len(requests) == 1:
            async with aclosing(self._pieces(requests[0], passes[0])) as pieces:
                async for delta in pieces:
                    yield 0, delta
            return
        several = [self._pieces(*each) for each in zip(requests, passes, strict=True)]
        try:
            async for index, delta in _merged(several):
                yield index, delta
        finally:
            for pieces in several:
                await pieces.aclose()

    async def _pieces(self, request: Request, own: Permit) -> AsyncGenerator[TextDelta, None]:
        noted = self.request_log.begin(request) if self.request_log is not None else None
        try:
            async for delta in self.llm.generate(request):
                # What a search begins with is a piece of all its beams.
                for choice in (delta.choice,) if request.beam is None else range(own.num_sequences):
                    self.gate.note_piece(own, choice)
                if noted is not None:
                    noted.add(delta)
                yield delta
        finally:
            if noted is not None:
                noted.end()

    # -- asleep ------------------------------------------------------------------------------------

    async def idle(self) -> None:
        """When none is inside any more; all end now if one that falls asleep is to abort them."""
        while self.gate.num_under_way:
            if self._num_aborting:
                await self.llm.abort(None)
            await asyncio.sleep(_POLL_S)

    @asynccontextmanager
    async def falling_asleep(self, level: int, *, aborts: bool) -> AsyncGenerator[None, None]:
        """Inside the block no request is let in. If nothing keeps it from its end, they are not
        behind it either, and memory is given back. One that ``aborts`` does not wait until another
        one has been ``idle``.

        Raises: RequestError for a level that the model cannot have.
        """
        self.llm.llm.check_sleep(level)  # before a request ends for it
        self._num_aborting += aborts
        try:
            async with self._changing_sleep:
                self.gate.sleeping = True
                try:
                    yield
                    while not await self.llm.sleep(level):  # what was left is about to end
                        await asyncio.sleep(_POLL_S)
                finally:
                    self.gate.sleeping = self.llm.llm.is_sleeping
        finally:
            self._num_aborting -= aborts

    async def wake_up(self) -> None:
        """Let requests in again. Raises: what keeps the engine from it, and then it sleeps on."""
        async with self._changing_sleep:
            try:
                await self.llm.wake_up()
            finally:
                self.gate.sleeping = self.llm.llm.is_sleeping

    # -- the end -----------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
        """Let no request in and wait for those inside; True if none is left."""
        self.gate.draining = True
        until_s = time.monotonic() + timeout_s
        while self.gate.num_under_way and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)
        return not self.gate.num_under_way

    def close(self) -> None:
        """End tasks, threads and processes; the engine is its owner's."""
        self.background.close()
        self.text_threads.close()
        if self.tracer is not None:
            self.tracer.close()
        if self.request_log is not None:
            self.request_log.close()


async def _merged(
    several: Sequence[AsyncIterator[TextDelta]],
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Of all of them, in the order in which pieces come. None is asked for more than is taken."""
    asking: dict[asyncio.Task[TextDelta], int] = {
        asyncio.ensure_future(anext(pieces)): index for index, pieces in enumerate(several)
    }
    try:
        while asking:
            done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = asking.pop(task)
                try:
                    delta = task.result()
                except StopAsyncIteration:
                    continue
                yield index, delta
                asking[asyncio.ensure_future(anext(several[index]))] = index
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
