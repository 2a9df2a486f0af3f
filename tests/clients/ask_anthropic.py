"""Anthropic's client: messages, whole and in pieces, tools, the number of tokens, and errors.

    python tests/clients/ask_anthropic.py --base-url http://127.0.0.1:8000 [--api-key KEY]

The server needs a chat template, and ``--tool-call-parser hermes``.
"""

import anthropic
from anthropic import Anthropic
from client_flags import client_flags

SCHEMA = {
    "type": "object",
    "properties": {"far": {"type": "boolean"}},
    "required": ["far"],
    "additionalProperties": False,
}
LOOK = {"name": "look", "description": "Look around.", "input_schema": SCHEMA}
HELLO = [{"role": "user", "content": "Hello"}]


def texts(client: Anthropic, model: str) -> None:
    ask = {"model": model, "messages": HELLO, "max_tokens": 12, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**ask, system="Be short.")
    assert whole.role == "assistant"
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert 0 < whole.usage.output_tokens <= 12
    with client.messages.stream(**ask, system="Be short.") as stream:
        said = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert said == "".join(block.text for block in whole.content)
    assert last.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model=model, messages=HELLO, system="Be short.")
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def tools(client: Anthropic, model: str) -> None:
    ask = {"model": model, "max_tokens": 90, "extra_body": {"temperature": 0}, "tools": [LOOK]}
    called = client.messages.create(**ask, messages=HELLO, tool_choice={"type": "any"})
    assert called.stop_reason == "tool_use"
    use = next(block for block in called.content if block.type == "tool_use")
    assert use.name == "look"
    assert isinstance(use.input["far"], bool)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "a wall"}
    told = [*HELLO, {"role": "assistant", "content": called.content}]
    told.append({"role": "user", "content": [result]})
    assert client.messages.create(**ask, messages=told, tool_choice={"type": "none"}).id


def refused(kind: type[anthropic.APIStatusError], client: Anthropic, **ask: object) -> bool:
    try:
        client.messages.create(**ask)
    except kind as error:
        return bool(error.body["error"]["message"] and error.request_id)
    return False


def errors(client: Anthropic, model: str) -> None:
    assert refused(anthropic.BadRequestError, client, model=model, messages=[], max_tokens=1)
    assert refused(anthropic.NotFoundError, client, model="other", messages=HELLO, max_tokens=1)


if __name__ == "__main__":
    options = client_flags(names_model=False).parse_args()
    client = Anthropic(base_url=options.base_url, api_key=options.api_key)
    model = client.models.list().data[0].id
    for part in (texts, tools, errors):
        part(client, model)
    print(f"anthropic {anthropic.__version__}: messages, streams, tools, count_tokens, errors")
