"""Count a model's weights from the shapes in its config.json, by what a step does with them.

A step reads attention and dense layers whole, of the experts those that its tokens choose, of the
token embedding a row a token. So the parts are counted apart: attention, gated or plain
feed-forward layers, experts, tables, norms and biases, and a SigLIP tower if its sizes are stated.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any

from quire.spec import (
    AttentionSpec,
    KeptWhole,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    RecurrentState,
)
from quire.spec.config_json import text_fields, text_section
from quire.spec.fields import Fields

# -- names of fields, and what families leave out of their files -----------------------------------

# Names in config.json files for the number of experts, of those per token, and for their width.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
_EXPERT_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size")
_SHARED = ("n_shared_experts", "num_shared_experts")
_SHARED_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size")
_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "d_ff")
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers")
# Families whose feed-forward layers have two matrices and no gate, with any activation.
_UNGATED = frozenset(
    (
        *("bart", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox"),
        *("gptj", "mpt", "opt", "phi", "starcoder2", "t5", "whisper"),
    )
)
# Families whose class in Transformers ties the head to the embedding by default.
_TIED = (
    *("bart", "bloom", "cohere", "ernie4_5", "falcon", "gemma", "gpt2", "gpt_bigcode", "gpt_neo_"),
    *("granite_swa", "lfm", "mamba", "minicpm3", "mpt", "opt", "recurrent_gemma", "smollm3"),
    *("starcoder2", "t5", "vaultgemma", "whisper", "youtu", "zamba", "zaya"),
)
# Families in which all products and norms have biases.
_BIASED = frozenset(("bloom", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "phi", "starcoder2"))
_BIASED_QUERIES = ("qwen2", "gpt_oss")  # by default: queries, keys and values
_NORMS_OF_HEADS = ("qwen3", "gemma3")  # queries and keys
_FOUR_NORMS = ("gemma2", "gemma3", "glm4")  # a layer's; others have two
_GATED_OUTPUT = ("qwen3_next", "qwen3_5")  # attention's, by default
_GATED_SHARED = ("qwen2_moe", "qwen3_next", "qwen3_5")  # a gate before the shared expert
_LEARNED_POSITIONS = frozenset(("gpt2", "gpt_bigcode", "gpt_neo", "opt"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightParts:
    """A model's weights by what a step does with them: as numbers of weights, or as bytes."""

    table: int  # the token embedding: a row a token is read
    head: int  # the output head; 0 if it is the token embedding
    attention: int  # products of attention, or of recurrent layers
    dense: int  # feed-forward layers that every token passes, with shared experts
    experts: int  # all routed experts of all layers
    small: int  # norms, biases, routers, learned positions
    towers: int = 0  # for images: no step of text reads them

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields_of(self))

    @property
    def every_step(self) -> int:
        """Return what a step reads whole, whatever its tokens are; the head aside."""
        return self.attention + self.dense + self.small

    @property
    def as_head(self) -> int:
        """Return what makes logits: the head, or the token embedding that is one."""
        return self.head or self.table


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The fields of a config.json that size the weights."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    width: int  # of a dense feed-forward layer
    num_matrices: int  # of a feed-forward layer: three if one is a gate
    num_experts: int  # 0 for a dense model
    num_chosen: int  # experts per token
    expert_width: int
    shared_width: int  # of all shared experts together
    num_dense: int  # layers without experts
    is_tied: bool  # the output head is the token embedding

    @property
    def rows_of_experts(self) -> int:
        """Return the outputs of a token in its experts, whose gate and up projections are one."""
        return self.num_chosen * max(2 * self.expert_width, self.hidden_size)

    @property
    def num_sparse(self) -> int:
        """Return the layers with experts."""
        return self.num_layers - self.num_dense


