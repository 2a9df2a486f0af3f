"""Products with packed weights beside their slow twin: every family of kernels, any shape."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.machines import isa_or_skip, kernel_folder
from layers.products import ACTIVATIONS, allowed, twin
from quire.kernels.compile import KINDS
from quire.layers.cpu import CpuLinear
from quire.layers.cpu.packed_frame import PackedShape
from quire.layers.cpu.packed_weight import PackedForm, PackedWeight, pack, quantize
from quire.layers.packed_linear import PackedLinear, rounded_inputs


class Which(NamedTuple):
    """What an instruction set and a form change. Each is a compilation."""

    isa: str
    dtype: torch.dtype
    form: PackedForm
    rounds: bool = False  # inputs to 8 bits

    @property
    def digits(self) -> int:
        shape = PackedShape(kind=KINDS[self.dtype], form=self.form, rounds_inputs=self.rounds)
        return shape.digits(isa_or_skip(self.isa))


MOST_ROWS = 66  # of these tests, whatever is faster
SETS = (
    Which("native", torch.bfloat16, PackedForm(bits=4, group_size=32, has_zeros=True)),
    Which("native", torch.float32, PackedForm(bits=8, group_size=128)),
    Which("native", torch.float16, PackedForm(bits=8, group_size=24, has_zeros=True)),
    Which("native", torch.float32, PackedForm(bits=4, group_size=32)),
    Which("avx512", torch.bfloat16, PackedForm(bits=4, group_size=32, scale_dtype=torch.bfloat16)),
    Which("avx512", torch.float32, PackedForm(bits=8, group_size=128, has_zeros=True)),
    Which("avx2", torch.float32, PackedForm(bits=4, group_size=32, has_zeros=True)),
    Which("avx2", torch.float16, PackedForm(bits=8, group_size=128)),
    Which("sse", torch.float32, PackedForm(bits=4, group_size=8, scale_dtype=torch.float32)),
    Which("native", torch.bfloat16, PackedForm(bits=8, group_size=128), rounds=True),
    Which("native", torch.float16, PackedForm(bits=4, group_size=24, has_zeros=True), rounds=True),
    Which("native", torch.float32, PackedForm(bits=4, group_size=32), rounds=True),
    Which("avx512", torch.bfloat16, PackedForm(bits=4, group_size=32), rounds=True),
)
Use = Callable[[int], None]


def name_of(which: Which) -> str:
    isa, dtype, form, rounds = which
    name = f"{isa}-{dtype}-{form.bits}-{form.group_size}{'-rounds' * rounds}"
    return name.replace("torch.", "")


every_set = pytest.mark.parametrize("which", SETS, ids=name_of)
# From 16 or 64 rows on codes are kept as bytes.
ROWS = st.one_of(st.sampled_from([1, 2, 3, 4, 5, 16, 17, 65]), st.integers(1, MOST_ROWS))
INPUTS = st.one_of(st.sampled_from([1, 8, 31, 32, 33, 128, 129, 256]), st.integers(1, 300))
OUTPUTS = st.one_of(st.sampled_from([1, 15, 16, 17, 63, 64, 65, 128]), st.integers(1, 200))


@cache
def linears(isa: str) -> CpuLinear:
    return CpuLinear(isa_or_skip(isa), kernel_folder(), most_rows=MOST_ROWS)


def some(
    seed: int, which: Which, rows: int, inputs: int, *outputs: int
) -> tuple[Tensor, list[PackedWeight]]:
    """Inputs, and weights of each number of outputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator).to(which[1])
    weights = [torch.randn(n, inputs, generator=generator) for n in outputs]
    return x, [quantize(weight, which[2]) for weight in weights]


def may_differ(which: Which, x: Tensor, weight: PackedWeight, want: Tensor) -> Tensor:
    """By sums in float32 of codes and zeros, by a rounding, and by the digits of inputs."""
    form, digits = which.form, which.digits
    codes, scales, zeros = weight.unpacked()
    size = form.group_size
    sizes = (
        codes.float().abs()
        + zeros.float().abs().repeat_interleave(size, 1)[:, : codes.shape[1]]
        - form.least
    )
    sizes *= scales.float().abs().repeat_interleave(size, 1)[:, : codes.shape[1]]
    found = allowed(x, sizes, want)
    if digits:
        whole = torch.nn.functional.pad(x.double().abs(), (0, -x.shape[1] % size))
        largest = whole.view(len(x), -1, size).amax(-1).repeat_interleave(size, 1)
        rounding = 1 / (2 * 127 * 254.0 ** (digits - 1)) + 2**-23
        exact = weight.dequantized().double().abs()
        found += rounding * (largest[:, : x.shape[1]] @ exact.T)
    return found


