"""A chat turn as a response: its events in OpenAI's order, and its state at any moment."""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, final

from quire.engine.sequence import TokenLogprobs
from quire.server.endpoints.answer_blocks import Begun, Block, Blocks, Change, Grown, Kind
from quire.server.endpoints.generation import ChatTurn, OutputPiece
from quire.server.endpoints.logprobs import of_chat
from quire.server.logs import place_of
from quire.server.schemas.chat_request import ChatLogprob
from quire.server.schemas.response_request import (
    CallItem,
    Item,
    MessageItem,
    OutputText,
    Part,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseEvent,
    ResponseUsage,
)
from quire.server.wire.error_responses import Refused, refusal

log = logging.getLogger(__name__)

_PREFIXES: Mapping[Kind, str] = MappingProxyType({"reasoning": "rs", "text": "msg", "call": "fc"})


@final
class Responding:
    """One response. ``response`` is as far as it has come; its output is filled at the end.

    ``num_top``: how many likely tokens the logprobs have; None for no logprobs. ``says_ids``:
    tokens are named by ids. ``shows_broken``: broken calls are items too, since a stream's reader
    has been told of them.
    """

    def __init__(
        self,
        turn: ChatTurn,
        response: Response,
        *,
        num_top: int | None,
        says_ids: bool,
        shows_broken: bool,
        end: Callable[[Response], None],
    ) -> None:
        self.response = response
        self.error: Refused | None = None
        self._turn, self._num_top, self._shows_broken = turn, num_top, shows_broken
        self._says_ids = says_ids
        self._end_with = end
        self._blocks = Blocks()
        self._num_events = 0
        self._said: dict[int, list[ChatLogprob]] = {}  # by block
        self._unsaid: list[TokenLogprobs] = []  # tokens whose text is still held back

    async def events(self) -> AsyncGenerator[ResponseEvent, None]:
        """Yield all events, of which an error is one. ``end`` is called before the last one."""
        yield self._event("response.created", response=self.response)
        yield self._event(
            "response.queued" if self.response.status == "queued" else "response.in_progress",
            response=self.response,
        )
        try:
            async with aclosing(self._turn.pieces()) as pieces:
                async for piece in pieces:
                    if self.response.status == "queued":
                        self.response.status = "in_progress"
                        yield self._event("response.in_progress", response=self.response)
                    for event in self._of_piece(piece):
                        yield event
                    if piece.finish_reason is not None:
                        for event in self._of_end(piece):
                            yield event
        except Exception as error:
            self._fail(refusal(error), error)
        await self._count()
        self.response.completed_at = int(time.time()) if self.response.status != "failed" else None
        self.fill()
        self._end_with(self.response)
        yield self._event(f"response.{self.response.status}", response=self.response)

    def cancel(self) -> None:
        """End it early."""
        self._blocks.end(is_whole=False)
        self.response.status = "cancelled"
        self.fill()

    def fill(self) -> None:
        """Write what there is so far into the response."""
        shown = [b for b in self._blocks.all if self._shows_broken or not b.given_up]
        self.response.output = [self._item(block) for block in shown]

    def _of_piece(self, piece: OutputPiece) -> Iterator[ResponseEvent]:
        self._unsaid += piece.delta.logprobs
        for change in self._blocks.add(piece.events):
            yield from self._events(change)
        last = self._blocks.all[-1] if self._blocks.all else None
        if piece.events and last is not None and last.kind != "text":
            self._unsaid.clear()  # these were tokens of reasoning, or of a call

    def _of_end(self, last: OutputPiece) -> Iterator[ResponseEvent]:
        """Yield the last events. Raises: Refused for an answer that only the server has ended."""
        reason = last.finish_reason
        for change in self._blocks.end(is_whole=reason != "length"):
            yield from self._events(change)
        if reason == "length":
            self.response.status = "incomplete"
            self.response.incomplete_details = {"reason": "max_output_tokens"}
        elif reason in ("stop", "tool_calls"):
            self.response.status = "completed"
        else:
            raise Refused(503, last.delta.detail or "the server has ended this answer")

    def _fail(self, refused: Refused, error: Exception) -> None:
        if refused.status == 500:  # 503: the server ends it on purpose
            log.error("a response ended early: %s", place_of(error))
        self.error = refused
        self._blocks.end(is_whole=False)
        self.response.status = "failed"
        self.response.error = {"code": "server_error", "message": refused.message}

    def _events(self, change: Change) -> Iterator[ResponseEvent]:
        block = change.block
        if isinstance(change, Begun):
            item = self._item(block, is_new=True)
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind != "call":
                yield self._of_part(
                    "response.content_part.added", block, part=self._part(block, "")
                )
        elif isinstance(change, Grown):
            yield self._grown(block, change.text)
        else:
            yield from self._over(block)

    def _grown(self, block: Block, text: str) -> ResponseEvent:
        match block.kind:
            case "reasoning":
                return self._of_part("response.reasoning_text.delta", block, delta=text)
            case "text":
                logprobs = self._take_logprobs(block)
                return self._of_part(
                    "response.output_text.delta", block, delta=text, logprobs=logprobs
                )
            case "call":
                return self._event(
                    "response.function_call_arguments.delta",
                    output_index=block.index,
                    item_id=self._id(block),
                    delta=text,
                )

    def _over(self, block: Block) -> Iterator[ResponseEvent]:
        match block.kind:
            case "reasoning":
                yield self._of_part("response.reasoning_text.done", block, text=block.text)
            case "text":
                yield self._of_part(
                    "response.output_text.done",
                    block,
                    text=block.text,
                    logprobs=self._said.get(block.index, []),
                )
            case "call":
                yield self._event(
                    "response.function_call_arguments.done",
                    output_index=block.index,
                    item_id=self._id(block),
                    name=block.name,
                    arguments=block.text,
                )
        if block.kind != "call":
            part = self._part(block, block.text)
            yield self._of_part("response.content_part.done", block, part=part)
        item = self._item(block)
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _take_logprobs(self, block: Block) -> list[ChatLogprob]:
        """Return the logprobs of the tokens whose text comes now."""
        if self._num_top is None:
            return []
        service = self._turn.service
        found = of_chat(service.texts, self._unsaid, self._num_top, as_ids=self._says_ids).content
        self._unsaid.clear()
        self._said.setdefault(block.index, []).extend(found)
        return found

    def _item(self, block: Block, *, is_new: bool = False) -> Item:
        status = "in_progress" if is_new else "completed" if block.is_whole else "incomplete"
        own = self._id(block)
        if block.kind == "call":
            return CallItem(
                id=own,
                status=status,
                call_id=block.call_id,
                name=block.name,
                arguments="" if is_new else block.text,
            )
        parts = [] if is_new else [self._part(block, block.text)]
        if block.kind == "reasoning":
            thoughts = [part for part in parts if isinstance(part, ReasoningText)]
            return ReasoningItem(id=own, status=status, content=thoughts)
        texts = [part for part in parts if isinstance(part, OutputText)]
        return MessageItem(id=own, status=status, content=texts)

    def _part(self, block: Block, text: str) -> Part:
        if block.kind == "reasoning":
            return ReasoningText(text=text)
        logprobs = self._said.get(block.index, []) if text else []
        return OutputText(text=text, logprobs=list(logprobs))

    def _id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._turn.context.id}_{block.index}"

    def _of_part(self, kind: str, block: Block, **fields: Any) -> ResponseEvent:
        return self._event(
            kind, output_index=block.index, item_id=self._id(block), content_index=0, **fields
        )

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        number = self._num_events
        self._num_events += 1
        return ResponseEvent(type=kind, sequence_number=number, **fields)

    async def _count(self) -> None:
        turn = self._turn
        self.response.kv_transfer_params = turn.kv_transfer_params
        num_thought = await turn.num_reasoning_tokens()
        self.response.usage = ResponseUsage(
            input_tokens=turn.prompt_tokens,
            input_tokens_details={
                "cached_tokens": turn.cached_tokens,
                "cache_write_tokens": turn.cache_write_tokens,
            },
            output_tokens=turn.completion_tokens,
            output_tokens_details={"reasoning_tokens": num_thought},
            total_tokens=turn.prompt_tokens + turn.completion_tokens,
        )
