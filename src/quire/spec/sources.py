"""Encoder-decoders: how their files name the decoder, and how long a source it reads.

Which family has sources is said in ``families``; an encoder by itself keeps nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

from quire.spec.fields import Fields
from quire.spec.layers import CrossAttention, FullAttention, Layer

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


def stated(name: str, default: int) -> Callable[[Fields], int]:
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
