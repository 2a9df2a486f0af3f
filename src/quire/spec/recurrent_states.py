"""Compute the shapes of recurrent layers' states, with one function per kind of layer.

The shapes are those of one sequence in the cache of Transformers' modelling code: convolution
states in the model's dtype, scan states in float32, in which the code accumulates.

Shapes: W convolution width, I inner channels, N state size, H heads, D head dim, G groups.
"""

from quire.spec.fields import Fields, stated_head_dim, stated_kv_heads
from quire.spec.layer_specs import RecurrentState, StateTensor

_SCAN_DTYPE = "float32"


def unknown(fields: Fields) -> RecurrentState:
    """Refuse a family without a row. Raises: UnsupportedModel."""
    raise fields.unsupported(
        "it has recurrent layers whose state has an unknown shape: "
        "add a row for its model_type to quire.spec.families"
    )


def mamba(fields: Fields) -> RecurrentState:
    """Return conv [I, W] and scan [I, N]. Source: Gu and Dao 2023, §3; modeling_mamba."""
    inner = _inner(fields)
    return _states(
        fields,
        conv=(inner, fields.integer("conv_kernel", 4)),
        scan=(inner, fields.integer("state_size", 16)),
    )


def mamba_heads(fields: Fields) -> RecurrentState:
    """Return Mamba's states with channels in heads: scan [H, I / H, N]. Source: modeling_zamba."""
    inner, heads = _inner(fields), fields.integer("mamba_num_heads")
    return _states(
        fields,
        conv=(inner, fields.integer("conv_kernel", 4)),
        scan=(
            heads,
            fields.quotient(inner, heads, "mamba_num_heads"),
            fields.integer("state_size"),
        ),
    )


def mamba2(fields: Fields) -> RecurrentState:
    """Return conv [I + 2 G N, W], scan [H, D, N]. Source: Dao and Gu 2024, §7; modeling_mamba2."""
    heads = fields.optional_integer("mamba_num_heads") or fields.integer("num_heads")
    head_dim = fields.optional_integer("mamba_head_dim")
    inner = heads * head_dim if head_dim else _inner(fields)
    size = fields.integer("state_size")
    return _states(
        fields,
        conv=(inner + 2 * fields.integer("n_groups", 1) * size, fields.integer("conv_kernel", 4)),
        scan=(heads, fields.quotient(inner, heads, "mamba_num_heads"), size),
    )


def gated_delta(fields: Fields) -> RecurrentState:
    """Return conv [2 Hk Dk + Hv Dv, W], scan [Hv, Dk, Dv]. Source: modeling_qwen3_next."""
    key_heads, value_heads = (fields.integer(f"linear_num_{x}_heads") for x in ("key", "value"))
    key_dim, value_dim = (fields.integer(f"linear_{x}_head_dim") for x in ("key", "value"))
    return _states(
        fields,
        conv=(2 * key_heads * key_dim + value_heads * value_dim, fields.integer("conv_kernel", 4)),
        scan=(value_heads, key_dim, value_dim),
    )


def gated_delta_of_attention(fields: Fields) -> RecurrentState:
    """Return gated delta states; heads default to attention's. Source: modeling_olmo_hybrid."""
    heads = fields.integer("num_attention_heads")
    key_heads = fields.integer("linear_num_key_heads", heads)
    key_dim = fields.integer(
        "linear_key_head_dim", 3 * fields.integer("hidden_size") // (4 * key_heads)
    )
    stated = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": fields.integer("linear_num_value_heads", heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": fields.integer("linear_value_head_dim", 2 * key_dim),
    }
    return gated_delta(fields.with_values(stated))


def delta_attention(fields: Fields) -> RecurrentState:
    """Return Kimi's conv [3 H D, W], scan [H, D, D]. Source: modeling_kimi_linear."""
    heads, head_dim = fields.integer("linear_num_heads"), fields.integer("linear_head_dim")
    return _states(
        fields,
        conv=(3 * heads * head_dim, fields.integer("conv_kernel", 4)),
        scan=(heads, head_dim, head_dim),
    )


def delta_attention_of_attention(fields: Fields) -> RecurrentState:
    """Return Kimi's states; heads default to the attention's. Source: modeling_bailing_hybrid."""
    stated = {
        "linear_num_heads": fields.integer(
            "linear_num_heads", fields.integer("num_attention_heads")
        ),
        "linear_head_dim": fields.integer("linear_head_dim", fields.integer("head_dim")),
    }
    return delta_attention(fields.with_values(stated))


def lightning(fields: Fields) -> RecurrentState:
    """Return MiniMax's products of keys and values [H, D, D]. Source: modeling_minimax."""
    heads, head_dim = fields.integer("num_attention_heads"), stated_head_dim(fields)
    memory = StateTensor(name="memory", shape=(heads, head_dim, head_dim), dtype=fields.dtype())
    return RecurrentState(states=(memory,))


def convolved_heads(fields: Fields) -> RecurrentState:
    """Return Zaya's queries and keys [(H + K) D, W], and values [K D / 2] (modeling_zaya)."""
    heads, kv_heads = fields.integer("num_attention_heads"), stated_kv_heads(fields)
    head_dim = stated_head_dim(fields)
    width = fields.integer("cca_time0", 2) + fields.integer("cca_time1", 2) - 2
    shapes = {"conv": ((heads + kv_heads) * head_dim, width), "value": (kv_heads * head_dim // 2,)}
    return RecurrentState(
        states=tuple(
            StateTensor(name=name, shape=shape, dtype=fields.dtype())
            for name, shape in shapes.items()
        )
    )


def four_convolutions(fields: Fields) -> RecurrentState:
    """Return convs of keys and values [K D, W] and two of [hidden, W] (modeling_inkling)."""
    width = fields.integer("conv_kernel", 4)
    cached = stated_kv_heads(fields) * stated_head_dim(fields)
    channels = (cached, cached, *2 * (fields.integer("hidden_size"),))
    return RecurrentState(
        states=tuple(
            StateTensor(name=f"conv{i}", shape=(inner, width), dtype=_SCAN_DTYPE)
            for i, inner in enumerate(channels)
        )
    )


def short_convolution(fields: Fields) -> RecurrentState:
    """Return conv [hidden, W] without a scan. Source: modeling_lfm2."""
    return _states(fields, conv=(fields.integer("hidden_size"), fields.integer("conv_kernel")))


def linear_recurrent_unit(fields: Fields) -> RecurrentState:
    """Return conv [L, W - 1], scan [L]. Source: De et al. 2024, §2; modeling_recurrent_gemma."""
    width = fields.integer("lru_width", fields.integer("hidden_size"))
    conv_width = fields.integer("conv1d_width", 4, least=2)
    return _states(fields, conv=(width, conv_width - 1), scan=(width,))


def _inner(fields: Fields) -> int:
    """Return the inner channels: as stated, else expand × hidden_size."""
    stated = fields.optional_integer("mamba_d_ssm")
    return stated or fields.integer("expand", 2) * fields.integer("hidden_size")


def _states(
    fields: Fields,
    *,
    conv: tuple[int, ...],
    scan: tuple[int, ...] = (),
) -> RecurrentState:
    states = [StateTensor(name="conv", shape=conv, dtype=fields.dtype())]
    if scan:
        states.append(StateTensor(name="scan", shape=scan, dtype=_SCAN_DTYPE))
    return RecurrentState(states=tuple(states))
