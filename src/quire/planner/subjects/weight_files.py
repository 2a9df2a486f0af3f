"""A model's own bytes from the headers of its safetensors files: every shape, and no weight.

A header is a length and a JSON object; only those are read. What a model has besides and no file
holds (tables of rotary frequencies) is not seen here.
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
from quire.planner.subjects.parameters import Shapes

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
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
    """One tensor of a file."""

    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]

    @property
    def num_items(self) -> int:
        return prod(self.shape)

    def bytes_in(self, item_bytes: int | None) -> int:
        """Its bytes, floating-point numbers of 16 bits and more in so many; None: as they are."""
        own = _BYTES.get(self.dtype, 1)
        kept = item_bytes is None or self.dtype not in _FLOATS
        return prod(self.shape) * (own if kept or item_bytes is None else item_bytes)


def stored_tensors(folder: Path) -> Mapping[str, Stored] | None:
    """All tensors of a folder's safetensors files; None where it has none.

    Raises: ModelNotLoadable naming the file that is missing or broken.
    """
    files = _files(folder)
    if not files:
        return None
    tensors: dict[str, Stored] = {}
    for file in files:
        tensors |= read_header(file)
    return tensors


def read_header(file: Path) -> dict[str, Stored]:
    """One file's tensors. Raises: ModelNotLoadable."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= _MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length:,} bytes")
            text = opened.read(length)
            if len(text) < length:
                raise ValueError("its header is cut short")
            return parsed(json.loads(text))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelNotLoadable(
            f"{file} is no safetensors file ({error}): fetch it again"
        ) from error


def parsed(header: Mapping[str, Any]) -> dict[str, Stored]:
    """A header's tensors."""
    return {
        name: Stored(dtype=str(said["dtype"]), shape=tuple(int(n) for n in said["shape"]))
        for name, said in header.items()
        if name != "__metadata__"
    }


def footprint_of(
    tensors: Mapping[str, Stored], shapes: Shapes, item_bytes: int, *, keeps_dtype: bool
) -> Footprint:
    """The footprint of the files' weights; ``shapes`` are those of the config.json beside them.

    ``keeps_dtype``: weights stay as they are stored, else a number takes ``item_bytes``.
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
    """Outputs that a token has in this product; experts, one by one in a file, run as one."""
    sides = tensor.shape[-2:]
    if len(sides) < 2 or shapes.vocab_size in sides:
        return 0
    if shapes.num_experts and len(tensor.shape) == 2 and _EXPERT.search(name):
        return shapes.rows_of_experts
    return max(sides) * (shapes.num_chosen if len(tensor.shape) > 2 else 1)


def _is_left_out(name: str, shapes: Shapes) -> bool:
    """A head that is the table of tokens; tables of old files that are computed today."""
    tied = shapes.is_tied and name.endswith("lm_head.weight")
    return tied or name.endswith((".rotary_emb.inv_freq", ".attn.masked_bias"))


def _files(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    index = folder / _INDEX
    if not index.is_file():
        return []
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        files = [folder / shard for shard in shards]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelNotLoadable(f"{index} does not map tensors to files ({error!r})") from error
    if missing := [file for file in files if not file.is_file()]:
        raise ModelNotLoadable(f"{missing[0]} is missing, and {_INDEX} lists it: fetch it")
    return files
