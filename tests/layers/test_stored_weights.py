"""Weights as other tools store them: packed, they are the numbers of the file, bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layers.stored import METHODS, Stored, store
from quire.layers.stored_weights import read_stored

SIZES = st.tuples(st.integers(1, 12), st.integers(1, 12))


@settings(max_examples=80)
@given(
    method=st.sampled_from(METHODS),
    size=SIZES,
    group_size=st.sampled_from([8, 32, 64, 128, 256, 0]),
    is_symmetric=st.booleans(),
    bits=st.sampled_from([4, 8]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    zeros_less=st.sampled_from([0, 1]),
    seed=st.integers(0, 2**32),
)
def test_what_is_packed_has_the_numbers_of_the_file(
    method: str,
    size: tuple[int, int],
    group_size: int,
    is_symmetric: bool,
    bits: int,
    dtype: torch.dtype,
    zeros_less: int,
    seed: int,
) -> None:
    if method == "awq":
        bits = 4
    outputs, inputs = size[0] * 8, size[1] * (group_size or 24)
    stored = store(
        method, outputs, inputs, group_size or inputs,
        bits=bits, is_symmetric=is_symmetric, dtype=dtype, zeros_less=zeros_less, seed=seed,
    )  # fmt: skip
    packed = read_stored(method, stored.tensors, bits=bits, zeros_less=zeros_less)
    assert packed.form.scale_dtype == dtype
    assert packed.form.has_zeros or is_symmetric or not stored.zeros.any()
    assert torch.equal(packed.dequantized(), stored.weight)


def usual(method: str) -> Stored:
    return store(
        method, 16, 64, 32,
        bits=4, is_symmetric=False, dtype=torch.float16, zeros_less=1, seed=0,
    )  # fmt: skip


def refused(method: str, reason: str, **others: Tensor) -> None:
    with pytest.raises(ValueError, match=reason):
        read_stored(method, usual(method).tensors | others, bits=4)


def test_what_is_refused() -> None:
    moved = torch.arange(64, dtype=torch.int32).flip(0) // 32
    refused("gptq", "another order", g_idx=moved)
    refused("compressed-tensors", "another order", weight_g_idx=moved)
    refused("gptq", "do not belong together", scales=torch.ones(3, 16).half())
    refused("awq", r"scales is \[16\], which is no matrix", scales=torch.ones(16).half())
    refused("awq", r"words are torch\.int64", qweight=torch.zeros(64, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="AWQ has codes of 4 bits"):
        read_stored("awq", usual("awq").tensors, bits=8)
