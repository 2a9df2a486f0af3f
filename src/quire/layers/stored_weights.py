"""Weights as GPTQ, AWQ and compressed-tensors store them, read into codes, scales and zeros.

    w[n][k] = (code[n][k] - zero[n][g]) * scale[n][g]

holds in all of them, so nothing is rounded anew: what is packed has the very numbers of the file.
Codes and zeros count from the middle here, and from the lowest code there.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from quire.layers.cpu.packed_weight import MOST_GROUP, STEP, PackedWeight, pack
from quire.units import align_up, ceil_div

_WORD_BITS = 32
# Which of eight outputs a word's i-th four bits are of. Source: AutoAWQ, gemm.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

STORED_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": (
        "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
    ),
})  # fmt: skip
_OPTIONAL = frozenset({"g_idx", "weight_zero_point", "weight_g_idx"})
_NO_MATRICES = frozenset({"g_idx", "weight_g_idx", "weight_shape"})


def stored_bits(
    method: str, tensors: Mapping[str, Tensor], num_outputs: int, num_inputs: int
) -> int:
    """Find in how many bits a layer's codes are: files may mix them.

    ``tensors``: words i32[…, …], as for ``read_stored``.
    Raises: ValueError for other than 4 and 8, and as ``read_stored`` for what is missing.
    """
    _check_whole(method, tensors)
    if method == "gptq":
        words, codes = tensors["qweight"].shape[0], num_inputs
    elif method == "awq":
        words, codes = tensors["qweight"].shape[-1], num_outputs
    else:
        words, codes = tensors["weight_packed"].shape[-1], num_inputs
    bits = _WORD_BITS * words // codes
    if bits not in (4, 8):
        raise ValueError(f"{words} words for {codes} codes are neither of 4 nor of 8 bits")
    return bits


def read_stored(
    method: str,
    tensors: Mapping[str, Tensor],
    *,
    bits: int,
    zeros_less: int = 1,
    group_sizes: Collection[int] = (),
) -> PackedWeight:
    """Pack what a checkpoint has of one layer, by the names of ``STORED_NAMES``.

    ``tensors``: words i32[…, …] and scales, shaped as the method has them. ``zeros_less``: by how
    much the zeros that GPTQ stores are too small (0 in its second form). ``group_sizes``: those
    that the checkpoint speaks of, since a row may end inside of a group.
    Raises: ValueError for tensors that are missing, for shapes or an order of inputs that are none
    of the method's, and for scales that are no finite numbers.
    """
    _check_whole(method, tensors)
    if method == "gptq":
        codes = _along_rows(tensors["qweight"], bits).T
        # A zero of nothing is stored as the highest code.
        zeros = (_along_columns(tensors["qzeros"], bits).T + zeros_less) & ((1 << bits) - 1)
        scales = tensors["scales"].T
    elif method == "awq":
        codes, zeros = (_awq(tensors[name], bits).T for name in ("qweight", "qzeros"))
        scales = tensors["scales"].T
    else:
        num_outputs, num_inputs = map(int, tensors["weight_shape"])
        codes = _along_columns(tensors["weight_packed"], bits)[:num_outputs, :num_inputs]
        scales = tensors["weight_scale"]
        stored = tensors.get("weight_zero_point")
        middle = 1 << (bits - 1)
        if stored is None:
            zeros = torch.full(scales.shape, middle, dtype=torch.int32)
        else:
            zeros = _along_rows(stored, bits)[:num_outputs]
    scales = scales.contiguous()
    if not bool(scales.isfinite().all()):
        raise ValueError("there are scales that are no finite numbers")
    group_of = tensors.get("g_idx", tensors.get("weight_g_idx"))
    group_size = _group_size(codes, scales, zeros, group_of, group_sizes)
    codes, zeros = ((x - (1 << (bits - 1))).to(torch.int8).contiguous() for x in (codes, zeros))
    if group_size > MOST_GROUP:  # several records have the same scale
        parts = ceil_div(codes.shape[1], MOST_GROUP)
        if scales.shape[1] > 1 and group_size % MOST_GROUP:
            raise ValueError(f"a group of {group_size} inputs is no multiple of {MOST_GROUP}")
        scales, zeros = (
            x.repeat_interleave(ceil_div(group_size, MOST_GROUP), 1)[:, :parts].contiguous()
            for x in (scales, zeros)
        )
        group_size = MOST_GROUP
    return pack(
        codes, scales, zeros if bool(zeros.any()) else None, bits=bits, group_size=group_size
    )


def _check_whole(method: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises: ValueError for a tensor that is missing, or that is no matrix."""
    for name in STORED_NAMES[method]:
        if name not in tensors and name not in _OPTIONAL:
            raise ValueError(f"there is no {name}")
    for name, each in tensors.items():
        if name not in _NO_MATRICES and (each.dim() != 2 or not each.numel()):
            raise ValueError(f"{name} is {list(each.shape)}, which is no matrix")
    shape = tensors.get("weight_shape")
    if shape is not None and shape.shape != (2,):
        raise ValueError(f"weight_shape is {list(shape.shape)}, and not two numbers")


