"""Read a config.json: find its text section, look up the family, and build each layer's specs.

``fields`` has the spellings and checks of fields, ``families`` the model families, ``patterns`` the
rules for kinds of layers, and ``recurrent_states`` the states of recurrent layers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.errors import ConfigError, ModelNotLoadable
from quire.spec.families import FAMILIES, ModelFamily
from quire.spec.fields import Fields
from quire.spec.gguf_config import gguf_config
from quire.spec.gguf_file import is_gguf, read_gguf
from quire.spec.layer_specs import (
    AttentionSpec,
    ChunkedAttention,
    FullAttention,
    LatentAttention,
    Layer,
    LayerSpec,
    SlidingWindow,
)
from quire.spec.patterns import (
    CONV,
    FULL,
    HYBRID,
    HYBRID_SLIDING,
    NOTHING,
    RECURRENT,
    RULES,
    SLIDING,
    of_decoder,
    stated,
    with_source,
)

# Where multimodal models keep the section of their language model.
_TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")
_DTYPES = ("dtype", "torch_dtype")

_REFUSED_FIELDS = MappingProxyType(
    {
        **{
            name: f"its sparse indexer ({name}) keeps keys of a kind that Quire cannot hold"
            for name in ("index_topk", "indexer_budget")
        },
    }
)

# Kind of layer → the kinds of memory that it has side by side.
_PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        NOTHING: (),
        CONV: (RECURRENT,),
        HYBRID: (FULL, RECURRENT),
        HYBRID_SLIDING: (SLIDING, RECURRENT),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigReading:
    """The part of a config.json that sizes memory."""

    model_type: str
    layers: tuple[Layer, ...]
    max_model_len: int  # tokens
    dtype: str


def load(path: str | Path) -> tuple[Mapping[str, Any], str]:
    """Load a config.json, the one in a folder, or what a GGUF file's header stands for.

    Returns: the object, and the file's name.
    Raises: ModelNotLoadable if there is none, or it holds no JSON object; UnsupportedModel for a
    GGUF file of an unknown architecture.
    """
    file = Path(path)
    if is_gguf(file):
        return gguf_config(read_gguf(file)), str(file)
    if file.is_dir():
        file /= "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotLoadable(f"cannot read {file}: {error}") from error
    if not isinstance(config, dict):
        raise ModelNotLoadable(f"{file} holds a {type(config).__name__}, not a JSON object")
    return config, str(file)


def read(config: Mapping[str, Any], source: str = "config.json") -> ConfigReading:
    """Read the layers of the text section. Raises: ConfigError, UnsupportedModel."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{source} holds a {type(config).__name__}, not a JSON object")
    fields, model_type, family = _reading(config, source)
    _refuse(fields, family)
    find_source_tokens = family.source_tokens if fields.has("is_encoder_decoder") else None
    source_tokens = find_source_tokens(fields) if find_source_tokens else 0
    fields = of_decoder(fields) if source_tokens else fields
    kinds = stated(fields) or family.pattern(fields)
    layers = _layers(fields, family, kinds)
    return ConfigReading(
        model_type=model_type,
        layers=with_source(layers, source_tokens) if source_tokens else layers,
        max_model_len=fields.integer("max_position_embeddings"),
        dtype=fields.dtype(),
    )


def text_fields(config: Mapping[str, Any], source: str) -> Fields:
    """Return the fields of the language model's section, with its family's defaults.

    Raises: ConfigError, UnsupportedModel.
    """
    fields, _, _ = _reading(config, source)
    return fields


def _reading(config: Mapping[str, Any], source: str) -> tuple[Fields, str, ModelFamily]:
    """Find the text section: its fields, its model_type and the family of that."""
    outer = Fields(section=config, source=source).text("model_type") or ""
    section, source = text_section(config, source)
    model_type = Fields(section=section, source=source).text("model_type") or outer
    family = FAMILIES.get(model_type) or FAMILIES.get(f"{model_type}_text", ModelFamily())
    nested = section is not config
    defaults = {**family.nested_defaults, **family.defaults} if nested else family.defaults
    return Fields(section=section, source=source, defaults=defaults), model_type, family


def text_section(config: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], str]:
    """Find the innermost section of the language model, or the config itself if it has none.

    A section inherits the dtype of the file around it. Returns: the section, and its name.
    """
    section, dtype = config, None
    while True:
        dtype = next((section[name] for name in _DTYPES if section.get(name)), dtype)
        inner = [name for name in _TEXT_SECTIONS if isinstance(section.get(name), Mapping)]
        if not inner:
            return ({**section, "dtype": dtype} if section is not config else config), source
        section, source = section[inner[0]], f"{source}, {inner[0]}"


