"""What a format of tool calls is: the marks of a call, and a reader that begins at a mark."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from quire.chat.lexer import Broken, IncrementalLexer, Reading
from quire.chat.output_events import Events, call_id
from quire.chat.tools.declared import Tool

ReadCalls: TypeAlias = Callable[[IncrementalLexer, Events, Mapping[str, Tool]], Reading[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls.

    ``calls`` reads what begins with one of ``opens``, and raises Broken where that is no call.
    Without ``opens`` a text begins with its calls, or has none. ``marks`` are further tokens that a
    reader needs to see, and those of ``stop`` end an answer. ``is_all``: every text of these models
    has marks, and ``calls`` reads all of it, reasoning too.
    """

    opens: tuple[str, ...]
    calls: ReadCalls
    marks: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    is_all: bool = False
    make_id: Callable[[], str] = call_id

    def read(
        self, lexer: IncrementalLexer, out: Events, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        """Read all of the text: content and calls."""
        while not self.opens or (yield from lexer.upto(*self.opens, put=out.content)):
            is_text = False
            lexer.record()
            try:
                yield from self.calls(lexer, out, tools)
                lexer.recorded()
            except Broken:
                # Without a mark it may be any text until a call has a name.
                is_text = not (lexer.breaks_off and (self.opens or out.in_call))
                if is_text:
                    out.give_up(lexer.recorded())
                else:
                    out.cut()
            if lexer.breaks_off and not is_text:
                lexer.drop()  # the beginning of a mark or a call
            if not self.opens:
                yield from lexer.upto(put=out.content)
                break
        out.end_of_content()
