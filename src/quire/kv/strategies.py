"""The cache's strategies by name, each with what the rest of the house may know of it.

No other room asks for a strategy's name: it asks for the facts of ``Strategy``. A strategy of
another package is such an object too (docs/guides/write-a-strategy.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from quire.kv.contiguous import ContiguousAccounting
from quire.kv.growing import GrowingAccounting
from quire.kv.interface import Accounting, CacheConfig, MakeWriter, Storage
from quire.kv.layout import states_last
from quire.kv.paged import PagedAccounting
from quire.kv.ranges import RangeAccounting
from quire.kv.storage.per_layer import BlockStorage, RangeStorage
from quire.kv.storage.stacked import StackedStorage
from quire.kv.virtual import VirtualAccounting
from quire.kv.virtual_shared import SharedVirtualAccounting
from quire.memory import MemoryProvider
from quire.plugins import Registry
from quire.spec import Group, ModelSpec

# (groups of layers, those with tokens first, the cache's numbers) → an empty cache's accounting
AccountingFactory: TypeAlias = Callable[[tuple[Group, ...], CacheConfig], Accounting]
# (an accounting of the same strategy, pages, a layer's writer or None) → its storage
StorageFactory: TypeAlias = Callable[[Any, MemoryProvider, MakeWriter | None], Storage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One strategy: how its two halves are made, and what an engine sizes itself by."""

    make_accounting: AccountingFactory
    make_storage: StorageFactory
    # A sequence commits at its beginning what the option ``reserve`` says, and not as it grows.
    reserves: bool = False
    # Each of ``max_num_seqs`` sequences has addresses for ``max_model_len`` tokens to itself.
    has_own_ranges: bool = False
    # While a sequence grows, it has its old place and a larger one.
    grows_by_copying: bool = False
    # With prefix caching, sequences see shared pages through windows, if the memory has windows.
    maps_pages: bool = False


def range_storage(
    accounting: Accounting, provider: MemoryProvider, make_writer: MakeWriter | None
) -> Storage:
    """Make the storage of a ``RangeAccounting``, head by head or in stacks of layers.

    Raises: TypeError for an accounting that is none. MemoryUnavailable.
    """
    if not isinstance(accounting, RangeAccounting):
        raise TypeError(f"{type(accounting).__name__} is no RangeAccounting: it has no stacking()")
    stacked = any(accounting.stacking(group) for group in range(len(accounting.groups)))
    return (StackedStorage if stacked else RangeStorage)(accounting, provider, make_writer)


def _virtual_accounting(groups: tuple[Group, ...], config: CacheConfig) -> Accounting:
    return (SharedVirtualAccounting if config.shares_pages else VirtualAccounting)(groups, config)


def _virtual_storage(
    accounting: Accounting, provider: MemoryProvider, make_writer: MakeWriter | None
) -> Storage:
    if isinstance(accounting, SharedVirtualAccounting):
        return StackedStorage(accounting, provider, make_writer)
    return range_storage(accounting, provider, make_writer)


def _why_no_strategy(found: object) -> str | None:
    return None if isinstance(found, Strategy) else f"{found!r} is no quire.kv.Strategy"


STRATEGIES: Registry[Strategy] = Registry(
    "cache strategy",
    "quire.strategies",
    {
        "contiguous": Strategy(
            make_accounting=ContiguousAccounting, make_storage=range_storage, reserves=True
        ),
        "growing": Strategy(
            make_accounting=GrowingAccounting,
            make_storage=range_storage,
            has_own_ranges=True,
            grows_by_copying=True,
        ),
        "paged": Strategy(make_accounting=PagedAccounting, make_storage=BlockStorage),
        "virtual": Strategy(
            make_accounting=_virtual_accounting,
            make_storage=_virtual_storage,
            has_own_ranges=True,
            maps_pages=True,
        ),
    },
    _why_no_strategy,
)


def build_accounting(strategy: str, spec: ModelSpec, config: CacheConfig) -> Accounting:
    """Make the accounting of a strategy for a model.

    Raises: ConfigError for an unknown name, or where another package's strategy raises an error.
    """
    found = STRATEGIES.find(strategy, "cache")
    with STRATEGIES.blamed(strategy, "cache"):
        return found.make_accounting(states_last(spec.groups), config)


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

    Raises: ConfigError for an unknown name, or where another package's strategy raises an error.
    MemoryUnavailable.
    """
    found = STRATEGIES.find(strategy, "cache")
    with STRATEGIES.blamed(strategy, "cache"):
        storage = found.make_storage(accounting, provider, make_writer)
    if one_stream and isinstance(storage, StackedStorage):
        storage.copy_in_line()
    return storage
