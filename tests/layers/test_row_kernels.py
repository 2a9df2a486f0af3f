"""Norms, rotary positions and gates against torch's operations: rows of all widths and strides."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layers.products import ACTIVATIONS, linears
from quire.kernels.compile import KINDS
from quire.layers.cpu.row_kernels import (
    GateKernel,
    GateShape,
    Norm,
    NormForm,
    NormShape,
    Rotary,
    RotaryShape,
    Sums,
)
from quire.layers.fused import agrees

Use = Callable[[int], None]

# What an instruction set changes: how it rounds, and how many registers it has.
SETS = (
    ("native", torch.float32),
    ("native", torch.bfloat16),
    ("native", torch.float16),
    ("avx2", torch.bfloat16),
    ("sse", torch.float16),
)
WIDTHS = (1, 33, 128)
FORMS = tuple(NormForm(rounds_first=a, from_one=b) for a in (False, True) for b in (False, True))
TURNS = ((32, 32), (80, 48), (24, 6))  # width of a head, and of what is turned

every_set = pytest.mark.parametrize(("isa", "dtype"), SETS)
counts = st.integers(0, 40)


@cache
def norm(isa: str, dtype: torch.dtype, width: int, form: NormForm) -> Norm:
    shape = NormShape(width=width, kind=KINDS[dtype], eps=1e-3, form=form)
    return Norm(shape, linears(isa).kernels, linears(isa).threads)


def torch_norm(x: Tensor, weight: Tensor, form: NormForm) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)
    if form.rounds_first:
        wide = wide.to(x.dtype).float()
    factor = weight.float() + 1 if form.from_one else weight.float()
    return (wide * factor).to(x.dtype)


@cache
def rotary(isa: str, dtype: torch.dtype, width: int, turned: int) -> Rotary:
    shape = RotaryShape(query_heads=3, kv_heads=2, width=width, turned=turned, kind=KINDS[dtype])
    return Rotary(shape, linears(isa).kernels, linears(isa).threads)


def torch_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = cos.shape[-1]
    low, high = x[..., : turned // 2], x[..., turned // 2 : turned]
    partner = torch.cat([-high, low], -1)
    return torch.cat([x[..., :turned] * cos + partner * sin, x[..., turned:]], -1)


@cache
def gate(isa: str, dtype: torch.dtype, width: int, activation: str) -> GateKernel:
    shape = GateShape(width=width, activation=activation, kind=KINDS[dtype])
    return GateKernel(shape, linears(isa).kernels, linears(isa).threads)


def spread(x: Tensor, how: str) -> Tensor:
    """The same numbers, lying otherwise."""
    if how == "apart":
        return torch.stack([x, x], -1)[..., 0]
    if how == "in a row":
        return torch.cat([x, x], -1)[..., x.shape[-1] :]
    return x


every_spread = st.sampled_from(["side by side", "apart", "in a row"])


@every_set
@settings(max_examples=25)
@given(
    num_rows=counts, width=st.sampled_from(WIDTHS), form=st.sampled_from(FORMS), how=every_spread
)
def test_a_norm_is_torchs(
    isa: str, dtype: torch.dtype, num_rows: int, width: int, form: NormForm, how: str
) -> None:
    x = spread((torch.randn(1, num_rows, 2, width) * 3).to(dtype), how)
    weight = torch.randn(width).to(dtype)
    got, want = norm(isa, dtype, width, form)(x, weight), torch_norm(x, weight, form)
    if form.rounds_first:  # twice, so that a last bit of the first can become two of the second
        eps = max(torch.finfo(dtype).eps, 16 * torch.finfo(torch.float32).eps)
        apart = (got.float() - want.float()).abs()
        assert (apart <= 2 * eps * want.float().abs() + 1e-30).all()
    else:
        assert agrees(got, want)


@every_set
@settings(max_examples=25)
@given(num_tokens=counts, turn=st.sampled_from(TURNS), how=every_spread, token_major=st.booleans())
def test_a_rotation_is_torchs(
    isa: str,
    dtype: torch.dtype,
    num_tokens: int,
    turn: tuple[int, int],
    how: str,
    token_major: bool,
) -> None:
    def heads(count: int) -> Tensor:
        if token_major:
            x = torch.randn(1, num_tokens, count, turn[0]).transpose(1, 2)
        else:
            x = torch.randn(1, count, num_tokens, turn[0])
        return spread(x.to(dtype), how)

    q, k = heads(3), heads(2)
    cos, sin = (spread(torch.randn(1, num_tokens, turn[1]).to(dtype), how) for _ in range(2))
    before = q.clone(), k.clone()
    got = rotary(isa, dtype, *turn)(q, k, cos, sin)
    for x, own, found in zip((q, k), before, got, strict=True):
        assert torch.equal(x, own)  # what is given stays
        assert agrees(found, torch_rotary(x, cos[:, None], sin[:, None]), of_sums=True)


@every_set
@pytest.mark.parametrize("activation", ACTIVATIONS)
@settings(max_examples=10)
@given(num_rows=counts, width=st.sampled_from(WIDTHS[1:]), how=every_spread)
def test_a_gate_is_torchs(
    isa: str, dtype: torch.dtype, activation: str, num_rows: int, width: int, how: str
) -> None:
    first, second = (torch.randn(1, num_rows, width) * 3 for _ in range(2))
    left, right = spread(first.to(dtype), how), spread(second.to(dtype), how)
    got = gate(isa, dtype, width, activation)(left, right)
    # One rounding of the activation, and one of the product.
    want = ACTIVATIONS[activation](left) * right
    assert agrees(got, want, of_sums=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 17])
def test_an_activation_alone_is_torchs_at_any_width(activation: str, width: int) -> None:
    """One element behind the last vector: LLVM ended the process over gelu's in float32."""
    shape = GateShape(width=width, activation=activation, kind="f32", alone=True)
    own = GateKernel(shape, linears("native").kernels, linears("native").threads)
    x = torch.randn(5, width) * 3
    assert agrees(own(x, x), ACTIVATIONS[activation](x), of_sums=True)


