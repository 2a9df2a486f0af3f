"""From a request to tokens, and from generated text to an answer: reasoning, content, calls."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat.answers import TOOLS, hermes, pieces
from chat.families import CHATML, DEEPSEEK, FAMILIES, LLAMA3, MISTRAL, tokenizer
from conformance.covering import examples
from engine.test_llm import demo
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.chat.conversation import Chat, ChatInput
from quire.chat.output_events import OpenCall, Reply, reply
from quire.chat.reasoning_parsers import REASONING
from quire.chat.tools.declared import checked_tools
from quire.chat.tools.registry import TOOL_FORMATS, tool_format
from quire.chat.tools.tool_choice import ToolChoice, forced_form
from quire.config import ServerConfig
from quire.errors import ConfigError, RequestError

HELLO = [{"role": "user", "content": "Hello"}]
cuts = st.lists(st.integers(0, 10**6), max_size=12)


def chat(template: str = CHATML, special: tuple[str, ...] = (), **options: Any) -> Chat:
    return Chat(tokenizer(template, special), **options)


def test_the_beginning_of_sequence_is_not_doubled() -> None:
    prompt = chat(LLAMA3).prompt(ChatInput(messages=HELLO))
    assert prompt.text.startswith("<s>")
    assert prompt.token_ids[0] == 1
    assert 1 not in prompt.token_ids[1:]
    doubled = chat(LLAMA3).prompt(ChatInput(messages=HELLO, add_special_tokens=True))
    assert doubled.token_ids[:2] == (1, 1)


def test_text_that_is_none_is_refused() -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        chat().prompt(ChatInput(messages=[{"role": "user", "content": "\ud800"}]))


# -- reasoning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parser", "prompt", "text", "found"),
    [
        ("qwen3", "", "<think>\nHm.\n</think>\n\nYes.", Reply(reasoning="Hm.", content="Yes.")),
        ("qwen3", "", "Yes.", Reply(content="Yes.")),
        ("qwen3", "", "\nYes, </think> is a tag.", Reply(content="\nYes, </think> is a tag.")),
        ("qwen3", "<think>\n", "Hm.\n</think>\nYes.", Reply(reasoning="Hm.", content="Yes.")),
        ("qwen3", "<think>\n\n</think>\n\n", "Yes.", Reply(content="Yes.")),
        ("qwen3", "", "<think>\nHm. \n", Reply(reasoning="Hm. \n")),
        ("qwen3", "", "<think>\n\n</think>\n\nYes.", Reply(content="Yes.")),
        ("qwen3", "", "  <think>a\n\nb</think>", Reply(reasoning="a\n\nb")),
        ("deepseek_r1", "", "Hm.</think>Yes.", Reply(reasoning="Hm.", content="Yes.")),
        ("deepseek_r1", "", "<think>Hm.</think>Yes.", Reply(reasoning="Hm.", content="Yes.")),
        ("deepseek_r1", "<think>\n", "Hm.", Reply(reasoning="Hm.")),
        ("deepseek_r1", "<think></think>", "Yes.", Reply(content="Yes.")),
        ("mistral", "", "[THINK]Hm.[/THINK]Yes.", Reply(reasoning="Hm.", content="Yes.")),
        ("seed_oss", "", "<seed:think>Hm.</seed:think>Y", Reply(reasoning="Hm.", content="Y")),
        (
            "granite",
            "",
            "Here is my thought process: Hm.\n\nHere is my response: Yes.",
            Reply(reasoning="Hm.", content="Yes."),
        ),
        (
            "qwen3",
            "a <think> that was said before",
            "<think>Hm.</think>Yes.",
            Reply(reasoning="Hm.", content="Yes."),
        ),
    ],
)
def test_reasoning_ends_where_it_ends(parser: str, prompt: str, text: str, found: Reply) -> None:
    made = chat(prompt or "x", reasoning_parser=parser)
    prepared = made.prompt(ChatInput(messages=HELLO))
    assert made.reader(prepared).read(text) == found
    one_by_one = made.reader(prepared)
    assert (
        reply([e for letter in text for e in one_by_one.feed(letter)] + one_by_one.finish())
        == found
    )


PARTS = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<thi", "</", "\n", " ", "a", "Hm. ", "ü", hermes([("search", {})])]
    ),
    max_size=12,
)


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize("template", ["x", "x<think>\n"])
@settings(max_examples=examples(20, of=60), deadline=None)
@given(parts=PARTS, cuts=cuts)
def test_what_is_reasoning_does_not_depend_on_the_cuts(
    parser: str, template: str, parts: list[str], cuts: list[int]
) -> None:
    made = chat(template, reasoning_parser=parser, tool_call_parser="hermes")
    prepared = made.prompt(ChatInput(messages=HELLO, tools=TOOLS))
    text = "".join(parts)
    reader = made.reader(prepared)
    found = [e for piece in pieces(text, cuts) for e in reader.feed(piece)] + reader.finish()
    whole = made.reader(prepared).read(text)
    assert [call.name for call in reply(found).calls] == [call.name for call in whole.calls]
    assert (reply(found).content, reply(found).reasoning) == (whole.content, whole.reasoning)


def test_calls_follow_reasoning() -> None:
    made = chat(reasoning_parser="auto", tool_call_parser="hermes")
    prepared = made.prompt(ChatInput(messages=HELLO, tools=TOOLS))
    text = f"<think>\n<tool_call> or not?\n</think>\n\n{hermes([('search', {'path': 'x'})])}"
    found = made.reader(prepared).read(text)
    assert found.reasoning == "<tool_call> or not?"
    assert found.content is None
    ((call,)) = found.calls
    assert (call.name, json.loads(call.arguments)) == ("search", {"path": "x"})


# -- which format ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("chatml", "hermes"),
        ("llama3", "llama3_json"),
        ("mistral", "mistral"),
        ("deepseek", "deepseek_v3"),
        ("gpt_oss", "openai"),
        ("gemma4", "gemma4"),
        ("olmo3", "olmo3"),
    ],
)
def test_the_format_is_found_in_the_template(
    family: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert tool_format("auto", FAMILIES[family]) is TOOL_FORMATS[name]
    assert name in caplog.text
    assert tool_format(None, FAMILIES[family]) is TOOL_FORMATS[name]


# vLLM's table, of its parsers that there are here: a model of each family, its type, and what its
# published template has in it (none: it has no template, or one that says nothing of calls).
TABLE = [
    ("NousResearch/Hermes-2-Pro-Llama-3-8B", "llama", '"\n<tool_call>\n{"name": "', "hermes"),
    ("NousResearch/Hermes-2-Pro-Mistral-7B", "mistral", '"\n<tool_call>\n"', "hermes"),
    ("Qwen/Qwen2.5-7B-Instruct", "qwen2", '\'\n<tool_call>\n{"name": "\'', "hermes"),
    ("Qwen/QwQ-32B", "qwen2", "within <tool_call></tool_call> XML tags", "hermes"),
    ("Qwen/Qwen3-8B", "qwen3", "", "hermes"),
    ("mistralai/Mistral-7B-Instruct-v0.3", "mistral", '"[TOOL_CALLS] ["', "mistral"),
    ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "mistral3", "", "mistral"),
    (
        "meta-llama/Llama-3.1-8B-Instruct",
        "llama",
        "'<|start_header_id|>' + '\"parameters\": '",
        "llama3_json",
    ),
    ("meta-llama/Llama-3.2-3B-Instruct", "llama", "", "llama3_json"),
    (
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "llama4",
        "'<|header_start|>' '\"parameters\": '",
        "llama4_json",
    ),
    ("ibm-granite/granite-3.1-8b-instruct", "granite", "with <|tool_call|> followed", "granite"),
    ("ibm-granite/granite-4.0-h-small", "granitemoehybrid", "", "granite4"),
    (
        "deepseek-ai/DeepSeek-V3-0324",
        "deepseek_v3",
        "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + '\n```json\n'",
        "deepseek_v3",
    ),
    ("deepseek-ai/DeepSeek-V3.1", "deepseek_v3", "'<｜tool▁call▁begin｜>'", "deepseek_v31"),
    (
        "moonshotai/Kimi-K2-Instruct",
        "kimi_k2",
        "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
        "kimi_k2",
    ),
    ("zai-org/GLM-4.5", "glm4_moe", "'<tool_call>' '<arg_key>'", "glm45"),
    ("zai-org/GLM-4.7-Flash", "glm4_moe_lite", "", "glm47"),
    (
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "qwen3_moe",
        "'<tool_call>\n<function=' '<parameter='",
        "qwen3_xml",
    ),
    ("Qwen/Qwen3.5", "qwen3_5_moe", "", "qwen3_coder"),
    ("XiaomiMiMo/MiMo-V2-Flash", "mimo_v2_flash", "", "mimo"),
    (
        "ByteDance-Seed/Seed-OSS-36B-Instruct",
        "seed_oss",
        "'<seed:tool_call>\n<function=' '<parameter='",
        "seed_oss",
    ),
    ("MiniMaxAI/MiniMax-M2", "minimax_m2", "'<minimax:tool_call>'", "minimax_m2"),
    ("microsoft/Phi-4-mini-instruct", "phi3", "'<|tool|>' + tools + '<|/tool|>'", "phi4_mini_json"),
    ("microsoft/Phi-4-mini-instruct", "phi3", "as functools[{", "phi4_mini_json"),
    (
        "openai/gpt-oss-20b",
        "gpt_oss",
        '"functions." + name + "<|channel|>commentary " + "json<|message|>"',
        "openai",
    ),
    ("openai/gpt-oss-120b", "gpt_oss", "", "openai"),
    (
        "meta-llama/Llama-3.2-1B-Instruct",
        "llama",
        "'<|start_header_id|>' 'in the format [func_name1(params_name1=params_value1'",
        "pythonic",
    ),
    ("Team-ACE/ToolACE-8B", "llama", "format of [func_name1(params_name1=", "pythonic"),
    ("google/gemma-3-4b-it", "gemma3", "format of [func_name1(params_name1=", "pythonic"),
    (
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
        "llama4",
        "'<|header_start|>' 'exact format: [func_name1(param1=value1'",
        "llama4_pythonic",
    ),
    ("LiquidAI/LFM2-1.2B", "lfm2", "List of tools: <|tool_list_start|>[", "lfm2"),
    ("LiquidAI/LFM2-8B-A1B", "lfm2_moe", "", "lfm2"),
    ("allenai/Olmo-3-7B-Instruct", "olmo3", "'<function_calls>' + calls", "olmo3"),
    ("google/gemma-4-E4B-it", "gemma4", "'<|tool_call>call:' + function['name']", "gemma4"),
    (
        "google/functiongemma-270m-it",
        "gemma3_text",
        "'<start_function_call>call:' + function['name']",
        "functiongemma",
    ),
    ("deepseek-ai/DeepSeek-V3.2", "deepseek_v32", "", "deepseek_v32"),
    ("deepseek-ai/DeepSeek-V3.2", "deepseek_v3", "'<｜DSML｜function_calls>'", "deepseek_v32"),
    ("deepseek-ai/DeepSeek-V4", "deepseek_v4", "'<｜DSML｜tool_calls>'", "deepseek_v4"),
]


@pytest.mark.parametrize(("model", "model_type", "marks", "name"), TABLE)
def test_the_parser_of_each_family_is_found(
    model: str, model_type: str, marks: str, name: str
) -> None:
    assert tool_format(None, marks, model_type) is TOOL_FORMATS[name], model
    assert tool_format("auto", marks, model_type) is TOOL_FORMATS[name], model


def test_the_table_has_every_parser_and_all_are_documented() -> None:
    assert {name for *_, name in TABLE} | {"qwen3_coder"} == set(TOOL_FORMATS)
    page = (Path(__file__).parents[2] / "docs/reference/tool-calls.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in [*TOOL_FORMATS, *REASONING])
    helps = {each.name: each.metadata["help"] for each in fields(ServerConfig)}
    for option, known in (("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", REASONING)):
        _, _, names = helps[option].partition("), ")
        listed = names.partition(". ")[0].strip(", .")
        assert listed.split(", ") == sorted(known)


@pytest.mark.parametrize(
    ("family", "ends", "most"),
    [
        ("chatml", "<|im_end|>\n", 2),
        ("llama3", "<|eot_id|>", 1),
        ("gpt_oss", "<|call|>", 1),
        ("gemma4", "<turn|>\n", 2),
        ("olmo3", "<|im_end|>\n", 2),
    ],
)
def test_what_a_template_writes_of_calls_is_read_as_them(family: str, ends: str, most: int) -> None:
    given = [
        ("search", {"count": -3, "path": "a \"b\" 'c' \\ <tag>\nü", "share": 0.5}),
        ("write_file", {"is_new": True, "options": {"x": [1, "y", {}]}, "tags": ["a, b)", "}"]}),
    ]
    made = chat(FAMILIES[family])
    for several in ([given[0]], [given[1]], given)[: 1 + most]:
        calls = [{"function": {"name": name, "arguments": a}} for name, a in several]
        prompt = made.prompt(ChatInput(messages=HELLO, tools=TOOLS))
        turns = [*HELLO, {"role": "assistant", "tool_calls": calls}]
        told = made.prompt(ChatInput(messages=turns, tools=TOOLS, add_generation_prompt=False))
        said = told.text.removeprefix(prompt.text).removesuffix(ends)
        assert len(said) + len(prompt.text) + len(ends) == len(told.text)
        found = made.reader(prompt).read(said)
        assert [(call.name, json.loads(call.arguments)) for call in found.calls] == several
        assert found.content is None


def test_without_a_format_calls_cannot_be_read() -> None:
    made = chat("just text")
    with pytest.raises(RequestError, match="--tool-call-parser, one of hermes, granite4, "):
        made.prompt(ChatInput(messages=HELLO, tools=TOOLS))
    assert made.prompt(ChatInput(messages=HELLO, tools=TOOLS, tool_choice="none")).tools == {}


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="'nonsense' is unknown; known: auto,"):
        chat(**{option: "nonsense"})


def test_marks_that_are_special_tokens_are_asked_for() -> None:
    asked = ChatInput(messages=HELLO, tools=TOOLS)
    assert chat(MISTRAL).prompt(asked).skip_special_tokens
    special = chat(MISTRAL, special=("[TOOL_CALLS]",))
    assert not special.prompt(asked).skip_special_tokens
    assert special.prompt(ChatInput(messages=HELLO)).skip_special_tokens


def test_special_tokens_without_a_role_are_asked_for() -> None:
    """As in most models' tokenizer.json: Transformers' list of special tokens has none of them."""
    own = tokenizer(MISTRAL)
    own.backend_tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    mark = own.convert_tokens_to_ids("[TOOL_CALLS]")
    assert own.decode([mark], skip_special_tokens=True) == ""
    assert not Chat(own).prompt(ChatInput(messages=HELLO, tools=TOOLS)).skip_special_tokens


# -- tools -----------------------------------------------------------------------------------------


def function(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("x", "a list of functions"),
        ([{"type": "web_search"}], "'web_search': only functions"),
        ([{"type": "function"}], r"tools\[0\] has no function"),
        ([function(name="a b")], "the name 'a b' must be"),
        ([function(parameters=[])], "must be a JSON schema"),
        ([function(), function()], r"tools\[1\] has the name 'f' again"),
        ([function(name=f"f{i}") for i in range(300)], "300 functions and may have 256"),
        ([function(description="x" * 2**20)], "limit is 1.00 MiB"),
        ([function(parameters=json.loads('{"a":' * 80 + "1" + "}" * 80))], "64 deep"),
    ],
)
def test_tools_that_cannot_be(tools: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        chat().prompt(ChatInput(messages=HELLO, tools=tools))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("sometimes", "must be none, auto, required or a function"),
        ({"type": "function"}, "to name a tool"),
        ({"type": "function", "function": {"name": "g"}}, "not among the tools"),
        ({"type": "function", "name": "g"}, "not among the tools"),
    ],
)
def test_choices_that_cannot_be(choice: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        chat().prompt(ChatInput(messages=HELLO, tools=[function()], tool_choice=choice))
    with pytest.raises(RequestError, match="needs tools"):
        chat().prompt(ChatInput(messages=HELLO, tool_choice="required"))


def test_a_named_tool_gets_its_own_schema() -> None:
    made = chat(reasoning_parser="qwen3")
    prepared = made.prompt(
        ChatInput(
            messages=HELLO,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "search"}},
        )
    )
    own = TOOLS[1]["function"]["parameters"]  # type: ignore[index]
    assert prepared.structured_outputs == StructuredOutputsParams(
        json={**own, "additionalProperties": False}
    )
    ((call,)) = made.reader(prepared).read('{"path": "<think>"}').calls
    assert (call.name, call.arguments) == ("search", '{"path": "<think>"}')


RECURSIVE = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}, "kind": {"$ref": "#/$defs/kind"}},
    "required": ["kind"],
    "additionalProperties": False,
    "$defs": {"kind": {"type": "string", "enum": ["a", "b"]}},
}


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_what_a_grammar_allows(parallel: bool) -> None:
    llm = LLM(demo(), kv_cache_memory_bytes=8 << 20)
    tools = checked_tools([function(name="a/b", parameters=RECURSIVE), function(name="g")])
    form = forced_form(ToolChoice(kind="required"), tools, parallel=parallel)
    params = [
        SamplingParams(max_tokens=60, temperature=1.5, seed=seed, structured_outputs=form)
        for seed in range(6)
    ]
    ended = [done.text for done in llm.generate(["x"] * 6, params) if done.finish_reason == "stop"]
    assert ended
    made = chat()
    prepared = made.prompt(
        ChatInput(
            messages=HELLO,
            tools=[tool.declaration for tool in tools],
            tool_choice="required",
            parallel_tool_calls=parallel,
        )
    )
    assert prepared.structured_outputs == form
    for text in ended:
        found = made.reader(prepared).read(text)
        assert found.content is None
        assert len(found.calls) == 1 if not parallel else found.calls
        for call in found.calls:
            assert call.name in ("a/b", "g")
            if call.name == "a/b":
                assert json.loads(call.arguments)["kind"] in ("a", "b")


# -- the demo model --------------------------------------------------------------------------------


def test_the_demo_model_talks_in_python() -> None:
    llm = LLM(demo(), kv_cache_memory_bytes=8 << 20)
    made = Chat(llm.tokenizer)
    messages = [
        {"role": "system", "content": "Two\nlines."},
        {"role": "user", "content": "def first(items):"},
    ]
    prepared = made.prompt(ChatInput(messages=messages))
    assert prepared.text == "# Two\n# lines.\n\ndef first(items):"
    assert prepared.token_ids == tuple(llm.tokenizer(prepared.text)["input_ids"])
    assert prepared.stop == ("\n\n\n", "\nclass ", "\ndef ")
    done = llm.generate(
        [list(prepared.token_ids)] * 8,
        [
            SamplingParams(max_tokens=300, temperature=0.8, seed=seed, stop=prepared.stop)
            for seed in range(8)
        ],
    )
    assert any(each.finish_reason == "stop" for each in done)
    assert not any(stop in each.text for each in done for stop in prepared.stop)
    messages += [
        {"role": "assistant", "content": "\n    return items[0]"},
        {"role": "user", "content": "def last("},
    ]
    longer = made.prompt(ChatInput(messages=messages)).text
    assert longer == f"{prepared.text}\n    return items[0]\n\n\ndef last("
    with pytest.raises(RequestError, match="not robot"):
        made.prompt(ChatInput(messages=[{"role": "robot", "content": "x"}]))


def test_the_demo_model_has_a_tool_parser() -> None:
    made = Chat(demo().tokenizer, model_type=demo().spec.model_type)
    call = {"id": "c", "function": {"name": "search", "arguments": '{"path": "x"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "one\ntwo"},
    ]
    prepared = made.prompt(ChatInput(messages=messages, tools=TOOLS[1:]))
    written = '<tool_call>{"name": "search", "arguments": {"path": "x"}}</tool_call>'
    declared, _, rest = prepared.text.partition("\n\n")
    assert json.loads(declared.removeprefix("# ")) == TOOLS[1]
    assert rest == f"Hello\n{written}\n\n\n# one\n# two\n\n"
    ((found,)) = made.reader(prepared).read(written).calls
    assert (found.name, found.arguments) == ("search", '{"path": "x"}')


def test_the_demo_models_template_is_a_file_that_transformers_finds() -> None:
    tokenizer = demo().tokenizer
    file = Path(tokenizer.name_or_path) / "chat_template.jinja"
    assert tokenizer.chat_template == file.read_text(encoding="utf-8")


def test_a_whole_turn_with_calls() -> None:
    made = chat()
    asked = ChatInput(messages=HELLO, tools=TOOLS)
    (call,) = made.reader(made.prompt(asked)).read(hermes([("search", {"path": "x"})])).calls
    assert call == OpenCall(id=call.id, name="search", arguments='{"path": "x"}')
    assert call.id.startswith("call_")
    again = {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
    answered = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [again]},
        {"role": "tool", "tool_call_id": call.id, "content": "found"},
    ]
    text = made.prompt(ChatInput(messages=answered, tools=TOOLS)).text
    assert hermes([("search", {"path": "x"})]) in text
    assert "<tool_response>\nfound\n" in text


@pytest.mark.parametrize(
    ("begun", "found"),
    [
        ("<think>\nIt", Reply(reasoning="is.", content="Yes.")),
        ("<think>It.</think>So", Reply(content="is.</think>Yes.")),
    ],
)
def test_an_answer_is_continued_within_its_reasoning(begun: str, found: Reply) -> None:
    made = chat(LLAMA3, reasoning_parser="deepseek_r1")
    prepared = made.prompt(
        ChatInput(
            messages=[*HELLO, {"role": "assistant", "content": begun}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
    )
    assert made.reader(prepared).read("is.</think>Yes.") == found


def test_deepseek_opens_its_reasoning() -> None:
    made = chat(DEEPSEEK, reasoning_parser="auto")
    prepared = made.prompt(ChatInput(messages=HELLO))
    assert prepared.begun == "<think>"
    assert made.reader(prepared).read("Hm.</think>Yes.") == Reply(reasoning="Hm.", content="Yes.")


@pytest.mark.parametrize(
    ("said", "closed"),
    [
        ({"properties": {"far": {"type": "boolean"}}}, True),
        ({"properties": {}}, True),
        ({}, False),  # it names none, so any may come
        ({"properties": {}, "additionalProperties": {"type": "string"}}, False),
        ({"properties": {}, "allOf": [{"properties": {"x": {}}}]}, False),
    ],
)
def test_a_forced_call_has_no_arguments_but_those_that_are_named(
    said: dict[str, Any], closed: bool
) -> None:
    tools = checked_tools([function(name="look", parameters=said)])
    form = forced_form(ToolChoice(kind="named", name="look"), tools, parallel=True)
    assert form is not None
    schema = json.loads(str(form.json))
    assert (schema.get("additionalProperties") is False) == closed
