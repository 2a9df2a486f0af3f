"""The bundled table of published models: what their config.json files state, and who was asked.

A name is found whatever its case, with or without its organisation. Nothing is looked up on a
network, and nothing in the table is a guess: each entry names the public place that it was read
from, and leaves out what that place does not say.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

_TABLE = "published.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One model of the table."""

    name: str  # as on the Hugging Face hub
    config: Mapping[str, Any]  # of its config.json, what sizes it
    source: str  # where that was read


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All of it, and when its sources were read."""

    read_on: str  # a date
    models: tuple[Published, ...]

    def find(self, name: str) -> Published | None:
        """By its name, or the part behind the organisation."""
        wanted = name.strip().lower()
        for model in self.models:
            if wanted in (model.name.lower(), _short(model.name)):
                return model
        return None

    def nearest(self, name: str) -> str | None:
        """The name that was probably meant."""
        known = {_short(model.name): model.name for model in self.models}
        near = get_close_matches(name.strip().lower().rpartition("/")[2], known, n=1)
        return known[near[0]] if near else None


def published_models() -> Table:
    """Read the table."""
    said = json.loads((files("quire.planner.subjects") / _TABLE).read_text(encoding="utf-8"))
    sources = said["sources"]
    return Table(
        read_on=said["read_on"],
        models=tuple(
            Published(
                name=name,
                config=entry["config"],
                source=sources.get(entry["source"], entry["source"]),
            )
            for name, entry in said["models"].items()
        ),
    )


def _short(name: str) -> str:
    return name.lower().rpartition("/")[2]