def shapes_of(config: Mapping[str, Any], spec: ModelSpec, source: str) -> Shapes:
    """Read the shapes from a config.json. Raises: ConfigError for a missing or wrong field."""
    fields = text_fields(config, source)
    hidden = fields.integer("hidden_size")
    num_experts = _first(fields, _EXPERTS)
    width = _first(fields, _WIDTHS) or 4 * hidden
    expert_width = (_first(fields, _EXPERT_WIDTHS) or width) if num_experts else 0
    shared = _first(fields, _SHARED_WIDTHS) or _first(fields, _SHARED) * expert_width
    every = _first(fields, ("decoder_sparse_step", "interleave_moe_layer_step")) or 1
    dense_first = _first(fields, _DENSE_FIRST)
    num_dense = spec.num_layers if not num_experts else dense_first
    if num_experts and every > 1:
        num_dense += (spec.num_layers - dense_first) * (every - 1) // every
    outer = Fields(section=config, source=source)
    # Files leave the field out where it is the class's default.
    default = outer.flag("tie_word_embeddings", spec.model_type.startswith(_TIED))
    return Shapes(
        hidden_size=hidden,
        vocab_size=_first(fields, ("vocab_size", "padded_vocab_size")) or 1,
        num_layers=spec.num_layers,
        width=width,
        num_matrices=2 if spec.model_type in _UNGATED else 3,
        num_experts=num_experts,
        num_chosen=min(_first(fields, _CHOSEN) or 1, num_experts or 1),
        expert_width=expert_width,
        shared_width=shared if num_experts else 0,
        num_dense=min(num_dense, spec.num_layers),
        is_tied=fields.flag("tie_word_embeddings", default),
    )


# -- counts ----------------------------------------------------------------------------------------


def parameters_of(config: Mapping[str, Any], spec: ModelSpec, source: str) -> WeightParts:
    """Count the weights of each part, from the shapes. Raises: ConfigError."""
    shapes = shapes_of(config, spec, source)
    fields = text_fields(config, source)
    hidden, table = shapes.hidden_size, shapes.vocab_size * shapes.hidden_size
    pairs = [_of_layer(fields, spec, n, kept, hidden) for n, kept in _kept(spec)]
    per_width = shapes.num_matrices * hidden
    routers = hidden * shapes.num_experts
    if shapes.shared_width and spec.model_type.startswith(_GATED_SHARED):
        routers += hidden
    return WeightParts(
        table=table,
        head=0 if shapes.is_tied else table,
        attention=sum(weights for weights, _ in pairs),
        dense=per_width
        * (shapes.num_dense * shapes.width + shapes.num_sparse * shapes.shared_width),
        experts=shapes.num_sparse * _experts(shapes, spec),
        small=sum(small for _, small in pairs)
        + shapes.num_sparse * routers
        + _norms_and_biases(fields, shapes, spec),
        towers=_tower(config, hidden),
    )


def names_a_tower(config: Mapping[str, Any], source: str) -> bool:
    """Return whether the model also has parts besides its text section, such as for images."""
    section, _ = text_section(config, source)
    return section is not config or isinstance(config.get("vision_config"), Mapping)


