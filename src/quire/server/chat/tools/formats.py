"""The formats of tool calls by name, and which of them a model writes."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from quire.errors import ConfigError
from quire.server.chat.events import Events, call_id, short_call_id
from quire.server.chat.tape import Broken, Reading, Tape
from quire.server.chat.tools import named, objects, tagged
from quire.server.chat.tools.declared import Tool

log = logging.getLogger(__name__)

ReadCalls: TypeAlias = Callable[[Tape, Events, Mapping[str, Tool]], Reading[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls.

    ``calls`` reads what begins with one of ``opens``, and raises Broken where that is no call;
    without any it reads the whole text.
    """

    opens: tuple[str, ...]
    calls: ReadCalls
    make_id: Callable[[], str] = call_id

    def read(self, tape: Tape, out: Events, tools: Mapping[str, Tool]) -> Reading[None]:
        """All of the text: content and calls."""
        if not self.opens:
            yield from self.calls(tape, out, tools)
        else:
            while (yield from tape.upto(*self.opens, put=out.content)):
                tape.record()
                try:
                    yield from self.calls(tape, out, tools)
                    tape.recorded()
                except Broken:
                    if tape.breaks_off:
                        out.cut()
                    else:
                        out.give_up(tape.recorded())
                if tape.breaks_off:
                    tape.drop()  # the beginning of a mark
        out.end_of_content()


_HERMES = ToolFormat(opens=("<tool_call>",), calls=objects.hermes)
_QWEN3_CODER = ToolFormat(opens=("<tool_call>", "<function="), calls=tagged.qwen3_coder)
_GLM = ToolFormat(opens=("<tool_call>",), calls=tagged.glm45)
_LLAMA = ToolFormat(opens=(), calls=objects.llama)

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": _HERMES,
        "granite4": _HERMES,
        "qwen3_coder": _QWEN3_CODER,
        "qwen3_xml": _QWEN3_CODER,
        "mimo": _QWEN3_CODER,
        "llama3_json": _LLAMA,
        "llama4_json": _LLAMA,
        "mistral": ToolFormat(opens=("[TOOL_CALLS]",), calls=named.mistral, make_id=short_call_id),
        "deepseek_v3": ToolFormat(
            opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"), calls=named.deepseek_v3
        ),
        "deepseek_v31": ToolFormat(
            opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"), calls=named.deepseek_v31
        ),
        "seed_oss": ToolFormat(opens=("<seed:tool_call>", "<function="), calls=tagged.seed_oss),
        "glm45": _GLM,
        "glm47": _GLM,
        "kimi_k2": ToolFormat(
            opens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"), calls=named.kimi_k2
        ),
        "minimax_m2": ToolFormat(
            opens=("<minimax:tool_call>", '<invoke name="'), calls=tagged.minimax_m2
        ),
        "granite": ToolFormat(opens=("<|tool_call|>", "<tool_call>"), calls=objects.granite),
        "phi4_mini_json": ToolFormat(opens=("functools[", "<|tool_call|>"), calls=objects.phi4),
    }
)
# What a chat template has in it, all of a line, if its format is that; the first one counts.
_FOUND_BY: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|tool_call_argument_begin|>",), "kimi_k2"),
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
    (('"parameters":', "<|start_header_id|>"), "llama3_json"),
    (('"parameters":', "<|header_start|>"), "llama4_json"),
)


# Where no template tells, as with models that come with a tokenizer of their own kind, the type of
# the model does: what most models of that type write.
_BY_MODEL_TYPE: Mapping[str, str] = MappingProxyType(
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
        "deepseek_v3": "deepseek_v3",
        "kimi_k2": "kimi_k2",
        "seed_oss": "seed_oss",
        "minimax_m2": "minimax_m2",
        "mimo_v2_flash": "mimo",
        "phi3": "phi4_mini_json",
    }
)


def tool_format(name: str | None, template: str, model_type: str = "") -> ToolFormat | None:
    """That of a name; "auto", or without one, as the template's text tells, or else the type.

    None where neither does. Raises: ConfigError naming those there are.
    """
    if name is not None and name != "auto":
        if name not in TOOL_FORMATS:
            raise ConfigError(
                f"--tool-call-parser {name!r} is unknown; known: auto, {', '.join(TOOL_FORMATS)}"
            )
        return TOOL_FORMATS[name]
    found = next(
        (name for marks, name in _FOUND_BY if all(mark in template for mark in marks)), None
    )
    by = "chat template"
    if found is None:
        by, found = f"model's type {model_type!r}", _BY_MODEL_TYPE.get(model_type)
    log.info("tool call parser, by the %s: %s", by, found or "none")
    return None if found is None else TOOL_FORMATS[found]