def _group_size(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group_of: Tensor | None,  # each input's; all -1 where nothing is said
    sizes: Collection[int],
) -> int:
    """Find how many inputs a group has; the last one of a row may have fewer."""
    num_outputs, num_inputs = codes.shape
    groups = scales.shape[1]
    if not groups or scales.shape != (num_outputs, groups) or zeros.shape != scales.shape:
        raise ValueError(
            f"codes are {list(codes.shape)}, scales {list(scales.shape)} and zeros "
            f"{list(zeros.shape)}: they do not belong together"
        )
    if group_of is not None and bool((group_of == -1).all()):
        group_of = None
    if group_of is not None and group_of.shape != (num_inputs,):
        raise ValueError(f"groups of {list(group_of.shape)} inputs are said, of {num_inputs}")
    if groups == 1:
        size = align_up(num_inputs, STEP)
    elif group_of is not None:
        size = int((group_of == 0).sum())
    else:
        even = num_inputs // groups
        fitting = [size for size in sizes if ceil_div(num_inputs, size) == groups]
        size = even if even in fitting or not fitting else fitting[0]
    if group_of is not None:
        usual = torch.arange(num_inputs, dtype=group_of.dtype) // max(1, size)
        if not torch.equal(group_of, usual):
            raise ValueError("its groups are of inputs in another order (act-order, desc_act)")
    if not size or ceil_div(num_inputs, size) != groups:
        raise ValueError(f"{num_inputs} inputs are not {groups} groups of one size")
    return size


def _fields(words: Tensor, bits: int) -> Tensor:
    """Codes i32[…, 32 / bits] of words i32[…], the lowest bits first."""
    if words.dtype != torch.int32:
        raise ValueError(f"words are {words.dtype}, and not torch.int32")
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)


def _along_rows(words: Tensor, bits: int) -> Tensor:
    """[R, C] to [R · 32 / bits, C]."""
    return _fields(words, bits).transpose(1, 2).reshape(-1, words.shape[1])


def _along_columns(words: Tensor, bits: int) -> Tensor:
    """[R, C] to [R, C · 32 / bits]."""
    return _fields(words, bits).reshape(words.shape[0], -1)


def _awq(words: Tensor, bits: int) -> Tensor:
    """[R, C] to [R, C · 8], in the order of outputs."""
    if bits != 4:
        raise ValueError(f"AWQ has codes of 4 bits, and not of {bits}")
    fields = _fields(words, bits)
    places = torch.empty(len(_AWQ_ORDER), dtype=torch.long)
    places[list(_AWQ_ORDER)] = torch.arange(len(_AWQ_ORDER))
    return fields[..., places].reshape(words.shape[0], -1)