def pair_flops(config: Mapping[str, Any], spec: ModelSpec, source: str) -> int:
    """Count the operations of attention for one pair of a token and an entry, in all layers.

    A latent is read absorbed, as wide as it is kept, by every head. Recurrent layers have no pairs.
    Raises: ConfigError.
    """
    fields = text_fields(config, source)
    return sum(
        2 * _heads(fields, number) * sum(_widths(kept))
        for number, kept in _kept(spec)
        if not isinstance(kept, KeptWhole)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Elements that a token's activations read and write between products, in all layers."""

    whole: int  # hidden states, which every rank has whole
    divided: int  # heads, and the inner widths of feed-forward layers


def passed_elements(config: Mapping[str, Any], spec: ModelSpec, source: str) -> Passed:
    """Count what norms, rotations and activation functions read and write for a token.

    In a layer: each of two norms reads the stream and what is added to it, and writes both; queries
    and keys are rotated; of gate and up projections one result is made. Experts get a copy of the
    token each, and their results are added up. Raises: ConfigError.
    """
    shapes, fields = shapes_of(config, spec, source), text_fields(config, source)
    rotated = sum(
        2 * (_heads(fields, number) * _widths(kept)[0] + _key_elements(kept))
        for number, kept in _kept(spec)
        if not isinstance(kept, KeptWhole)
    )
    dense = shapes.num_dense * shapes.width + shapes.num_sparse * shapes.shared_width
    chosen = shapes.num_sparse * shapes.num_chosen if shapes.num_experts else 0
    return Passed(
        whole=8 * shapes.hidden_size * shapes.num_layers,
        divided=rotated
        + shapes.num_matrices * (dense + chosen * shapes.expert_width)
        + 2 * chosen * shapes.hidden_size,
    )


def _key_elements(kept: AttentionSpec) -> int:
    heads, width = kept.entry_shapes[0]
    return heads * width


def widest_rows(config: Mapping[str, Any], spec: ModelSpec, source: str) -> int:
    """Return the most outputs that a token has in one product. Raises: ConfigError."""
    shapes = shapes_of(config, spec, source)
    fields = text_fields(config, source)
    queries = max(
        (
            _heads(fields, number) * _query_width(fields, kept)
            for number, kept in _kept(spec)
            if not isinstance(kept, KeptWhole)
        ),
        default=0,
    )
    dense = max(shapes.hidden_size, shapes.width if shapes.num_dense else 0, shapes.shared_width)
    return max(dense, queries, shapes.rows_of_experts if shapes.num_experts else 0)


def _kept(spec: ModelSpec) -> Iterator[tuple[int, LayerSpec]]:
    """Yield each memory that a layer reads, with the layer's number."""
    for number, layer in enumerate(spec.layers):
        for kept in layer.specs or spec.layers[layer.shares_with or 0].specs:
            yield number, kept


def _heads(fields: Fields, layer: int) -> int:
    return fields.of_layer(layer).optional_integer("num_attention_heads") or 1


def _widths(kept: AttentionSpec) -> tuple[int, int]:
    """Return the elements of a head's query and of its result, as attention reads the entries."""
    if isinstance(kept, LatentAttention):
        return kept.latent_dim + kept.rope_dim, kept.latent_dim
    return kept.head_dim, kept.value_head_dim or kept.head_dim


def _query_width(fields: Fields, kept: AttentionSpec) -> int:
    if isinstance(kept, LatentAttention):
        nope = fields.optional_integer("qk_nope_head_dim", least=0) or 0
        value = fields.optional_integer("v_head_dim", least=0) or 0
        return max(nope + kept.rope_dim, nope + value)
    return kept.head_dim


def _of_layer(
    fields: Fields, spec: ModelSpec, number: int, kept: LayerSpec, hidden: int
) -> tuple[int, int]:
    """Return the weights of a layer's attention or recurrent part, and its norms and biases."""
    if isinstance(kept, RecurrentState):
        return _recurrent(spec, kept, hidden)
    heads = _heads(fields, number)
    if isinstance(kept, LatentAttention):
        return _latent(fields, kept, heads, hidden)
    value = kept.value_head_dim or kept.head_dim
    queries, results = heads * kept.head_dim, heads * value
    entries = kept.num_kv_heads * (kept.head_dim + value)
    gate = 0
    if fields.flag("attn_output_gate", spec.model_type.startswith(_GATED_OUTPUT)):
        gate = results
    small = 0
    biased = spec.model_type in _BIASED
    if biased or fields.flag("attention_bias", spec.model_type.startswith(_BIASED_QUERIES)):
        small += queries + entries
        small += hidden if biased or spec.model_type == "gpt_oss" else 0
    if spec.model_type == "gpt_oss":
        small += heads  # a sink each
    has_norms = spec.model_type.startswith(_NORMS_OF_HEADS)
    if fields.flag("use_qk_norm", has_norms):
        small += 2 * kept.head_dim
    return hidden * (queries + entries + gate + results), small


def _latent(fields: Fields, kept: LatentAttention, heads: int, hidden: int) -> tuple[int, int]:
    nope = fields.optional_integer("qk_nope_head_dim", least=0) or 0
    value = fields.optional_integer("v_head_dim", least=0) or nope
    rank = fields.optional_integer("q_lora_rank", least=0) or 0
    queries = heads * (nope + kept.rope_dim)
    down = hidden * (kept.latent_dim + kept.rope_dim)
    up = kept.latent_dim * heads * (nope + value)
    asked = hidden * rank + rank * queries if rank else hidden * queries
    return down + up + asked + heads * value * hidden, rank + kept.latent_dim


def _recurrent(spec: ModelSpec, kept: RecurrentState, hidden: int) -> tuple[int, int]:
    """Count from the shapes of the states, where these tell; else about six hidden squares."""
    shapes = {state.name: state.shape for state in kept.states}
    conv, scan = shapes.get("conv", ()), shapes.get("scan", ())
    if len(conv) != 2 or len(scan) != 3:
        # It projects in, out and to a gate, each of about twice the hidden width.
        return 6 * hidden * hidden, 0
    channels, window = conv
    if spec.model_type.startswith(("qwen3", "olmo_hybrid")):  # gated delta: [Hv, Dk, Dv]
        heads, _, value = scan
        inner, gates = heads * value, 2 * heads
    else:  # Mamba 2: [H, D, N]
        heads, value, _ = scan
        inner, gates = heads * value, heads
    small = channels * window + 2 * heads + value
    return hidden * (channels + 2 * inner + gates), small


def _experts(shapes: Shapes, spec: ModelSpec) -> int:
    """Return the weights of all experts of a layer."""
    one = shapes.num_matrices * shapes.hidden_size * shapes.expert_width
    if spec.model_type == "gpt_oss":
        one += 2 * shapes.expert_width + shapes.hidden_size  # biases
    return shapes.num_experts * one


def _norms_and_biases(fields: Fields, shapes: Shapes, spec: ModelSpec) -> int:
    hidden, layers = shapes.hidden_size, shapes.num_layers
    per_layer = 4 if spec.model_type.startswith(_FOUR_NORMS) and "moe" not in spec.model_type else 2
    small = (per_layer * layers + 1) * hidden
    if spec.model_type in _BIASED:
        small = 2 * small + layers * (shapes.width * (shapes.num_matrices - 1) + hidden)
    if spec.model_type == "gpt_oss":
        small += layers * shapes.num_experts
    if spec.model_type in _LEARNED_POSITIONS:
        small += hidden * fields.integer("max_position_embeddings")
    return small


def _tower(config: Mapping[str, Any], hidden: int) -> int:
    """Count Gemma 3's tower for images (SigLIP) and its projector; 0 where none is stated.

    Raises: ConfigError for a field that is missing.
    """
    section = config.get("vision_config")
    if not isinstance(section, Mapping) or config.get("model_type") != "gemma3":
        return 0
    fields = Fields(section=section, source="vision_config")
    width, inner = fields.integer("hidden_size"), fields.integer("intermediate_size")
    patch = fields.integer("patch_size")
    places = (fields.integer("image_size") // patch) ** 2
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    embedding = (3 * patch * patch + 1 + places) * width
    return (
        embedding + fields.integer("num_hidden_layers") * layer + 2 * width + width * hidden + width
    )


def _first(fields: Fields, names: tuple[str, ...]) -> int:
    """Return the first of these fields that is set, or 0."""
    found = (fields.of_layer(0).optional_integer(name, least=0) for name in names)
    return next((value for value in found if value), 0)
