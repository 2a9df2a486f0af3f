"""A model's weights and widest products, from the shapes that its config.json states.

It is an estimate, for where there is no file of weights to read: attention, gated or plain
feed-forward layers, experts, embeddings. What else a family has (convolutions, scans, towers for
images) is counted where it is large and simple, and left out where it is not: the estimate says so.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.errors import ModelNotLoadable
from quire.memory.budget import Footprint
from quire.spec import AttentionSpec, KeptWhole, LatentAttention, LayerSpec, ModelSpec
from quire.spec.config_json import text_section
from quire.spec.fields import Fields
from quire.spec.model_files import safetensors_files

# -- parameters ------------------------------------------------------------------------------------


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
    def num_in_tables(self) -> int:
        """Return the weights of the token embedding and the output head."""
        return (1 if self.is_tied else 2) * self.vocab_size * self.hidden_size

    @property
    def rows_of_experts(self) -> int:
        """Return the outputs of a token in its experts, whose gate and up projections are one."""
        return self.num_chosen * max(2 * self.expert_width, self.hidden_size)


def shapes_of(config: Mapping[str, Any], spec: ModelSpec, source: str) -> Shapes:
    """Read the shapes from a config.json. Raises: ConfigError for a missing or wrong field."""
    section, source = text_section(config, source)
    fields = Fields(section=section, source=source)
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
    # Transformers' classes tie by default, and Gemma's files leave the field out.
    tied = fields.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", _ties(spec)))
    return Shapes(
        hidden_size=hidden,
        vocab_size=_first(fields, ("vocab_size", "padded_vocab_size")) or 1,
        num_layers=spec.num_layers,
        width=width,
        num_matrices=2 if spec.model_type in _UNGATED else 3,
        num_experts=num_experts,
        num_chosen=_first(fields, _CHOSEN) or 1,
        expert_width=expert_width,
        shared_width=shared if num_experts else 0,
        num_dense=min(num_dense, spec.num_layers),
        is_tied=tied,
    )


def num_parameters(config: Mapping[str, Any], spec: ModelSpec, source: str) -> int:
    """Estimate the number of weights from the shapes. Raises: ConfigError."""
    shapes = shapes_of(config, spec, source)
    section, source = text_section(config, source)
    fields = Fields(section=section, source=source)
    attention = sum(
        _attention(fields, kept, shapes.hidden_size)
        for layer in spec.layers
        for kept in (layer.specs or spec.layers[layer.shares_with or 0].specs)
    )
    per_width = shapes.num_matrices * shapes.hidden_size
    dense = shapes.num_dense * per_width * shapes.width
    sparse = (shapes.num_layers - shapes.num_dense) * (
        per_width * (shapes.num_experts * shapes.expert_width + shapes.shared_width)
        + shapes.hidden_size * shapes.num_experts
    )
    norms = (2 * shapes.num_layers + 1) * shapes.hidden_size
    return shapes.num_in_tables + attention + dense + sparse + norms


def num_active_parameters(config: Mapping[str, Any], spec: ModelSpec, source: str) -> int:
    """Estimate by how many weights a token is multiplied: those of its own experts alone.

    The token embedding is a look-up, and the output head a product. Raises: ConfigError.
    """
    shapes = shapes_of(config, spec, source)
    idle_experts = max(0, shapes.num_experts - shapes.num_chosen) if shapes.num_experts else 0
    sparse = (shapes.num_layers - shapes.num_dense) * shapes.num_matrices * shapes.hidden_size
    looked_up = 0 if shapes.is_tied else shapes.vocab_size * shapes.hidden_size
    idle = sparse * idle_experts * shapes.expert_width + looked_up
    return num_parameters(config, spec, source) - idle


def estimated_footprint(
    config: Mapping[str, Any], spec: ModelSpec, source: str, item_bytes: int
) -> Footprint:
    """Estimate the model's memory, with weights of ``item_bytes``. Raises: ConfigError."""
    shapes, bits = shapes_of(config, spec, source), weight_bits(config)
    whole = num_parameters(config, spec, source)
    coded = 0 if bits is None else whole - shapes.num_in_tables
    return Footprint(
        weights_bytes=(whole - coded) * item_bytes + int(coded * (bits or 0) / 8),
        counted_bytes=0,
        hidden_size=shapes.hidden_size,
        widest_rows=widest_rows(config, spec, source),
        vocab_size=shapes.vocab_size,
        item_bytes=item_bytes,
    )


def weight_bits(config: Mapping[str, Any]) -> float | None:
    """Return the bits of a weight in a quantized checkpoint, with its scales.

    Returns None for other checkpoints and for unknown methods. Embeddings are not quantized.
    """
    section, _ = text_section(config, "config.json")
    said = config.get("quantization_config") or section.get("quantization_config")
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if method in ("fp8", "fbgemm_fp8"):
        return 8
    if method == "mxfp4":
        return 4.25  # a scale of eight bits for 32 weights
    bits = said.get("bits") if isinstance(said, Mapping) and method in ("awq", "gptq") else None
    if isinstance(bits, int) and 1 <= bits <= 8:
        return bits + 20 / 128  # a scale and a zero point for 128 weights, as in nearly all files
    return None


def widest_rows(config: Mapping[str, Any], spec: ModelSpec, source: str) -> int:
    """Return the most outputs that a token has in one product. Raises: ConfigError."""
    shapes = shapes_of(config, spec, source)
    section, source = text_section(config, source)
    fields = Fields(section=section, source=source)
    heads = fields.optional_integer("num_attention_heads") or 1
    queries = max(
        (
            heads * _query_width(fields, kept)
            for layer in spec.layers
            for kept in layer.specs
            if not isinstance(kept, KeptWhole)
        ),
        default=0,
    )
    dense = max(shapes.hidden_size, shapes.width if shapes.num_dense else 0, shapes.shared_width)
    return max(dense, queries, shapes.rows_of_experts if shapes.num_experts else 0)


