"""Compute hit rates of prefix caches on traces, by cache size and eviction policy."""

from quire.planner.hit_rates.curve import (
    HitRate,
    HitRates,
    hit_rate_curve,
    policy_names,
    round_sizes,
)
from quire.planner.hit_rates.prefix_tree import Prompts, prompts_of

__all__ = [
    "HitRate",
    "HitRates",
    "Prompts",
    "hit_rate_curve",
    "policy_names",
    "prompts_of",
    "round_sizes",
]
