"""Places for blocks outside the pool: host memory, files, stores that machines share."""

from collections.abc import Callable
from typing import TypeAlias

from quire.plugins import Registry
from quire.tiers.address import TierAddress
from quire.tiers.files import make_file_tier
from quire.tiers.host_memory import make_memory_tier
from quire.tiers.tier import Deadline, Name, Tier, TierError, TierFull, TierTraits, TierUsage

# (where, the bytes of the largest record, an engine's namespace: 16 hex digits) → a tier
MakeTier: TypeAlias = Callable[[TierAddress, int, str], Tier]


def _redis(address: TierAddress, record_bytes: int, namespace: str) -> Tier:
    from quire.tiers.redis import open_redis

    return open_redis(address, record_bytes, namespace)


def _objects(address: TierAddress, record_bytes: int, namespace: str) -> Tier:
    from quire.tiers.objects import open_objects

    return open_objects(address, record_bytes, namespace)


def _mooncake(address: TierAddress, record_bytes: int, namespace: str) -> Tier:
    from quire.tiers.mooncake import open_mooncake

    return open_mooncake(address, record_bytes, namespace)


TIERS: Registry[MakeTier] = Registry(
    "tier",
    "quire.tiers",
    {
        "memory": make_memory_tier,
        "file": make_file_tier,
        "redis": _redis,
        "rediss": _redis,
        "s3": _objects,
        "gs": _objects,
        "az": _objects,
        "mooncake": _mooncake,
    },
    lambda found: None if callable(found) else f"{found!r} takes no quire.tiers.TierAddress",
)

__all__ = [
    "TIERS",
    "Deadline",
    "MakeTier",
    "Name",
    "Tier",
    "TierAddress",
    "TierError",
    "TierFull",
    "TierTraits",
    "TierUsage",
]
