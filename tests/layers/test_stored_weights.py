"""Weights as other tools store them: packed, they are the numbers of the file, bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layers.stored import METHODS, Stored, store
from quire.layers.stored_weights import read_stored, stored_bits

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


@pytest.mark.parametrize("group_size", [32, 128, 256])
@pytest.mark.parametrize("method", METHODS)
def test_a_row_may_end_inside_of_a_group(method: str, group_size: int) -> None:
    """Half of one: its groups could also be all of one size, which are others."""
    stored = store(
        method, 16, group_size * 3 // 2, group_size,
        bits=4, is_symmetric=False, dtype=torch.float16, zeros_less=1, seed=1,
    )  # fmt: skip
    packed = read_stored(method, stored.tensors, bits=4, group_sizes={64, group_size, 1024})
    assert torch.equal(packed.dequantized(), stored.weight)
    if method == "gptq":  # says it itself
        packed = read_stored(method, stored.tensors, bits=4)
        assert torch.equal(packed.dequantized(), stored.weight)


def test_groups_that_are_not_said_are_of_inputs_that_follow_one_another() -> None:
    stored = usual("compressed-tensors")
    unsaid = {"weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}
    packed = read_stored("compressed-tensors", stored.tensors | unsaid, bits=4)
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
    refused("gptq", r"groups of \[63\] inputs are said, of 64", g_idx=moved[1:])
    refused("gptq", "another order", g_idx=torch.full((64,), 2**30, dtype=torch.int32))
    refused("gptq", "do not belong together", scales=torch.ones(3, 16).half())
    refused("awq", r"scales is \[16\], which is no matrix", scales=torch.ones(16).half())
    refused("awq", r"words are torch\.int64", qweight=torch.zeros(64, 2, dtype=torch.int64))
    for each in (torch.inf, torch.nan):
        scales = usual("gptq").tensors["scales"].clone()
        scales[1, 3] = each
        refused("gptq", "scales that are no finite numbers", scales=scales)
    refused("compressed-tensors", "and not two numbers", weight_shape=torch.tensor([16, 64, 1]))
    with pytest.raises(ValueError, match="AWQ has codes of 4 bits"):
        read_stored("awq", usual("awq").tensors, bits=8)


@pytest.mark.parametrize(("method", "name"), [
    ("gptq", "qweight"), ("gptq", "scales"), ("awq", "qzeros"),
    ("compressed-tensors", "weight_scale"), ("compressed-tensors", "weight_shape"),
])  # fmt: skip
def test_what_is_missing_is_named(method: str, name: str) -> None:
    tensors = usual(method).tensors
    del tensors[name]
    for read in (stored_bits_of, read_usual):
        with pytest.raises(ValueError, match=f"there is no {name}"):
            read(method, tensors)


def stored_bits_of(method: str, tensors: dict[str, Tensor]) -> None:
    stored_bits(method, tensors, 16, 64)


def read_usual(method: str, tensors: dict[str, Tensor]) -> None:
    read_stored(method, tensors, bits=4)
