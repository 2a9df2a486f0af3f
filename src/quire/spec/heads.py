"""How many heads of keys and values a layer has, how wide they are, and how far they are read.

Which family reads them by which of these rules is said in ``families``.
"""

from quire.spec.fields import Fields


def stated_kv_heads(fields: Fields) -> int:
    """As stated, else one for each query head, whose number they must divide."""
    stated = fields.optional_integer("num_key_value_heads")
    if stated is None:
        return fields.integer("num_attention_heads")
    fields.quotient(fields.integer("num_attention_heads", stated), stated, "num_key_value_heads")
    return stated


def falcon_kv_heads(fields: Fields) -> int:
    """One for all in Falcon-7B, groups since Falcon-40B (Transformers caches them expanded)."""
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1
    return stated_kv_heads(fields)


def bigcode_kv_heads(fields: Fields) -> int:
    """One for all unless ``multi_query`` is false (StarCoder)."""
    return 1 if fields.flag("multi_query") else fields.integer("num_attention_heads")


def searched_kv_heads(fields: Fields) -> int:
    """Nemotron-NAS: a layer states how many query heads share one."""
    shared_by = fields.entry("block_configs").integer("attention.n_heads_in_group")
    return fields.quotient(fields.integer("num_attention_heads"), shared_by, "n_heads_in_group")


def stated_head_dim(fields: Fields) -> int:
    """As stated, else hidden_size / num_attention_heads."""
    return fields.optional_integer("head_dim") or _split(fields, width=1)


def key_width(fields: Fields) -> int:
    """T5's ``d_kv``, whatever the hidden size is."""
    return fields.integer("d_kv")


def doubled_head_dim(fields: Fields) -> int:
    """Zamba's shared attention reads the hidden state and the embedding side by side."""
    return fields.optional_integer("attention_head_dim") or _split(fields, width=2)


def stated_window(fields: Fields) -> int:
    """As stated: tokens, the reading one included."""
    return fields.integer("sliding_window")


def window_before(fields: Fields) -> int:
    """MiMo's files count the tokens before the reading one; its class adds that one."""
    before = fields.optional_integer("sliding_window_size")
    return stated_window(fields) if before is None else before + 1


def _split(fields: Fields, width: int) -> int:
    heads = fields.integer("num_attention_heads")
    return fields.quotient(width * fields.integer("hidden_size"), heads, "num_attention_heads")
