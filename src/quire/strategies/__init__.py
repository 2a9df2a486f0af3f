"""The four strategies: each an accounting (who holds which tokens) and a storage (where bytes lie).

``build`` makes the pair by name. Importing this room imports no torch; building a storage does.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from quire.blocks import (
    Change,
    Commit,
    Copy,
    Fits,
    Image,
    Map,
    Never,
    NotNow,
    PrefixHit,
    PrefixKeys,
    Release,
    TokenIds,
    Unmap,
    Verdict,
)
from quire.errors import ConfigError
from quire.memory import MemoryProvider
from quire.spec import Group, ModelSpec
from quire.strategies.base import (
    Accounting,
    CacheConfig,
    Growth,
    Storage,
    Usage,
)
from quire.strategies.census import CellState, Census
from quire.strategies.contiguous import ContiguousAccounting
from quire.strategies.growing import GrowingAccounting
from quire.strategies.layout import states_last
from quire.strategies.paged import PagedAccounting
from quire.strategies.stacked_storage import StackedStorage
from quire.strategies.stacking import LayersPerPage
from quire.strategies.storage import BlockStorage, RangeStorage
from quire.strategies.view import EntryWriter, LayerView, MakeWriter
from quire.strategies.virtual import VirtualAccounting
from quire.strategies.virtual_shared import SharedVirtualAccounting


class _MakeAccounting(Protocol):
    def __call__(self, groups: tuple[Group, ...], config: CacheConfig) -> Accounting: ...


class _MakeStorage(Protocol):
    def __call__(
        self, accounting: Accounting, provider: MemoryProvider, make_writer: MakeWriter | None
    ) -> Storage: ...


def _virtual_accounting(groups: tuple[Group, ...], config: CacheConfig) -> Accounting:
    return (SharedVirtualAccounting if config.shares_pages else VirtualAccounting)(groups, config)


def _virtual_storage(
    accounting: Accounting, provider: MemoryProvider, make_writer: MakeWriter | None
) -> Storage:
    if isinstance(accounting, SharedVirtualAccounting):
        return StackedStorage(accounting, provider, make_writer)
    return _range_storage(accounting, provider, make_writer)


def _range_storage(
    accounting: Accounting, provider: MemoryProvider, make_writer: MakeWriter | None
) -> Storage:
    assert isinstance(accounting, ContiguousAccounting | GrowingAccounting | VirtualAccounting)
    stacked = any(accounting.stacking(group) for group in range(len(accounting.groups)))
    return (StackedStorage if stacked else RangeStorage)(accounting, provider, make_writer)


STRATEGIES: Mapping[str, tuple[_MakeAccounting, _MakeStorage]] = MappingProxyType(
    {
        "contiguous": (ContiguousAccounting, _range_storage),
        "growing": (GrowingAccounting, _range_storage),
        "paged": (PagedAccounting, BlockStorage),
        "virtual": (_virtual_accounting, _virtual_storage),
    }
)


def build_accounting(strategy: str, spec: ModelSpec, config: CacheConfig) -> Accounting:
    """Who holds which tokens and states. Raises: ConfigError for an unknown name."""
    if strategy not in STRATEGIES:
        raise ConfigError(f"cache strategy {strategy!r} is unknown; known: {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy][0](states_last(spec.groups), config)


def build_storage(
    strategy: str,
    accounting: Accounting,
    provider: MemoryProvider,
    make_writer: MakeWriter | None = None,
) -> Storage:
    """Where the bytes of an accounting lie, in pages of ``provider``.

    ``make_writer`` is asked once for each layer, and what it gives writes there instead of torch.
    """
    return STRATEGIES[strategy][1](accounting, provider, make_writer)


__all__ = [
    "STRATEGIES",
    "Accounting",
    "CacheConfig",
    "CellState",
    "Census",
    "Change",
    "Commit",
    "Copy",
    "EntryWriter",
    "Fits",
    "Growth",
    "Image",
    "LayerView",
    "LayersPerPage",
    "MakeWriter",
    "Map",
    "Never",
    "NotNow",
    "PrefixHit",
    "PrefixKeys",
    "Release",
    "Storage",
    "TokenIds",
    "Unmap",
    "Usage",
    "Verdict",
    "build_accounting",
    "build_storage",
]
