"""Calls that are a name, a mark, and the arguments as JSON: Mistral, DeepSeek V3, Kimi K2."""

import re
from collections.abc import Mapping

from quire.server.chat.events import Events
from quire.server.chat.tape import Broken, Reading, Tape
from quire.server.chat.tools.declared import Tool
from quire.server.chat.tools.objects import call_list, called

_MISTRAL = "[TOOL_CALLS]"
_DEEPSEEK_CALLS, _DEEPSEEK_NO_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_KIMI_CALLS, _KIMI_NO_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"


def mistral(tape: Tape, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
    """``[TOOL_CALLS]name{…}``, or ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`` of old.

    Between name and arguments there may be ``[CALL_ID]…`` and ``[ARGS]``. Source: the templates of
    Mistral 7B v0.3 and of Mistral Small 3.1 and later.
    """
    yield from tape.expect(_MISTRAL)
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


def deepseek_v3(tape: Tape, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
    """``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME``, and the arguments in a fenced block.

    Several stand between marks for all of them. Source: DeepSeek-V3's template.
    """
    yield from _opened(tape, _DEEPSEEK_CALLS, _DEEPSEEK_CALL)
    yield from tape.expect("function")
    yield from tape.expect(_DEEPSEEK_SEPARATOR)
    name = yield from tape.name("```json")
    yield from tape.expect("```json")
    yield from tape.blanks()
    yield from called(tape, out, name)
    out.end()
    tape.record()
    yield from tape.blanks()
    yield from tape.skip("```")
    yield from _closed(tape, _DEEPSEEK_END, _DEEPSEEK_NO_CALLS)


def deepseek_v31(tape: Tape, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
    """``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>``. Source: DeepSeek-V3.1."""
    yield from _opened(tape, _DEEPSEEK_CALLS, _DEEPSEEK_CALL)
    name = yield from tape.name(_DEEPSEEK_SEPARATOR)
    yield from tape.expect(_DEEPSEEK_SEPARATOR)
    yield from tape.blanks()
    yield from called(tape, out, name)
    out.end()
    tape.record()
    yield from _closed(tape, _DEEPSEEK_END, _DEEPSEEK_NO_CALLS)


def kimi_k2(tape: Tape, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
    """``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>``.

    What stands before the arguments is the call's id, and the template wants it back as such.
    Source: Kimi-K2's template.
    """
    yield from _opened(tape, _KIMI_CALLS, _KIMI_CALL)
    given_id = yield from tape.name(_KIMI_ARGUMENTS)
    yield from tape.expect(_KIMI_ARGUMENTS)
    yield from tape.blanks()
    match = re.fullmatch(r"(?:functions\.)?(.+?)(?::\d+)?", given_id)
    if match is None:
        raise Broken
    yield from called(tape, out, match[1], given_id)
    out.end()
    tape.record()
    yield from _closed(tape, _KIMI_END, _KIMI_NO_CALLS)


def _opened(tape: Tape, calls: str, call: str) -> Reading[None]:
    """The mark for several calls, maybe, and that of the next one."""
    yield from tape.skip(calls)
    yield from tape.blanks()
    yield from tape.expect(call)
    yield from tape.blanks()


def _closed(tape: Tape, call: str, calls: str) -> Reading[None]:
    yield from tape.blanks()
    yield from tape.skip(call)
    yield from tape.blanks()
    yield from tape.skip(calls)
