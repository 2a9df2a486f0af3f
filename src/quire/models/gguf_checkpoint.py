"""A model out of a GGUF file: its tensors under Transformers' names, and what ggml changed undone.

Linear layers in Q8_0 and Q4_0 keep their codes: they are repacked, and never expanded. All else
becomes numbers in the dtype that is computed in: what is stored as such, tables of tokens, and
matrices of other quantizations, which the log names. ``gguf`` has the names and the other
quantizations' formats; the header is checked first (``quire.spec.gguf_file``), and each tensor's
shape against the model's before any is read.
"""

import logging
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import (
    HfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from quire.errors import ConfigError, ModelNotLoadable
from quire.layers.gguf_blocks import pack_blocks, packed_bytes
from quire.layers.packed_linear import PackedLinear
from quire.memory.host.huge_pages import drop_file_pages
from quire.memory.machine.probe import mapped_from_files
from quire.models.quantized import pieces, put
from quire.spec.gguf_config import GgufFamily, gguf_family
from quire.spec.gguf_file import GGUF_KEPT, GgufFile, GgufTensor
from quire.units import format_bytes

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger(__name__)

_NAME = "quire-gguf"
_FLOATS: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
_FREQUENCIES = "rope_freqs.weight"  # by what each of the rotary frequencies is divided
_HEAD = "lm_head.weight"
_BLOCKS = "blocks"


def load_gguf(
    file: GgufFile, outline: PreTrainedModel, keeps_codes: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Make the model of a file. Returns: it, and what Transformers says about its loading.

    ``outline`` is the model of its config on the meta device, in the dtype that is computed in.
    ``keeps_codes`` of linear layers in Q8_0 and Q4_0; else they become numbers, too.
    Raises: ModelNotLoadable naming a tensor; ConfigError without the package ``gguf``.
    """
    library, dtype = _library(), outline.dtype
    places = _places(file, library, outline)
    linear = {name for name, module in outline.named_modules() if type(module) is nn.Linear}
    coded: dict[str, _Place] = {}
    expanded: list[_Place] = []
    state: dict[str, Tensor] = {}
    whole = _mapped(file)
    for name, place in places.items():
        where, _, own = name.rpartition(".")
        is_weight = own == "weight" and where in linear
        if keeps_codes and is_weight and place.tensor.type in GGUF_KEPT:
            coded[where] = place
            state[f"{where}.{_BLOCKS}"] = place.rows_of(whole)
        else:
            expanded.append(place)
            state[name] = place.numbers_of(whole, library).to(dtype)
    _say_expanded(file, expanded, dtype, keeps_codes)
    config = copy(outline.config)
    if coded:
        _register()
        config.quantization_config = {
            "quant_method": _NAME,
            "kinds": {where: place.tensor.type for where, place in coded.items()},
            "rows": {where: list(place.rows_shape) for where, place in coded.items()},
        }
    model, found = type(outline).from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=dtype,
        attn_implementation=outline.config._attn_implementation,
        output_loading_info=True,
    )
    if _FREQUENCIES in file.tensors:
        factors = _Place(tensor=file.tensors[_FREQUENCIES]).numbers_of(whole, library)
        _divide_frequencies(model, factors, file)
    return model, found


def _library() -> "ModuleType":
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            f"a GGUF file needs the package gguf ({error}): pip install 'quire-kv[gguf]'"
        ) from error
    return gguf


def _mapped(file: GgufFile) -> Tensor:
    """Its bytes, u8[bytes], which lie in memory as they are read."""
    size = file.path.stat().st_size
    return torch.from_file(str(file.path), shared=False, size=size, dtype=torch.uint8)


@cache
def _register() -> None:
    """Add our quantizer to those that Transformers knows, under our name."""
    register_quantization_config(_NAME)(_GgufConfig)
    register_quantizer(_NAME)(_GgufQuantizer)


# -- tensors and their places ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a model's tensor lies in the file, and how it was changed."""

    tensor: GgufTensor
    paired_heads: int = 0  # so many heads' rows lie in pairs
    offset: float = 0  # was added

    @property
    def rows_shape(self) -> tuple[int, int]:
        """Its rows, as bytes."""
        rows = self.tensor.shape[0]
        return rows, self.tensor.num_bytes // rows

    def rows_of(self, whole: Tensor) -> Tensor:
        """Return the bytes of its rows in Transformers' order, u8[rows, bytes]."""
        begin = self.tensor.begin
        rows = whole[begin : begin + self.tensor.num_bytes].view(self.rows_shape)
        if not self.paired_heads:
            return rows
        pairs = rows.view(self.paired_heads, -1, 2, rows.shape[1])
        return pairs.transpose(1, 2).reshape(rows.shape)

    def numbers_of(self, whole: Tensor, library: "ModuleType") -> Tensor:
        """Return its numbers, in float32 where they are not stored as such."""
        rows, kind = self.rows_of(whole), self.tensor.type
        if kind in _FLOATS:
            numbers = rows.contiguous().view(-1).view(_FLOATS[kind]).view(self.tensor.shape)
        else:
            found = library.dequantize(rows.numpy(), library.GGMLQuantizationType[kind])
            numbers = torch.from_numpy(found).view(self.tensor.shape)
        return numbers.float() - self.offset if self.offset else numbers


def _places(file: GgufFile, library: "ModuleType", outline: PreTrainedModel) -> dict[str, _Place]:
    """Find each of a model's tensors. Raises: ModelNotLoadable for one of another shape."""
    family, architecture = gguf_family(file), str(file.fields["general.architecture"])
    config = outline.config
    number = next(n for n, name in library.MODEL_ARCH_NAMES.items() if name == architecture)
    names = library.get_tensor_name_map(number, config.num_hidden_layers)
    found: dict[str, _Place] = {}
    left = set(file.tensors) - {_FREQUENCIES}
    for name, tensor in outline.state_dict().items():
        if name == _HEAD and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored not in file.tensors:
            raise ModelNotLoadable(f"{file.path} lacks {stored or name}")
        own = file.tensors[stored]
        if own.shape != tuple(tensor.shape):
            raise ModelNotLoadable(
                f"{file.path}: {stored} is {list(own.shape)}, and its header makes it "
                f"{list(tensor.shape)}"
            )
        if len(own.shape) == 1 and own.type not in _FLOATS:
            raise ModelNotLoadable(f"{file.path}: {stored} is a vector in {own.type}")
        found[name] = _Place(tensor=own, **_changes(name, family, config))
        left.discard(stored)
    if left:
        raise ModelNotLoadable(
            f"{file.path} has {len(left)} tensors that {type(outline).__name__} does not have: "
            f"{', '.join(sorted(left)[:3])}{', …' if len(left) > 3 else ''}"
        )
    return found


def _changes(name: str, family: GgufFamily, config: Any) -> dict[str, Any]:
    *_, module, _ = name.split(".")
    if family.pairs_rows and module in ("q_proj", "k_proj"):
        is_query = module == "q_proj"
        return {
            "paired_heads": config.num_attention_heads if is_query else config.num_key_value_heads
        }
    return {"offset": family.norm_offset} if "norm" in module else {}


def _say_expanded(
    file: GgufFile, places: Iterable[_Place], dtype: torch.dtype, keeps_codes: bool
) -> None:
    """Name what was in few bits and is not any more."""
    by_kind: dict[str, list[_Place]] = {}
    for place in places:
        if place.tensor.type not in _FLOATS:
            by_kind.setdefault(place.tensor.type, []).append(place)
    for kind, found in by_kind.items():
        before = sum(place.tensor.num_bytes for place in found)
        after = sum(dtype.itemsize * torch.Size(place.tensor.shape).numel() for place in found)
        log.log(
            logging.INFO if kind in GGUF_KEPT and keeps_codes else logging.WARNING,
            "%s: %d matrices in %s are expanded to %s: %s instead of %s",
            file.path.name, len(found), kind, str(dtype).removeprefix("torch."),
            format_bytes(after), format_bytes(before),
        )  # fmt: skip


def _divide_frequencies(model: PreTrainedModel, factors: Tensor, file: GgufFile) -> None:
    """Llama 3 reads longer contexts by lower frequencies, which the file has as divisors."""
    for name, module in model.named_modules():
        frequencies = getattr(module, "inv_freq", None)
        if not isinstance(frequencies, Tensor):
            continue
        if frequencies.shape != factors.shape or not bool((factors > 0).all()):
            raise ModelNotLoadable(
                f"{file.path}: {_FREQUENCIES} does not fit {name}: {list(factors.shape)} divisors "
                f"for {list(frequencies.shape)} frequencies"
            )
        frequencies.div_(factors)
        module.original_inv_freq = frequencies.clone()


# -- Transformers' seam ----------------------------------------------------------------------------


class _GgufConfig(QuantizationConfigMixin):
    """Which layers keep their codes."""

    def __init__(
        self,
        kinds: Mapping[str, str],
        rows: Mapping[str, list[int]],
        quant_method: str = _NAME,
    ) -> None:
        self.quant_method = quant_method
        self.kinds, self.rows = dict(kinds), dict(rows)


class _CodedLinear(nn.Module):
    """Stands for a linear layer while its blocks are loaded."""

    def __init__(self, layer: nn.Linear, rows: list[int]) -> None:
        super().__init__()
        empty = torch.empty(rows, dtype=torch.uint8, device="meta")
        self.blocks = nn.Parameter(empty, requires_grad=False)
        self.bias = layer.bias


class _GgufQuantizer(HfQuantizer):
    """Has Transformers load blocks in place of weights, and packs them afterwards."""

    quantization_config: _GgufConfig

    @property
    def is_trainable(self) -> bool:
        """Tell that whole numbers are not trained."""
        return False

    def is_serializable(self) -> bool:
        """Tell that what was repacked is not written again."""
        return False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        for where, rows in self.quantization_config.rows.items():
            put(model, where, _CodedLinear(model.get_submodule(where), rows))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        config = self.quantization_config
        layers = [(where, model.get_submodule(where)) for where in config.kinds]
        sizes = [packed_bytes(config.kinds[where], layer.blocks) for where, layer in layers]
        on_files = mapped_from_files([layer.blocks.data_ptr() for _, layer in layers])
        for (where, layer), place in zip(layers, pieces(sizes), strict=True):
            blocks = layer.blocks.data
            try:
                packed = pack_blocks(config.kinds[where], blocks, place)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            bias = None if layer.bias is None else layer.bias.data
            put(model, where, PackedLinear(packed, bias, model.dtype))
            if blocks.data_ptr() in on_files:
                drop_file_pages(blocks.data_ptr(), blocks.nbytes)
        log.info("%d linear layers keep their codes: %s", len(layers), format_bytes(sum(sizes)))
        del model.config.quantization_config  # the file says it, by which a content is named
