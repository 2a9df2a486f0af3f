"""Compute hit rates of prefix caches on traces, by cache size and eviction policy."""

from quire.planner.hit_rates.curve import (
    OPTIMUM,
    OWN_POLICIES,
    HitRate,
    HitRates,
    hit_rate_curve,
    require_policies,
    round_sizes,
)
from quire.planner.hit_rates.prefix_tree import Prompts, prompts_of
from quire.planner.hit_rates.tiered import TieredHits, TierHits, kept_blocks, tiered_hits

__all__ = [
    "OPTIMUM",
    "OWN_POLICIES",
    "HitRate",
    "HitRates",
    "Prompts",
    "TierHits",
    "TieredHits",
    "hit_rate_curve",
    "kept_blocks",
    "prompts_of",
    "require_policies",
    "round_sizes",
    "tiered_hits",
]