def beside(which: Which, x: Tensor, weight: PackedWeight, bias: Tensor | None, got: Tensor) -> None:
    want = twin(x, weight.dequantized(), bias)
    assert got.dtype == x.dtype
    assert got.shape == want.shape
    assert ((got.double() - want).abs() <= may_differ(which, x, weight, want)).all()


@every_set
@settings(max_examples=20)
@given(
    rows=ROWS,
    inputs=INPUTS,
    widths=st.lists(OUTPUTS, min_size=1, max_size=3),
    gap=st.integers(0, 3),
    with_bias=st.lists(st.booleans(), min_size=3, max_size=3),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_products_are_as_near_as_their_arithmetic_allows(
    which: Which,
    rows: int,
    inputs: int,
    widths: list[int],
    gap: int,
    with_bias: list[bool],
    threads: int,
    seed: int,
) -> None:
    isa, dtype = which.isa, which.dtype
    x, weights = some(seed, which, rows, inputs, *widths)
    drawn = [torch.randn(n).to(dtype) for n in widths]
    biases = [bias if wanted else None for bias, wanted in zip(drawn, with_bias, strict=False)]
    wide = torch.full((rows, inputs + gap), torch.nan, dtype=dtype)
    wide[:, :inputs] = x
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        bound = linears(isa).bind(weights, biases, dtype, rounds_inputs=which.rounds)
        outs = bound(wide[:, :inputs])
    finally:
        torch.set_num_threads(before)
    for out, weight, bias in zip(outs, weights, biases, strict=True):
        beside(which, x, weight, bias, out)


@every_set
def test_many_rows_by_torch_are_as_near(which: Which) -> None:
    """But for a rounding of weights to 16 bits, where the CPU multiplies bfloat16 itself."""
    dtype, own = which.dtype, linears(which.isa)
    x, weights = some(7, which, MOST_ROWS + 3, 200, 700, 65)
    biases = [None, torch.randn(65).to(dtype)]
    outs = own.bind(weights, biases, dtype, rounds_inputs=which.rounds)(x)
    isa = own.kernels.isa
    by_16_bits = dtype == torch.bfloat16 and (isa.bf16_convert or isa.amx)
    rounding = torch.finfo(dtype).eps / 2 if by_16_bits else 0.0
    for out, weight, bias in zip(outs, weights, biases, strict=True):
        exact = weight.dequantized()
        want = twin(x, exact, bias)
        room = may_differ(which, x, weight, want)
        room += rounding * (x.double().abs() @ exact.double().abs().T)
        assert out.dtype == dtype
        assert ((out.double() - want).abs() <= room).all()


@every_set
def test_a_batch_invariant_product_takes_any_number_of_rows(which: Which) -> None:
    """And gives each the same bits."""
    isa, dtype = which.isa, which.dtype
    cpu = CpuLinear(isa_or_skip(isa), kernel_folder(), most_rows=7, batch_invariant=True)
    x, weights = some(7, which, 20, 200, 130, 65)
    bound = cpu.bind(weights, None, dtype, rounds_inputs=which.rounds)
    outs = bound(x)
    for out, weight in zip(outs, weights, strict=True):
        beside(which, x, weight, None, out)
    for start, stop in ((0, 1), (6, 8), (3, 19)):
        for some_rows, out in zip(bound(x[start:stop]), outs, strict=True):
            assert torch.equal(some_rows, out[start:stop])


@every_set
def test_numbers_for_torch_are_the_slow_twins_bit_by_bit(which: Which) -> None:
    """Inputs of one: each output is a weight."""
    isa, form = which.isa, which.form
    cpu = linears(isa)
    _, (weight,) = some(3, Which("native", torch.float32, form), 1, 100, 130)
    bound = CpuLinear(cpu.kernels.isa, kernel_folder(), most_rows=0).bind(
        [weight], None, torch.float32
    )
    (out,) = bound(torch.eye(100))
    assert torch.equal(out.T, weight.dequantized())


@every_set
def test_a_row_is_the_same_alone_and_in_any_batch(which: Which, use_threads: Use) -> None:
    isa, dtype = which.isa, which.dtype
    x, weights = some(5, which, MOST_ROWS, 300, 150)
    bound = linears(isa).bind(weights, None, dtype, rounds_inputs=which.rounds)
    (whole,) = bound(x)
    for threads in (1, 2):
        use_threads(threads)
        for first, last in ((0, 1), (1, 3), (3, 8), (8, 25), (25, 66)):
            (part,) = bound(x[first:last])
            assert torch.equal(part, whole[first:last])


def test_little_weights_are_multiplied_by_one_thread(use_threads: Use) -> None:
    which = SETS[0]
    cpu = linears("native")
    use_threads(2)
    for outputs, num_threads in ((64, 1), (1024, 2)):
        x, weights = some(23, which, 1, 256, *[outputs] * 3)
        with cpu.threads.listening():
            cpu.bind(weights, None, torch.bfloat16)(x)
            (heard,) = cpu.threads.take_heard()
        assert heard.num_threads == num_threads


@pytest.mark.parametrize("which", SETS[::2], ids=name_of)
def test_gated_rounds_where_separate_operations_round(which: Which) -> None:
    isa, dtype = which.isa, which.dtype
    x, (gate, up) = some(11, which, 9, 160, 100, 100)
    bias = torch.randn(100).to(dtype)
    cpu = linears(isa)
    got = cpu.bind_gated(gate, up, "silu", [bias, None], dtype)(x)
    first, second = cpu.bind([gate, up], [bias, None], dtype)(x)
    want = (ACTIVATIONS["silu"](first.double()).to(dtype).double() * second.double()).to(dtype)
    units = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 2)
    torch.testing.assert_close(got, want, rtol=units, atol=units * 1e-2)


