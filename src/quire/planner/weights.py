"""The bytes of a model's weights and the sizes of its products: of headers, or estimated.

A file's header has all shapes and dtypes, and no weight is read. Where there is no file, the
weights are those that ``parameters`` counts, in the bits that ``precision`` reads.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.errors import ModelNotLoadable
from quire.memory.budget import Footprint
from quire.planner.parameters import Shapes, WeightParts
from quire.spec.gguf_file import GGUF_KEPT, GGUF_TYPES, GgufFile, GgufTensor
from quire.spec.model_files import safetensors_files
from quire.spec.module_names import is_of_tower


def footprint_of(
    weights: WeightParts, shapes: Shapes, widest_rows: int, item_bytes: int
) -> Footprint:
    """Make the footprint of weights of these bytes; activations take ``item_bytes``.

    ``widest_rows``: the most outputs that a token has in one product.
    """
    return Footprint(
        weights_bytes=weights.total,
        counted_bytes=0,
        hidden_size=shapes.hidden_size,
        widest_rows=widest_rows,
        vocab_size=shapes.vocab_size,
        item_bytes=item_bytes,
    )


# -- headers of weight files -----------------------------------------------------------------------

# A header has all shapes. Buffers that a model computes, as rotary frequencies, are in no file.
_EXPERT = re.compile(r"\.experts?\.\d+\.")
# Names of modules, which stand between the dots of a tensor's name.
_ROUTED = frozenset({"experts", "switch_mlp"})
_TABLES = frozenset({"embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings"})
_MIXERS = frozenset({"mixer", "mamba"})
_MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
_FLOATS: Mapping[str, int] = MappingProxyType({"F64": 8, "F32": 4, "F16": 2, "BF16": 2})
_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **_FLOATS,
        **{"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1},
        **{"BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
    }
)
# Of ggml's types: the numbers of a block, and its bytes.
_BLOCKS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {name: (items, size) for name, items, size in GGUF_TYPES.values() if items > 1}
)
# What is expanded when it is loaded, and read by every step.
_GGUF_NAMES = MappingProxyType(
    {"token_embd.weight": "embed_tokens.weight", "output.weight": "lm_head.weight"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor of a file."""

    dtype: str  # as safetensors spells it, or ggml
    shape: tuple[int, ...]

    @property
    def num_items(self) -> int:
        return prod(self.shape)

    def bytes_in(self, item_bytes: int | None) -> int:
        """Return its bytes when loaded; if given, ``item_bytes`` replaces 16 bits and more."""
        if self.dtype in _BLOCKS:
            items, block_bytes = _BLOCKS[self.dtype]
            return self.num_items // items * block_bytes
        if item_bytes is None or self.dtype not in _FLOATS:
            item_bytes = _BYTES.get(self.dtype, 1)
        return self.num_items * item_bytes


def stored_tensors(folder: Path) -> Mapping[str, Stored] | None:
    """Read the tensors of a folder's safetensors files; None if it has no such file.

    Raises: ModelNotLoadable with the file that is missing or broken.
    """
    tensors: dict[str, Stored] = {}
    for file in safetensors_files(folder):
        tensors |= read_header(file)
    return tensors or None


def gguf_tensors(file: GgufFile) -> Mapping[str, Stored]:
    """Return the tensors of a GGUF file as an engine on a CPU keeps them, by Transformers' names.

    Codes of linear layers stay where they are kept, and all else becomes numbers.
    """
    return {
        _GGUF_NAMES.get(name, name): Stored(dtype=_kept(name, tensor), shape=tensor.shape)
        for name, tensor in file.tensors.items()
        if name != "rope_freqs.weight"
    }


def _kept(name: str, tensor: GgufTensor) -> str:
    is_linear = len(tensor.shape) == 2 and name != "token_embd.weight"
    return tensor.type if is_linear and tensor.type in GGUF_KEPT else "F32"


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


def widest_stored(tensors: Mapping[str, Stored], shapes: Shapes) -> int:
    """Return the most outputs that a token has in one product, by a file's tensors."""
    loaded = (named for named in tensors.items() if not _is_left_out(named[0], shapes))
    return max((_rows(name, tensor, shapes) for name, tensor in loaded), default=0)


def of_codes(tensors: Mapping[str, Stored]) -> frozenset[str]:
    """Return the names of the tensors of modules that have codes: scales keep their dtype there.

    Some files have them one name farther on: q_proj.weight.absmax.
    """
    modules = {_module(name) for name, tensor in tensors.items() if tensor.dtype not in _FLOATS}
    return frozenset(name for name in tensors if modules & {_module(name), _module(_module(name))})


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def parts_of(
    tensors: Mapping[str, Stored], shapes: Shapes, size: Callable[[str, Stored], int]
) -> WeightParts:
    """Return the size of each part of the weights, by the names of a file's tensors.

    ``size`` of a tensor, by its name.
    """
    sizes = dict.fromkeys(("table", "head", "attention", "dense", "experts", "small", "towers"), 0)
    for name, tensor in tensors.items():
        if not _is_left_out(name, shapes):
            sizes[_part(name, tensor)] += size(name, tensor)
    return WeightParts(**sizes)


def _part(name: str, tensor: Stored) -> str:
    """Return the part that a tensor belongs to; what has no known name is read by every step."""
    modules = frozenset(name.split(".")[:-1])
    if is_of_tower(modules):
        return "towers"
    if modules & _ROUTED:
        return "experts"
    if modules & _TABLES:
        return "table"
    if name.endswith("lm_head.weight"):
        return "head"
    if modules & _MIXERS or any("attn" in each or "attention" in each for each in modules):
        return "attention"
    return "dense" if len(tensor.shape) > 1 else "small"


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
