"""The environment: what it says of options, and the few other variables that Quire looks at."""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from math import isfinite, nan
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from quire.config.option import nearest
from quire.errors import ConfigError

log = logging.getLogger(__name__)
Config = TypeVar("Config")

_SWITCHES: Mapping[str, bool] = MappingProxyType(
    {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentValue:
    """What a variable says."""

    variable: str
    value: Any


def read(
    config: type[Config],
    options: dict[str, Any],
    others: Callable[[set[str]], dict[str, EnvironmentValue]],
) -> Config:
    """A config from its options, as words or values; what is not there, the environment may say.

    ``others`` says what variables that are not called ``QUIRE_*`` say of options that are not among
    those it gets.

    Raises: ConfigError naming the option, or the variable.
    """
    known = {option.name: option for option in fields(config)}  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}{nearest(name, known)}")
    values = {name: _value(known[name], value) for name, value in options.items()}
    found: dict[str, EnvironmentValue] = {}
    for name, option in known.items():
        if name not in options:
            own = said(f"QUIRE_{name.upper()}", partial(_parse, option))
            if own is not None:
                found[name] = own
    found |= others({*options, *found})
    try:
        return config(**{name: each.value for name, each in found.items()}, **values)
    except ConfigError as error:
        for name, each in found.items():
            if re.match(rf"{name}\b", str(error)):
                raise _named(each.variable, error) from None
        raise


def said(variable: str, parse: Callable[[str], Any]) -> EnvironmentValue | None:
    """What a variable says; None if it is not set, or empty. Raises: ConfigError naming it."""
    text = os.environ.get(variable)
    if not text:
        return None
    if variable == "QUIRE_PORT" and text.startswith("tcp://"):
        # Kubernetes says so to every container beside a service that is called quire.
        log.info("QUIRE_PORT=%s is where a service of that name is, and no option", text)
        return None
    try:
        return EnvironmentValue(variable=variable, value=parse(text))
    except ConfigError as error:
        raise _named(variable, error) from None


def is_empty(variable: str) -> bool:
    """Whether a variable is set, to nothing."""
    return os.environ.get(variable) == ""


def number(text: str, kind: type[float]) -> float:
    """Raises: ConfigError for what is no finite number of that kind."""
    try:
        value = kind(text)
    except ValueError:
        value = nan
    if not isfinite(value):
        raise ConfigError(f"{text!r} is not a {'whole ' if kind is int else ''}number")
    return value


def kernel_dir() -> Path | None:
    """Where compiled kernels are kept, if the user has a place for caches of his own."""
    for name, inside in (("QUIRE_CACHE_DIR", "."), ("XDG_CACHE_HOME", "quire")):
        if os.environ.get(name):
            return Path(os.environ[name]) / inside
    return None


def wait_patiently() -> None:
    """Let idle OpenMP threads sleep instead of spinning, unless the user has said otherwise.

    A small model runs five to ten times slower where spinning threads and other work share the
    cores. It must be said before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def keep_few_shapes() -> None:
    """Let torch forget how it multiplied matrices of shapes that do not come again.

    It keeps 1,024 ways (oneDNN, and as many again in front of it), some of a megabyte. A server
    meets as many lengths of prompts, and grew by hundreds of megabytes that no ledger knew of. It
    must be said before torch is imported.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "32")


@contextmanager
def as_rank(rank: int, loopback: str) -> Iterator[None]:
    """While it lasts the environment says which of a machine's ranks this process is.

    Transformers looks there for the number of the device that it places weights on, and gloo for
    the network that it meets the others in: ``loopback``, unless the user has named another one.
    """
    said = {"LOCAL_RANK": str(rank)}
    said["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME") or loopback
    before = {name: os.environ.get(name) for name in said}
    os.environ.update(said)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def names_threads() -> bool:
    """Whether the user has said with how many threads each process computes."""
    return bool(os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"))


def _named(variable: str, error: ConfigError) -> ConfigError:
    return ConfigError(f"environment variable {variable}: {error}")


def _value(option: Any, value: Any) -> Any:
    """What an argument means; several words are a tuple of what each means."""
    parse = option.metadata.get("parse")
    if parse is None:
        return value
    try:
        if isinstance(value, list):
            return tuple(part for text in value for part in parse(text))
        return parse(value) if isinstance(value, str) else value
    except ConfigError as error:
        if re.match(rf"{option.name}\b", str(error)):
            raise
        raise ConfigError(f"{option.name}: {error}") from error


def _parse(option: Any, text: str) -> Any:
    """A value of an option's type. Raises: ConfigError."""
    kinds = get_args(option.type) or (option.type,)
    if "parse" in option.metadata:
        return option.metadata["parse"](text)
    if bool in kinds:
        if text.lower() not in _SWITCHES:
            raise ConfigError(f"{text!r} is neither of {', '.join(_SWITCHES)}")
        return _SWITCHES[text.lower()]
    for kind in (int, float):
        if kind in kinds:
            return number(text, kind)
    return text
