"""Weights as GPTQ, AWQ and compressed-tensors write them, word by word, and their numbers.

This is the slow way round, by loops over codes, as their formats are described.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

METHODS = ("gptq", "awq", "compressed-tensors")


@dataclass(frozen=True)
class Stored:
    tensors: dict[str, Tensor]
    weight: Tensor  # f32[N, K]
    zeros: Tensor  # i8[N, groups], from the middle


def words_of(codes: Tensor, bits: int) -> Tensor:
    """i64[R, C] to words i32[R, C · bits / 32], the first code in the lowest bits."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each))
    found = torch.zeros(len(codes), padded.shape[1] // each, dtype=torch.int64)
    for column in range(padded.shape[1]):
        found[:, column // each] |= padded[:, column] << (bits * (column % each))
    return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32)


def awq_words(codes: Tensor) -> Tensor:
    """i64[R, C] to words i32[R, C / 8], in AWQ's order of outputs."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return words_of(torch.cat([part[:, order] for part in codes.split(8, 1)], 1), 4)


def store(
    method: str,
    outputs: int,
    inputs: int,
    group_size: int,
    *,
    bits: int,
    is_symmetric: bool,
    dtype: torch.dtype,
    zeros_less: int,
    seed: int,
    scale: float = 1.0,
) -> Stored:
    """Any codes, with scales of about one times ``scale``."""
    generator = torch.Generator().manual_seed(seed)
    groups, most, middle = -(-inputs // group_size), 2**bits, 2 ** (bits - 1)
    codes = torch.randint(0, most, (outputs, inputs), generator=generator)
    zeros = torch.randint(0, most, (outputs, groups), generator=generator)
    if is_symmetric:
        zeros[:] = middle
    scales = (torch.rand(outputs, groups, generator=generator) + 0.5).mul(scale).to(dtype)
    groups_of = torch.arange(inputs) // group_size
    weight = (codes - zeros[:, groups_of]).float() * scales.float()[:, groups_of]
    if method == "gptq":
        tensors = {
            "qweight": words_of(codes, bits).T.contiguous(),  # along the inputs
            "qzeros": words_of((zeros - zeros_less).T % most, bits),
            "scales": scales.T.contiguous(),
            "g_idx": groups_of.to(torch.int32),
        }
    elif method == "awq":
        tensors = {
            "qweight": awq_words(codes.T),
            "qzeros": awq_words(zeros.T),
            "scales": scales.T.contiguous(),
        }
    else:
        tensors = {
            "weight_packed": words_of(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = words_of(zeros.T, bits).T.contiguous()
    return Stored(tensors, weight, (zeros - middle).to(torch.int8))