def _refuse(fields: Fields, family: ModelFamily) -> None:
    """Refuse models that would be read wrongly. Raises: UnsupportedModel."""
    if family.refused and not (family.unless and fields.flag(family.unless)):
        raise fields.unsupported(family.refused)
    if fields.section.get("use_bidirectional_attention") in (True, "all"):
        raise fields.unsupported("it attends in both directions, so it cannot use a cache")
    if family.source_tokens is None and fields.has("is_encoder_decoder"):
        raise fields.unsupported("it is an encoder-decoder (is_encoder_decoder) of an unknown kind")
    for name, reason in _REFUSED_FIELDS.items():
        if fields.has(name):
            raise fields.unsupported(reason)
    unread = [name for name in RULES if fields.has(name)]
    if family == ModelFamily() and unread and not fields.has("layer_types"):
        raise fields.unsupported(
            f"{', '.join(unread)} make its layers differ in an unknown way: "
            "list 'layer_types', or add a row for its model_type to quire.spec.families"
        )


def _layers(fields: Fields, family: ModelFamily, kinds: Sequence[str]) -> tuple[Layer, ...]:
    """Build each layer's specs, or find the layer whose keys and values it shares."""
    num_sharing = fields.integer("num_kv_shared_layers", 0, least=0)
    if num_sharing >= len(kinds):
        raise fields.wrong(
            "num_kv_shared_layers", num_sharing, f"leaves none of {len(kinds)} layers"
        )
    own = kinds[: len(kinds) - num_sharing]
    layers = [
        Layer(specs=_specs(_of_layer(fields, family, i, kind), family, kind))
        for i, kind in enumerate(own)
    ]
    # Gemma 3n's rule: the last layer of the same kind that computes its own.
    last = {kind: i for i, kind in enumerate(own)}
    for kind in kinds[len(own) :]:
        if kind not in last:
            raise fields.unsupported(
                f"no layer computes the entries that its later {kind} layers share"
            )
        layers.append(Layer(specs=(), shares_with=last[kind]))
    return tuple(layers)


def _of_layer(fields: Fields, family: ModelFamily, layer: int, kind: str) -> Fields:
    """Return the fields of one layer: its own and its kind's override the common ones."""
    fields = fields.of_layer(layer)
    own: dict[str, Any] = {
        name: value
        for name, special in family.own_fields.get(kind, {}).items()
        if (value := fields.optional_integer(special)) is not None
    }
    # Transformers 5 writes the layers that differ by padded index: {"05": {"head_dim": 512}, …}.
    differing = fields.section.get("per_layer_config")
    for index, values in differing.items() if isinstance(differing, Mapping) else ():
        if str(index).lstrip("0") == str(layer).lstrip("0") and isinstance(values, Mapping):
            own.update(values)
    return fields.with_values(own)


def _specs(fields: Fields, family: ModelFamily, kind: str) -> tuple[LayerSpec, ...]:
    """Return the specs of a layer of this kind: none, one, or two side by side."""
    return tuple(
        family.recurrent(fields) if part == RECURRENT else _attention(fields, family, part)
        for part in _PARTS.get(kind, (kind,))
    )


def _attention(fields: Fields, family: ModelFamily, kind: str) -> AttentionSpec:
    """Return the spec of a full, sliding or chunked layer, or of a latent if one is declared."""
    dtype = fields.dtype()
    latent_dim = fields.optional_integer("kv_lora_rank", least=0)
    if latent_dim and fields.flag("use_mla", default=True):
        if kind != FULL:
            raise fields.unsupported(f"Quire cannot hold {kind} over a compressed latent")
        rope_dim = fields.integer("qk_rope_head_dim")
        return LatentAttention(latent_dim=latent_dim, rope_dim=rope_dim, dtype=dtype)
    num_kv_heads, head_dim = family.num_kv_heads(fields), family.head_dim(fields)
    if kind == SLIDING:
        num_kv_heads *= family.heads_in_windows
    value_dim = fields.optional_integer("v_head_dim", least=0) or head_dim
    full = FullAttention(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_head_dim=None if value_dim == head_dim else value_dim,
        dtype=dtype,
    )
    if kind == FULL:
        return full
    if kind == SLIDING:
        return SlidingWindow(**asdict(full), window=family.window(fields))
    return ChunkedAttention(**asdict(full), chunk=fields.integer("attention_chunk_size"))
