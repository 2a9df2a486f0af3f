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


def dsml(outer: str) -> Callable[[Calls], str]:
    """DeepSeek V3.2's own markup: what is no string is JSON."""

    def parameter(key: str, value: Any) -> str:
        is_string = str(isinstance(value, str)).lower()
        opens = f'<｜DSML｜parameter name="{key}" string="{is_string}">'
        return f"{opens}{as_text(value)}</｜DSML｜parameter>\n"

    def write(calls: Calls) -> str:
        several = "\n".join(
            f'<｜DSML｜invoke name="{name}">\n'
            + "".join(parameter(*each) for each in a.items())
            + "</｜DSML｜invoke>"
            for name, a in calls
        )
        return f"<｜DSML｜{outer}>\n{several}\n</｜DSML｜{outer}>"

    return write


def of_python(calls: Calls) -> list[str]:
    return [f"{name}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for name, a in calls]


def pythonic(calls: Calls) -> str:
    return f"[{', '.join(of_python(calls))}]"


def llama4_pythonic(calls: Calls) -> str:
    return f"<|python_start|>{pythonic(calls)}<|python_end|>"


def lfm2(calls: Calls) -> str:
    return f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>"


def olmo3(calls: Calls) -> str:
    return "\n".join(["<function_calls>", *of_python(calls), "</function_calls>"])


def of_gemma(value: Any, quote: str) -> str:
    """As the macro format_argument of the templates writes it, keys with marks."""
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            members = (f"{quote}{k}{quote}:{of_gemma(v, quote)}" for k, v in value.items())
            return f"{{{','.join(members)}}}"
        case list():
            return f"[{','.join(of_gemma(each, quote) for each in value)}]"
        case None:
            return "None"
    return dumps(value)


def gemma(opens: str, closes: str, quote: str) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        return "".join(
            f"{opens}call:{name}{{"
            + ",".join(f"{k}:{of_gemma(v, quote)}" for k, v in a.items())
            + f"}}{closes}"
            for name, a in calls
        )

    return write


def harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(a)}<|call|>"
        for name, a in calls
    )


@dataclass(frozen=True)
class Case:
    """One way to write calls, and the parser that is to read it."""

    id: str
    parser: str
    write: Callable[[Calls], str]
    closing: str = ""  # a tag that no value may contain: there is no way to write it
    alone: bool = False  # no content may stand beside calls
    drops_marks: bool = False  # also those of what is no call


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
    Case("deepseek_v32", "deepseek_v32", dsml("function_calls"), closing="</｜DSML｜parameter>"),
    Case("deepseek_v4", "deepseek_v4", dsml("tool_calls"), closing="</｜DSML｜parameter>"),
    Case("pythonic", "pythonic", pythonic, alone=True),
    Case("llama4_pythonic", "llama4_pythonic", llama4_pythonic, alone=True),
    Case("lfm2", "lfm2", lfm2),
    Case("olmo3", "olmo3", olmo3),
    Case("gemma4", "gemma4", gemma("<|tool_call>", "<tool_call|>", '<|"|>'), closing='<|"|>'),
    Case(
        "functiongemma",
        "functiongemma",
        gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        closing="<escape>",
    ),
    Case("openai", "openai", harmony, closing="<|call|>", alone=True, drops_marks=True),
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