@every_set
@settings(max_examples=20)
@given(shape=st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_a_sum_is_torchs_to_the_bit(isa: str, dtype: torch.dtype, shape: list[int]) -> None:
    sums = Sums(linears(isa).kernels, linears(isa).threads)
    a, b = (torch.randn(shape).to(dtype) * 30 for _ in range(2))
    a.view(-1)[0] = torch.inf
    assert sums.fit(a, b)
    out = torch.empty_like(a)
    sums(a, b, out)
    assert torch.equal(out, a + b)


def test_only_what_lies_alike_is_summed() -> None:
    sums = Sums(linears("native").kernels, linears("native").threads)
    a = torch.randn(4, 6)
    assert sums.fit(a, a)
    for other in (2.0, a[:1], a[0], a.t().contiguous().t(), a.double(), a.bfloat16(), a.to("meta")):
        assert not sums.fit(a, other)
        assert not sums.fit(other, a)
    assert not sums.fit(torch.zeros(0, 6), torch.zeros(0, 6))


def test_rows_are_the_same_on_any_number_of_threads(use_threads: Use) -> None:
    x, weight = torch.randn(5000, 128).bfloat16(), torch.randn(128).bfloat16()
    one = norm("native", torch.bfloat16, 128, FORMS[0])
    results = []
    for count in (1, 2, 3):
        use_threads(count)
        results.append(one(x, weight))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_what_is_no_number_stays_none() -> None:
    x = torch.randn(2, 33)
    x[1, 7] = torch.nan
    found = norm("native", torch.float32, 33, FORMS[0])(x, torch.ones(33))
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


def test_a_row_of_zeros_stays_zero() -> None:
    x = torch.zeros(1, 33)
    assert torch.equal(norm("native", torch.float32, 33, FORMS[0])(x, torch.ones(33)), x)
