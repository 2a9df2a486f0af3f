"""Model families as a table: which layer is of which kind, and what their files leave unsaid.

To add a family, add a row. A row says only what differs from plain attention as Llama has it; a
``model_type`` without a row is read by its fields alone. Defaults are those of the family's config
class in Transformers, which the files rely on when they leave a field out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from quire.spec import heads, recurrent
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the files of one ``model_type`` are read."""

    pattern: Pattern = uniform  # kinds of layers, where ``layer_types`` does not list them
    recurrent: Callable[[Fields], RecurrentState] = recurrent.unknown  # a recurrent layer's state
    num_kv_heads: Callable[[Fields], int] = heads.stated_kv_heads
    head_dim: Callable[[Fields], int] = heads.stated_head_dim
    defaults: _Values = field(default_factory=dict)  # for what a file leaves out
    nested_defaults: _Values = field(default_factory=dict)  # … when it is a section of another's
    # kind → {field: the field that replaces it in layers of that kind}
    own_fields: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    refused: str = ""  # why it cannot be held


def _sizes(layers: int, query_heads: int, kv_heads: int, hidden: int, context: int) -> _Values:
    """The class's sizes, which multimodal files leave out of their text section."""
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "max_position_embeddings": context,
    }


# No position is encoded and no length is stated: as far as memory goes, they run for ever.
_ENDLESS = MappingProxyType({"max_position_embeddings": 2**20})
_MAMBA2_HEADS = MappingProxyType(
    {"mamba_num_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256}
)
_WIDE_HEADS = MappingProxyType({"head_dim": 256})

_EXAONE4 = Family(
    pattern=every(4, named="sliding_window_pattern"), defaults={"sliding_window": 4096}
)
_GEMMA4 = Family(
    pattern=every(6),
    defaults={**_WIDE_HEADS, "sliding_window": 512, "global_head_dim": 512},
    nested_defaults=_sizes(30, 8, 4, 2304, 131_072),
    own_fields={
        FULL: {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
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
_QWEN2 = Family(
    pattern=from_layer("max_window_layers"),
    defaults={"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    nested_defaults=_sizes(32, 32, 32, 4096, 32_768),
)
_QWEN2_VL = replace(_QWEN2, nested_defaults=_sizes(80, 64, 8, 8192, 32_768))
_QWEN3_HYBRID = Family(
    pattern=every(4, named="full_attention_interval", rest=RECURRENT),
    recurrent=recurrent.gated_delta,
    defaults={
        **_WIDE_HEADS,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
)
_SWA = Family(pattern=every(4, at=0), defaults={"sliding_window": 128})

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

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "afmoe": Family(
            pattern=every(4, named="global_attn_every_n_layers"), defaults={"sliding_window": 1024}
        ),
        "bamba": Family(
            pattern=at_indices("attn_layer_indices", rest=RECURRENT, absent=RECURRENT),
            recurrent=recurrent.mamba2,
            defaults=_MAMBA2_HEADS,
        ),
        "beam": Family(pattern=listed, defaults={"sliding_window": 512}),
        "bloom": Family(defaults={"max_position_embeddings": 2048}),
        "cohere2": _EXAONE4,
        "cohere2_moe": _EXAONE4,
        "cohere_compass_text": Family(pattern=only(FULL)),
        "cwm": Family(pattern=every(4, at=0), defaults={"sliding_window": 8192}),
        "dots1": Family(
            pattern=from_layer("max_window_layers"),
            defaults={"sliding_window": 4096, "max_window_layers": 62},
        ),
        "exaone4": _EXAONE4,
        "exaone_moe": _EXAONE4,
        "falcon": Family(
            num_kv_heads=heads.falcon_kv_heads,
            defaults={"multi_query": True, "max_position_embeddings": 2048},
        ),
        "falcon_h1": Family(
            pattern=only(HYBRID),
            recurrent=recurrent.mamba2,
            defaults={**_MAMBA2_HEADS, "mamba_d_ssm": 1024},
        ),
        "falcon_mamba": _MAMBA,
        "flint": Family(pattern=listed, defaults={"sliding_window": 513}),
        "gemma": Family(defaults=_WIDE_HEADS),
        "gemma2": Family(pattern=every(2), defaults={**_WIDE_HEADS, "sliding_window": 4096}),
        "gemma3_text": Family(
            pattern=every(6, named="sliding_window_pattern"),
            defaults={**_WIDE_HEADS, "sliding_window": 4096},
            nested_defaults=_sizes(26, 8, 4, 2304, 131_072),
        ),
        "gemma3n_text": Family(
            pattern=every(5),
            defaults={**_WIDE_HEADS, "sliding_window": 512, "num_kv_shared_layers": 15},
            nested_defaults=_sizes(35, 8, 2, 2048, 32_768),
        ),
        "gemma4_text": _GEMMA4,
        "gemma4_unified_text": replace(
            _GEMMA4,
            defaults={**_GEMMA4.defaults, "sliding_window": 1024},
            nested_defaults=_sizes(30, 8, 4, 2304, 262_144),
        ),
        "glm": Family(defaults={"head_dim": 128}),
        "glm4": Family(defaults={"head_dim": 128}),
        "gpt_bigcode": Family(num_kv_heads=heads.bigcode_kv_heads, defaults={"multi_query": True}),
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
        "llama": Family(nested_defaults=_sizes(32, 32, 32, 4096, 2048)),
        "llama4_text": Family(
            pattern=where_rope,
            defaults={"head_dim": 128, "attention_chunk_size": 8192},
            nested_defaults=_sizes(48, 40, 8, 5120, 131_072),
        ),
        "longcat_flash": Family(pattern=only(FULL, times=2)),  # two attentions in one layer
        "mamba": _MAMBA,
        "mamba2": Family(
            pattern=only(RECURRENT),
            recurrent=recurrent.mamba2,
            defaults={**_ENDLESS, "num_heads": 128, "state_size": 128, "n_groups": 8},
        ),
        "mellum": Family(pattern=only(FULL)),
        "mimo_v2_flash": Family(
            refused="its sliding layers have heads of their own, read by no row"
        ),
        "ministral": Family(defaults={"sliding_window": 4096}),
        "mistral": Family(
            defaults={"sliding_window": 4096}, nested_defaults=_sizes(32, 32, 8, 4096, 131_072)
        ),
        "nemotron-nas": Family(pattern=no_op_blocks, num_kv_heads=heads.searched_kv_heads),
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
        "qwen2_vl_text": _QWEN2_VL,
        "qwen2_5_vl_text": _QWEN2_VL,
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
        "vaultgemma": Family(pattern=every(2), defaults={**_WIDE_HEADS, "sliding_window": 4096}),
        "zamba": Family(
            pattern=zamba,
            recurrent=recurrent.mamba_heads,
            head_dim=heads.doubled_head_dim,
            defaults={"mamba_num_heads": 2, "state_size": 16},
        ),
        "zamba2": Family(
            pattern=listed,
            recurrent=recurrent.mamba2,
            head_dim=heads.doubled_head_dim,
            defaults={"mamba_num_heads": 8, "state_size": 64},
        ),
        **dict.fromkeys(
            _UNKNOWN_STATE, Family(refused="its layers keep states not described here")
        ),
        **dict.fromkeys(
            _ENCODERS, Family(refused="an encoder reads its text once and keeps no cache")
        ),
    }
)
