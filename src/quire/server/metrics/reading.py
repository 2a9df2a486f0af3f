"""What an engine's figures are at one moment, read without waiting for a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.engine.elastic import Elasticity
from quire.engine.llm import LLM
from quire.engine.statistics import Statistics
from quire.kv import Usage
from quire.server.metrics.counts import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All that a scrape shows. ``statistics`` go on counting meanwhile."""

    statistics: Statistics
    usage: Usage
    elastic: Elasticity
    num_running: int
    waiting: Mapping[str, int]  # by reason
    swap_used_bytes: int
    is_up: bool
    sleep_level: int
    cache_config: Mapping[str, str]
    counts: Counts

    @property
    def usage_share(self) -> float:
        """Of what may be held now; what is only cached is free for others."""
        held = self.usage.committed_bytes - self.usage.cached_bytes
        return held / self.elastic.ceiling_bytes if self.elastic.ceiling_bytes else 0.0


def read(llm: LLM, counts: Counts) -> Reading:
    scheduler = llm.engine.scheduler
    return Reading(
        statistics=llm.statistics,
        usage=llm.usage(wait=False),
        elastic=llm.elastic,
        num_running=scheduler.num_running,
        waiting=scheduler.waiting_by_reason,
        swap_used_bytes=scheduler.swap.used_bytes,
        is_up=not llm.is_closed,
        sleep_level=llm.sleep_level,
        cache_config=_cache_config(llm),
        counts=counts,
    )


def _cache_config(llm: LLM) -> Mapping[str, str]:
    """Under vLLM's names where it has them; a block is one of each group."""
    config, capacity_bytes = llm.config, llm.elastic.capacity_bytes
    block_bytes = sum(group.bytes_for(config.block_size) for group in llm.spec.groups)
    return MappingProxyType(
        {
            "block_size": str(config.block_size),
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "kv_cache_memory_bytes": str(capacity_bytes),
            "kv_strategy": config.cache,
            "num_gpu_blocks": str(capacity_bytes // block_bytes if block_bytes else 0),
        }
    )
