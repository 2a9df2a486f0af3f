"""Generated texts in each format of tool calls, as the models' published templates have them."""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Calls = Sequence[tuple[str, dict[str, Any]]]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n{dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )


def llama(calls: Calls) -> str:
    return "; ".join(dumps({"name": name, "parameters": a}) for name, a in calls)


def mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}{dumps(arguments)}" for name, arguments in calls)


def mistral_with_marks(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcdefghi[ARGS]{dumps(a)}" for name, a in calls)


def mistral_list(calls: Calls) -> str:
    return f"[TOOL_CALLS] {dumps([{'name': name, 'arguments': a} for name, a in calls])}"


def deepseek_v3(calls: Calls) -> str:
    several = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(a)}\n```<｜tool▁call▁end｜>"
        for name, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{several}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    several = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>"
        for name, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{several}<｜tool▁calls▁end｜>"


def kimi_k2(calls: Calls) -> str:
    several = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumps(a)}"
        "<|tool_call_end|>"
        for index, (name, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{several}<|tool_calls_section_end|>"


def granite(calls: Calls) -> str:
    return f"<|tool_call|>{dumps([{'name': name, 'arguments': a} for name, a in calls])}"


def phi4(calls: Calls) -> str:
    return f"functools{dumps([{'name': name, 'arguments': a} for name, a in calls])}"


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def qwen3_coder(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{as_text(v)}\n</parameter>\n" for k, v in a.items())
        + "</function>\n</tool_call>"
        for name, a in calls
    )


def seed_oss(calls: Calls) -> str:
    return "\n".join(
        f"<seed:tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>{as_text(v)}</parameter>\n" for k, v in a.items())
        + "</function>\n</seed:tool_call>"
        for name, a in calls
    )


def glm45(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{as_text(v)}</arg_value>\n" for k, v in a.items()
        )
        + "</tool_call>"
        for name, a in calls
    )


def minimax_m2(calls: Calls) -> str:
    several = "\n".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{as_text(v)}</parameter>\n' for k, v in a.items())
        + "</invoke>"
        for name, a in calls
    )
    return f"<minimax:tool_call>\n{several}\n</minimax:tool_call>"


@dataclass(frozen=True)
class Case:
    """One way to write calls, and the parser that is to read it."""

    id: str
    parser: str
    write: Callable[[Calls], str]
    closing: str = ""  # a tag that no value may contain: there is no way to write it
    alone: bool = False  # no content may stand beside calls


CASES = (
    Case("hermes", "hermes", hermes),
    Case("llama3_json", "llama3_json", llama, alone=True),
    Case("mistral", "mistral", mistral),
    Case("mistral_marks", "mistral", mistral_with_marks),
    Case("mistral_list", "mistral", mistral_list),
    Case("deepseek_v3", "deepseek_v3", deepseek_v3),
    Case("deepseek_v31", "deepseek_v31", deepseek_v31),
    Case("kimi_k2", "kimi_k2", kimi_k2),
    Case("granite", "granite", granite),
    Case("phi4_mini_json", "phi4_mini_json", phi4),
    Case("qwen3_coder", "qwen3_coder", qwen3_coder, closing="</parameter>"),
    Case("seed_oss", "seed_oss", seed_oss, closing="</parameter>"),
    Case("glm45", "glm45", glm45, closing="</arg_value>"),
    Case("minimax_m2", "minimax_m2", minimax_m2, closing="</parameter>"),
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "share": {"type": "number"},
                    "is_new": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "options": {"type": "object"},
                },
            },
        },
    }
    for name in ("write_file", "search")
]


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    """The text, cut at these places."""
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]
