"""Every option, once: ``EngineConfig`` for an engine, ``ServerConfig`` for what serves it.

Names are vLLM's where vLLM has one. A flag or an argument counts before the environment
(``QUIRE_BLOCK_SIZE=32``), and that before the default. No other room touches the environment.
"""

from quire.config.engine import KV_CACHE_DTYPES, EngineConfig
from quire.config.environment import (
    as_rank,
    keep_few_shapes,
    kernel_dir,
    names_threads,
    wait_patiently,
)
from quire.config.options import ADVANCED
from quire.config.server import LOOPBACK, ServerConfig
from quire.config.speculative import SpeculativeConfig

__all__ = [
    "ADVANCED",
    "KV_CACHE_DTYPES",
    "LOOPBACK",
    "EngineConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "as_rank",
    "keep_few_shapes",
    "kernel_dir",
    "names_threads",
    "wait_patiently",
]
