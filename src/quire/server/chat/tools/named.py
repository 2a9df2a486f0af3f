"""Calls that are a name, a mark, and the arguments as JSON: Mistral, DeepSeek V3, Kimi K2."""

from collections.abc import Mapping

from quire.server.chat.events import Events
from quire.server.chat.tape import Reading, Tape
from quire.server.chat.tools.declared import Tool
from quire.server.chat.tools.format import ToolFormat
from quire.server.chat.tools.objects import call_list, called


def mistral(tape: Tape, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
    """``[TOOL_CALLS]name{…}``, or ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`` of old.

    Between name and arguments there may be ``[CALL_ID]…`` and ``[ARGS]``. Source: the templates of
    Mistral 7B v0.3 and of Mistral Small 3.1 and later.
    """
    yield from tape.expect("[TOOL_CALLS]")
    yield from tape.blanks()
    if (yield from tape.peek()) == "[":
        yield from call_list(tape, out)
        return
    name = yield from tape.name("{", "[ARGS]", "[CALL_ID]")
    given_id = None
    if (yield from tape.skip("[CALL_ID]")):
        given_id = (yield from tape.name("{", "[ARGS]")) or None
    yield from tape.skip("[ARGS]")
    yield from tape.blanks()
    yield from called(tape, out, name, given_id)
    out.end()


def named(
    *,
    several: tuple[str, str],
    one: tuple[str, str],
    separator: str,
    kind: str = "",
    behind: str = "",
    has_ids: bool = False,
) -> ToolFormat:
    """A name between marks, and its arguments behind a separator.

    ``several`` are the marks around all calls, and ``one`` those around each; none must close.
    ``kind`` stands before a name, and ``behind`` after the arguments. ``has_ids``: the name is
    within an id, such as ``functions.NAME:0``, which the template wants back.
    Source: the templates of DeepSeek-V3, DeepSeek-V3.1 and Kimi-K2.
    """

    def calls(tape: Tape, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
        yield from tape.skip(several[0])
        yield from tape.blanks()
        yield from tape.expect(one[0])
        yield from tape.blanks()
        yield from tape.expect(kind)
        name = yield from tape.name(separator)
        yield from tape.expect(separator)
        yield from tape.blanks()
        yield from called(tape, out, *(_of_id(name) if has_ids else (name, None)))
        out.end()
        tape.record()
        for mark in (behind, one[1], several[1]):
            yield from tape.comes(mark)

    return ToolFormat(opens=(several[0], one[0]), calls=calls)


def _of_id(given_id: str) -> tuple[str, str]:
    """The name in an id, and the id."""
    name = given_id.removeprefix("functions.") or given_id
    head, _, number = name.rpartition(":")
    return head if head and number.isdecimal() else name, given_id
