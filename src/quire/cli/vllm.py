"""Translate a command line of vLLM: a flag is renamed, ignored with a note, or refused.

No flag is dropped silently: the server logs each note when it starts.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, TypeAlias

import typer

from quire.cli.config_file import Entry, read_entries
from quire.cli.help_text import HelpfulCommand
from quire.cli.vllm_flags import DTYPE_WORDS, FOREIGN, STRATEGY_WORDS, Foreign
from quire.errors import ConfigError

NOTES, PLACES = "quire.notes", "quire.places"  # keys in a context's ``meta``
_SWITCHED: Mapping[str, bool] = MappingProxyType(
    {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
)
_GIB_NUMBER = re.compile(r"\d{1,4}(\.\d+)?")  # as vLLM writes sizes in GiB
_THOUSANDS = re.compile(r"(\d+(?:\.\d+)?)([kKmM])")

Rewrite: TypeAlias = Callable[[str, "Translation"], list[str]]


@dataclass(slots=True)
class Translation:
    """Arguments for Quire, and notes on what was changed in them."""

    given: frozenset[str] = frozenset()  # all flags of the line
    arguments: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, was: str, *now: str) -> list[str]:
        """Add a note that ``was`` is read as ``now``. Returns: the words of ``now``."""
        self.notes.append(f"{was} is read as {' '.join(now)}")
        return list(now)


def translate(
    arguments: list[str], own: Mapping[str, bool], beside: frozenset[str] = frozenset()
) -> Translation:
    """Translate arguments; ``own`` has Quire's flags and whether each takes a value.

    ``beside`` are further flags that are set elsewhere, as in a file of options.

    Raises: ConfigError for an unknown flag, and for one that Quire cannot honour.
    """
    split = list(_split(arguments, own))
    done = Translation(given=beside.union(flag for flag, _, _ in split if flag))
    for flag, value, words in split:
        if flag in REWRITES and value is not None:
            done.arguments += REWRITES[flag](value, done)
        elif flag in _BY_FLAG:
            done.notes.append(_said(_BY_FLAG[flag], flag, value))
        else:
            done.arguments += words
    return done


def _split(
    arguments: list[str], own: Mapping[str, bool]
) -> Iterator[tuple[str, str | None, list[str]]]:
    """Yield each flag, its value, and both as Quire spells them; other words have no flag."""
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word == "--":
            yield "", None, [word, *left]
            return
        if not word.startswith("-") or len(word) == 1 or (word in own and not own[word]):
            yield "", None, [word]
            continue
        flag, equals, value = word.partition("=")
        if re.fullmatch(r"-O\d", flag):
            flag, equals, value = "-O", "=", flag[2:]
        flag = flag if flag in own else _known(flag, own)
        takes = _takes_value(flag, own)
        if equals:
            yield flag, value, [f"{flag}={value}"]
        elif takes:
            if not left:
                yield "", None, [flag]  # the parser reports the missing value
                return
            value = left.pop(0)
            yield flag, value, [flag, value]
        else:  # a switch of vLLM, which older versions wrote with a value
            foreign = flag in _BY_FLAG and left and left[0].lower() in ("true", "false")
            value = left.pop(0).lower() if foreign else "true"
            yield flag, value, [flag]


def _known(flag: str, own: Mapping[str, bool]) -> str:
    """Return a flag as Quire spells it. Raises: ConfigError with the nearest name."""
    dashed = "--" + flag[2:].replace("_", "-") if flag.startswith("--") else flag
    known = {*own, *REWRITES, *_BY_FLAG}
    if dashed in known:
        return dashed
    near = get_close_matches(dashed, sorted(known), n=1)
    raise ConfigError(f"No such option: {flag}" + (f". Did you mean {near[0]}?" if near else ""))


def _said(row: Foreign, flag: str, value: str | None) -> str:
    """Return a note on a flag that has no effect. Raises: ConfigError if it would need one."""
    if row.switch:
        is_on = (value != "false") != flag.startswith("--no-")
        value, shown = ("on" if is_on else "off"), flag
    else:
        shown = f"{flag} {value}"
    if row.harmless is not None and value not in row.harmless:
        if row.harmless and not row.switch:
            others = " or ".join(row.harmless)
            raise ConfigError(f"{shown} is not supported: {row.here} (accepted values: {others})")
        raise ConfigError(f"{shown} is not supported: {row.here}")
    return f"{shown} has no effect: {row.here}"


def _utilization(value: str, done: Translation) -> list[str]:
    """Choose vLLM's rule for its flag; a size in bytes overrides any rule, as in vLLM."""
    rule = () if "--budget" in done.given else ("--budget", "vllm")
    return done.note(f"--gpu-memory-utilization {value}", *rule, "--memory-utilization", value)


