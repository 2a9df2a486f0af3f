"""The events of generated text, piece by piece: reasoning, content, tool calls."""

import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias, final

from quire.chat.lexer import BLANKS


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentDelta:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStarted:
    """A tool call begins; its arguments follow."""

    index: int  # among the calls of one answer
    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentsDelta:
    """More of a call's arguments, as JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded:
    """A call's arguments are complete: a JSON object."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCut:
    """The answer ends within a call's arguments, which are the beginning of a JSON object."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBroken:
    """The call was none: its arguments are no JSON. ``text`` is all of it, as content."""

    index: int
    text: str


Event: TypeAlias = (
    ReasoningDelta | ContentDelta | CallStarted | ArgumentsDelta | CallEnded | CallCut | CallBroken
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """A tool call. The last one's arguments may break off where the answer does."""

    id: str
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole answer. ``content`` and ``reasoning`` are None where there is none."""

    content: str | None = None
    reasoning: str | None = None
    calls: tuple[OpenCall, ...] = ()


def reply(events: Iterable[Event]) -> Reply:
    """Collect all events of one answer. A broken call's text becomes content."""
    reasoning: list[str] = []
    content: list[str] = []
    started: dict[int, CallStarted] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        match event:
            case ReasoningDelta(text=text):
                reasoning.append(text)
            case ContentDelta(text=text):
                content.append(text)
            case CallStarted(index=index):
                started[index], arguments[index] = event, []
            case ArgumentsDelta(index=index, text=text):
                arguments[index].append(text)
            case CallBroken(index=index, text=text):
                content.append(text)
                del started[index]
    return Reply(
        content="".join(content) or None,
        reasoning="".join(reasoning) or None,
        calls=tuple(
            OpenCall(id=call.id, name=call.name, arguments="".join(arguments[index]))
            for index, call in started.items()
        ),
    )


def call_id() -> str:
    """Return an id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Return nine letters and digits, which Mistral's templates insist on."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@final
class Events:
    """Collects what readers find; neighbours of one kind become one event.

    Blanks beside a tool call, or around reasoning, belong to the form and not to the text.
    """

    def __init__(self, make_id: Callable[[], str] = call_id) -> None:
        self._make_id = make_id
        self._found: list[Event] = []
        self._held: list[str] = []  # blanks whose meaning depends on what follows
        self._dropped = ""  # the last blanks left out, in case the call is none
        self._at_edge = False  # the next blanks are left out
        self._open: int | None = None
        self._num_started = 0

    def take(self) -> list[Event]:
        """Return the events since the last time."""
        found, self._found = self._found, []
        taken: list[Event] = []
        for _, several in groupby(found, type):
            first, *others = several
            if isinstance(first, ReasoningDelta | ContentDelta | ArgumentsDelta):
                texts = [event.text for event in others if isinstance(event, type(first))]
                taken.append(replace(first, text="".join((first.text, *texts))))
            else:
                taken += [first, *others]
        return taken

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        if text := self._without_edges(text):
            self._found.append(ReasoningDelta(text=text))

    def content(self, text: str) -> None:
        """Add content."""
        if text := self._without_edges(text):
            self._found.append(ContentDelta(text=text))

    def edge(self) -> None:
        """Note a mark: blanks before and after it are no text."""
        self._held.clear()
        self._at_edge = True

    def end_of_reasoning(self) -> None:
        """End reasoning without a mark: its last blanks count."""
        if blanks := self._blanks():
            self._found.append(ReasoningDelta(text=blanks))

    def end_of_content(self) -> None:
        """End content without a mark: its last blanks count."""
        if blanks := self._blanks():
            self._found.append(ContentDelta(text=blanks))

    def start(self, name: str, given_id: str | None = None) -> None:
        """Begin a call; its arguments and ``end`` or ``give_up`` follow."""
        self._dropped = self._blanks()
        self._open = self._num_started
        self._num_started += 1
        call = CallStarted(index=self._open, id=given_id or self._make_id(), name=name)
        self._found.append(call)

    @property
    def in_call(self) -> bool:
        """Return whether a call has begun and not ended."""
        return self._open is not None

    def arguments(self, text: str) -> None:
        """Add to the arguments of the open call."""
        assert self._open is not None, "arguments belong to a call"
        if text:
            self._found.append(ArgumentsDelta(index=self._open, text=text))

    def end(self) -> None:
        """End the open call."""
        assert self._open is not None, "a call has been started"
        self._found.append(CallEnded(index=self._open))
        self._open, self._dropped, self._at_edge = None, "", True

    def cut(self) -> None:
        """End the answer here. A call whose name has not come leaves nothing."""
        if self._open is not None:
            self._found.append(CallCut(index=self._open))
        self._open, self._dropped, self._at_edge = None, "", True

    def give_up(self, source: str) -> None:
        """Turn what was read back into content, from where the call began."""
        if self._open is None:
            self.content(source)
            return
        self._found.append(CallBroken(index=self._open, text=self._dropped + source))
        self._open, self._dropped, self._at_edge = None, "", False

    def _without_edges(self, text: str) -> str:
        if self._at_edge:
            text = text.lstrip(BLANKS)
            if not text:
                return ""
            self._at_edge = False
        sure = text.rstrip(BLANKS)
        lead = self._blanks() if sure else ""
        self._held.append(text[len(sure) :])
        return lead + sure

    def _blanks(self) -> str:
        """Return the blanks that are held, and hold them no longer."""
        blanks = "".join(self._held)
        self._held.clear()
        return blanks