@every_set
def test_what_is_no_number_comes_out_as_none_and_spoils_no_other_row(which: Which) -> None:
    isa, dtype = which.isa, which.dtype
    x, weights = some(13, which, 5, 150, 70)
    bound = linears(isa).bind(weights, None, dtype, rounds_inputs=which.rounds)
    (plain,) = bound(x)
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoiled = x.clone()
        spoiled[2, 149] = bad
        (out,) = bound(spoiled)
        assert not out[2].isfinite().any()
        assert torch.equal(out[[0, 1, 3, 4]], plain[[0, 1, 3, 4]])


@pytest.mark.parametrize("which", [*SETS[:4], *SETS[6:]], ids=name_of)
@settings(max_examples=12)
@given(outputs=OUTPUTS, inputs=INPUTS, gap=st.integers(0, 2), seed=st.integers(0, 2**32))
def test_weights_are_rounded_as_the_slow_twin_rounds_them(
    which: Which, outputs: int, inputs: int, gap: int, seed: int
) -> None:
    isa, dtype, form = which.isa, which.dtype, which.form
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(outputs, inputs + gap, generator=generator).to(dtype)
    wide[0] = 0
    weight = wide[:, :inputs]
    rounds = linears(isa).quantizer(form)
    assert rounds.fits(weight)
    for got, want in zip(rounds(weight).unpacked(), quantize(weight, form).unpacked(), strict=True):
        assert torch.equal(got, want)


def test_weights_that_are_no_numbers_are_noticed() -> None:
    rounds = linears("native").quantizer(SETS[0][2])
    for bad in (torch.nan, torch.inf, -torch.inf):
        weight = torch.randn(70, 40)
        weight[69, 39] = bad
        with pytest.raises(ValueError, match="no finite numbers"):
            rounds(weight)
    assert not rounds.fits(torch.randn(4, 4).double())
    assert not rounds.fits(torch.randn(4, 4).T)


@pytest.mark.parametrize("which", [SETS[0], SETS[1]], ids=name_of)
def test_weights_that_are_too_large_for_a_scale_are_noticed(which: Which) -> None:
    """Their codes times infinity were no numbers."""
    weight = torch.randn(70, 40)
    weight[69, 39] = 1e12
    for rounds in (linears("native").quantizer(which.form), lambda x: quantize(x, which.form)):
        with pytest.raises(ValueError, match=r"too large for a scale in torch\.float16"):
            rounds(weight)
        with pytest.raises(ValueError, match="too large for a scale"):
            rounds(-weight)


def test_inputs_of_zeros_and_of_hardly_more() -> None:
    which = SETS[0]
    _, weights = some(17, which, 1, 64, 64)
    bound = linears("native").bind(weights, [torch.ones(64).bfloat16()], torch.bfloat16)
    for size in (0.0, 1e-40, 1e-30):
        (out,) = bound(torch.full((3, 64), size).bfloat16())
        assert torch.equal(out, torch.ones(3, 64).bfloat16())


