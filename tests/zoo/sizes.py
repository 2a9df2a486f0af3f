"""How small each class is made: sizes that all have in common, and what single ones need besides.

A class gets those of the common sizes that its config knows; the table says the rest. A window or
a chunk is shorter than the prompts, so that it moves. Whether what is built is right is not judged
here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

VOCAB = 199
WINDOW, CHUNK = 7, 8
NUM_LAYERS = 4
MAX_LEN = 128

# Given to a class that knows them, though it has none by default.
_ALSO_WHERE_NONE = (
    *("sliding_window", "pad_token_id", "bos_token_id", "eos_token_id", "head_dim"),
    *("num_key_value_heads", "num_experts_per_tok", "n_routed_experts"),
    "n_shared_experts",
)
_DROP = object()  # a common size that this class must not be given
_Sizes = dict[str, Any]
_NOTHING: Mapping[str, Any] = MappingProxyType({})

_TEXT: _Sizes = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=MAX_LEN,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    sliding_window=WINDOW,
    attention_chunk_size=CHUNK,
)
# The same in the words of older classes.
_OTHER_WORDS: _Sizes = dict(
    n_embd=64,
    n_layer=NUM_LAYERS,
    n_head=4,
    n_inner=96,
    n_positions=MAX_LEN,
    n_ctx=MAX_LEN,
    d_model=64,
    n_layers=NUM_LAYERS,
    n_heads=4,
    num_layers=NUM_LAYERS,
    num_heads=4,
    d_inner=96,
    ffn_dim=96,
    ffn_hidden_size=96,
    word_embed_proj_dim=64,
    max_seq_len=MAX_LEN,
    decoder_layers=NUM_LAYERS,
    decoder_attention_heads=4,
    decoder_ffn_dim=96,
    encoder_layers=NUM_LAYERS,  # of which Transformers makes the decoder's cache
    encoder_attention_heads=4,
    encoder_ffn_dim=96,
    max_target_positions=MAX_LEN,
)
_EXPERTS: _Sizes = dict(
    num_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    n_routed_experts=4,
    n_shared_experts=1,
    num_shared_experts=1,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    shared_intermediate_size=32,
    dense_intermediate_size=96,
    first_k_dense_replace=1,
    num_dense_layers=1,
    decoder_sparse_step=1,
    moe_k=2,
    moe_num_experts=4,
    moe_num_shared_experts=1,
    moe_topk=2,
    moe_layer_start_index=1,
)
_LATENT: _Sizes = dict(
    q_lora_rank=24, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12
)
_RECURRENT: _Sizes = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_heads=4,
    linear_head_dim=8,
    mamba_n_heads=8,
    mamba_num_heads=8,
    mamba_d_head=16,
    mamba_head_dim=16,
    mamba_d_state=8,
    mamba_d_ssm=128,
    mamba_expand=2,
    mamba_n_groups=1,
    mamba_chunk_size=CHUNK,
    n_groups=1,
    expand=2,
    state_size=8,
    ssm_state_size=8,
    chunk_size=CHUNK,
)
_SPARSE: _Sizes = dict(
    index_topk=8, index_n_heads=8, index_head_dim=16
)  # so many that no two scores are equal
_OTHERS: _Sizes = dict(
    swa_num_attention_heads=4,
    swa_num_key_value_heads=4,
    swa_head_dim=12,
    sliding_window_size=WINDOW,
    rel_extent=2 * WINDOW,
    query_pre_attn_scalar=16,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCAB,
    num_kv_shared_layers=0,
    laurel_rank=4,
)
COMMON: _Sizes = {
    **_TEXT,
    **_OTHER_WORDS,
    **_EXPERTS,
    **_LATENT,
    **_RECURRENT,
    **_SPARSE,
    **_OTHERS,
}

_MLA: _Sizes = dict(head_dim=_DROP, num_key_value_heads=4)
_EVERY_OTHER: _Sizes = dict(layer_types=["linear_attention", "full_attention"] * 2)
_GEMMA4: _Sizes = dict(global_head_dim=24, num_global_key_value_heads=1)

# Encoders that can be told to write: listed apart.
ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"),
    *("roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
)
# Decoders cut out of encoder-decoders, without what they would have read: apart too.
HALVES = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp"),
    *("pegasus", "plbart", "prophetnet", "trocr", "whisper"),
)
OWN_OF_ENCODERS: dict[str, _Sizes] = {
    "reformer": dict(
        attn_layers=["local", "lsh"] * 2,
        attention_head_size=16,
        axial_pos_shape=[8, 16],
        axial_pos_embds_dim=[16, 48],
        feed_forward_size=96,
        local_attn_chunk_length=CHUNK,
        lsh_attn_chunk_length=CHUNK,
        num_buckets=4,
        hash_seed=0,
    ),
    "xlm": dict(causal=True, n_heads=4, emb_dim=64),
    "xlnet": dict(max_position_embeddings=_DROP),
    "xmod": dict(languages=["en_XX"], default_language="en_XX"),
}
OWN: dict[str, _Sizes] = {
    "axk1": _MLA,
    "axk2": _MLA,
    "bailing_hybrid": dict(
        _MLA, head_dim=8, layer_types=["linear_attention", "full_attention"] * 2
    ),
    "bamba": dict(layer_types=_DROP, layers_block_type=_DROP, attn_layer_indices=[1, 3]),
    "blt": dict(vocab_size=260, encoder_hash_byte_group_vocab=101),
    "blt_global_transformer": dict(hidden_size=128, head_dim=_DROP),
    "blt_local_decoder": dict(vocab_size=260, hidden_size_global=128, head_dim=_DROP),
    "blt_local_encoder": dict(vocab_size=260, hidden_size_global=128, head_dim=_DROP),
    "blt_patcher": dict(vocab_size=260, head_dim=_DROP),
    "codegen": dict(rotary_dim=8),
    "cohere_compass_text": dict(
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": 10_000.0}
            for kind in ("sliding_attention", "full_attention")
        }
    ),
    "cpmant": dict(dim_head=16, dim_ff=96, num_attention_heads=4, prompt_length=4),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10_000.0)),
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "dots3_note_text": dict(_MLA, layer_types=["indexed_attention", "sliding_attention"] * 2),
    "falcon": dict(num_kv_heads=4, head_dim=_DROP),
    "falcon_h1": dict(layer_types=_DROP, layers_block_type=_DROP),
    "falcon_mamba": dict(layer_types=_DROP, time_step_rank=4),
    "gemma3n_text": dict(
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA,
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]], window_size=WINDOW),
    "gptj": dict(rotary_dim=8),
    "granitemoehybrid": _EVERY_OTHER,
    "jamba": dict(
        layer_types=_DROP,
        attn_layer_offset=1,
        attn_layer_period=2,
        use_mamba_kernels=False,
        mamba_dt_rank=4,
    ),
    "kimi_linear": dict(_MLA, **_EVERY_OTHER),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "longcat_flash": dict(_MLA, head_dim=8, num_layers=2, zero_expert_num=2, moe_topk=2),
    "mamba": dict(layer_types=_DROP, time_step_rank=4),
    "mamba2": dict(layer_types=_DROP, num_heads=8, head_dim=16),
    "minicpm3": _MLA,
    "minimax": dict(_EVERY_OTHER, block_size=CHUNK),
    # Its code looks through a window only where it has a cache: one that is never full.
    "moshi": dict(sliding_window=MAX_LEN),
    "musicgen_decoder": dict(num_codebooks=1, audio_channels=1),
    "musicgen_melody_decoder": dict(num_codebooks=1, audio_channels=1),
    "nemotron_h": dict(
        layer_types=_DROP,
        layers_block_type=_DROP,
        num_hidden_layers=_DROP,
        hybrid_override_pattern="M*M-",
    ),
    "olmo_hybrid": _EVERY_OTHER,
    "prophetnet": dict(
        num_hidden_layers=_DROP,
        num_encoder_layers=NUM_LAYERS,
        num_decoder_layers=NUM_LAYERS,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        is_encoder_decoder=False,
    ),
    "qwen3_5_moe_text": _EVERY_OTHER,
    "qwen3_5_text": _EVERY_OTHER,
    "qwen3_next": _EVERY_OTHER,
    "qwen4_exp_text": dict(
        layer_types=["linear_attention", "indexed_attention"] * 2,
        hc_lowrank=16,
        indexer_n_heads=8,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=2,
    ),
    "recurrent_gemma": dict(
        lru_width=64, attention_window_size=WINDOW, layer_types=_DROP, layers_block_type=_DROP
    ),
    "xlstm": dict(qk_dim_factor=1.0, v_dim_factor=1.0),
    "youtu": _MLA,
    "zaya": dict(router_hidden_size=16, num_experts_per_tok=1),
    "zamba2": dict(
        layers_block_type=["linear_attention", "hybrid"] * 2,
        layer_types=["linear_attention", "hybrid"] * 2,
        hybrid_layer_ids=[1, 3],
        n_mamba_heads=8,
        mamba_headdim=16,
        mamba_ngroups=1,
        num_mem_blocks=1,
        adapter_rank=4,
        attention_head_dim=32,
        attention_hidden_size=128,
        head_dim=_DROP,
    ),
    **{name: dict(is_decoder=True, **OWN_OF_ENCODERS.get(name, {})) for name in ENCODERS},
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The config of a class, tiny. Raises: whatever its config class does.

    A class that is the writing part of a larger one gets that part's config, as ``AutoModel`` gives
    it.
    """
    whole = CONFIG_MAPPING[model_type]
    own = causal_class(model_type).config_class
    parts = [type(part) for part in vars(whole()).values() if isinstance(part, PreTrainedConfig)]
    if own in parts:
        return own(**tiny_sizes(own, own.model_type))
    return whole(**tiny_sizes(whole, model_type))