def _swap_space(value: str, done: Translation) -> list[str]:
    if not _GIB_NUMBER.fullmatch(value):
        return ["--swap-space", value]
    return done.note(f"--swap-space {value}", "--swap-space", f"{value}GiB")


def _offloading(value: str, done: Translation) -> list[str]:
    if not _GIB_NUMBER.fullmatch(value):
        return ["--kv-offloading-size", value]
    return done.note(f"--kv-offloading-size {value}", "--kv-offloading-size", f"{value}GiB")


def _tokens(flag: str) -> Rewrite:
    """Read numbers that end in k (1000) or K (1024), as vLLM does."""

    def rewrite(value: str, done: Translation) -> list[str]:
        if flag == "--max-model-len" and value in ("auto", "-1"):
            done.notes.append(f"{flag} {value}: the model's own length, which must fit")
            return []
        match = _THOUSANDS.fullmatch(value)
        if match is None:
            return [flag, value]
        base = 1000 if match[2].islower() else 1024
        number = int(float(match[1]) * base ** (1 if match[2] in "kK" else 2))
        return done.note(f"{flag} {value}", flag, str(number))

    return rewrite


def _words(flag: str, here: str, words: Mapping[str, str]) -> Rewrite:
    """Rename a flag and its values."""

    def rewrite(value: str, done: Translation) -> list[str]:
        now = words.get(value, value)
        if (flag, now) == (here, value):
            return [flag, value]
        return done.note(f"{flag} {value}", here, now)

    return rewrite


# Flags that are rewritten. Each of them takes a value, except the switches.
SWITCHES = frozenset({"--disable-uvicorn-access-log"})
REWRITES: Mapping[str, Rewrite] = MappingProxyType(
    {
        "--model": lambda value, _: [value],
        "--gpu-memory-utilization": _utilization,
        "--device-memory-utilization": _utilization,
        "--swap-space": _swap_space,
        "--kv-offloading-size": _offloading,
        "--kv-strategy": _words("--kv-strategy", "--cache", STRATEGY_WORDS),
        "--memory": _words("--memory", "--kv-cache-memory-bytes", {}),
        "--dtype": _words("--dtype", "--dtype", DTYPE_WORDS),
        "-q": _words("-q", "--quantization", {}),
        "-tp": _words("-tp", "--tensor-parallel-size", {}),
        "--max-model-len": _tokens("--max-model-len"),
        "--max-num-batched-tokens": _tokens("--max-num-batched-tokens"),
        "--disable-uvicorn-access-log": lambda _, done: done.note(
            "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"
        ),
    }
)

_BY_FLAG: Mapping[str, Foreign] = MappingProxyType(
    {
        name: row
        for row in FOREIGN
        for name in (
            row.flag,
            *row.short,
            *(("--no-" + row.flag.removeprefix("--"),) if row.switch else ()),
        )
    }
)


