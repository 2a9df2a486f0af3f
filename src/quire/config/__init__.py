"""Define every option once: ``EngineConfig`` for an engine, ``ServerConfig`` for a server,
``FleetConfig`` for several engines behind one address.

Options have vLLM's names where vLLM has one. A flag or an argument overrides the environment
(``QUIRE_BLOCK_SIZE=32``), which overrides the default. No other room reads the environment.
"""

from quire.config.engine_config import KV_CACHE_DTYPES, EngineConfig, SpeculativeConfig
from quire.config.environment import (
    as_rank,
    keep_few_shapes,
    kernel_dir,
    names_threads,
    prepare_own_ray,
    ray_address,
    sets_allocator,
    wait_patiently,
)
from quire.config.fleet_config import FleetConfig
from quire.config.kv_events import KVEventsConfig
from quire.config.kv_transfer import KVTransferConfig
from quire.config.option import ADVANCED
from quire.config.server_config import LOOPBACK, ServerConfig

__all__ = [
    "ADVANCED",
    "KV_CACHE_DTYPES",
    "LOOPBACK",
    "EngineConfig",
    "FleetConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "as_rank",
    "keep_few_shapes",
    "kernel_dir",
    "names_threads",
    "prepare_own_ray",
    "ray_address",
    "sets_allocator",
    "wait_patiently",
]
