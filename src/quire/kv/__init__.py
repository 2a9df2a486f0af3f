"""The KV cache: four strategies, each an accounting (who holds which tokens) and a storage (where).

``build_accounting`` and ``build_storage`` make the pair by name. Importing this room imports no
torch; building a storage does. Begin to read with ``interface``, then ``paged``.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from quire.errors import ConfigError
from quire.kv.allocation import FITS, AllocationResult, Fits, Never, NotNow
from quire.kv.block_pool import PoolSize
from quire.kv.contiguous import ContiguousAccounting, FirstFit
from quire.kv.eviction import DEFAULT_POLICY, EVICTION_POLICIES, EvictionPolicy, PolicyPool
from quire.kv.growing import GrowingAccounting
from quire.kv.interface import (
    Accounting,
    CacheConfig,
    EntryWriter,
    Extension,
    Growth,
    LayerView,
    MakeWriter,
    Storage,
    Usage,
)
from quire.kv.layout import LayersPerPage, states_last
from quire.kv.occupancy import CellState, Occupancy
from quire.kv.paged import BlockCoordinator, PagedAccounting
from quire.kv.prefix_cache import PrefixHit, Shortfall, TokenIds
from quire.kv.prefix_index import NO_KEYS, BlockKey, Image, PrefixKeys
from quire.kv.scored_eviction import CachedBlock, Score, ScoredPolicy
from quire.kv.storage.per_layer import BlockStorage, RangeStorage
from quire.kv.storage.stacked import StackedStorage
from quire.kv.storage_ops import Commit, Copy, Map, Release, StorageOp, Unmap
from quire.kv.virtual import VirtualAccounting
from quire.kv.virtual_shared import SharedVirtualAccounting
from quire.memory import MemoryProvider
from quire.spec import Group, ModelSpec


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
    *,
    one_stream: bool = False,
) -> Storage:
    """Make the place where the bytes of an accounting lie, in pages of ``provider``.

    ``make_writer`` is asked once for each layer, and what it gives writes there instead of torch.
    With ``one_stream`` nothing is copied beside the steps of a GPU.
    """
    storage = STRATEGIES[strategy][1](accounting, provider, make_writer)
    if one_stream and isinstance(storage, StackedStorage):
        storage.copy_in_line()
    return storage


__all__ = [
    "DEFAULT_POLICY",
    "EVICTION_POLICIES",
    "FITS",
    "NO_KEYS",
    "STRATEGIES",
    "Accounting",
    "AllocationResult",
    "BlockCoordinator",
    "BlockKey",
    "CacheConfig",
    "CachedBlock",
    "CellState",
    "Commit",
    "Copy",
    "EntryWriter",
    "EvictionPolicy",
    "Extension",
    "FirstFit",
    "Fits",
    "GrowingAccounting",
    "Growth",
    "Image",
    "LayerView",
    "LayersPerPage",
    "MakeWriter",
    "Map",
    "Never",
    "NotNow",
    "Occupancy",
    "PolicyPool",
    "PoolSize",
    "PrefixHit",
    "PrefixKeys",
    "Release",
    "Score",
    "ScoredPolicy",
    "Shortfall",
    "StackedStorage",
    "Storage",
    "StorageOp",
    "TokenIds",
    "Unmap",
    "Usage",
    "build_accounting",
    "build_storage",
]