def test_a_layers_own_product_is_the_kernels_twin() -> None:
    for which in SETS[:3]:
        x, (weight,) = some(19, which, 6, 90, 80)
        bias = torch.randn(80).to(which[1])
        layer = PackedLinear(weight, bias, which[1])
        beside(which, x, weight, bias, layer(x))
        assert str(which[2].bits) in repr(layer)


ROUNDING = [which for which in SETS if which.rounds and which.isa == "native"]


@pytest.mark.parametrize("which", ROUNDING, ids=name_of)
@settings(max_examples=15)
@given(rows=ROWS, inputs=INPUTS, outputs=OUTPUTS, seed=st.integers(0, 2**32))
def test_inputs_are_rounded_as_the_slow_twin_rounds_them(
    which: Which, rows: int, inputs: int, outputs: int, seed: int
) -> None:
    """So sums differ by float32's rounding alone, and not by that of 8 bits."""
    if which.digits != 1:
        pytest.skip("this CPU does not multiply bytes")
    x, (weight,) = some(seed, which, rows, inputs, outputs)
    x *= torch.logspace(-2, 2, inputs, dtype=x.dtype)  # groups of any size
    bound = linears("native").bind([weight], None, which.dtype, rounds_inputs=True)
    beside_rounded(which, x, weight, bound(x)[0])
    layer = PackedLinear(weight, None, which.dtype)
    layer.rounds_inputs = True
    beside_rounded(which, x, weight, layer(x))
    assert "rounds inputs" in repr(layer)


def test_rows_that_lie_apart_and_no_rows_are_rounded_too() -> None:
    x = torch.randn(6, 40).T
    assert torch.equal(rounded_inputs(x, 8), rounded_inputs(x.contiguous(), 8))
    assert rounded_inputs(x[:0], 8).shape == (0, 6)


def beside_rounded(which: Which, x: Tensor, weight: PackedWeight, got: Tensor) -> None:
    rounded = rounded_inputs(x.float(), which.form.group_size)
    exact = which._replace(dtype=torch.float32, rounds=False, isa="avx512")
    want = twin(rounded, weight.dequantized(), None)
    in_float32 = may_differ(exact, rounded, weight, want)
    info = torch.finfo(which.dtype)
    by_rounding = info.eps * (want.abs() + in_float32 + info.smallest_normal)
    assert ((got.double() - want).abs() <= in_float32 + by_rounding).all()


@pytest.mark.parametrize("which", ROUNDING, ids=name_of)
def test_sums_of_the_largest_bytes_do_not_overflow(which: Which) -> None:
    form = which.form
    size, least = form.group_size, form.least
    codes = torch.tensor([least, -least - 1, 0]).repeat_interleave(30)[:, None].repeat(1, 2 * size)
    weight = pack(
        codes.to(torch.int8), torch.ones(90, 2).half(), None, bits=form.bits, group_size=size
    )
    bound = linears("native").bind([weight], None, torch.float32, rounds_inputs=True)
    x = torch.stack([torch.full((2 * size,), value) for value in (1.0, -1.0, 0.0)])
    assert torch.equal(bound(x)[0], x @ codes.float().T)


def test_what_is_refused() -> None:
    which = SETS[0]
    _, (one, other) = some(1, which, 1, 64, 64, 64)
    _, (longer,) = some(1, which, 1, 65, 64)
    wide = quantize(torch.randn(64, 64), PackedForm(bits=8, group_size=32))
    cpu = linears("native")
    for weights, reason in (
        ([one, longer], "of 64 and of 65 inputs"),
        ([one, wide], "packed in one form"),
        ([one, torch.randn(64, 64)], "all packed, or none"),
    ):
        with pytest.raises(ValueError, match=reason):
            cpu.bind(weights, None, torch.bfloat16)
    with pytest.raises(ValueError, match="give dtype"):
        cpu.bind([one])
    with pytest.raises(ValueError, match=r"none for torch\.float64"):
        cpu.bind([one], None, torch.float64)
    with pytest.raises(ValueError, match="a bias is"):
        cpu.bind([one, other], [torch.zeros(3).bfloat16(), None], torch.bfloat16)
    with pytest.raises(ValueError, match="1 biases for 2 weights"):
        cpu.bind([one, other], [None], torch.bfloat16)
