"""Divide a model's KV memory among ranks (tensor parallelism) as vLLM does.

Ranks share the heads of keys and values; with more ranks than heads, several ranks keep the same
head. All heads share a latent, so each rank keeps it whole. States are divided along their first
dimension (heads or channels) if the ranks divide it.

``quire plan --tp`` uses this. The engine's own division is in ``models.rank_spec``.
"""

from dataclasses import replace

from quire.errors import ConfigError
from quire.spec.layer_specs import LatentAttention, LayerSpec, RecurrentState
from quire.spec.model import ModelSpec


def rank_spec(spec: ModelSpec, num_ranks: int) -> ModelSpec:
    """Return a rank's part of a model. Raises: ConfigError if ranks cannot divide the heads."""
    if num_ranks == 1:
        return spec
    layers = (
        replace(layer, specs=tuple(_share(kept, num_ranks) for kept in layer.specs))
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


def is_replicated(spec: ModelSpec, on_rank: ModelSpec, num_ranks: int) -> bool:
    """Return whether several ranks keep the same keys and values."""
    return num_ranks * on_rank.bytes_per_token > spec.bytes_per_token


def divisors(number: int) -> str:
    """List the divisors of a number, for an error message."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _share(kept: LayerSpec, num_ranks: int) -> LayerSpec:
    if isinstance(kept, LatentAttention):
        return kept
    if isinstance(kept, RecurrentState):
        states = (
            replace(state, shape=(state.shape[0] // num_ranks, *state.shape[1:]))
            if state.shape and state.shape[0] % num_ranks == 0
            else state
            for state in kept.states
        )
        return replace(kept, states=tuple(states))
    heads = kept.num_kv_heads
    if heads % num_ranks and num_ranks % heads:
        raise ConfigError(
            f"tp={num_ranks} is neither a divisor nor a multiple of {heads} KV heads: make it one "
            f"of {divisors(heads)}, or a multiple of {heads}"
        )
    shared: LayerSpec = replace(kept, num_kv_heads=max(1, heads // num_ranks))
    return shared
