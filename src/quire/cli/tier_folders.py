"""What the folders of ``--kv-tier`` hold, and whether an engine with these options would read it.

Records of other weights, options or releases lie in namespaces of their own. An engine passes them
over without a word, so ``quire doctor`` says which there are, and what differs.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.markup import escape

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.tiers import TierAddress, TierError
from quire.tiers.files import folder_of
from quire.tiers.fingerprint import Fingerprint
from quire.tiers.record_folder import NamespaceContents, namespaces_of
from quire.units import format_bytes, format_number_of

_KIND = "file"  # of tiers that lie in folders
_NO_DESCRIPTION = (
    "nothing says what it is: its namespace.json is missing, cannot be read, or is another's"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundNamespace:
    """Records that one kind of engine reads."""

    name: str  # 16 hex digits
    num_records: int
    num_bytes: int
    used_s: float | None  # when a record was last used, in seconds since 1970
    differences: tuple[str, ...]  # from this engine; none: it reads these records


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTier:
    """A tier that the options name."""

    address: str  # without passwords
    own: str | None  # the namespace that an engine with these options reads and writes
    why_not: str | None  # why there is none, or why the folder cannot be read
    namespaces: tuple[FoundNamespace, ...] | None = None  # None: it was not looked at

    @property
    def verdict(self) -> str:
        """Say in a sentence what an engine with these options finds there."""
        if self.why_not is not None:
            return self.why_not
        if self.namespaces is None:
            return f"not looked at; an engine with these options uses {self.own}"
        if any(each.name == self.own and each.num_records for each in self.namespaces):
            return f"an engine with these options reads {self.own}"
        if not any(each.num_records for each in self.namespaces):
            return f"no records yet; an engine with these options begins {self.own}"
        return (
            f"{format_number_of(len(self.namespaces), 'namespace')} of other engines, and none "
            f"that fits: an engine with these options begins {self.own}"
        )


def find_tiers(model: str | None, config: EngineConfig) -> tuple[FoundTier, ...]:
    """Look into the tiers of the options, and change nothing there.

    Weights are hashed if they have not been, which takes a second for each 1.5 GB.

    Raises: ModelNotLoadable, MemoryUnavailable.
    """
    if not config.tiers:
        return ()
    from quire.engine.kv_fingerprint import planned_fingerprint
    from quire.models.file_hashes import CannotName

    try:
        own, why_not = planned_fingerprint(model, config), None
    except (CannotName, ConfigError) as error:
        own, why_not = None, f"no tier can be used: {error}"
    return tuple(_found(address, own, why_not) for address in config.tiers)


def as_json(found: tuple[FoundTier, ...]) -> list[dict[str, Any]]:
    """Return what was found as JSON has it."""
    return [{**asdict(each), "verdict": each.verdict} for each in found]


def print_tiers(found: tuple[FoundTier, ...], console: Console) -> None:
    """Print each tier, its namespaces, and what differs in them."""
    for tier in found:
        console.print(
            f"[bold]KV tier[/] {escape(tier.address)}: {escape(tier.verdict)}", soft_wrap=True
        )
        for each in tier.namespaces or ():
            used = each.used_s and f", last used {datetime.fromtimestamp(each.used_s):%F %R}"
            console.print(
                f"  [cyan]{each.name}[/]  {format_number_of(each.num_records, 'record')}, "
                f"{format_bytes(each.num_bytes)}{used or ''}"
            )
            for line in each.differences:
                console.print(f"    {escape(line)}", soft_wrap=True)


def _found(address: TierAddress, own: Fingerprint | None, why_not: str | None) -> FoundTier:
    namespace = own and own.namespace
    if address.kind != _KIND:
        return FoundTier(address=str(address), own=namespace, why_not=why_not)
    several: list[FoundNamespace] = []
    try:
        path = folder_of(address)
    except ConfigError as error:
        return FoundTier(address=str(address), own=namespace, why_not=why_not or str(error))
    try:
        several += (_compared(each, own) for each in namespaces_of(path))
    except TierError as error:
        if not path.exists():
            why_not = why_not or f"there is no folder {path}: an engine makes it at its start"
        else:
            why_not = why_not or str(error)
    return FoundTier(
        address=str(address), own=namespace, why_not=why_not, namespaces=tuple(several)
    )


def _compared(contents: NamespaceContents, own: Fingerprint | None) -> FoundNamespace:
    return FoundNamespace(
        name=contents.name,
        num_records=contents.num_records,
        num_bytes=contents.num_bytes,
        used_s=contents.newest_s,
        differences=tuple(_differences(contents, own)),
    )


def _differences(contents: NamespaceContents, own: Fingerprint | None) -> Iterator[str]:
    if own is not None and contents.name == own.namespace:
        return
    if contents.fingerprint is None:
        yield _NO_DESCRIPTION
    elif own is not None:
        yield from own.difference(contents.fingerprint)
