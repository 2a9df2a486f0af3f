"""What one of several ranks must remember of a model that Transformers has cut into parts.

Transformers' plan says how: where it divides the heads of keys, each rank keeps its own; where it
gathers them again, or leaves attention whole, each keeps all. Every rank keeps all of a latent.
"""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING

from quire.errors import ConfigError, UnsupportedModel
from quire.spec import KeptWhole, LatentAttention, ModelSpec
from quire.spec.tensor_parallel import divisors, rank_spec
from quire.units import format_count

_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "qkv", "query_key_value")


def part_spec(name: str, config: Any, spec: ModelSpec, num_ranks: int) -> ModelSpec:
    """Return a rank's part of ``spec``; ``config`` is Transformers'.

    Raises: UnsupportedModel for a model that is not cut, ConfigError for heads that do not divide.
    """
    return _part(name, tensor_parallel_plan(config), spec, num_ranks)


def part_of_type(name: str, spec: ModelSpec, num_ranks: int) -> ModelSpec:
    """Return the same where there is a spec and no config: the plan is that of the class.

    Raises: UnsupportedModel, ConfigError, as ``part_spec``.
    """
    plan: Mapping[str, str] | None = None
    if spec.model_type in CONFIG_MAPPING:
        plan = getattr(CONFIG_MAPPING[spec.model_type], "base_model_tp_plan", None)
    return _part(name, plan or {}, spec, num_ranks)


def _part(name: str, plan: Mapping[str, str], spec: ModelSpec, num_ranks: int) -> ModelSpec:
    option = f"tensor_parallel_size={num_ranks}"
    if num_ranks == 1:
        return spec
    if spec.source_tokens:
        raise UnsupportedModel(
            f"{option}: {name} reads a source, and such models run in one process so far"
        )
    if layers := list(spec.recurrent_layers):
        raise UnsupportedModel(
            f"{option}: layers {layers} of {name} keep recurrent states, which Transformers' plan "
            f"does not divide: such models run in one process so far"
        )
    if not plan:
        raise UnsupportedModel(
            f"{option}: Transformers has no tensor-parallel plan for {name} ({spec.model_type})"
        )
    divided = any(
        rule.rsplit(".", 1)[-1] in _KEY_PROJECTIONS and how == "colwise"
        for rule, how in plan.items()
    )
    several = [
        kept
        for layer in spec.layers
        for kept in layer.specs
        if not isinstance(kept, LatentAttention | KeptWhole)
    ]
    if not divided:
        return spec
    for heads in sorted({kept.num_kv_heads for kept in several}):
        if heads % num_ranks:
            raise ConfigError(
                f"{option} does not divide the {format_count(heads)} heads of keys and values of "
                f"{name}: make it one of {divisors(heads)}"
            )
    return rank_spec(spec, num_ranks)


def tensor_parallel_plan(config: Any) -> dict[str, str]:
    """Return Transformers' rules for the layers of a config's text model, if it has any."""
    return dict(getattr(config.get_text_config(), "base_model_tp_plan", None) or {})
