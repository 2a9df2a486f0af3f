"""Read in how many bits a checkpoint keeps its weights, from ``quantization_config``.

Methods of the hub are known by their own fields: MXFP4, FP8, ModelOpt, compressed-tensors, GPTQ,
AWQ and bitsandbytes. Token embeddings, output heads, norms and routers stay as they are, and so do
the modules that the file excludes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, TypeGuard

from quire.errors import ConfigError
from quire.planner.parameters import WeightParts
from quire.spec.config_json import text_section
from quire.spec.gguf_file import GGUF_TYPES
from quire.spec.layer_specs import DTYPE_BYTES
from quire.spec.weight_forms import WeightForm, weight_form


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """In how many bits weights are kept, and in how many products of them are computed."""

    name: str  # as people say it
    bits: float  # of a coded weight, with its scales
    computes_in_bits: int = 16  # 16 if codes are decoded before they are multiplied
    codes_attention: bool = True
    codes_dense: bool = True
    codes_experts: bool = True

    @property
    def is_coded(self) -> bool:
        """Return whether weights are kept as codes, and not in the dtype of activations."""
        return self.name not in DTYPE_BYTES

    def bytes_of(self, parts: WeightParts, item_bytes: int) -> WeightParts:
        """Return the bytes of each part; weights that are not coded take ``item_bytes``."""

        def coded(count: int) -> int:
            return int(count * self.bits / 8)

        return WeightParts(
            table=parts.table * item_bytes,
            head=parts.head * item_bytes,
            attention=coded(parts.attention)
            if self.codes_attention
            else parts.attention * item_bytes,
            dense=coded(parts.dense) if self.codes_dense else parts.dense * item_bytes,
            experts=coded(parts.experts) if self.codes_experts else parts.experts * item_bytes,
            small=parts.small * item_bytes,
            towers=parts.towers * item_bytes,
        )


def uncoded(dtype: str, item_bytes: int) -> Precision:
    """Return the precision of weights that are kept in a dtype."""
    return Precision(name=dtype, bits=8 * item_bytes)


def of_form(form: WeightForm) -> Precision:
    """Return the precision of weights that are quantized at load (``quire.models.quantized``)."""
    return Precision(name=form.name, bits=form.bits_a_weight, codes_experts=False)


def of_gguf(kind: str) -> Precision:
    """Return the precision of linear layers that keep a GGUF file's codes, by ggml's name."""
    items, block_bytes = next(sizes for name, *sizes in GGUF_TYPES.values() if name == kind)
    return Precision(name=f"GGUF {kind}", bits=8 * block_bytes / items)


# What --weights can ask for beside ``published``: as checkpoints of these kinds usually are, and
# whole numbers as ``--quantization`` makes them.
NAMED: Final[Mapping[str, Precision]] = MappingProxyType(
    {
        "bfloat16": Precision(name="bfloat16", bits=16),
        "fp8": Precision(name="FP8", bits=8, computes_in_bits=8),
        "nvfp4": Precision(name="NVFP4", bits=4.5, computes_in_bits=4),  # a scale of 8 bits for 16
        "mxfp4": Precision(name="MXFP4", bits=4.25),  # a scale of 8 bits for 32
        "int8": Precision(name="8-bit integers", bits=weight_form("int8").bits_a_weight),
        "int4": Precision(name="4-bit integers", bits=weight_form("int4").bits_a_weight),
    }
)


def named(name: str) -> Precision:
    """Find a precision of ``NAMED``. Raises: ConfigError."""
    if name not in NAMED:
        raise ConfigError(f"--weights {name!r} is unknown; known: published, {', '.join(NAMED)}")
    return NAMED[name]


def precision_of(config: Mapping[str, Any]) -> Precision | None:
    """Return the precision that a config.json states; None if it is not quantized.

    A method or a field of an unknown kind also is None: the weights are then counted as uncoded,
    and ``unread_method`` names it.
    """
    said = _section(config)
    if said is None:
        return None
    read = _METHODS.get(str(said.get("quant_method", "")).lower())
    found = None if read is None else read(said)
    if found is None:
        return None
    excluded = list(_excluded(said))
    return replace(
        found,
        codes_attention=found.codes_attention and not any(map(_is_attention, excluded)),
        codes_dense=found.codes_dense and not any(map(_is_dense, excluded)),
    )


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json says that some weights are codes, by a method known or not."""
    return _section(config) is not None


