"""List model families: how to find the kinds of their layers, and the defaults of their fields.

To add a family, add a row. A row says only what differs from plain attention as in Llama; a
``model_type`` without a row is read by its fields alone. Defaults are those of the family's config
class in Transformers, on which files rely when they leave a field out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from quire.spec import fields as heads
from quire.spec import recurrent_states as recurrent
from quire.spec.fields import Fields
from quire.spec.layer_specs import RecurrentState
from quire.spec.patterns import (
    CONV,
    FULL,
    HYBRID,
    HYBRID_SLIDING,
    NOTHING,
    RECURRENT,
    SLIDING,
    Pattern,
    as_long_as_the_text,
    at_indices,
    chosen,
    cycle,
    every,
    first_too,
    from_layer,
    kimi_linear,
    letters,
    listed,
    no_op_blocks,
    only,
    stated_source,
    uniform,
    where_rope,
    zamba,
)

_Values: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """How to read the config.json files of one ``model_type``."""

    pattern: Pattern = uniform  # kinds of layers, if ``layer_types`` does not list them
    recurrent: Callable[[Fields], RecurrentState] = recurrent.unknown  # a recurrent layer's state
    num_kv_heads: Callable[[Fields], int] = heads.stated_kv_heads
    head_dim: Callable[[Fields], int] = heads.stated_head_dim
    defaults: _Values = field(default_factory=dict)  # of fields that a file leaves out
    nested_defaults: _Values = field(default_factory=dict)  # further ones, for a nested section
    # kind → {field: the field that replaces it in layers of that kind}
    own_fields: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    window: Callable[[Fields], int] = heads.stated_window
    heads_in_windows: int = 1  # factor by which sliding layers have more KV heads
    # Of an encoder-decoder: the tokens of the longest source.
    source_tokens: Callable[[Fields], int] | None = None
    refused: str = ""  # why Quire cannot hold its memory
    unless: str = ""  # a field that lifts the refusal if it is true


def _sizes(layers: int, query_heads: int, kv_heads: int, hidden: int, context: int) -> _Values:
    """Return the class's sizes, which multimodal files leave out of their text section."""
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "max_position_embeddings": context,
    }


