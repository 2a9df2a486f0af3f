"""Read the fields of a config.json's section: all their spellings, with every value checked.

``families`` says which fields a model family has, and which rules below read its heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from reprlib import Repr
from types import MappingProxyType
from typing import Any

from quire.errors import ConfigError, UnsupportedModel
from quire.spec.layer_specs import DTYPE_BYTES

# The name used here → other spellings in files, the most trusted first. A dot enters a section.
SPELLINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "num_hidden_layers": (
            "n_layer",
            "n_layers",
            "num_layers",
            "num_transformer_layers",
            "decoder_layers",
            "num_decoder_layers",
        ),
        "num_attention_heads": (
            "n_head",
            "n_heads",
            "num_heads",
            "attention_heads",
            "num_query_heads",
            "decoder_attention_heads",
            "num_decoder_attention_heads",
        ),
        "num_key_value_heads": (
            "num_kv_heads",
            "n_head_kv",
            "num_key_value_heads_per_layer",
            "multi_query_group_num",
            "attn_config.kv_n_heads",
        ),
        "hidden_size": ("n_embd", "n_embed", "d_model", "model_dim"),
        "head_dim": ("attention_head_dim", "kv_channels"),
        "max_position_embeddings": (
            "n_positions",
            "max_seq_len",
            "model_max_length",
            "max_sequence_length",
            "max_context_length",
            "seq_length",
            "n_ctx",
            "max_target_positions",
        ),
        "layer_types": ("layers_block_type",),
        "sliding_window": ("attention_window_size",),
        "dtype": ("torch_dtype",),
        # Recurrent layers.
        "expand": ("mamba_expand",),
        "state_size": ("mamba_d_state", "ssm_state_size"),
        "n_groups": ("mamba_n_groups", "mamba_ngroups"),
        "mamba_num_heads": ("mamba_n_heads", "n_mamba_heads"),
        "mamba_head_dim": ("mamba_d_head", "mamba_headdim"),
        "conv_kernel": (
            "mamba_d_conv",
            "linear_conv_kernel_dim",
            "linear_attn_config.short_conv_kernel_size",
            "conv_L_cache",
            "short_conv_kernel_size",
        ),
        "block_types": ("_block_types",),
        "linear_num_heads": ("linear_attn_config.num_heads",),
        "linear_head_dim": ("linear_attn_config.head_dim",),
    }
)

# Limits far above any model, and far below what would make arithmetic or lists too large.
_MOST = MappingProxyType(
    {
        "num_hidden_layers": 10_000,
        "max_position_embeddings": 2**40,
        "sliding_window": 2**40,
        "attention_chunk_size": 2**40,
    }
)
_MOST_OTHERS = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """A section, the defaults of its family, and the layer whose entries of lists it reads.

    A missing field has its default; null and "auto" mean none. If ``layer`` is set and a value is a
    list, the field is the layer's entry, as in models whose layers differ in heads.
    """

    section: Mapping[str, Any]
    source: str = "config.json"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    layer: int | None = None

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Read a whole number of at least ``least``. Raises: ConfigError if wrong or missing."""
        value = self.optional_integer(name, least=least)
        if value is not None:
            return value
        if default is not None:
            return default
        others = "".join(f", {other!r}" for other in SPELLINGS.get(name, ()))
        raise ConfigError(
            f"{self.source} has no {name!r}{' (nor' + others[1:] + ')' if others else ''}: "
            "add it: it sizes the cache"
        )

    def optional_integer(self, name: str, *, least: int = 1) -> int | None:
        """Read a whole number, or None if the field is null or missing. Raises: ConfigError."""
        value = self._value(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON does not tell 2.0 from 2
        most = _MOST.get(name, _MOST_OTHERS)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, value, f"must be a whole number from {least:,} to {most:,}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Read true or false. Raises: ConfigError."""
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "must be true or false")
        return value

    def text(self, name: str) -> str | None:
        """Read a string, or None if it is missing. Raises: ConfigError."""
        value = self._value(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "must be a string")
        return value

    def items(self, name: str) -> Sequence[Any] | None:
        """Read a whole list, or None if it is missing. Raises: ConfigError."""
        value = self._value(name, of_layer=False)
        if value is not None and not isinstance(value, list | tuple):
            raise self.wrong(name, value, "must be a list")
        return value

    def has(self, name: str) -> bool:
        """Return whether the field is set, and not to null, false or an empty list."""
        return bool(self._value(name, of_layer=False))

    def dtype(self) -> str:
        """Read the dtype; the default is bfloat16, as in nearly all files. Raises: ConfigError."""
        name = (self.text("dtype") or "bfloat16").removeprefix("torch.")
        name = {"half": "float16", "float": "float32", "double": "float64"}.get(name, name)
        if name not in DTYPE_BYTES:
            raise self.wrong("dtype", name, f"is not known; known: {', '.join(DTYPE_BYTES)}")
        return name

    def entry(self, name: str) -> "Fields":
        """Return this layer's entry of a list of sections. Raises: ConfigError."""
        value = self._value(name)
        if not isinstance(value, Mapping):
            raise self.wrong(name, value, "must be a list with one section a layer")
        return replace(self, section=value, defaults={})

    def of_layer(self, layer: int) -> "Fields":
        """Return the section as one layer reads it."""
        return replace(self, layer=layer)

    def with_values(self, values: Mapping[str, Any]) -> "Fields":
        """Return the section with these values in place of its own."""
        return replace(self, section={**self.section, **values}) if values else self

    def quotient(self, dividend: int, divisor: int, name: str) -> int:
        """Divide without a rest. Raises: ConfigError with the field ``name``."""
        if dividend % divisor:
            raise self.wrong(name, divisor, f"does not divide {dividend:,}")
        return dividend // divisor

    def unsupported(self, reason: str) -> UnsupportedModel:
        """Return the error for a model whose memory Quire cannot hold."""
        return UnsupportedModel(f"{self.source}: this model is not supported: {reason}")

    def wrong(self, name: str, value: object, limit: str) -> ConfigError:
        """Return the error for a value that cannot work."""
        return ConfigError(f"{self.source}: {name} = {shown(value)} {limit}")

    def _value(self, name: str, *, of_layer: bool = True) -> Any:
        """The value under any spelling; a null in the section hides the default."""
        spellings = (name, *SPELLINGS.get(name, ()))
        stated = [found for spelling in spellings if (found := _look_up(self.section, spelling))]
        if not stated:
            stated = [
                found for spelling in spellings if (found := _look_up(self.defaults, spelling))
            ]
        value = next((value for (value,) in stated if value not in (None, "auto")), None)
        if of_layer and self.layer is not None and isinstance(value, list | tuple):
            if self.layer >= len(value):
                raise self.wrong(name, value, f"has no entry for layer {self.layer}")
            return value[self.layer]
        return value


