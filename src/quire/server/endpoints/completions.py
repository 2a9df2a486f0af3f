"""``POST /v1/completions``: continue one text or several."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from msgspec import UNSET

from quire.engine.outputs import TextDelta
from quire.engine.sequence import Request, TokenLogprobs
from quire.server.endpoints.answers import Json, as_events, as_json
from quire.server.endpoints.generation import (
    Gathered,
    Generation,
    engine_request,
    one_by_one,
    prompt_ids,
    room_for,
    sampling,
    stop_reason,
)
from quire.server.endpoints.logprobs import of_completion, of_prompt
from quire.server.request_context import RequestContext
from quire.server.request_params import searched
from quire.server.schemas.completion_request import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    prompts_of,
)
from quire.server.wire.streams import EventStream

_DEFAULT_TOKENS = 16  # OpenAI's


async def completions(
    context: RequestContext, asked: CompletionRequest
) -> Json[Completion] | EventStream[Completion]:
    """Continue a text, or several."""
    requests = await completion_requests(context, asked)
    continuing = _Continuing(Generation(context, requests, "text_completion"), asked)
    if asked.stream:
        return as_events(context, continuing.chunks())
    return as_json(context, await continuing.whole())


async def completion_requests(context: RequestContext, asked: CompletionRequest) -> list[Request]:
    """Make the engine's request of each prompt. Raises: Refused; RequestError."""
    prompts = prompts_of(asked.prompt, "prompt")
    return [await _request(context, prompt, asked) for prompt in prompts]


async def _request(
    context: RequestContext, prompt: str | list[int], asked: CompletionRequest
) -> Request:
    """Raises: Refused; RequestError."""
    token_ids = await prompt_ids(context, prompt, asked)
    room = room_for(context, len(token_ids), asked.max_tokens or None)
    params = sampling(
        context,
        asked,
        max_tokens=min(_DEFAULT_TOKENS, room)
        if asked.max_tokens is None
        else asked.max_tokens or 1,
        logprobs=asked.logprobs,
    )
    if asked.echo and asked.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=asked.logprobs)
    return await engine_request(context, token_ids, searched(asked, params), asked)


class _Continuing:
    """The answer to one request."""

    def __init__(self, work: Generation, asked: CompletionRequest) -> None:
        self._work, self._asked = work, asked
        self._service = work.service
        self._offsets: dict[int, int] = {}  # by choice: where its next token's text begins
        options = asked.stream_options
        self._last_usage = options is not None and bool(options.include_usage)
        self._every_usage = options is not None and bool(options.continuous_usage_stats)

    async def whole(self) -> Completion:
        choices = await one_by_one(self._choice, await self._work.gather())
        return self._answer(choices, with_usage=True)

    async def chunks(self) -> AsyncGenerator[Completion, None]:
        begun: set[int] = set()
        async with aclosing(self._work.deltas()) as deltas:
            async for number, delta in deltas:
                choice = self._choice(number, _gathered(delta), is_first=number not in begun)
                begun.add(number)
                yield self._answer([choice], with_usage=self._every_usage)
        if self._last_usage:
            yield self._answer([], with_usage=True)

    def _choice(self, number: int, own: Gathered, *, is_first: bool = True) -> CompletionChoice:
        """Return a choice, or what is new of it."""
        asked, texts = self._asked, self._service.texts
        prompt_ids = self._work.requests[number // self._work.num_choices].prompt_token_ids
        echoes = bool(asked.echo) and is_first
        nothing_new = asked.max_tokens == 0  # the engine generates one token all the same
        asks_ids = bool(asked.return_token_ids)
        asks_prompt = asked.prompt_logprobs is not None and is_first
        return CompletionChoice(
            index=number,
            text=(texts.text_of(prompt_ids) if echoes else "") + ("" if nothing_new else own.text),
            logprobs=self._logprobs(
                number,
                [prompt_ids[0], *own.prompt_logprobs] if echoes else [],
                [] if nothing_new else own.logprobs,
            ),
            finish_reason=own.finish_reason,
            stop_reason=own.stop_reason,
            token_ids=own.token_ids if asks_ids and not nothing_new else UNSET,
            prompt_token_ids=list(prompt_ids) if asks_ids and is_first else UNSET,
            prompt_logprobs=of_prompt(texts, own.prompt_logprobs) if asks_prompt else UNSET,
        )

    def _logprobs(
        self, number: int, prompt: Sequence[TokenLogprobs | int], output: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs | None:
        if self._asked.logprobs is None:
            return None
        said, self._offsets[number] = of_completion(
            self._service.texts,
            [*prompt, *output],
            self._asked.logprobs,
            self._offsets.get(number, 0),
            as_ids=bool(self._asked.return_tokens_as_token_ids),
        )
        return said

    def _answer(self, choices: list[CompletionChoice], *, with_usage: bool) -> Completion:
        usage = self._work.usage()
        if self._asked.max_tokens == 0:
            usage.total_tokens, usage.completion_tokens = usage.prompt_tokens, 0
        return Completion(
            id=f"cmpl-{self._work.context.id}",
            created=self._work.context.created,
            model=self._asked.model or self._service.model_name,
            choices=choices,
            usage=usage if with_usage else UNSET,
            kv_transfer_params=self._work.kv_transfer_params,
        )


def _gathered(delta: TextDelta) -> Gathered:
    return Gathered(
        text=delta.text,
        token_ids=list(delta.token_ids),
        logprobs=list(delta.logprobs),
        prompt_logprobs=delta.prompt_logprobs,
        finish_reason=delta.finish_reason,
        stop_reason=stop_reason(delta),
    )
