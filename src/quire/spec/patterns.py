"""Which layer is of which kind, when a config.json gives a rule instead of a list.

A pattern takes a section's fields and returns one kind word a layer, in Transformers' words.
``layer_types``, where a config states it, wins over any rule.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

from quire.errors import ConfigError
from quire.spec.fields import Fields, shown
from quire.spec.layer_specs import CrossAttention, FullAttention, Layer

# -- patterns --------------------------------------------------------------------------------------


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
RECURRENT, CONV = "linear_attention", "conv"  # a state instead of keys and values
HYBRID, HYBRID_SLIDING = "hybrid", "hybrid_sliding"  # both, side by side
NOTHING = "nothing"  # a layer that remembers nothing: a feed-forward block

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

# Fields that say which layer is of which kind, or that some layers keep a state. A model_type that
# has one of these but no row in ``families`` would be misread as plain attention.
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
    """The kinds as ``layer_types`` lists them, None where it does not. Raises: ConfigError."""
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
    """All layers alike: with a window where one is stated and not switched off, else full."""
    switched_on = fields.flag("use_sliding_window", default=True)
    windowed = switched_on and fields.optional_integer("sliding_window") is not None
    return [SLIDING if windowed else FULL] * _num_layers(fields)


def only(kind: str, *, times: int = 1) -> Pattern:
    """All layers of one kind; ``times`` attentions are counted for each layer that is stated."""
    return lambda fields: [kind] * (times * _num_layers(fields))


def listed(fields: Fields) -> Sequence[str]:
    """No rule: the file must list the kinds."""
    raise ConfigError(f"{fields.source} has no 'layer_types' (nor 'layers_block_type'): add it")


def every(
    period: int,
    *,
    named: str = "",
    at: int = -1,
    at_named: str = "",
    kind: str = FULL,
    rest: str = SLIDING,
) -> Pattern:
    """``kind`` in layer ``at`` of each ``period`` layers, ``rest`` in the others.

    ``named`` and ``at_named`` are the config.json fields that may say otherwise.
    """

    def pattern(fields: Fields) -> Sequence[str]:
        length = fields.integer(named, period) if named else period
        place = (fields.integer(at_named, at, least=0) if at_named else at) % length
        return [kind if i % length == place else rest for i in range(_num_layers(fields))]

    return pattern


def first_too(pattern: Pattern) -> Pattern:
    """The same, but the first layer has full attention whatever the rule says of it."""
    return lambda fields: [FULL, *pattern(fields)[1:]]


def chosen(named: str, kind: str, *, rest: str, absent: Pattern) -> Pattern:
    """``kind`` in the layers that the field ``named`` lists; as ``absent`` has it without it."""

    def pattern(fields: Fields) -> Sequence[str]:
        places = fields.items(named)
        if places is None:
            return absent(fields)
        return [kind if i in places else rest for i in range(_num_layers(fields))]

    return pattern


def cycle(named: str, kinds: Mapping[str, str]) -> Pattern:
    """The words of the list ``named``, over and over (RecurrentGemma's block_types)."""

    def pattern(fields: Fields) -> Sequence[str]:
        words = fields.items(named)
        if not words or not all(isinstance(word, str) and word in kinds for word in words):
            raise fields.wrong(named, words, f"must be a list of {', '.join(kinds)}")
        return [kinds[words[i % len(words)]] for i in range(_num_layers(fields))]

    return pattern


def at_indices(named: str, *, rest: str, absent: str = FULL) -> Pattern:
    """Full attention in the layers that the field ``named`` lists; ``absent`` in all without it."""
    return chosen(named, FULL, rest=rest, absent=only(absent))


def letters(named: str, kinds: Mapping[str, str]) -> Pattern:
    """One letter a layer in the string ``named``, as in Nemotron-H's ``M-M*``."""

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
    """Full attention below layer ``named``, windows from there on (Qwen2's max_window_layers)."""

    def pattern(fields: Fields) -> Sequence[str]:
        first = fields.integer(named, least=0)
        return [FULL if i < first else kind for i, kind in enumerate(uniform(fields))]

    return pattern


def where_rope(fields: Fields) -> Sequence[str]:
    """Chunked where rotary positions are used, full where not (Llama 4)."""
    interval = fields.integer("no_rope_layer_interval", 4)
    rope = fields.items("no_rope_layers") or [
        (i + 1) % interval != 0 for i in range(_num_layers(fields))
    ]
    _check_length(fields, "no_rope_layers", rope)
    return [CHUNKED if has_rope else FULL for has_rope in rope]


def kimi_linear(fields: Fields) -> Sequence[str]:
    """Full attention where ``linear_attn_config.full_attn_layers`` says, counted from 1."""
    places = fields.items("linear_attn_config.full_attn_layers")
    if places is None:
        places = [i + 1 for i in range(_num_layers(fields)) if i and i % 4 == 0]
    return [FULL if i + 1 in places else RECURRENT for i in range(_num_layers(fields))]


def no_op_blocks(fields: Fields) -> Sequence[str]:
    """Nemotron-NAS: full attention, but for the layers whose search removed it."""
    blocks = [fields.of_layer(i).entry("block_configs") for i in range(_num_layers(fields))]
    removed = ("attention.no_op", "attention.replace_with_linear")
    return [NOTHING if any(map(block.flag, removed)) else FULL for block in blocks]


def zamba(fields: Fields) -> Sequence[str]:
    """Two recurrent layers, a hybrid one, then one hybrid in each ``attn_layer_period``."""
    period = fields.integer("attn_layer_period", 6)
    place = fields.integer("attn_layer_offset", 4, least=0)
    rest = range(max(0, _num_layers(fields) - 3))
    kinds = [RECURRENT, RECURRENT, HYBRID]
    return kinds + [HYBRID if i % period == place else RECURRENT for i in rest]


def _check_length(fields: Fields, named: str, entries: Sequence[Any]) -> None:
    """Raise ConfigError where a list names another number of layers than the file states."""
    num_layers = fields.integer("num_hidden_layers", max(1, len(entries)))
    if len(entries) != num_layers:
        raise fields.wrong(
            named, entries, f"names {len(entries)} layers, but num_hidden_layers = {num_layers}"
        )


def _num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers")


# -- sources ---------------------------------------------------------------------------------------

# Encoder-decoders: how their files name the decoder, and how long a source it reads.
#
# Which family has sources is said in ``families``; an encoder by itself keeps nothing.


# What a file calls the decoder's own, where the plain name is the encoder's or that of both.
_OF_DECODER = MappingProxyType(
    {
        "num_hidden_layers": ("decoder_layers", "num_decoder_layers"),
        "num_attention_heads": ("decoder_attention_heads", "num_decoder_attention_heads"),
        "max_position_embeddings": ("max_target_positions", "max_decoder_position_embeddings"),
    }
)


def of_decoder(fields: Fields) -> Fields:
    """The fields as the decoder reads them."""
    own = {
        name: value
        for name, spellings in _OF_DECODER.items()
        for spelling in spellings
        if (value := fields.optional_integer(spelling)) is not None
    }
    return fields.with_values(own)


def as_long_as_the_text(fields: Fields) -> int:
    """One limit for source and text."""
    return fields.integer("max_position_embeddings")


def stated_source(name: str, default: int) -> Callable[[Fields], int]:
    """A limit of the source's own."""
    return lambda fields: fields.integer(name, default)


def with_source(layers: tuple[Layer, ...], source_tokens: int) -> tuple[Layer, ...]:
    """The layers, each of which attends to the source besides: with as many heads, as wide."""

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