def causal_class(model_type: str) -> type[PreTrainedModel]:
    """What ``AutoModelForCausalLM`` makes of this ``model_type``."""
    found: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return found


def tiny_sizes(
    config: type[PreTrainedConfig], model_type: str, sight: Mapping[str, Any] = _NOTHING
) -> _Sizes:
    """The arguments, those of sections inside them; ``sight`` has those of sections that see."""
    full = config()
    common = COMMON
    if sight:  # an image has many tokens
        common = {**COMMON, "max_position_embeddings": 4 * MAX_LEN}
    if sight and "vocab_size" not in vars(full):
        common |= sight
    sizes = {name: value for name, value in common.items() if _knows(config, full, name)}
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(getattr(full, name, None) or ()))
        if kinds:  # each kind that its full size has, in turn
            sizes[name] = (kinds * NUM_LAYERS)[:NUM_LAYERS]
    for name in config.sub_configs:
        section = getattr(full, name, None)
        if isinstance(section, PreTrainedConfig):
            sizes[name] = tiny_sizes(type(section), section.model_type, sight)
    if sight:
        sizes = {name: _of_kind(full, name, value) for name, value in sizes.items()}
        axes = getattr(full, "rope_parameters", None) or {}
        if "mrope_section" in axes:  # of half a head
            sizes["rope_parameters"] = {**axes, "mrope_section": [2, 3, 3]}
    sizes |= OWN.get(model_type, {})
    return {name: value for name, value in sizes.items() if value is not _DROP}


def _of_kind(full: PreTrainedConfig, name: str, value: Any) -> Any:
    """A size in the form that a class has it: a fraction, or one for each side."""
    try:
        default = getattr(full, name, None)
    except Exception:  # it differs by layer
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if isinstance(default, float):
            return float(value)
        if isinstance(default, list | tuple) and default and isinstance(default[0], int):
            return type(default)(value for _ in default)
    return value


def _knows(config: type[PreTrainedConfig], full: PreTrainedConfig, name: str) -> bool:
    """Whether the class has such a size, and, but for a few, one by default."""
    own = getattr(config, name, None)
    if isinstance(own, property) and own.fset is None:
        return False
    try:
        default = getattr(full, name)
    except Exception:  # none, or it differs by layer and cannot be asked for
        return name in getattr(config, "__dataclass_fields__", {})
    return default is not None or name in _ALSO_WHERE_NONE
