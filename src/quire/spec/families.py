"""Model families as a table: which layer is of which kind, and what their files leave unsaid.

To add a family, add a row. A row says only what differs from plain attention as Llama has it; a
``model_type`` without a row is read by its fields alone. Defaults are those of the family's config
class in Transformers, which the files rely on when they leave a field out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from quire.spec import recurrent
from quire.spec.fields import Fields
from quire.spec.layers import RecurrentState
from quire.spec.patterns import (
    CONV,
    FULL,
    HYBRID,
    NOTHING,
    RECURRENT,
    SLIDING,
    Pattern,
    at_indices,
    cycle,
    every,
    from_layer,
    global_and_local,
    kimi_linear,
    letters,
    listed,
    no_op_blocks,
    only,
    uniform,
    where_rope,
    zamba,
)

_Values: TypeAlias = Mapping[str, Any]


def stated_kv_heads(fields: Fields) -> int:
    """As stated, else one for each query head."""
    stated = fields.optional_integer("num_key_value_heads")
    return stated or fields.integer("num_attention_heads")


def stated_head_dim(fields: Fields) -> int:
    """As stated, else hidden_size / num_attention_heads."""
    return fields.optional_integer("head_dim") or _split_heads(fields, width=1)


def doubled_head_dim(fields: Fields) -> int:
    """Zamba's shared attention reads the hidden state and the embedding side by side."""
    return fields.optional_integer("attention_head_dim") or _split_heads(fields, width=2)


def _split_heads(fields: Fields, width: int) -> int:
    heads = fields.integer("num_attention_heads")
    return fields.quotient(width * fields.integer("hidden_size"), heads, "num_attention_heads")


def falcon_heads(fields: Fields) -> int:
    """One for all in Falcon-7B, groups since Falcon-40B (Transformers caches them expanded)."""
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1
    return stated_kv_heads(fields)


def bigcode_heads(fields: Fields) -> int:
    return 1 if fields.flag("multi_query") else fields.integer("num_attention_heads")


