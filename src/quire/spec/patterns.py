"""Find the kind of each layer, for a config.json that gives a rule instead of a list.

A pattern takes a section's fields and returns one kind per layer, in Transformers' words. If a
config has ``layer_types``, that overrides any rule.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

from quire.errors import ConfigError
from quire.spec.fields import Fields, shown
from quire.spec.layer_specs import CrossAttention, FullAttention, Layer

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
RECURRENT, CONV = "linear_attention", "conv"  # states instead of keys and values
HYBRID, HYBRID_SLIDING = "hybrid", "hybrid_sliding"  # both, side by side
NOTHING = "nothing"  # a layer without memory: a feed-forward block

_WORDS: Mapping[str, str] = MappingProxyType(
    {
        **{
            word: word for word in (FULL, SLIDING, CHUNKED, RECURRENT, CONV, HYBRID, HYBRID_SLIDING)
        },
        **dict.fromkeys(("attention", "global", "global_attention"), FULL),
        **dict.fromkeys(("local", "local_attention", "sliding_window"), SLIDING),
        **dict.fromkeys(("mamba", "mamba2", "recurrent", "linear"), RECURRENT),
        **dict.fromkeys(("moe", "mlp"), NOTHING),
    }
)

# Fields that make layers differ. A model_type with one of these and no row in ``families`` would be
# misread as plain attention.
RULES = (
    "attention_chunk_size",
    "attn_layer_period",
    "attn_layer_indices",
    "attn_type_list",
    "attention_types",
    "block_types",
    "block_configs",
    "conv_kernel",
    "full_attention_interval",
    "full_attn_idxs",
    "global_attn_every_n_layers",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_num_value_heads",
    "local_attention",
    "lru_width",
    "sliding_window_pattern",
    "state_size",
    "use_cla",
)

Pattern: TypeAlias = Callable[[Fields], Sequence[str]]


def stated(fields: Fields) -> Sequence[str] | None:
    """Return the kinds of ``layer_types``, or None. Raises: ConfigError, UnsupportedModel."""
    words = fields.items("layer_types")
    if words is None:
        return None
    _check_length(fields, "layer_types", words)
    for word in words:
        if not isinstance(word, str) or word not in _WORDS:
            raise fields.unsupported(
                f"its layer_types name {shown(word)}; known kinds: {', '.join(sorted(_WORDS))}"
            )
    return [_WORDS[word] for word in words]


def uniform(fields: Fields) -> Sequence[str]:
    """Return sliding layers if a window is stated and not switched off, else full ones."""
    switched_on = fields.flag("use_sliding_window", default=True)
    windowed = switched_on and fields.optional_integer("sliding_window") is not None
    return [SLIDING if windowed else FULL] * _num_layers(fields)


def only(kind: str, *, times: int = 1) -> Pattern:
    """Make a pattern of one kind, with ``times`` attentions per stated layer."""
    return lambda fields: [kind] * (times * _num_layers(fields))


def listed(fields: Fields) -> Sequence[str]:
    """Refuse a file without a list of kinds. Raises: ConfigError."""
    raise ConfigError(f"{fields.source} has no 'layer_types' (nor 'layers_block_type'): add it")


def every(
    num_layers: int,
    *,
    named: str = "",
    at: int = -1,
    at_named: str = "",
    kind: str = FULL,
    rest: str = SLIDING,
) -> Pattern:
    """Make a pattern with ``kind`` in layer ``at`` of each ``num_layers`` layers.

    All other layers are ``rest``. The config.json fields ``named`` and ``at_named`` override
    ``num_layers`` and ``at``.
    """

    def pattern(fields: Fields) -> Sequence[str]:
        length = fields.integer(named, num_layers) if named else num_layers
        place = (fields.integer(at_named, at, least=0) if at_named else at) % length
        return [kind if i % length == place else rest for i in range(_num_layers(fields))]

    return pattern


def first_too(pattern: Pattern) -> Pattern:
    """Make a pattern whose first layer is full, and whose others follow ``pattern``."""
    return lambda fields: [FULL, *pattern(fields)[1:]]


def chosen(named: str, kind: str, *, rest: str, absent: Pattern) -> Pattern:
    """Make a pattern with ``kind`` in the layers that ``named`` lists, or ``absent`` without it."""

    def pattern(fields: Fields) -> Sequence[str]:
        places = fields.items(named)
        if places is None:
            return absent(fields)
        return [kind if i in places else rest for i in range(_num_layers(fields))]

    return pattern


def cycle(named: str, kinds: Mapping[str, str]) -> Pattern:
    """Make a pattern that repeats the list ``named`` (RecurrentGemma's block_types)."""

    def pattern(fields: Fields) -> Sequence[str]:
        words = fields.items(named)
        if not words or not all(isinstance(word, str) and word in kinds for word in words):
            raise fields.wrong(named, words, f"must be a list of {', '.join(kinds)}")
        return [kinds[words[i % len(words)]] for i in range(_num_layers(fields))]

    return pattern


def at_indices(named: str, *, rest: str, absent: str = FULL) -> Pattern:
    """Make a pattern with full layers where ``named`` lists them, or all ``absent`` without it."""
    return chosen(named, FULL, rest=rest, absent=only(absent))


def letters(named: str, kinds: Mapping[str, str]) -> Pattern:
    """Make a pattern from the string ``named``, a letter per layer, as Nemotron-H's ``M-M*``."""

    def pattern(fields: Fields) -> Sequence[str]:
        text = fields.text(named)
        if not text:
            return listed(fields)
        _check_length(fields, named, text)
        if wrong := set(text) - set(kinds):
            raise fields.wrong(named, text, f"has {sorted(wrong)}; known: {', '.join(kinds)}")
        return [kinds[letter] for letter in text]

    return pattern


def from_layer(named: str) -> Pattern:
    """Make a pattern with windows from layer ``named`` on (Qwen2's max_window_layers)."""

    def pattern(fields: Fields) -> Sequence[str]:
        first = fields.integer(named, least=0)
        return [FULL if i < first else kind for i, kind in enumerate(uniform(fields))]

    return pattern


def where_rope(fields: Fields) -> Sequence[str]:
    """Return chunked layers where rotary positions are used, else full ones (Llama 4)."""
    interval = fields.integer("no_rope_layer_interval", 4)
    rope = fields.items("no_rope_layers") or [
        (i + 1) % interval != 0 for i in range(_num_layers(fields))
    ]
    _check_length(fields, "no_rope_layers", rope)
    return [CHUNKED if has_rope else FULL for has_rope in rope]


def kimi_linear(fields: Fields) -> Sequence[str]:
    """Return full layers where ``linear_attn_config.full_attn_layers`` lists them, from 1 on."""
    places = fields.items("linear_attn_config.full_attn_layers")
    if places is None:
        places = [i + 1 for i in range(_num_layers(fields)) if i and i % 4 == 0]
    return [FULL if i + 1 in places else RECURRENT for i in range(_num_layers(fields))]


def no_op_blocks(fields: Fields) -> Sequence[str]:
    """Return Nemotron-NAS's kinds: full, except where its search removed the attention."""
    blocks = [fields.of_layer(i).entry("block_configs") for i in range(_num_layers(fields))]
    removed = ("attention.no_op", "attention.replace_with_linear")
    return [NOTHING if any(map(block.flag, removed)) else FULL for block in blocks]


def zamba(fields: Fields) -> Sequence[str]:
    """Return two recurrent layers, a hybrid, and one hybrid per ``attn_layer_period`` (Zamba)."""
    period = fields.integer("attn_layer_period", 6)
    place = fields.integer("attn_layer_offset", 4, least=0)
    rest = range(max(0, _num_layers(fields) - 3))
    kinds = [RECURRENT, RECURRENT, HYBRID]
    return kinds + [HYBRID if i % period == place else RECURRENT for i in rest]


def _check_length(fields: Fields, named: str, entries: Sequence[Any]) -> None:
    """Check that a list has an entry per layer. Raises: ConfigError."""
    num_layers = fields.integer("num_hidden_layers", max(1, len(entries)))
    if len(entries) != num_layers:
        raise fields.wrong(
            named, entries, f"names {len(entries)} layers, but num_hidden_layers = {num_layers}"
        )


def _num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers")


# -- encoder-decoders ------------------------------------------------------------------------------

# Names of the decoder's fields, if the plain name is the encoder's or that of both.
_OF_DECODER = MappingProxyType(
    {
        "num_hidden_layers": ("decoder_layers", "num_decoder_layers"),
        "num_attention_heads": ("decoder_attention_heads", "num_decoder_attention_heads"),
        "max_position_embeddings": ("max_target_positions", "max_decoder_position_embeddings"),
    }
)


def of_decoder(fields: Fields) -> Fields:
    """Return the fields of the decoder."""
    own = {
        name: value
        for name, spellings in _OF_DECODER.items()
        for spelling in spellings
        if (value := fields.optional_integer(spelling)) is not None
    }
    return fields.with_values(own)


def as_long_as_the_text(fields: Fields) -> int:
    """Return the one limit of source and text, in tokens."""
    return fields.integer("max_position_embeddings")


def stated_source(name: str, default: int) -> Callable[[Fields], int]:
    """Make a reader of the source's own limit, in tokens."""
    return lambda fields: fields.integer(name, default)


def with_source(layers: tuple[Layer, ...], source_tokens: int) -> tuple[Layer, ...]:
    """Add a source to each attention layer, with heads of the same number and width."""

    def cross(own: FullAttention) -> CrossAttention:
        return CrossAttention(
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            value_head_dim=own.value_head_dim,
            dtype=own.dtype,
            source_tokens=source_tokens,
        )

    return tuple(
        replace(
            layer,
            specs=(*layer.specs, *(cross(k) for k in layer.specs if isinstance(k, FullAttention))),
        )
        for layer in layers
    )
