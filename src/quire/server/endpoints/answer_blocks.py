"""An answer as blocks, one after another: reasoning, text, tool calls.

Anthropic's messages and OpenAI's responses have this form. A block ends before the next begins.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final

from quire.chat.output_events import (
    ArgumentsDelta,
    CallBroken,
    CallCut,
    CallEnded,
    CallStarted,
    ContentDelta,
    Event,
    ReasoningDelta,
)

Kind: TypeAlias = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False, kw_only=True)
class Block:
    """One part of an answer, as far as it has come."""

    index: int  # among the blocks of the answer
    kind: Kind
    call_id: str = ""
    name: str = ""  # of the tool
    is_whole: bool = True  # False: the answer ended within it, or the call was none
    given_up: bool = False  # a broken call: the next block has its text
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the text; of a call, its arguments as JSON."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Begun:
    """A block begins, without any text yet."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """The last block that has begun has more text."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Over:
    """A block has ended."""

    block: Block


Change: TypeAlias = Begun | Grown | Over


@final
class Blocks:
    """The blocks of one answer so far."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    @property
    def num_calls(self) -> int:
        """Return how many calls are whole."""
        return sum(block.kind == "call" and block.is_whole for block in self.all)

    def add(self, events: Iterable[Event]) -> list[Change]:
        """Return what these events change, in order."""
        changes: list[Change] = []
        for event in events:
            match event:
                case ReasoningDelta(text=text):
                    changes += self._text("reasoning", text)
                case ContentDelta(text=text):
                    changes += self._text("text", text)
                case CallStarted(id=call_id, name=name):
                    changes += self._begin("call", call_id=call_id, name=name)
                case ArgumentsDelta(text=text):
                    changes += self._grow(text)
                case CallEnded():
                    changes += self._end()
                case CallCut():
                    changes += self._end(is_whole=False)
                case CallBroken(text=text):  # shown as the text that was generated
                    if self._open is not None:
                        self._open.given_up = True
                    changes += [*self._end(is_whole=False), *self._text("text", text)]
        return changes

    def end(self, *, is_whole: bool) -> list[Change]:
        """End the answer. ``is_whole``: it does not end because it has become too long."""
        return self._end(is_whole=is_whole)

    def _text(self, kind: Kind, text: str) -> list[Change]:
        begun = [] if self._open and self._open.kind == kind else self._begin(kind)
        return begun + self._grow(text)

    def _begin(self, kind: Kind, *, call_id: str = "", name: str = "") -> list[Change]:
        ended = self._end()
        self._open = Block(index=len(self.all), kind=kind, call_id=call_id, name=name)
        self.all.append(self._open)
        return [*ended, Begun(self._open)]

    def _grow(self, text: str) -> list[Change]:
        assert self._open is not None, "a block has begun"
        self._open.parts.append(text)
        return [Grown(self._open, text)]

    def _end(self, *, is_whole: bool = True) -> list[Change]:
        block, self._open = self._open, None
        if block is None:
            return []
        block.is_whole = is_whole
        return [Over(block)]
