"""The KV cache: four strategies, each an accounting (who holds which tokens) and a storage (where).

``build_accounting`` and ``build_storage`` make the pair by name; ``STRATEGIES`` has the names.
Importing this room imports no torch; building a storage does. Begin to read with ``interface``,
then ``paged``.
"""

from quire.kv.allocation import FITS, AllocationResult, Fits, Never, NotNow
from quire.kv.block_pool import PoolSize
from quire.kv.contiguous import FirstFit
from quire.kv.eviction import (
    DEFAULT_POLICY,
    EVICTION_POLICIES,
    EvictionPolicy,
    HeedsEnds,
    PolicyPool,
)
from quire.kv.growing import GrowingAccounting
from quire.kv.interface import (
    AS_IT_IS,
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
from quire.kv.layout import LayersPerPage
from quire.kv.occupancy import CellState, HeldRange, Occupancy
from quire.kv.paged import BlockCoordinator, PagedAccounting
from quire.kv.prefix_cache import PrefixHit, Shortfall, TokenIds
from quire.kv.prefix_index import NO_KEYS, BlockKey, Image, PrefixKeys
from quire.kv.ranges import RangeAccounting, Row, RowAccounting
from quire.kv.retention import HeedsRetention, Retention
from quire.kv.scored_eviction import CachedBlock, Score, ScoredPolicy
from quire.kv.storage.stacked import StackedStorage
from quire.kv.storage_ops import Commit, Copy, Map, Release, StorageOp, Unmap
from quire.kv.strategies import (
    STRATEGIES,
    Strategy,
    build_accounting,
    build_storage,
    range_storage,
)

__all__ = [
    "AS_IT_IS",
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
    "HeedsEnds",
    "HeedsRetention",
    "HeldRange",
    "Image",
    "LayerView",
    "LayersPerPage",
    "MakeWriter",
    "Map",
    "Never",
    "NotNow",
    "Occupancy",
    "PagedAccounting",
    "PolicyPool",
    "PoolSize",
    "PrefixHit",
    "PrefixKeys",
    "RangeAccounting",
    "Release",
    "Retention",
    "Row",
    "RowAccounting",
    "Score",
    "ScoredPolicy",
    "Shortfall",
    "StackedStorage",
    "Storage",
    "StorageOp",
    "Strategy",
    "TokenIds",
    "Unmap",
    "Usage",
    "build_accounting",
    "build_storage",
    "range_storage",
]
