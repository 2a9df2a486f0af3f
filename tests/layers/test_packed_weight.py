"""Weights as codes: what is packed comes back, and each is the nearest code of its group."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.layers.cpu.packed_weight import (
    MOST_GROUP,
    SCALE_DTYPES,
    PackedForm,
    PackedWeight,
    pack,
    quantize,
)
from quire.spec.weight_forms import WEIGHT_FORMS, WeightForm

SIZES = st.tuples(st.integers(1, 150), st.integers(1, 300))
FORMS = tuple({form.name: form for form in WEIGHT_FORMS.values()}.values())


def packed_form(form: WeightForm) -> PackedForm:
    return PackedForm(bits=form.bits, group_size=form.group_size, has_zeros=form.has_zeros)


def drawn(seed: int, size: tuple[int, int], form: PackedForm) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of any size."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-size[1] // form.group_size)
    limits = form.least, -form.least
    codes = torch.randint(*limits, size, generator=generator).to(torch.int8)
    zeros = torch.randint(*limits, (size[0], groups), generator=generator).to(torch.int8)
    scales = torch.randn(size[0], groups, generator=generator).to(form.scale_dtype)
    return codes, scales, zeros


@settings(max_examples=60)
@given(
    size=SIZES,
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([8, 24, 32, 64, MOST_GROUP]),
    has_zeros=st.booleans(),
    scale_dtype=st.sampled_from(SCALE_DTYPES),
    seed=st.integers(0, 2**32),
)
def test_what_is_packed_comes_back(
    size: tuple[int, int],
    bits: int,
    group_size: int,
    has_zeros: bool,
    scale_dtype: torch.dtype,
    seed: int,
) -> None:
    form = PackedForm(
        bits=bits, group_size=group_size, has_zeros=has_zeros, scale_dtype=scale_dtype
    )
    codes, scales, zeros = drawn(seed, size, form)
    packed = pack(codes, scales, zeros if has_zeros else None, bits=bits, group_size=group_size)
    assert packed.form == form
    assert packed.shape == size
    got = packed.unpacked()
    want = codes, scales, zeros if has_zeros else torch.zeros_like(zeros)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    own = [x.float().repeat_interleave(group_size, 1)[:, : size[1]] for x in want[1:]]
    assert torch.equal(packed.dequantized(), (codes.float() - own[1]) * own[0])


@settings(max_examples=60)
@given(
    size=SIZES,
    form=st.sampled_from(FORMS),
    shift=st.sampled_from([0.0, 0.5, -3.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32),
)
def test_no_weight_is_farther_from_its_code_than_half_a_step(
    size: tuple[int, int], form: WeightForm, shift: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(size, generator=generator) + shift).to(dtype)
    packed = quantize(weight, packed_form(form))
    codes, scales, _ = packed.unpacked()
    steps = scales.float().abs().repeat_interleave(form.group_size, 1)[:, : size[1]]
    apart = (packed.dequantized() - weight.float()).abs()
    # Symmetric codes have one fewer on one side, and a zero is rounded too: a step at the ends.
    assert (apart <= steps * 1.01 + 2**-10 * weight.float().abs()).all()
    least = -(1 << (form.bits - 1))
    inside = (codes > least) & (codes < -least - 1)
    # A scale in float16 is off by 2 ** -11, and so are all weights that are far from zero.
    limit = steps * 0.5 + 2**-10 * weight.float().abs() + 1e-6
    assert (apart[inside] <= limit[inside]).all()


def test_groups_of_zeros_and_of_one_number() -> None:
    weight = torch.zeros(3, 96)
    weight[1], weight[2, 40:] = 0.25, -0.125
    for form in FORMS:
        found = quantize(weight, packed_form(form)).dequantized()
        assert torch.equal(found == 0, weight == 0), form.name
        torch.testing.assert_close(found, weight, rtol=2**-10, atol=0)


def test_a_form_takes_the_bits_that_it_says() -> None:
    for form in FORMS:
        packed = quantize(torch.randn(128, 256), packed_form(form))
        assert packed.data.nbytes * 8 == form.bits_a_weight * 128 * 256


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="codes of 3 bits"):
        PackedForm(bits=3, group_size=32)
    with pytest.raises(ValueError, match="group of 20 inputs"):
        PackedForm(bits=4, group_size=20)
    with pytest.raises(ValueError, match="group of 256 inputs"):
        PackedForm(bits=4, group_size=256)
    with pytest.raises(ValueError, match=r"scales in torch\.float64"):
        PackedForm(bits=4, group_size=32, scale_dtype=torch.float64)
    form = PackedForm(bits=4, group_size=32)
    with pytest.raises(ValueError, match="packed data is"):
        PackedWeight(torch.zeros(1, 1, 3, dtype=torch.uint8), 64, 32, form)
    codes, scales, _ = drawn(0, (64, 64), form)
    with pytest.raises(ValueError, match=r"scales are \[64, 1\], and not \[64, 2\]"):
        pack(codes, scales[:, :1], None, bits=4, group_size=32)
    weight = torch.randn(64, 64)
    weight[3, 5] = torch.inf
    with pytest.raises(ValueError, match="no finite numbers"):
        quantize(weight, form)
