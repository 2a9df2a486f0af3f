"""Read a YAML file of options, as vLLM's ``--config`` names one: long option names and values.

The file is one mapping of names to scalars or to lists of scalars. It is parsed event by event, and
tags, aliases and nesting are refused, so that a hostile file costs no more than its length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError

_MOST_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An option that a file sets."""

    key: str
    value: str | list[str]
    place: str  # file and line, for error messages

    @property
    def flag(self) -> str:
        """Return the option as a flag of the command line."""
        return "--" + self.key.lstrip("-").replace("_", "-")

    def wrong(self, message: str) -> ConfigError:
        """Return an error that says where the file sets this option."""
        return ConfigError(f"{self.place}: {self.key}: {message}")


def read_entries(path: str) -> list[Entry]:
    """Read all options of a file. Raises: ConfigError, with the file and the line."""
    try:
        with Path(path).expanduser().open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        text = raw.decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--config {path} cannot be read: {reason or error}") from error
    if len(raw) > _MOST_BYTES:
        raise ConfigError(f"--config {path} is longer than {_MOST_BYTES:,} bytes")
    found: dict[str, Entry] = {}
    for entry in _entries(path, text):
        if entry.flag in found:
            raise entry.wrong(f"it is set twice; the first time at {found[entry.flag].place}")
        found[entry.flag] = entry
    return list(found.values())


def _entries(path: str, text: str) -> Iterator[Entry]:
    """Yield each option as soon as it is complete. Raises: ConfigError."""
    import yaml

    frame = (
        *(yaml.StreamStartEvent, yaml.StreamEndEvent),
        *(yaml.DocumentStartEvent, yaml.DocumentEndEvent),
    )
    key: str | None = None
    items: list[str] | None = None
    place, place_of_key, opened = f"--config {path}", "", 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            place = f"{path}, line {event.start_mark.line + 1}"
            if getattr(event, "tag", None) is not None:
                raise ConfigError(f"{place}: {event.tag[:80]!r}: tags are not allowed here")
            if isinstance(event, yaml.MappingStartEvent) and not opened:
                opened = 1
            elif isinstance(event, yaml.MappingEndEvent):
                opened = 2  # anything that follows is an error
            elif isinstance(event, yaml.SequenceStartEvent) and key is not None and items is None:
                items = []
            elif isinstance(event, yaml.SequenceEndEvent) and key is not None:
                yield Entry(key=key, value=items or [], place=place_of_key)
                key, items = None, None
            elif isinstance(event, yaml.ScalarEvent) and opened == 1:
                if items is not None:
                    items.append(event.value)
                elif key is None:
                    key, place_of_key = event.value, place
                else:
                    yield Entry(key=key, value=event.value, place=place_of_key)
                    key = None
            elif not isinstance(event, frame):
                raise ConfigError(
                    f"{place}: {f'{key}: ' if key else ''}only names of options are allowed here, "
                    "each with a text, a number or a list of these; put JSON in quotes"
                )
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        where = place if mark is None else f"{path}, line {mark.line + 1}"
        raise ConfigError(f"{where} is not YAML: {str(error).splitlines()[0]}") from error
