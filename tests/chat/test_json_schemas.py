"""Schemas that are closed, and schemas that are moved: what they exclude, and nothing else."""

import json
from typing import Any

import pytest

from engine.test_structured import taken_of
from quire import StructuredOutputsParams
from quire.chat.tools.declared import checked_tools
from quire.chat.tools.tool_choice import ToolChoice, arguments_schema, closed, forced_form, moved
from quire.errors import RequestError
from quire.server.request_params import sampling_params
from quire.server.schemas.request_fields import JsonSchema, ResponseFormat, Sampling

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
CLOSED_POINT = {**POINT, "additionalProperties": False}
OPEN = {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": True}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        (POINT, CLOSED_POINT),
        (OPEN, OPEN),
        ({"type": "object"}, {"type": "object"}),  # it names none: any may come
        ({"type": "array", "items": POINT}, {"type": "array", "items": CLOSED_POINT}),
        ({"prefixItems": [POINT]}, {"prefixItems": [CLOSED_POINT]}),
        ({"anyOf": [POINT, {"type": "null"}]}, {"anyOf": [CLOSED_POINT, {"type": "null"}]}),
        ({"$defs": {"p": POINT}, "$ref": "#/$defs/p"},
         {"$defs": {"p": CLOSED_POINT}, "$ref": "#/$defs/p"}),
        ({"additionalProperties": POINT}, {"additionalProperties": CLOSED_POINT}),
        ({"allOf": [{"$ref": "#/$defs/p"}]}, {"allOf": [{"$ref": "#/$defs/p"}]}),
        # More of the same object: closed, it would exclude what the outer one names.
        ({**POINT, "anyOf": [{"properties": {"y": {}}}]},
         {**POINT, "anyOf": [{"properties": {"y": {}}}]}),
        # Values, and names of properties, are no schemas, whatever they look like.
        ({"enum": [POINT], "const": POINT, "default": POINT},
         {"enum": [POINT], "const": POINT, "default": POINT}),
        ({"properties": {"properties": {"type": "string"}, "enum": POINT}},
         {"properties": {"properties": {"type": "string"}, "enum": CLOSED_POINT},
          "additionalProperties": False}),
        (True, True),
    ],
)  # fmt: skip
def test_each_object_is_closed_that_does_not_say_more(schema: Any, found: Any) -> None:
    before = json.dumps(schema)
    assert closed(schema) == found
    assert json.dumps(schema) == before


def test_what_cannot_be_closed_is_refused() -> None:
    with pytest.raises(RequestError, match="allOf of several"):
        closed({"items": {"allOf": [POINT, {"properties": {"y": {}}}]}})
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="too deep"):
        closed(deep)


def test_a_grammar_of_a_strict_schema_takes_no_others() -> None:
    nested = {"type": "object", "properties": {"p": POINT}, "required": ["p"]}
    text, more = '{"p": {"x": 1}}', '{"p": {"x": 1, "y": 2}}'

    def form(strict: bool) -> StructuredOutputsParams:
        asked = Sampling(
            response_format=ResponseFormat(
                type="json_schema", json_schema=JsonSchema(schema=nested, strict=strict)
            )
        )
        params = sampling_params(asked, defaults={}, max_tokens=9, logprobs=None, max_logprobs=0)
        assert params.structured_outputs is not None
        return params.structured_outputs

    assert taken_of(form(True), text) == taken_of(form(False), text) == (True, True)
    assert taken_of(form(False), more) == (True, True)
    assert taken_of(form(True), more)[0] is False


@pytest.mark.parametrize("strict", [True, False, None])
def test_strict_tools_are_closed_within(strict: bool | None) -> None:
    parameters = {"type": "object", "properties": {"p": POINT}, "required": ["p"]}
    function = {"name": "f", "parameters": parameters, "strict": strict}
    tools = checked_tools([{"type": "function", "function": function}])
    for kind, around in (("named", "%s"), ("required", '[{"name":"f","parameters":%s}]')):
        choice = ToolChoice(kind=kind, name="f" if kind == "named" else "")  # type: ignore[arg-type]
        form = forced_form(choice, tools, parallel=True)
        assert form is not None
        assert taken_of(form, around % '{"p":{"x":1}}') == (True, True)
        assert taken_of(form, around % '{"p":{"x":1},"q":1}')[0] is False
        assert taken_of(form, around % '{"p":{"x":1,"y":2}}')[0] is not strict


def test_strict_is_a_boolean() -> None:
    with pytest.raises(RequestError, match=r"tools\[0\]: strict='yes' must be"):
        checked_tools([{"type": "function", "function": {"name": "f", "strict": "yes"}}])


def test_references_move_and_values_do_not() -> None:
    schema = {
        "properties": {
            "$ref": {"$ref": "#/$defs/a"},
            "default": {"$ref": "#"},
            "b": {"enum": [{"$ref": "#/x"}], "default": {"$ref": "#/x"}},
        },
        "components": {"a": {"anyOf": [{"$ref": "#/components/b"}, {"$ref": "http://x"}]}},
    }
    assert moved(schema, "#/$defs/f") == {
        "properties": {
            "$ref": {"$ref": "#/$defs/f/$defs/a"},
            "default": {"$ref": "#/$defs/f"},
            "b": {"enum": [{"$ref": "#/x"}], "default": {"$ref": "#/x"}},
        },
        "components": {"a": {"anyOf": [{"$ref": "#/$defs/f/components/b"}, {"$ref": "http://x"}]}},
    }
    assert arguments_schema({}, strict=True) == {"type": "object"}
