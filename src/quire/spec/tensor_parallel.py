"""One rank of several that share a model's heads (tensor parallelism), as vLLM divides them.

Heads of keys and values are divided; with more ranks than heads each is kept by several. A latent
is shared by all heads, so that every rank keeps it whole. States are divided along their first
dimension, heads or channels, where that goes.

``quire plan --tp`` counts with all of this. What the engine divides is ``models.rank_spec``'
matter.
"""

from dataclasses import replace

from quire.errors import ConfigError
from quire.spec.layer_specs import LatentAttention, LayerSpec, RecurrentState
from quire.spec.model import ModelSpec


def rank_spec(spec: ModelSpec, num_ranks: int) -> ModelSpec:
    """What one rank must remember. Raises: ConfigError for heads that cannot be divided so."""
    if num_ranks == 1:
        return spec
    layers = (
        replace(layer, specs=tuple(_share(kept, num_ranks) for kept in layer.specs))
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


def is_replicated(spec: ModelSpec, on_rank: ModelSpec, num_ranks: int) -> bool:
    """Whether ranks keep some of the same keys and values."""
    return num_ranks * on_rank.bytes_per_token > spec.bytes_per_token


def divisors(number: int) -> str:
    """In words, for a message that asks to choose one."""
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
            f"tp={num_ranks} does not divide {heads} heads of keys and values, nor is it a "
            f"multiple of them: make it one of {divisors(heads)}, or a multiple of {heads}"
        )
    shared: LayerSpec = replace(kept, num_kv_heads=max(1, heads // num_ranks))
    return shared
