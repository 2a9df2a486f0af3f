"""/openapi.json: it is OpenAPI, and every route is in it, with all that it takes and gives."""

from typing import Any

import pytest
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from quire.config import ServerConfig
from quire.server.dashboard.page_routes import FILES
from quire.server.openapi import document as make_document
from quire.server.schemas.completion_request import Completion, CompletionRequest
from server.asking import Client, run, serving

NOTHING = {"/health", "/ping", "/reset_prefix_cache", "/sleep", "/wake_up"}  # is what they give
OPEN = {"/health", "/ping"} | set(FILES)


def described(config: ServerConfig | None = None, key: str | None = None) -> dict[str, Any]:
    async def ask() -> Any:
        async with serving(config) as client:
            answer = await client.with_key(key).get("/openapi.json")
            assert answer.status == 200
            assert answer.headers["content-type"] == "application/json"
            assert _routes(client) == set(answer.json["paths"])
            return answer.json

    document: dict[str, Any] = run(ask())
    return document


def _routes(client: Client) -> set[str]:
    return {route.path.replace(":path}", "}") for route in client.app.routes}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return described()


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path, method, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]


def test_it_names_its_server_behind_a_proxy(document: dict[str, Any]) -> None:
    assert document["servers"] == [{"url": "/"}]
    behind = make_document([], needs_key=lambda _: False, root_path="/llm")
    assert behind["servers"] == [{"url": "/llm"}]


def test_it_is_openapi_3_1(document: dict[str, Any]) -> None:
    errors = [
        f"{list(error.instance_path)}: {error.message}"
        for error in OPENAPI_31_VALIDATOR.iter_errors(document)
    ]
    assert not errors


def test_all_that_it_refers_to_is_there_and_nothing_else(document: dict[str, Any]) -> None:
    named = set(_references(document))
    there = {
        f"#/components/{kind}/{name}"
        for kind in ("schemas", "headers")
        for name in document["components"][kind]
    }
    assert named == there


def _references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [found for each in value for found in _references(each)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return own + [found for each in value.values() for found in _references(each)]


def test_every_operation_says_what_it_gives_and_has_a_name(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(names) == len(set(names))
    for path, _, operation in operations(document):
        assert operation["summary"].endswith("."), f"{path}: its endpoint has no docstring"
        assert ("content" in operation["responses"]["200"]) == (path not in NOTHING), path


def test_errors_are_those_of_its_kind(document: dict[str, Any]) -> None:
    for path, _, operation in operations(document):
        refused = set(operation["responses"]) - {"200"}
        assert ("401" in refused) == (path not in OPEN), path
        assert ({"400", "413"} <= refused) == ("requestBody" in operation), path
        for status in refused:
            answer = operation["responses"][status]
            assert answer["content"]["application/json"]["schema"]["$ref"].endswith("ErrorAnswer")
            assert ("retry-after" in answer["headers"]) == (status in ("429", "503"))


def test_a_stream_is_events_whose_data_is_described(document: dict[str, Any]) -> None:
    answer = document["paths"]["/v1/completions"]["post"]["responses"]["200"]
    event = answer["content"]["text/event-stream"]["schema"]
    kinds = event["properties"]["data"]["anyOf"][1]["contentSchema"]["anyOf"]
    assert [kind["$ref"].split("/")[-1] for kind in kinds] == ["Completion", "ErrorAnswer"]


def test_fields_are_those_of_the_structs(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert list(schemas["CompletionRequest"]["properties"]) == [
        *CompletionRequest.__struct_encode_fields__
    ]
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert set(schemas["Completion"]["properties"]) == set(Completion.__struct_encode_fields__)
    # Whatever is always sent is required; the usage is in some chunks only.
    assert set(schemas["Completion"]["required"]) == {"id", "object", "created", "model", "choices"}


def test_a_body_with_a_file_is_a_form(document: dict[str, Any]) -> None:
    for path, _, operation in operations(document):
        kinds = list(operation.get("requestBody", {}).get("content", {}))
        is_form = path.startswith("/v1/audio/")
        assert kinds in ([], ["multipart/form-data" if is_form else "application/json"]), path
        assert ("501" in operation["responses"]) == is_form, path
    file = document["components"]["schemas"]["TranscriptionRequest"]["properties"]["file"]
    assert file == {"type": "string", "contentEncoding": "binary"}


def test_a_key_is_asked_for_where_one_is_needed() -> None:
    document = described(ServerConfig(api_key=("one",)), key="one")
    ways = [{"bearer": []}, {"x-api-key": []}]
    for path, _, operation in operations(document):
        assert operation.get("security") == (None if path in OPEN else ways)


def test_without_keys_none_is_needed(document: dict[str, Any]) -> None:
    for path, _, operation in operations(document):
        assert path in OPEN or {} in operation["security"]
