"""Read the environment: the options that it sets, and a few other variables."""

import logging
import os
import re
import secrets
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
    """A variable and its parsed value."""

    variable: str
    value: Any


def read(
    config: type[Config],
    options: dict[str, Any],
    others: Callable[[set[str]], dict[str, EnvironmentValue]],
) -> Config:
    """Make a config from options, given as text or values, and from the environment.

    ``others`` gets the names that are set, and returns values for more options from variables with
    other names than ``QUIRE_*``.

    Raises: ConfigError with the option, or the variable.
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
    """Parse a variable; None if it is unset or empty. Raises: ConfigError with its name."""
    text = os.environ.get(variable)
    if not text:
        return None
    if variable == "QUIRE_PORT" and text.startswith("tcp://"):
        # Kubernetes sets it in every container next to a service with the name quire.
        log.info("QUIRE_PORT=%s is the address of a service and is ignored", text)
        return None
    try:
        return EnvironmentValue(variable=variable, value=parse(text))
    except ConfigError as error:
        raise _named(variable, error) from None


def is_empty(variable: str) -> bool:
    """Return whether a variable is set and empty."""
    return os.environ.get(variable) == ""


def number(text: str, kind: type[float]) -> float:
    """Parse a finite number of a kind. Raises: ConfigError."""
    try:
        value = kind(text)
    except ValueError:
        value = nan
    if not isfinite(value):
        raise ConfigError(f"{text!r} is not a {'whole ' if kind is int else ''}number")
    return value


def switch(text: str) -> bool:
    """Parse what is on or off. Raises: ConfigError."""
    if text.lower() not in _SWITCHES:
        raise ConfigError(f"{text!r} is neither of {', '.join(_SWITCHES)}")
    return _SWITCHES[text.lower()]


def kernel_dir() -> Path | None:
    """Return the folder that QUIRE_CACHE_DIR or XDG_CACHE_HOME names, for what starts keep.

    These are compiled kernels and hashes of weights.
    """
    for name, inside in (("QUIRE_CACHE_DIR", "."), ("XDG_CACHE_HOME", "quire")):
        if os.environ.get(name):
            return Path(os.environ[name]) / inside
    return None


def sets_allocator() -> bool:
    """Tell whether the environment sets what the C allocator keeps of freed memory (glibc)."""
    own = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    return bool(own) or "_threshold" in os.environ.get("GLIBC_TUNABLES", "")


def wait_patiently() -> None:
    """Let idle OpenMP threads sleep instead of spin, unless OMP_WAIT_POLICY is set.

    A small model runs five to ten times slower when spinning threads share the cores with other
    work. Call it before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def keep_few_shapes() -> None:
    """Keep torch's caches of matrix products small.

    By default they keep 1,024 shapes each (oneDNN's, and one in front of it), some of a megabyte. A
    server meets as many lengths of prompts, and grew by hundreds of megabytes outside its budget.
    Call it before torch is imported.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "32")


@contextmanager
def as_rank(rank: int, loopback: str) -> Iterator[None]:
    """Set this process's rank in the environment, inside the ``with`` block.

    Transformers reads there the number of the device for its weights, and gloo the network
    interface to the other ranks: ``loopback``, unless GLOO_SOCKET_IFNAME names another one.
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
    """Return whether OMP_NUM_THREADS or MKL_NUM_THREADS is set."""
    return bool(os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"))


def ray_address() -> str | None:
    """Return the address of a Ray cluster that runs (RAY_ADDRESS); None: there is none to join."""
    return os.environ.get("RAY_ADDRESS") or None


def prepare_own_ray() -> None:
    """Set what a Ray that this process starts is to do, unless the environment says otherwise.

    Ray's processes listen on every interface, so they ask for a token that is drawn here. No
    statistics of use leave the machine, and Serve's own lines stay in its log files. Call it before
    Ray is imported.
    """
    if not os.environ.get("RAY_AUTH_MODE"):
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")


def _named(variable: str, error: ConfigError) -> ConfigError:
    return ConfigError(f"environment variable {variable}: {error}")


def _value(option: Any, value: Any) -> Any:
    """Parse an argument; a list of texts becomes a tuple. Raises: ConfigError."""
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
    """Parse a text as an option's type. Raises: ConfigError."""
    kinds = get_args(option.type) or (option.type,)
    if "parse" in option.metadata:
        return option.metadata["parse"](text)
    if bool in kinds:
        return switch(text)
    for kind in (int, float):
        if kind in kinds:
            return number(text, kind)
    return text
