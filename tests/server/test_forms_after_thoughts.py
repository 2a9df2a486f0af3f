"""A form that is asked for begins where the reasoning ends, through every interface for chats."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from engine.test_llm import demo
from quire.config import ServerConfig
from quire.models.loader import LoadedModel
from server.asking import Client, run, serving

TURNS = "{% for m in messages %}# {{ m.content }}\n{% endfor %}"
PROMPTS = {
    "the prompt opens it": TURNS + "<think>\n",
    "the model opens it": TURNS + "# assistant: ",
    "the prompt has ended it": TURNS + "<think>\n\n</think>\n\n",
}
MESSAGES = [{"role": "user", "content": "def add(a, b):"}]
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
OPENS, CLOSES = 4094, 4095  # of the demo model's tokens, renamed
# The model begins to think if it may, and comes to an end of it.
FIELDS = {"seed": 1, "temperature": 0.7, "logit_bias": {str(OPENS): 60, str(CLOSES): 8}}
THINK = ("<think>", "</think>")
HARMONY = tuple(f"<|{word}|>" for word in ("start", "channel", "constrain", "message", "x", "end"))
SAYS = "<|start|>assistant"
CHANNELS = {
    "the prompt opens it": f"{TURNS}{SAYS}<|channel|>analysis<|message|>",
    "the model opens it": TURNS + SAYS,
    "the prompt has ended it": f"{TURNS}{SAYS}<|channel|>final<|message|>",
}


@cache
def model_with(marks: tuple[str, ...]) -> LoadedModel:
    """The demo model, with these tokens in place of its last ones."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    said = json.loads(demo().tokenizer.backend_tokenizer.to_str())
    vocabulary = said["model"]["vocab"]
    for token_id, mark in enumerate(marks, CLOSES + 1 - len(marks)):
        old = next(text for text, own in vocabulary.items() if own == token_id)
        said["model"]["merges"] = [
            pair for pair in said["model"]["merges"] if "".join(pair) != old and old not in pair
        ]
        del vocabulary[old]
        vocabulary[mark] = token_id
        form = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        is_special = marks is HARMONY
        said["added_tokens"].append(
            {"id": token_id, "content": mark, "special": is_special, **form}
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(said)), eos_token="<|endoftext|>"
    )
    return replace(demo(), tokenizer=tokenizer)


async def chat(client: Client, form: str) -> tuple[str, str, str, dict[str, Any]]:
    """Thoughts, text, arguments of the call, and usage."""
    tool = {"type": "function", "function": {"name": "say", "parameters": SCHEMA}}
    fields: dict[str, Any] = {"tools": [tool], "tool_choice": "required"}
    if form == "named":
        fields["tool_choice"] = {"type": "function", "function": {"name": "say"}}
    elif form == "schema":
        form_asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        fields = {"response_format": form_asked}
    body = {"messages": MESSAGES, "max_completion_tokens": 200, **FIELDS, **fields}
    answer = (await client.post("/v1/chat/completions", body)).json
    (choice,) = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] in ("stop", "tool_calls"), answer
    (call,) = message.get("tool_calls") or [{"function": {"arguments": ""}}]
    arguments = call["function"]["arguments"]
    usage = answer["usage"]
    return message.get("reasoning", ""), message["content"] or "", arguments, usage


async def messages(client: Client, form: str) -> tuple[str, str, str, dict[str, Any]]:
    tools = [{"name": "say", "input_schema": SCHEMA}]
    fields: dict[str, Any] = {"tools": tools, "tool_choice": {"type": "any"}}
    if form == "named":
        fields["tool_choice"] = {"type": "tool", "name": "say"}
    elif form == "schema":
        fields = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    body = {"messages": MESSAGES, "max_tokens": 200, **FIELDS, **fields}
    answer = (await client.post("/v1/messages", body)).json
    found = {"thinking": "", "text": "", "tool_use": ""}
    for block in answer["content"]:
        field = {"tool_use": "input"}.get(block["type"], block["type"])
        value = block[field]
        found[block["type"]] += value if isinstance(value, str) else json.dumps(value)
    assert answer["stop_reason"] in ("end_turn", "tool_use"), answer
    return found["thinking"], found["text"], found["tool_use"], answer["usage"]


async def responses(client: Client, form: str) -> tuple[str, str, str, dict[str, Any]]:
    tools = [{"type": "function", "name": "say", "parameters": SCHEMA}]
    fields: dict[str, Any] = {"tools": tools, "tool_choice": "required"}
    if form == "named":
        fields["tool_choice"] = {"type": "function", "name": "say"}
    elif form == "schema":
        fields = {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}
    body = {"input": MESSAGES, "max_output_tokens": 200, **FIELDS, **fields}
    answer = (await client.post("/v1/responses", body)).json
    found = {"reasoning": "", "message": "", "function_call": ""}
    for item in answer["output"]:
        found[item["type"]] += item.get("arguments") or "".join(
            part["text"] for part in item.get("content", ())
        )
    assert answer["status"] == "completed", answer
    return found["reasoning"], found["message"], found["function_call"], answer["usage"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("parser", ["qwen3", "openai_gptoss"])
def test_a_form_begins_where_the_reasoning_ends(parser: str, prompt: str) -> None:
    is_harmony = parser == "openai_gptoss"
    template = (CHANNELS if is_harmony else PROMPTS)[prompt]
    config = ServerConfig(chat_template=template, reasoning_parser=parser)

    async def run_it() -> None:
        async with serving(config, model_with(HARMONY if is_harmony else THINK)) as client:
            forms = ("schema", "required", "named")
            for ask, form in zip((chat, messages, responses), forms, strict=True):
                thoughts, text, arguments, _ = await ask(client, form)
                if not (is_harmony and prompt == "the model opens it"):  # it may, or not
                    assert bool(thoughts) == (prompt != "the prompt has ended it")
                assert not [m for m in (*THINK, *HARMONY) if m in thoughts + text + arguments]
                given = json.loads(text if form == "schema" else arguments)
                assert isinstance(given["sure"], bool)
                assert (arguments if form == "schema" else text) == ""

    run(run_it())


def test_without_a_reasoning_parser_the_form_is_all_of_the_text() -> None:
    config = ServerConfig(chat_template=PROMPTS["the prompt opens it"])

    async def run_it() -> None:
        async with serving(config, model_with(THINK)) as client:
            thoughts, text, _, _ = await chat(client, "schema")
            assert thoughts == ""
            assert isinstance(json.loads(text)["sure"], bool)

    run(run_it())