def unread_method(config: Mapping[str, Any]) -> str | None:
    """Return the name of a quantization that is stated and not known here, or None."""
    said = _section(config)
    if said is None or precision_of(config) is not None:
        return None
    return str(said.get("quant_method", "of no name"))[:40]


def _section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    section, _ = text_section(config, "config.json")
    for part in (config, section):
        said = part.get("quantization_config") or part.get("compression_config")
        if isinstance(said, Mapping):
            return said
    return None


# -- the methods -----------------------------------------------------------------------------------


def _mxfp4(_: Mapping[str, Any]) -> Precision:
    return NAMED["mxfp4"]


def _fp8(said: Mapping[str, Any]) -> Precision:
    """Return eight bits, with a scale of 32 for each block, channel or tensor."""
    block = said.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(map(_is_size, block)):
        return replace(NAMED["fp8"], bits=8 + 32 / (block[0] * block[1]))
    return NAMED["fp8"]


def _modelopt(said: Mapping[str, Any]) -> Precision | None:
    algorithm = str(said.get("quant_algo", "")).upper()
    if algorithm in ("NVFP4", "FP4"):
        return NAMED["nvfp4"]
    return NAMED["fp8"] if algorithm.startswith("FP8") else None


def _in_groups(name: str) -> Callable[[Mapping[str, Any]], Precision | None]:
    def read(said: Mapping[str, Any]) -> Precision | None:
        bits = said.get("bits", said.get("w_bit"))
        if not _is_bits(bits):
            return None
        group = said.get("group_size", said.get("q_group_size", 128))
        # A scale of 16 bits for each group, and a zero point as wide as a weight.
        extra = (16 + bits) / group if _is_size(group) else 0
        return Precision(name=f"{bits}-bit {name}", bits=bits + extra)

    return read


def _compressed_tensors(said: Mapping[str, Any]) -> Precision | None:
    """Read the first group of modules, which in nearly all files is the only one."""
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return None
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or not _is_bits(weights.get("num_bits")):
        return None
    bits, size = int(weights["num_bits"]), weights.get("group_size")
    is_float = weights.get("type") == "float"
    scale = 8 if is_float and bits == 4 else 16
    zero = 0 if is_float or weights.get("symmetric", True) else bits
    extra = (scale + zero) / size if _is_size(size) else 0
    activations = group.get("input_activations")
    computes = activations.get("num_bits") if isinstance(activations, Mapping) else None
    name = {(True, 4): "FP4", (True, 8): "FP8"}.get((is_float, bits), f"{bits}-bit integers")
    return Precision(
        name=f"{name} (compressed-tensors)",
        bits=bits + extra,
        computes_in_bits=int(computes) if computes in (4, 8) else 16,
    )


def _bitsandbytes(said: Mapping[str, Any]) -> Precision | None:
    if said.get("load_in_8bit"):
        return Precision(name="8-bit bitsandbytes", bits=8)
    if not said.get("load_in_4bit"):
        return None
    # A scale of 32 bits for 64 weights; twice quantized, of 8 bits, with one of 32 for 256 of them.
    twice = bool(said.get("bnb_4bit_use_double_quant"))
    return Precision(name="4-bit bitsandbytes", bits=4 + (8 / 64 + 32 / 64 / 256 if twice else 0.5))


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], Precision | None]] = MappingProxyType(
    {
        "mxfp4": _mxfp4,
        "fp8": _fp8,
        "fbgemm_fp8": _fp8,
        "modelopt": _modelopt,
        "modelopt_fp4": _modelopt,
        "gptq": _in_groups("GPTQ"),
        "awq": _in_groups("AWQ"),
        "compressed-tensors": _compressed_tensors,
        "bitsandbytes": _bitsandbytes,
    }
)


def _is_bits(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 8


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**20


# -- what is left as it is -------------------------------------------------------------------------

_EXCLUDING = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


def _excluded(said: Mapping[str, Any]) -> Iterable[str]:
    for name in _EXCLUDING:
        listed = said.get(name)
        if isinstance(listed, list):
            yield from (each for each in listed if isinstance(each, str) and _is_general(each))


def _is_general(pattern: str) -> bool:
    """Return whether it names modules of all layers, and not of one."""
    return not any(part.isdigit() for part in pattern.replace("\\.", ".").split("."))


def _is_attention(pattern: str) -> bool:
    return "attn" in pattern or "attention" in pattern


def _is_dense(pattern: str) -> bool:
    return "mlp" in pattern and not any(word in pattern for word in ("router", "gate", "expert"))