class VllmCommand(HelpfulCommand):
    """A command that also takes vLLM's flags, and a file of options.

    The context's ``meta`` has the notes, and the place of each option in the file.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate the line and the file that it names, and parse the result."""
        parameters = {
            name: parameter
            for parameter in self.get_params(ctx)
            for name in (*parameter.opts, *parameter.secondary_opts)
            if name.startswith("-")
        }
        own = {name: not getattr(each, "is_flag", False) for name, each in parameters.items()}
        try:
            done = translate(args, own)
            said = list(_split(done.arguments, own))
            given = {parameters[flag].name for flag, _, _ in said if flag in parameters}
            given |= {parameters[word].name for _, _, [word, *_] in said if word in parameters}
            if any(not flag and not words[0].startswith("-") for flag, _, words in said):
                given.add("model")
            file = next((value for flag, value, _ in said if flag == "--config"), None)
            filed = Filed() if file is None else _filed(ctx, file, parameters, own, given)
        except ConfigError as error:
            ctx.fail(str(error))
        ctx.meta[NOTES] = (*filed.notes, *done.notes)
        ctx.meta[PLACES] = filed.places
        parsed: list[str] = super().parse_args(ctx, filed.arguments + done.arguments)
        return parsed

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises: ConfigError, with its place for an option of the file."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            for name, place in ctx.meta[PLACES].items():
                if re.match(rf"(--)?{re.sub('[_-]', '[_-]', name)}\b", str(error)):
                    raise ConfigError(f"{place}: {error}") from error
            raise


@dataclass(slots=True)
class Filed:
    """What a file of options adds to the command line."""

    arguments: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)  # option → file and line


def _filed(
    ctx: Any, file: str, parameters: Mapping[str, Any], own: Mapping[str, bool], given: set[str]
) -> Filed:
    """Return a file's options, without those in ``given``. Raises: ConfigError."""
    filed, entries = Filed(), read_entries(file)
    together = frozenset(entry.flag for entry in entries)
    for entry in entries:
        try:
            done = translate(_spelled(entry, parameters, own), own, together)
            for flag, value, words in _split(done.arguments, own):
                parameter = parameters.get(flag or words[0])
                name = "model" if parameter is None else parameter.name
                if name in given:
                    continue
                if parameter is not None and flag:
                    parameter.process_value(ctx, [value] if parameter.multiple else value)
                filed.arguments += words
                filed.places[name] = entry.place
        except typer.BadParameter as error:
            raise entry.wrong(f"{entry.value!r}: {error.message}") from error
        except ConfigError as error:
            raise entry.wrong(str(error)) from error
        filed.notes += [f"{entry.place}: {note}" for note in done.notes]
    return filed


def _spelled(entry: Entry, parameters: Mapping[str, Any], own: Mapping[str, bool]) -> list[str]:
    """Return an entry as words of a command line. Raises: ConfigError."""
    if entry.flag == "--config":
        raise ConfigError("a file cannot name another one")
    flag = "--model" if entry.flag == "--model" else _known(entry.flag, own)
    values = entry.value if isinstance(entry.value, list) else [entry.value]
    parameter = parameters.get(flag)
    if not all(values):
        raise ConfigError("it has no value")
    if flag == "--model" and values[0].startswith("-"):
        raise ConfigError(f"{values[0]!r} is neither a folder nor a name")
    if not _takes_value(flag, own):
        turned = _SWITCHED.get(values[0].lower()) if entry.value == values[0] else None
        if turned is None:
            raise ConfigError(f"{entry.value!r} is neither true nor false")
        return [flag] if turned else _turned_off(flag, parameter)
    if flag in own and isinstance(entry.value, list) and not getattr(parameter, "multiple", False):
        raise ConfigError("it takes one value, not a list")
    if flag not in own and flag not in REWRITES and isinstance(entry.value, list):
        return [flag, json.dumps(values)]  # vLLM's form of a list on a command line
    return [word for value in values for word in (flag, value)]


def _takes_value(flag: str, own: Mapping[str, bool]) -> bool:
    if flag in own or flag in REWRITES:
        return own.get(flag, flag not in SWITCHES)
    return not _BY_FLAG[flag].switch


def _turned_off(flag: str, parameter: Any) -> list[str]:
    """Return the words for a switch that a file sets to false. Raises: ConfigError if none do."""
    if parameter is None:
        return [] if flag in SWITCHES else [flag, "false"]
    others = parameter.secondary_opts if flag in parameter.opts else parameter.opts
    if not others:
        raise ConfigError("it cannot be false: leave it out")
    return [others[0]]


def notes_of(context: typer.Context) -> tuple[str, ...]:
    """Return the notes on a translated command line."""
    notes: tuple[str, ...] = context.meta.get(NOTES, ())
    return notes