def _query_width(fields: Fields, kept: AttentionSpec) -> int:
    if isinstance(kept, LatentAttention):
        nope = fields.optional_integer("qk_nope_head_dim", least=0) or 0
        value = fields.optional_integer("v_head_dim", least=0) or 0
        return max(nope + kept.rope_dim, nope + value)
    return kept.head_dim


def _attention(fields: Fields, kept: LayerSpec, hidden: int) -> int:
    """Return the weights of a layer's attention or recurrent part."""
    if isinstance(kept, KeptWhole):
        # A recurrent layer projects in, out and to a gate, each of about twice the hidden width.
        return 3 * hidden * 2 * hidden
    heads = fields.optional_integer("num_attention_heads") or 1
    if isinstance(kept, LatentAttention):
        nope = fields.optional_integer("qk_nope_head_dim", least=0) or 0
        value = fields.optional_integer("v_head_dim", least=0) or nope
        rank = fields.optional_integer("q_lora_rank", least=0) or 0
        queries = heads * (nope + kept.rope_dim)
        down = hidden * (kept.latent_dim + kept.rope_dim)
        up = kept.latent_dim * heads * (nope + value)
        asked = hidden * rank + rank * queries if rank else hidden * queries
        return down + up + asked + heads * value * hidden
    value = kept.value_head_dim or kept.head_dim
    keys_and_values = kept.num_kv_heads * (kept.head_dim + value)
    return hidden * (heads * (kept.head_dim + value) + keys_and_values)


def _first(fields: Fields, names: tuple[str, ...]) -> int:
    """Return the first of these fields that is set, or 0."""
    found = (fields.of_layer(0).optional_integer(name, least=0) for name in names)
    return next((value for value in found if value), 0)


def _ties(spec: ModelSpec) -> bool:
    return spec.model_type.startswith(("gemma", "t5", "bart", "gpt2", "cohere"))


# -- headers of weight files -----------------------------------------------------------------------

# A header has all shapes. Buffers that a model computes, as rotary frequencies, are in no file.
_EXPERT = re.compile(r"\.experts?\.\d+\.")
_MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
_FLOATS: Mapping[str, int] = MappingProxyType({"F64": 8, "F32": 4, "F16": 2, "BF16": 2})
_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **_FLOATS,
        **{"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1},
        **{"BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor of a file."""

    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]

    @property
    def num_items(self) -> int:
        return prod(self.shape)

    def bytes_in(self, item_bytes: int | None) -> int:
        """Return its bytes when loaded; if given, ``item_bytes`` replaces 16 bits and more."""
        own = _BYTES.get(self.dtype, 1)
        kept = item_bytes is None or self.dtype not in _FLOATS
        return prod(self.shape) * (own if kept or item_bytes is None else item_bytes)


def stored_tensors(folder: Path) -> Mapping[str, Stored] | None:
    """Read the tensors of a folder's safetensors files; None if it has no such file.

    Raises: ModelNotLoadable with the file that is missing or broken.
    """
    tensors: dict[str, Stored] = {}
    for file in safetensors_files(folder):
        tensors |= read_header(file)
    return tensors or None


def read_header(file: Path) -> dict[str, Stored]:
    """Read a file's tensors. Raises: ModelNotLoadable."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= _MOST_HEADER_BYTES:
                raise ValueError(f"its header has {length:,} bytes")
            text = opened.read(length)
            if len(text) < length:
                raise ValueError("its header is truncated")
            return parsed(json.loads(text))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelNotLoadable(
            f"{file} is not a safetensors file ({error}): download it again"
        ) from error


def parsed(header: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors of a parsed header."""
    return {
        name: Stored(dtype=str(said["dtype"]), shape=tuple(int(n) for n in said["shape"]))
        for name, said in header.items()
        if name != "__metadata__"
    }


def footprint_of(
    tensors: Mapping[str, Stored], shapes: Shapes, item_bytes: int, *, keeps_dtype: bool
) -> Footprint:
    """Compute the bytes of weights and activations from the headers and the config.json's shapes.

    ``keeps_dtype`` keeps each weight's stored dtype; else a float takes ``item_bytes``.
    """
    loaded = {name: t for name, t in tensors.items() if not _is_left_out(name, shapes)}
    return Footprint(
        weights_bytes=sum(
            tensor.bytes_in(None if keeps_dtype else item_bytes) for tensor in loaded.values()
        ),
        counted_bytes=0,
        hidden_size=shapes.hidden_size,
        widest_rows=max((_rows(name, t, shapes) for name, t in loaded.items()), default=0),
        vocab_size=shapes.vocab_size,
        item_bytes=item_bytes,
    )


def _rows(name: str, tensor: Stored, shapes: Shapes) -> int:
    """Return a token's outputs in this product; experts, separate in a file, run as one."""
    sides = tensor.shape[-2:]
    if len(sides) < 2 or shapes.vocab_size in sides:
        return 0
    if shapes.num_experts and len(tensor.shape) == 2 and _EXPERT.search(name):
        return shapes.rows_of_experts
    return max(sides) * (shapes.num_chosen if len(tensor.shape) > 2 else 1)


def _is_left_out(name: str, shapes: Shapes) -> bool:
    """Return whether a tensor is not loaded: a tied head, or a table that is computed today."""
    tied = shapes.is_tied and name.endswith("lm_head.weight")
    return tied or name.endswith((".rotary_emb.inv_freq", ".attn.masked_bias"))