# These models encode no positions and state no context, so any length works.
_ENDLESS = MappingProxyType({"max_position_embeddings": 2**20})
_MAMBA2_HEADS = MappingProxyType(
    {"mamba_num_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256}
)
_WIDE_HEADS = MappingProxyType({"head_dim": 256})

_EXAONE4 = ModelFamily(
    pattern=every(4, named="sliding_window_pattern"), defaults={"sliding_window": 4096}
)
_GEMMA4 = ModelFamily(
    pattern=every(6),
    defaults={**_WIDE_HEADS, "sliding_window": 512, "global_head_dim": 512},
    nested_defaults=_sizes(30, 8, 4, 2304, 131_072),
    own_fields={
        FULL: {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    },
)
_INKLING2 = ModelFamily(
    pattern=every(6, kind=HYBRID, rest=HYBRID_SLIDING),
    recurrent=recurrent.four_convolutions,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "swa_head_dim": 128,
        "swa_num_attention_heads": 48,
        "swa_num_key_value_heads": 8,
        "sliding_window_size": 1024,
    },
    own_fields={
        HYBRID_SLIDING: {
            "head_dim": "swa_head_dim",
            "num_attention_heads": "swa_num_attention_heads",
            "num_key_value_heads": "swa_num_key_value_heads",
            "sliding_window": "sliding_window_size",
        }
    },
)
_LFM2 = ModelFamily(
    pattern=at_indices("full_attn_idxs", rest=CONV),
    recurrent=recurrent.short_convolution,
    defaults={"conv_L_cache": 3},
)
_MAMBA = ModelFamily(
    pattern=only(RECURRENT),
    recurrent=recurrent.mamba,
    defaults=_ENDLESS,
    own_fields={RECURRENT: {"mamba_d_ssm": "intermediate_size"}},
)
_QWEN2 = ModelFamily(
    pattern=from_layer("max_window_layers"),
    defaults={"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    nested_defaults=_sizes(32, 32, 32, 4096, 32_768),
)
_QWEN2_VL = replace(_QWEN2, nested_defaults=_sizes(80, 64, 8, 8192, 32_768))
_QWEN3_HYBRID = ModelFamily(
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
# These models learn no positions; the context is that of their training.
_T5 = ModelFamily(
    head_dim=heads.key_width,
    source_tokens=as_long_as_the_text,
    defaults={"d_kv": 64, "max_position_embeddings": 512},
)
_BART = ModelFamily(source_tokens=as_long_as_the_text, defaults={"max_position_embeddings": 1024})
_SWA = ModelFamily(pattern=every(4, at=0), defaults={"sliding_window": 128})

# Encoders, unless they are decoders (``is_decoder``).
_ENCODERS = (
    *("albert", "bert", "bert-generation", "big_bird", "camembert", "clip_text_model"),
    *("data2vec-text", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "eurobert"),
    *("longformer", "megatron-bert", "modernbert", "mpnet", "nomic_bert", "rembert", "roberta"),
    *("roberta-prelayernorm", "roc_bert", "roformer", "siglip_text_model", "vit", "wav2vec2"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
_STATE_OF_ITS_OWN = "its layers keep states of their own outside Transformers' cache"
_REFUSED = MappingProxyType(
    {
        "blt": "it reads bytes in patches, and several models within it keep caches of their own",
        "cpmant": "it puts a prompt of its own before each text, which later tokens change",
        **dict.fromkeys(("rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm"), _STATE_OF_ITS_OWN),
        "minimax_text_01": _STATE_OF_ITS_OWN,
        **dict.fromkeys(
            ("musicgen_decoder", "musicgen_melody_decoder"),
            "it writes sound, several codes at a time",
        ),
        "reformer": "it keeps buckets of hashed keys, not keys and values",
        **dict.fromkeys(
            ("openai-gpt", "xlm", "xlnet"),
            "its code keeps no keys and values: it reads a whole text anew for each token",
        ),
    }
)

FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        **dict.fromkeys(("longt5", "mt5", "t5", "umt5"), _T5),
        **dict.fromkeys(("bart", "m2m_100", "marian", "mbart"), _BART),
        **dict.fromkeys(("nllb-moe", "pegasus", "plbart"), _BART),
        "bigbird_pegasus": replace(_BART, defaults={"max_position_embeddings": 4096}),
        "blenderbot": replace(_BART, defaults={"max_position_embeddings": 128}),
        "blenderbot-small": replace(_BART, defaults={"max_position_embeddings": 512}),
        "led": ModelFamily(
            source_tokens=stated_source("max_encoder_position_embeddings", 16_384),
            defaults={"max_decoder_position_embeddings": 1024},
        ),
        "pegasus_x": replace(_BART, defaults={"max_position_embeddings": 16_384}),
        "whisper": ModelFamily(
            source_tokens=stated_source("max_source_positions", 1500),
            defaults={"max_target_positions": 448},
        ),
        "afmoe": ModelFamily(
            pattern=every(4, named="global_attn_every_n_layers"), defaults={"sliding_window": 1024}
        ),
        "bailing_hybrid": ModelFamily(
            pattern=every(6, named="layer_group_size", rest=RECURRENT),
            recurrent=recurrent.delta_attention_of_attention,
            defaults={"head_dim": 128},
        ),
        "bamba": ModelFamily(
            pattern=at_indices("attn_layer_indices", rest=RECURRENT, absent=RECURRENT),
            recurrent=recurrent.mamba2,
            defaults=_MAMBA2_HEADS,
        ),
        "beam": ModelFamily(pattern=listed, defaults={"sliding_window": 512}),
        "bloom": ModelFamily(defaults={"max_position_embeddings": 2048}),
        "cohere2": _EXAONE4,
        "cohere2_moe": _EXAONE4,
        "cohere_compass_text": ModelFamily(pattern=only(FULL)),
        "cwm": ModelFamily(pattern=every(4, at=0), defaults={"sliding_window": 8192}),
        "dots1": ModelFamily(
            pattern=from_layer("max_window_layers"),
            defaults={"sliding_window": 4096, "max_window_layers": 62},
        ),
        "exaone4": _EXAONE4,
        "exaone_moe": _EXAONE4,
        "falcon": ModelFamily(
            num_kv_heads=heads.falcon_kv_heads,
            defaults={"multi_query": True, "max_position_embeddings": 2048},
        ),
        "falcon_h1": ModelFamily(
            pattern=only(HYBRID),
            recurrent=recurrent.mamba2,
            defaults={**_MAMBA2_HEADS, "mamba_d_ssm": 1024},
        ),
        "falcon_mamba": _MAMBA,
        "flint": ModelFamily(pattern=listed, defaults={"sliding_window": 513}),
        "gemma": ModelFamily(defaults=_WIDE_HEADS),
        "gemma2": ModelFamily(pattern=every(2), defaults={**_WIDE_HEADS, "sliding_window": 4096}),
        "gemma3_text": ModelFamily(
            pattern=every(6, named="sliding_window_pattern"),
            defaults={**_WIDE_HEADS, "sliding_window": 4096},
            nested_defaults=_sizes(26, 8, 4, 2304, 131_072),
        ),
        "gemma3n_text": ModelFamily(
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
        "glm": ModelFamily(defaults={"head_dim": 128}),
        "glm4": ModelFamily(defaults={"head_dim": 128}),
        "gpt_bigcode": ModelFamily(
            num_kv_heads=heads.bigcode_kv_heads, defaults={"multi_query": True}
        ),
        # Its local layers mask their windows out of all tokens, so that all are kept.
        "gpt_neo": ModelFamily(pattern=only(FULL)),
        "gpt_oss": ModelFamily(pattern=every(2), defaults={"head_dim": 64, "sliding_window": 128}),
        "granite_swa": _SWA,
        "granitemoe_swa": _SWA,
        "granitemoehybrid": ModelFamily(
            pattern=only(RECURRENT), recurrent=recurrent.mamba2, defaults=_MAMBA2_HEADS
        ),
        "helium": ModelFamily(defaults={"head_dim": 128}),
        "inkling2_text": _INKLING2,
        "inkling_text": replace(
            _INKLING2,
            pattern=chosen(
                "local_layer_ids", HYBRID_SLIDING, rest=HYBRID, absent=_INKLING2.pattern
            ),
            defaults={
                **_INKLING2.defaults,
                "swa_num_attention_heads": 64,
                "swa_num_key_value_heads": 16,
                "sliding_window_size": 512,
            },
        ),
        "jamba": ModelFamily(
            pattern=every(
                8, named="attn_layer_period", at=4, at_named="attn_layer_offset", rest=RECURRENT
            ),
            recurrent=recurrent.mamba,
        ),
        "kimi_linear": ModelFamily(
            pattern=kimi_linear,
            recurrent=recurrent.delta_attention,
            defaults={"linear_num_heads": 32, "linear_head_dim": 128},
        ),
        "kolibri1": ModelFamily(pattern=every(5), defaults={"sliding_window": 513}),
        "laguna": ModelFamily(pattern=only(FULL)),
        "lfm2": _LFM2,
        "lfm2_moe": _LFM2,
        "lfm3": ModelFamily(
            pattern=listed, recurrent=recurrent.short_convolution, defaults={"head_dim": 128}
        ),
        "llama": ModelFamily(nested_defaults=_sizes(32, 32, 32, 4096, 2048)),
        "llama4_text": ModelFamily(
            pattern=where_rope,
            defaults={"head_dim": 128, "attention_chunk_size": 8192},
            nested_defaults=_sizes(48, 40, 8, 5120, 131_072),
        ),
        "longcat_flash": ModelFamily(pattern=only(FULL, times=2)),  # two attentions in one layer
        "mamba": _MAMBA,
        "mamba2": ModelFamily(
            pattern=only(RECURRENT),
            recurrent=recurrent.mamba2,
            defaults={**_ENDLESS, "num_heads": 128, "state_size": 128, "n_groups": 8},
        ),
        "mellum": ModelFamily(pattern=only(FULL)),
        "mimo_v2_flash": ModelFamily(
            pattern=first_too(every(6)),
            window=heads.window_before,
            heads_in_windows=2,
            defaults={"head_dim": 192, "v_head_dim": 128, "sliding_window": 129},
        ),
        "minimax": ModelFamily(
            pattern=every(2, at=0, rest=RECURRENT), recurrent=recurrent.lightning
        ),
        "ministral": ModelFamily(defaults={"sliding_window": 4096}),
        "mistral": ModelFamily(
            defaults={"sliding_window": 4096}, nested_defaults=_sizes(32, 32, 8, 4096, 131_072)
        ),
        # Layers that attend to an image keep nothing of the text.
        "mllama_text_model": ModelFamily(
            pattern=chosen("cross_attention_layers", NOTHING, rest=FULL, absent=only(FULL))
        ),
        "nemotron-nas": ModelFamily(pattern=no_op_blocks, num_kv_heads=heads.searched_kv_heads),
        "nemotron_h": ModelFamily(
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
        "olmo3": ModelFamily(pattern=every(4), defaults={"sliding_window": 4096}),
        "olmo_hybrid": ModelFamily(
            pattern=every(4, rest=RECURRENT), recurrent=recurrent.gated_delta_of_attention
        ),
        "qwen2": _QWEN2,
        "qwen2_vl_text": _QWEN2_VL,
        "qwen2_5_vl_text": _QWEN2_VL,
        "qwen3": ModelFamily(
            pattern=from_layer("max_window_layers"),
            defaults={**_QWEN2.defaults, "head_dim": 128},
            nested_defaults=_QWEN2.nested_defaults,
        ),
        "qwen3_5_text": _QWEN3_HYBRID,
        "qwen3_5_moe_text": _QWEN3_HYBRID,
        "qwen3_next": _QWEN3_HYBRID,
        "recurrent_gemma": ModelFamily(
            pattern=cycle("block_types", {"recurrent": RECURRENT, "attention": SLIDING}),
            recurrent=recurrent.linear_recurrent_unit,
            defaults={
                **_ENDLESS,
                "attention_window_size": 2048,
                "block_types": ["recurrent", "recurrent", "attention"],
            },
        ),
        "vaultgemma": ModelFamily(
            pattern=every(2), defaults={**_WIDE_HEADS, "sliding_window": 4096}
        ),
        "zamba": ModelFamily(
            pattern=zamba,
            recurrent=recurrent.mamba_heads,
            head_dim=heads.doubled_head_dim,
            defaults={"mamba_num_heads": 2, "state_size": 16},
        ),
        "zamba2": ModelFamily(
            pattern=listed,
            recurrent=recurrent.mamba2,
            head_dim=heads.doubled_head_dim,
            defaults={"mamba_num_heads": 8, "state_size": 64},
        ),
        "zaya": ModelFamily(
            pattern=only(HYBRID),
            recurrent=recurrent.convolved_heads,
            defaults={"head_dim": 128, "num_key_value_heads": 2},
        ),
        **dict.fromkeys(
            _ENCODERS,
            ModelFamily(
                refused="an encoder reads its text once and keeps no cache", unless="is_decoder"
            ),
        ),
        **{name: ModelFamily(refused=reason) for name, reason in _REFUSED.items()},
    }
)
