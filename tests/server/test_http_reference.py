"""docs/reference/http.md has every path that the server has, and every field of each."""

import re
from pathlib import Path

import pytest

from quire.server.dashboard.page_routes import FILES
from quire.server.routes import Operation
from quire.server.schemas.request_fields import GenerationRequest
from server.asking import run, serving

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
NAME = re.compile(r"`([a-z_0-9]+(?:\[\])?)`")


def fields(heading: str) -> set[str]:
    """In the first column of the table below a heading."""
    section = PAGE.split(f"\n{heading}\n")[1].split("\n#")[0]
    rows = [line.split(" | ")[0] for line in section.split("\n") if line.startswith("| `")]
    return {name for row in rows for name in NAME.findall(row)}


@pytest.fixture(scope="module")
def operations() -> list[Operation]:
    async def ask() -> list[Operation]:
        async with serving() as client:
            return [route.endpoint.operation for route in client.app.routes]

    return run(ask())


def test_paths_are_those_of_the_server(operations: list[Operation]) -> None:
    section = PAGE.split("\n## Paths\n")[1].split("\n#")[0]
    said = re.findall(r"`((?:GET|POST|DELETE) \S+)`", section)
    there = [
        f"{method} {each.path.replace(':path}', '}')}"
        for each in operations
        for method in each.methods
        if each.path not in FILES
    ]
    assert sorted(said) == sorted(there)


def test_fields_are_those_of_the_structs(operations: list[Operation]) -> None:
    assert fields("## Fields of all that generate") == set(
        GenerationRequest.__struct_encode_fields__
    )
    for each in operations:
        if each.takes is None or "{" in each.path:
            continue
        own = set(each.takes.__struct_encode_fields__)
        if issubclass(each.takes, GenerationRequest):
            own -= set(GenerationRequest.__struct_encode_fields__)
            own |= set(each.takes.__annotations__)  # a field that it has in its own way
        # A request to be rendered has its sibling's fields.
        assert fields(f"### `POST {each.path.removesuffix('/render')}`") == own, each.path
