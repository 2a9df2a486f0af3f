"""OpenAI's client converses: chat completions and responses, tools, and answers in a given form.

    python tests/clients/ask_openai_chats.py --base-url http://127.0.0.1:8000 [--api-key KEY]

The server needs a chat template, and ``--tool-call-parser hermes``.
"""

from typing import Literal

import openai
from client_flags import client_flags
from openai import OpenAI
from pydantic import BaseModel

PARAMETERS = {
    "type": "object",
    "properties": {"far": {"type": "boolean"}},
    "required": ["far"],
    "additionalProperties": False,
}
LOOK = {"name": "look", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": LOOK}]


class Answer(BaseModel):
    color: Literal["red", "green"]
    sure: bool


def chats(client: OpenAI, model: str) -> None:
    ask = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    create = client.chat.completions.create
    whole = create(**ask, max_completion_tokens=8, logprobs=True, top_logprobs=2, n=2)
    first = whole.choices[0]
    assert first.message.role == "assistant"
    assert [len(token.top_logprobs) for token in first.logprobs.content] == [2] * 8
    parts = create(**ask, max_completion_tokens=8, stream=True)
    said = "".join(part.choices[0].delta.content or "" for part in parts)
    assert said == first.message.content == whole.choices[1].message.content
    parsed = client.chat.completions.parse(**ask, response_format=Answer, max_tokens=90)
    assert isinstance(parsed.choices[0].message.parsed, Answer)


def tools(client: OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    ask = {"model": model, "temperature": 0, "max_tokens": 90, "tools": TOOLS}
    called = client.chat.completions.create(**ask, messages=messages, tool_choice="required")
    message = called.choices[0].message
    assert called.choices[0].finish_reason == "tool_calls"
    function = message.tool_calls[0].function
    assert function.name == "look"
    with client.chat.completions.stream(**ask, messages=messages, tool_choice="required") as events:
        streamed = events.get_final_completion().choices[0].message
    assert streamed.tool_calls[0].function.arguments == function.arguments
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a wall"}
    told = [*messages, message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(**ask, messages=told, tool_choice="none").choices


def responses(client: OpenAI, model: str) -> None:
    ask = {"model": model, "input": "Hello", "max_output_tokens": 90, "temperature": 0}
    whole = client.responses.create(**ask, instructions="Be short.", store=False)
    events = list(client.responses.create(**ask, instructions="Be short.", stream=True))
    assert events[0].type == "response.created"
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == whole.output_text
    assert isinstance(client.responses.parse(**ask, text_format=Answer).output_parsed, Answer)


if __name__ == "__main__":
    options = client_flags(names_model=False).parse_args()
    client = OpenAI(base_url=f"{options.base_url}/v1", api_key=options.api_key)
    model = client.models.list().data[0].id
    for part in (chats, tools, responses):
        part(client, model)
    print(f"openai {openai.__version__}: chat completions, tools, responses")
