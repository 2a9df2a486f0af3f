"""``TierAddress``: what ``--kv-tier`` says: which kind of tier, where, and its options."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from quire.errors import ConfigError

T = TypeVar("T")

_OPTION = "kv_tier"
_LONGEST = 4096  # characters
_UNITS_S = MappingProxyType({"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400})
_AGE = re.compile(r"([0-9]{1,9})([smhdw])")


@dataclass(frozen=True, slots=True)
class TierAddress:
    """One address, such as ``file:/var/cache/quire?size=50GiB&age=7d``."""

    kind: str  # a name in ``TIERS``: "file"
    url: SplitResult = field(repr=False)  # may hold a password
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> "TierAddress":
        """Read an address. Raises: ConfigError, which never shows what may be a password."""
        if len(text) > _LONGEST:
            raise ConfigError(f"{_OPTION} has {len(text):,} characters: at most {_LONGEST:,}")
        try:
            url = urlsplit(text)
            pairs = parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query))
            _ = url.port  # raises ValueError where it is no number
        except ValueError:  # whose words quote what was given
            raise ConfigError(
                f"{_OPTION}: an address is KIND:WHERE?OPTION=VALUE&OPTION=VALUE, with a number as "
                f"its port: write %2F, %3F, %23 and %40 for /, ?, # and @ in a password or a path"
            ) from None
        if not (text + unquote(url.path)).isprintable():  # line ends, which urlsplit takes out
            raise ConfigError(f"{_OPTION}: an address has a character that cannot be printed")
        if "#" in text:  # what is behind it would be left out
            raise ConfigError(f"{_OPTION}: an address has no #: write %23 for one in a path")
        if not url.scheme:
            raise ConfigError(
                f"{_OPTION} has no kind: an address is KIND:WHERE, such as file:/var/cache/quire, "
                f"with %20 for a space"
            )
        twice = {name for name, _ in pairs if sum(other == name for other, _ in pairs) > 1}
        if twice:
            raise ConfigError(f"{_OPTION}: {url.scheme}: {min(twice)} stands there twice")
        return cls(url.scheme, url, dict(pairs))

    def __str__(self) -> str:
        """Return the address without a password and options, for logs and labels."""
        host = self.url.hostname or ""
        port = f":{self.url.port}" if self.url.port else ""
        return f"{self.kind}:{'//' if host else ''}{host}{port}{self.url.path}"

    def require_known(self, *names: str) -> None:
        """Raise ConfigError if an option is none of these."""
        for name in self.options:
            if name not in names:
                known = ", ".join(names) or "none"
                raise ConfigError(f"{_OPTION}={self}: unknown option {name!r}; known: {known}")

    def option(self, name: str, parse: Callable[[str], T], default: T) -> T:
        """Return an option's value. Raises: ConfigError if it cannot be parsed."""
        if name not in self.options:
            return default
        try:
            return parse(self.options[name])
        except ValueError as error:
            raise ConfigError(f"{_OPTION}={self}: {name}={self.options[name]!r}: {error}") from None


def tier_names(addresses: Sequence[TierAddress]) -> list[str]:
    """Return what logs and metrics call each tier: ``memory``, ``file:/a``, ``file:/a (2)``."""
    names = list[str]()
    for at, address in enumerate(addresses):
        alike = sum(str(other) == str(address) for other in addresses[:at])
        names.append(str(address).removesuffix(":") + f" ({alike + 1})" * bool(alike))
    return names


def parse_age(text: str) -> float:
    """Return the seconds of ``90s``, ``30m``, ``12h``, ``7d`` or ``2w``. Raises: ValueError."""
    found = _AGE.fullmatch(text)
    if found is None or not int(found[1]):
        raise ValueError("an age is a number and s, m, h, d or w, such as 7d")
    return float(int(found[1]) * _UNITS_S[found[2]])