def shown(value: object) -> str:
    """Return a value as error messages show it, in at most 80 characters."""
    short = Repr()
    short.maxstring = short.maxlong = 60
    try:
        text = short.repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _look_up(section: Mapping[str, Any], spelling: str) -> tuple[Any] | None:
    """Return the value of ``a`` or ``a.b`` as a tuple, since null is a value; None if missing."""
    value: Any = section
    for part in spelling.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return (value,)


# -- rules for heads and windows -------------------------------------------------------------------


def stated_kv_heads(fields: Fields) -> int:
    """Return the stated number, which must divide the query heads; default: one per query head."""
    stated = fields.optional_integer("num_key_value_heads")
    if stated is None:
        return fields.integer("num_attention_heads")
    fields.quotient(fields.integer("num_attention_heads", stated), stated, "num_key_value_heads")
    return stated


def falcon_kv_heads(fields: Fields) -> int:
    """Return one head for Falcon-7B, and groups since Falcon-40B (Transformers expands them)."""
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1
    return stated_kv_heads(fields)


def bigcode_kv_heads(fields: Fields) -> int:
    """Return one head, unless ``multi_query`` is false (StarCoder)."""
    return 1 if fields.flag("multi_query") else fields.integer("num_attention_heads")


def searched_kv_heads(fields: Fields) -> int:
    """Return Nemotron-NAS's heads: a layer states how many query heads share one."""
    shared_by = fields.entry("block_configs").integer("attention.n_heads_in_group")
    return fields.quotient(fields.integer("num_attention_heads"), shared_by, "n_heads_in_group")


def stated_head_dim(fields: Fields) -> int:
    """Return the stated width, else hidden_size / num_attention_heads."""
    return fields.optional_integer("head_dim") or _split(fields, width=1)


def key_width(fields: Fields) -> int:
    """Return T5's ``d_kv``, which is independent of the hidden size."""
    return fields.integer("d_kv")


def doubled_head_dim(fields: Fields) -> int:
    """Return Zamba's head width, whose attention reads the hidden state beside the embedding."""
    return fields.optional_integer("attention_head_dim") or _split(fields, width=2)


def stated_window(fields: Fields) -> int:
    """Return the stated window in tokens, which includes the query's own token."""
    return fields.integer("sliding_window")


def window_before(fields: Fields) -> int:
    """Return MiMo's window; its files do not count the query's own token."""
    before = fields.optional_integer("sliding_window_size")
    return stated_window(fields) if before is None else before + 1


def _split(fields: Fields, width: int) -> int:
    heads = fields.integer("num_attention_heads")
    return fields.quotient(width * fields.integer("hidden_size"), heads, "num_attention_heads")
