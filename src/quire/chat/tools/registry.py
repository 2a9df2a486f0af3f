"""The formats of tool calls by name, and which of them a model writes."""

import logging
from collections.abc import Mapping
from types import MappingProxyType

from quire.chat.harmony import HARMONY
from quire.chat.lexer import IncrementalLexer, Reading
from quire.chat.output_events import Events, short_call_id
from quire.chat.tools.declared import Tool
from quire.chat.tools.json_objects import call_list, called, llama, marked
from quire.chat.tools.literals import gemma, olmo3, pythonic
from quire.chat.tools.tagged import functions, glm45, invokes
from quire.chat.tools.tool_format import ToolFormat
from quire.errors import ConfigError

# -- name, mark and arguments ----------------------------------------------------------------------


def mistral(lexer: IncrementalLexer, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
    """Read ``[TOOL_CALLS]name{…}``, or the older ``[TOOL_CALLS][{"name": …, "arguments": {…}},
    …]``.

    ``[CALL_ID]…`` and ``[ARGS]`` may stand between name and arguments. Source: the templates of
    Mistral 7B v0.3 and of Mistral Small 3.1 and later.
    """
    yield from lexer.expect("[TOOL_CALLS]")
    yield from lexer.blanks()
    if (yield from lexer.peek()) == "[":
        yield from call_list(lexer, out)
        return
    name = yield from lexer.name("{", "[ARGS]", "[CALL_ID]")
    given_id = None
    if (yield from lexer.skip("[CALL_ID]")):
        given_id = (yield from lexer.name("{", "[ARGS]")) or None
    yield from lexer.skip("[ARGS]")
    yield from lexer.blanks()
    yield from called(lexer, out, name, given_id)
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
    """Return the format of a name between marks, and its arguments behind a separator.

    ``several`` are the marks around all calls, and ``one`` those around each; none must close.
    ``kind`` precedes a name, and ``behind`` follows the arguments. ``has_ids``: the name is within
    an id, such as ``functions.NAME:0``, which the template wants back. Source: the templates of
    DeepSeek-V3, DeepSeek-V3.1 and Kimi-K2.
    """

    def calls(lexer: IncrementalLexer, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
        yield from lexer.skip(several[0])
        yield from lexer.blanks()
        yield from lexer.expect(one[0])
        yield from lexer.blanks()
        yield from lexer.expect(kind)
        name = yield from lexer.name(separator)
        yield from lexer.expect(separator)
        yield from lexer.blanks()
        yield from called(lexer, out, *(_of_id(name) if has_ids else (name, None)))
        out.end()
        lexer.record()
        for mark in (behind, one[1], several[1]):
            yield from lexer.comes(mark)

    return ToolFormat(opens=(several[0], one[0]), calls=calls)


def _of_id(given_id: str) -> tuple[str, str]:
    """Return the name in an id, and the id."""
    name = given_id.removeprefix("functions.") or given_id
    head, _, number = name.rpartition(":")
    return head if head and number.isdecimal() else name, given_id


# -- the table of formats --------------------------------------------------------------------------


log = logging.getLogger(__name__)

_HERMES = marked("<tool_call>", closes="</tool_call>")
_QWEN3_CODER = functions("<tool_call>", "</tool_call>", on_own_lines=True)
_GLM = ToolFormat(opens=("<tool_call>",), calls=glm45)
_LLAMA = ToolFormat(opens=(), calls=llama, marks=("<|python_tag|>",))
_PYTHONIC = pythonic("<|python_start|>", "<|python_end|>", has_marks=False)
_DSML = "｜DSML｜"
_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_NAME = "<｜tool▁sep｜>"

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": _HERMES,
        "granite4": _HERMES,
        "qwen3_coder": _QWEN3_CODER,
        "qwen3_xml": _QWEN3_CODER,
        "mimo": _QWEN3_CODER,
        "llama3_json": _LLAMA,
        "llama4_json": _LLAMA,
        "pythonic": _PYTHONIC,
        "llama4_pythonic": _PYTHONIC,
        "lfm2": pythonic("<|tool_call_start|>", "<|tool_call_end|>", has_marks=True),
        "olmo3": ToolFormat(opens=("<function_calls>",), calls=olmo3),
        "openai": HARMONY,
        "gemma4": gemma("<|tool_call>", "<tool_call|>", quote='<|"|>', stop="<|tool_response>"),
        "functiongemma": gemma(
            "<start_function_call>",
            "<end_function_call>",
            quote="<escape>",
            stop="<start_function_response>",
        ),
        "mistral": ToolFormat(opens=("[TOOL_CALLS]",), calls=mistral, make_id=short_call_id),
        "deepseek_v3": named(
            several=_DEEPSEEK_CALLS,
            one=_DEEPSEEK_CALL,
            kind=f"function{_DEEPSEEK_NAME}",
            separator="```json",
            behind="```",
        ),
        "deepseek_v31": named(
            several=_DEEPSEEK_CALLS, one=_DEEPSEEK_CALL, separator=_DEEPSEEK_NAME
        ),
        "deepseek_v32": invokes("function_calls", _DSML),
        "deepseek_v4": invokes("tool_calls", _DSML),
        "seed_oss": functions("<seed:tool_call>", "</seed:tool_call>", on_own_lines=False),
        "glm45": _GLM,
        "glm47": _GLM,
        "kimi_k2": named(
            several=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            one=("<|tool_call_begin|>", "<|tool_call_end|>"),
            separator="<|tool_call_argument_begin|>",
            has_ids=True,
        ),
        "minimax_m2": invokes("minimax:tool_call"),
        "granite": marked("<|tool_call|>", "<tool_call>", closes="</tool_call>"),
        "phi4_mini_json": marked("functools[", "<|tool_call|>", closes="<|/tool_call|>"),
    }
)
# Texts that a chat template has, all of them, and the format that they tell; the first counts.
FOUND_BY: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|tool_call_argument_begin|>",), "kimi_k2"),
    (("<|channel|>", "<|message|>"), "openai"),
    (("<|tool_call>",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    ((f"{_DSML}function_calls",), "deepseek_v32"),
    ((f"{_DSML}tool_calls",), "deepseek_v4"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<arg_key>",), "glm45"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool|>",), "phi4_mini_json"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<function_calls>",), "olmo3"),
    (("[func_name1(", "<|header_start|>"), "llama4_pythonic"),
    (("[func_name1(",), "pythonic"),
    (('"parameters":', "<|start_header_id|>"), "llama3_json"),
    (('"parameters":', "<|header_start|>"), "llama4_json"),
)


# Where no template tells, as with models that have their own kind of tokenizer: what most models of
# a type write.
BY_MODEL_TYPE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("mistral", "mistral3", "ministral", "ministral3", "mixtral"), "mistral"),
        **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "hermes"),
        **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), "granite"),
        **dict.fromkeys(
            ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "qwen3_coder"
        ),
        "glm4_moe": "glm45",
        **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa"), "glm47"),
        **dict.fromkeys(("llama4", "llama4_text"), "llama4_json"),
        "llama": "llama3_json",
        "granitemoehybrid": "granite4",
        **dict.fromkeys(("gemma4", "gemma4_text"), "gemma4"),
        **dict.fromkeys(("lfm2", "lfm2_moe"), "lfm2"),
        "gpt_oss": "openai",
        "olmo3": "olmo3",
        "deepseek_v3": "deepseek_v3",
        "deepseek_v32": "deepseek_v32",
        "deepseek_v4": "deepseek_v4",
        "kimi_k2": "kimi_k2",
        "seed_oss": "seed_oss",
        "minimax_m2": "minimax_m2",
        "mimo_v2_flash": "mimo",
        "phi3": "phi4_mini_json",
    }
)


def tool_format(name: str | None, template: str, model_type: str = "") -> ToolFormat | None:
    """Return the format of a name; for "auto" or None, by the template's text or the model's type.

    It is None where neither tells. Raises: ConfigError listing the known names.
    """
    if name is not None and name != "auto":
        if name not in TOOL_FORMATS:
            raise ConfigError(
                f"--tool-call-parser {name!r} is unknown; known: auto, {', '.join(TOOL_FORMATS)}"
            )
        return TOOL_FORMATS[name]
    found = next(
        (name for marks, name in FOUND_BY if all(mark in template for mark in marks)), None
    )
    by = "chat template"
    if found is None:
        by, found = f"model's type {model_type!r}", BY_MODEL_TYPE.get(model_type)
    log.info("tool call parser, by the %s: %s", by, found or "none")
    return None if found is None else TOOL_FORMATS[found]