def nas_heads(fields: Fields) -> int:
    """Nemotron-NAS: a layer states how many query heads share one head of keys and values."""
    shared_by = fields.entry("block_configs").integer("attention.n_heads_in_group")
    return fields.quotient(fields.integer("num_attention_heads"), shared_by, "n_heads_in_group")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the files of one ``model_type`` are read."""

    pattern: Pattern = uniform  # kinds of layers, where ``layer_types`` does not list them
    recurrent: Callable[[Fields], RecurrentState] | None = None  # state of a recurrent layer
    num_kv_heads: Callable[[Fields], int] = stated_kv_heads
    head_dim: Callable[[Fields], int] = stated_head_dim
    defaults: _Values = field(default_factory=dict)  # for what a file leaves out
    nested_defaults: _Values = field(
        default_factory=dict
    )  # … when it is a section of another's file
    # kind → {field: the field that replaces it in layers of that kind}
    own_fields: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    refused: str = ""  # why it cannot be held


_GEMMA3 = {
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
_GEMMA3N = {
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
}
_GEMMA4 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
_LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "max_position_embeddings": 2048,
}
_LLAMA4 = {
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
_MISTRAL = {
    **_LLAMA,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
_MAMBA2_HEADS = {"mamba_num_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256}
_GATED_DELTA = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# No position is encoded and no length is stated: as far as memory goes, they run for ever.
_ENDLESS = {"max_position_embeddings": 2**20}

_QWEN2 = Family(
    pattern=from_layer("max_window_layers"),
    defaults={"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    nested_defaults={**_LLAMA, "num_key_value_heads": 32, "max_position_embeddings": 32_768},
)
_QWEN3_HYBRID = Family(
    pattern=every(4, named="full_attention_interval", rest=RECURRENT),
    recurrent=recurrent.gated_delta,
    defaults=_GATED_DELTA,
)
_GEMMA4_TEXT = Family(
    pattern=every(6),
    defaults={"head_dim": 256, "sliding_window": 512, "global_head_dim": 512},
    nested_defaults=_GEMMA4,
    own_fields={
        FULL: {
            "head_dim": "global_head_dim",
            "num_key_value_heads": "num_global_key_value_heads",
        }
    },
)
_LFM2 = Family(
    pattern=at_indices("full_attn_idxs", rest=CONV),
    recurrent=recurrent.short_convolution,
    defaults={"conv_L_cache": 3},
)
_MAMBA = Family(
    pattern=only(RECURRENT),
    recurrent=recurrent.mamba,
    defaults=_ENDLESS,
    own_fields={RECURRENT: {"mamba_d_ssm": "intermediate_size"}},
)
_SWA = Family(pattern=every(4, at=0), defaults={"sliding_window": 128})
_EXAONE = Family(
    pattern=every(4, named="sliding_window_pattern"), defaults={"sliding_window": 4096}
)
_COHERE2 = _EXAONE
_UNKNOWN_STATE = (
    *("bailing_hybrid", "inkling_text", "inkling2_text", "minimax", "minimax_text_01"),
    *("rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm", "zaya"),
)
_ENCODERS = (
    *("albert", "bert", "camembert", "clip_text_model", "data2vec-text", "deberta", "deberta-v2"),
    *("distilbert", "electra", "ernie", "eurobert", "longformer", "megatron-bert", "modernbert"),
    *("mpnet", "nomic_bert", "rembert", "roberta", "roberta-prelayernorm", "roformer"),
    *("reformer", "siglip_text_model", "vit", "wav2vec2", "xlm", "xlm-roberta"),
    *("xlm-roberta-xl", "xlnet", "xmod"),
)

FAMILIES: Mapping[str, Family] = {
    "afmoe": Family(
        pattern=every(4, named="global_attn_every_n_layers"), defaults={"sliding_window": 1024}
    ),
    "bamba": Family(
        pattern=at_indices("attn_layer_indices", rest=RECURRENT, absent=RECURRENT),
        recurrent=recurrent.mamba2,
        defaults=_MAMBA2_HEADS,
    ),
    "beam": Family(pattern=every(6), defaults={"sliding_window": 512}),
    "bloom": Family(defaults={"max_position_embeddings": 2048}),
    "cohere2": _COHERE2,
    "cohere2_moe": _COHERE2,
    "cohere_compass_text": Family(pattern=only(FULL)),
    "cwm": Family(pattern=every(4, at=0), defaults={"sliding_window": 8192}),
    "dots1": Family(
        pattern=from_layer("max_window_layers"),
        defaults={"sliding_window": 4096, "max_window_layers": 62},
    ),
    "exaone4": _EXAONE,
    "exaone_moe": _EXAONE,
    "falcon": Family(
        num_kv_heads=falcon_heads, defaults={"multi_query": True, "max_position_embeddings": 2048}
    ),
    "falcon_h1": Family(
        pattern=only(HYBRID),
        recurrent=recurrent.mamba2,
        defaults={**_MAMBA2_HEADS, "mamba_d_ssm": 1024},
    ),
    "falcon_mamba": _MAMBA,
    "flint": Family(pattern=listed, defaults={"sliding_window": 513}),
    "gemma": Family(defaults={"head_dim": 256}),
    "gemma2": Family(pattern=every(2), defaults={"head_dim": 256, "sliding_window": 4096}),
    "gemma3_text": Family(
        pattern=every(6, named="sliding_window_pattern"),
        defaults={"head_dim": 256, "sliding_window": 4096},
        nested_defaults=_GEMMA3,
    ),
    "gemma3n_text": Family(
        pattern=every(5),
        defaults={"head_dim": 256, "sliding_window": 512, "num_kv_shared_layers": 15},
        nested_defaults=_GEMMA3N,
    ),
    "gemma4_text": _GEMMA4_TEXT,
    "gemma4_unified_text": _GEMMA4_TEXT,
    "glm": Family(defaults={"head_dim": 128}),
    "glm4": Family(defaults={"head_dim": 128}),
    "gpt_bigcode": Family(num_kv_heads=bigcode_heads, defaults={"multi_query": True}),
    "gpt_neo": Family(
        pattern=global_and_local,
        defaults={"window_size": 256},
        own_fields={SLIDING: {"sliding_window": "window_size"}},
    ),
    "gpt_oss": Family(pattern=every(2), defaults={"head_dim": 64, "sliding_window": 128}),
    "granite_swa": _SWA,
    "granitemoe_swa": _SWA,
    "granitemoehybrid": Family(
        pattern=only(RECURRENT), recurrent=recurrent.mamba2, defaults=_MAMBA2_HEADS
    ),
    "helium": Family(defaults={"head_dim": 128}),
    "jamba": Family(
        pattern=every(
            8, named="attn_layer_period", at=4, at_named="attn_layer_offset", rest=RECURRENT
        ),
        recurrent=recurrent.mamba,
    ),
    "kimi_linear": Family(
        pattern=kimi_linear,
        recurrent=recurrent.delta_attention,
        defaults={"linear_num_heads": 32, "linear_head_dim": 128},
    ),
    "kolibri1": Family(pattern=every(5), defaults={"sliding_window": 513}),
    "laguna": Family(pattern=only(FULL)),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "lfm3": Family(
        pattern=listed, recurrent=recurrent.short_convolution, defaults={"head_dim": 128}
    ),
    "llama": Family(nested_defaults=_LLAMA),
    "llama4_text": Family(
        pattern=where_rope,
        defaults={"head_dim": 128, "attention_chunk_size": 8192},
        nested_defaults=_LLAMA4,
    ),
    "longcat_flash": Family(pattern=only(FULL, times=2)),  # two attentions in one layer
    "mamba": _MAMBA,
    "mamba2": Family(
        pattern=only(RECURRENT),
        recurrent=recurrent.mamba2,
        defaults={**_ENDLESS, "num_heads": 128, "state_size": 128, "n_groups": 8},
    ),
    "mellum": Family(pattern=only(FULL)),
    "mimo_v2_flash": Family(refused="its sliding layers have heads of their own, read by no row"),
    "ministral": Family(defaults={"sliding_window": 4096}),
    "mistral": Family(defaults={"sliding_window": 4096}, nested_defaults=_MISTRAL),
    "nemotron-nas": Family(pattern=no_op_blocks, num_kv_heads=nas_heads),
    "nemotron_h": Family(
        pattern=letters(
            "hybrid_override_pattern", {"M": RECURRENT, "*": FULL, "-": NOTHING, "E": NOTHING}
        ),
        recurrent=recurrent.mamba2,
        defaults={
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
        },
    ),
    "olmo3": Family(pattern=every(4), defaults={"sliding_window": 4096}),
    "olmo_hybrid": Family(
        pattern=every(4, rest=RECURRENT), recurrent=recurrent.gated_delta_of_attention
    ),
    "qwen2": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen3": Family(
        pattern=from_layer("max_window_layers"),
        defaults={**_QWEN2.defaults, "head_dim": 128},
        nested_defaults=_QWEN2.nested_defaults,
    ),
    "qwen3_5_text": _QWEN3_HYBRID,
    "qwen3_5_moe_text": _QWEN3_HYBRID,
    "qwen3_next": _QWEN3_HYBRID,
    "recurrent_gemma": Family(
        pattern=cycle("block_types", {"recurrent": RECURRENT, "attention": SLIDING}),
        recurrent=recurrent.linear_recurrent_unit,
        defaults={
            **_ENDLESS,
            "attention_window_size": 2048,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
    ),
    "vaultgemma": Family(pattern=every(2), defaults={"head_dim": 256, "sliding_window": 4096}),
    "zamba": Family(
        pattern=zamba,
        recurrent=recurrent.mamba_heads,
        head_dim=doubled_head_dim,
        defaults={"mamba_num_heads": 2, "state_size": 16},
    ),
    "zamba2": Family(
        pattern=listed,
        recurrent=recurrent.mamba2,
        head_dim=doubled_head_dim,
        defaults={"mamba_num_heads": 8, "state_size": 64},
    ),
    **dict.fromkeys(_UNKNOWN_STATE, Family(refused="its layers keep states not described here")),
    **dict.fromkeys(_ENCODERS, Family(refused="an encoder reads its text once and keeps no cache")),
}
