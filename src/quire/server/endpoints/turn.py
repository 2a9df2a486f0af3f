"""One turn of a conversation being answered: what three interfaces for chats have in common."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from quire.engine.outputs import TextDelta
from quire.engine.params import SamplingParams
from quire.server.chat.chat import ChatPrompt, ChatRequest, Reader
from quire.server.chat.events import Event, ReasoningDelta
from quire.server.endpoints.work import Work
from quire.server.exchange import Exchange
from quire.server.sampling import searched
from quire.server.schemas.fields import Asked, Searching, Usage
from quire.server.wire.errors import Refused
from quire.server.wire.streams import while_connected


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What is new of one choice; at its end, why it has ended."""

    choice: int
    events: list[Event]
    delta: TextDelta
    finish_reason: str | None


@final
class Turn:
    """Of an admitted ``work``. ``own_stops``: stop strings that no client has named."""

    def __init__(self, work: Work, prompt: ChatPrompt, own_stops: frozenset[str]) -> None:
        self.work, self.prompt, self._own_stops = work, prompt, own_stops
        chat = work.service.chat
        self._readers: list[Reader] = [chat.reader(prompt) for _ in range(work.num_choices)]
        self._thoughts: list[list[str]] = [[] for _ in self._readers]

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """As they come. Leaving it ends the request. Raises: as ``Work.pieces``."""
        ended: set[int] = set()
        async with aclosing(self.work.pieces()) as pieces:
            async for choice, delta in pieces:
                if choice in ended:
                    continue
                if delta.stopped_by in self._own_stops:
                    delta = replace(delta, stopped_by=None)
                reader = self._readers[choice]
                events = reader.feed(delta.text)
                reason: str | None = delta.finish_reason
                if reason is not None:
                    ends_itself = reason == "stop" and delta.stopped_by is None
                    events += reader.finish(cut=not ends_itself)
                self._thoughts[choice] += (e.text for e in events if isinstance(e, ReasoningDelta))
                if reader.is_full:  # the only call that there may be: the rest is of no use
                    reason = "stop"
                if reason is not None:
                    ended.add(choice)
                yield Piece(
                    choice=choice,
                    events=events,
                    delta=delta,
                    finish_reason=self._reason(reader, reason),
                )
                if len(ended) == self.work.num_choices:
                    return

    async def gather(self) -> list[list[Piece]]:
        """All pieces of each choice, when all have ended. Raises: as ``pieces``; ClientGone."""
        return await while_connected(self.work.exchange.http.receive, self._gather())

    async def _gather(self) -> list[list[Piece]]:
        found: list[list[Piece]] = [[] for _ in self._readers]
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                found[piece.choice].append(piece)
        return found

    async def num_reasoning_tokens(self) -> int:
        """Of all choices so far, counted by their text: the tokens have no other mark."""
        exchange, number = self.work.exchange, 0
        encode = partial(exchange.service.texts.encode, add_special_tokens=False)
        for thoughts in filter(None, map("".join, self._thoughts)):
            number += len(await exchange.in_text_thread(encode, thoughts))
        return min(number, self.work.tally.completion_tokens)

    async def usage(self) -> Usage:
        """What it has cost; of a model whose reasoning is read, how much was that."""
        usage = self.work.tally.usage()
        if self._readers[0].reads_reasoning:
            number = await self.num_reasoning_tokens()
            usage.completion_tokens_details = {"reasoning_tokens": number}
        return usage

    def _reason(self, reader: Reader, reason: str | None) -> str | None:
        """A call is a reason to end, unless the client has named the tool and waits for it."""
        is_call = reason == "stop" and reader.num_calls > 0 and self.prompt.choice.kind != "named"
        return "tool_calls" if is_call else reason


async def take_turn(
    exchange: Exchange,
    chat: ChatRequest,
    asked: Asked,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    within_context: bool = False,
    num_bytes: int = 0,
) -> Turn:
    """Write the prompt, and join the queue.

    ``within_context``: ``max_tokens`` beyond the context are no error; it ends there.
    ``num_bytes``: of a conversation that is more than the body.
    Raises: Refused; RequestError.
    """
    service = exchange.service
    prompt = await exchange.in_text_thread(service.chat.prompt, chat, num_bytes=num_bytes)
    if not prompt.token_ids:
        raise Refused(
            400, "the chat template writes nothing for these messages: give one of them a text"
        )
    token_ids = service.shortened(list(prompt.token_ids), asked.truncate_prompt_tokens)
    room = service.room_for(len(token_ids), None)
    if within_context and max_tokens is not None:
        max_tokens = min(max_tokens, room)
    params: SamplingParams = service.params(
        asked,
        max_tokens=room if max_tokens is None else service.room_for(len(token_ids), max_tokens),
        logprobs=logprobs,
        form=prompt.structured_outputs,
    )
    if params.structured_outputs is not None:
        form = replace(params.structured_outputs, reasoning=prompt.reasoning)
        params = replace(params, structured_outputs=form)
    if prompt.stop and isinstance(asked, Searching) and asked.use_beam_search:
        raise Refused(
            400,
            f"use_beam_search: answers of this model end at a text ({prompt.stop[0][:40]!r}, of "
            "chat_stop_strings in its tokenizer_config.json), and a search looks for none",
            param="use_beam_search",
        )
    own_stops = frozenset(prompt.stop) - set(params.stop)
    params = replace(params, stop=(*params.stop, *prompt.stop))
    if asked.skip_special_tokens is None:
        params = replace(params, skip_special_tokens=prompt.skip_special_tokens)
    chosen = searched(asked, params) if isinstance(asked, Searching) else params
    request = await service.request(exchange.caller, token_ids, chosen, asked)
    return Turn(Work(exchange, [request], "chat"), prompt, own_stops)


def reasoning_kwargs(effort: str | None) -> dict[str, Any]:
    """For templates: how much the model is to think, and whether at all."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


def refuse_several(asked: Asked) -> None:
    """Where an answer has one choice only. Raises: Refused."""
    if asked.n is not None and asked.n != 1:
        raise Refused(400, f"n={asked.n}: this interface gives one answer", param="n")
