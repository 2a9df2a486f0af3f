"""What Anthropic and the Responses interface call messages, as the plain ones."""

from typing import Any

import pytest

from chat.families import CHATML, tokenizer
from quire.chat.api_inputs import from_anthropic, from_responses
from quire.chat.conversation import Chat
from quire.chat.templates import checked_messages
from quire.errors import RequestError


def call(identity: str, name: str, arguments: Any) -> dict[str, Any]:
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def test_a_conversation_of_anthropics() -> None:
    found = from_anthropic(
        **{
            "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
            "messages": [
                {"role": "user", "content": "Weather?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"at": "Ulm"}},
                        {"type": "tool_use", "id": "t2", "name": "time", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "sun"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "t2",
                            "content": [{"type": "text", "text": "noon"}],
                        },
                        {"type": "text", "text": "Well?"},
                    ],
                },
            ],
            "tools": [{"name": "weather", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        }
    )
    assert found.messages == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [call("t1", "weather", {"at": "Ulm"}), call("t2", "time", {})],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sun", "name": "weather"},
        {"role": "tool", "tool_call_id": "t2", "content": "noon", "name": "time"},
        {"role": "user", "content": "Well?"},
    ]
    assert found.tools == [
        {
            "type": "function",
            "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}},
        }
    ]
    assert (found.tool_choice, found.parallel_tool_calls) == ("required", False)
    assert found.add_generation_prompt
    assert not found.continue_final_message
    assert "<tool_response>\nsun\n" in Chat(tokenizer(CHATML)).prompt(found).text


def test_an_assistants_message_at_the_end_is_continued() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It"}]
    found = from_anthropic(messages)
    assert found.continue_final_message
    assert Chat(tokenizer(CHATML)).prompt(found).text.endswith("assistant\nIt")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, None),
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_choices_of_anthropics(given: Any, found: Any) -> None:
    messages = [{"role": "user", "content": "a"}]
    assert from_anthropic(messages, tool_choice=given).tool_choice == found


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "the role 'tool' must be"),
        ({"messages": [{"role": "user", "content": 3}]}, "a string or a list of blocks"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            r"'document': only text is read here",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "no tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]},
            "an id and a name",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "bash_2"}]}, "tools"),
        ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "auto"}, "tool_choice"),
    ],
)
def test_what_anthropics_messages_cannot_be(body: dict[str, Any], message: str) -> None:
    messages, others = body["messages"], {k: v for k, v in body.items() if k != "messages"}
    with pytest.raises(RequestError, match=message):
        from_anthropic(messages, **others)


def test_images_stay_as_they_are_for_the_template() -> None:
    """It reads the forms of all three interfaces; without images content is text, as always."""
    image = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    text = {"type": "text", "text": "What is this?"}
    found = from_anthropic([{"role": "user", "content": [image, text]}]).messages
    assert found == [{"role": "user", "content": [image, text]}]
    part = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    assert from_responses([{"role": "user", "content": [part]}]).messages == [
        {"role": "user", "content": [part]}
    ]
    images: list[Any] = []
    content = [image, part, text, {"type": "image_url", "image_url": {"url": "x"}}]
    [message] = checked_messages([{"role": "user", "content": content}], images)
    assert images == ["https://a.example/b.png", "data:image/png;base64,AAAA", "x"]
    assert [each["type"] for each in message["content"]] == ["image", "image", "text", "image"]
    with pytest.raises(RequestError, match="'image': only text is read here"):
        checked_messages([{"role": "user", "content": [image]}])  # for a model that sees none


def test_instructions_come_first() -> None:
    found = from_responses([{"role": "user", "content": "Hello"}], instructions="Be brief.")
    assert found.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]


def test_a_conversation_of_items() -> None:
    found = from_responses(
        **{
            "items": [
                {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "I look."}],
                },
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "sun"},
                {
                    "type": "function_call_output",
                    "call_id": "c2",
                    "output": [{"type": "input_text", "text": "noon"}],
                },
                {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "tool_choice": {"type": "function", "name": "f"},
            "parallel_tool_calls": False,
        }
    )
    assert found.messages == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [call("c1", "f", '{"a": 1}'), call("c2", "g", "{}")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sun", "name": "f"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon", "name": "g"},
        {"role": "assistant", "content": "", "tool_calls": [call("c3", "f", "{}")]},
    ]
    assert not found.parallel_tool_calls
    prompt = Chat(tokenizer(CHATML)).prompt(found)
    assert prompt.choice.name == "f"
    assert checked_messages(found.messages)[1]["tool_calls"][0] == call("c1", "f", {"a": 1})


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"type": "item_reference", "id": "x"}], "'item_reference' is not supported"),
        ([{"role": "user"}], "no content"),
        ([{"role": "user", "content": [{"type": "input_file"}]}], "text is read"),
        ([{"type": "function_call"}], "a call_id and a name"),
        ([{"type": "function_call_output"}], "no call_id"),
    ],
)
def test_what_items_cannot_be(items: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        from_responses(items)
