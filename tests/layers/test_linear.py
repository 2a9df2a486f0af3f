"""Products of few rows beside their slow twin: every family of kernels, any shape and stride."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layers.products import (
    ACTIVATIONS,
    MOST_ROWS,
    SETS,
    Which,
    allowed,
    gated_twin,
    invariant_linears,
    linears,
    name_of,
    twin,
    whole,
)
from quire.kernels.language import LANES
from quire.layers.cpu.linear_frame import ALIAS_BYTES, KEPT_ROWS, KEPT_STEPS

every_set = pytest.mark.parametrize("which", SETS, ids=name_of)
Use = Callable[[int], None]
# Around the sizes of tiles, panels and vectors.
ROWS = st.one_of(st.sampled_from([1, 2, 4, 5, 16, 17, 64, 65]), st.integers(1, MOST_ROWS))
INPUTS = st.one_of(st.sampled_from([1, 2, 16, 31, 32, 33, 64, 96]), st.integers(1, 150))
OUTPUTS = st.one_of(st.sampled_from([32, 33, 63, 64, 96]), st.integers(32, 130))


def strided(x: Tensor, gap: int) -> Tensor:
    """The same rows, with that many numbers between them that are none."""
    wide = torch.full((x.shape[0], x.shape[1] + gap), torch.nan, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def make(seed: int, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [whole(generator, *shape).to(dtype) for shape in shapes]


@every_set
@settings(max_examples=25)
@given(
    rows=ROWS,
    inputs=INPUTS,
    widths=st.lists(OUTPUTS, min_size=1, max_size=3),
    gaps=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    with_bias=st.lists(st.booleans(), min_size=3, max_size=3),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_whole_numbers_are_exact(
    which: Which,
    rows: int,
    inputs: int,
    widths: list[int],
    gaps: tuple[int, int],
    with_bias: list[bool],
    threads: int,
    seed: int,
) -> None:
    isa, dtype, _ = which
    x, *rest = make(seed, dtype, (rows, inputs), *((n, inputs) for n in widths))
    weights = [strided(weight, gaps[0]) for weight in rest]
    drawn = make(seed + 1, dtype, *((n,) for n in widths))
    biases = [bias if wanted else None for bias, wanted in zip(drawn, with_bias, strict=False)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        outs = linears(isa).bind(weights, biases)(strided(x, gaps[1]))
    finally:
        torch.set_num_threads(before)
    assert len(outs) == len(weights)
    for out, weight, bias in zip(outs, weights, biases, strict=True):
        torch.testing.assert_close(out, twin(x, weight, bias).to(dtype), rtol=0, atol=0)


@every_set
def test_rows_of_weights_that_fall_on_the_same_lines_of_a_cache(which: Which) -> None:
    isa, dtype, _ = which
    x, weight = make(4, dtype, (MOST_ROWS, 70), (75, 70))
    apart = strided(weight, ALIAS_BYTES // dtype.itemsize - 70)
    product = linears(isa).bind([apart])
    for rows in (1, 6, LANES, 3 * LANES + 1, MOST_ROWS):
        (out,) = product(x[:rows])
        assert torch.equal(out, twin(x[:rows], weight, None).to(dtype))


@every_set
@settings(max_examples=15)
@given(rows=ROWS, inputs=st.integers(1, 600), outputs=OUTPUTS, seed=st.integers(0, 2**32))
def test_a_sum_is_as_near_as_float32_and_one_rounding_allow(
    which: Which, rows: int, inputs: int, outputs: int, seed: int
) -> None:
    isa, dtype, _ = which
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    (out,) = linears(isa).bind([weight], [bias])(x)
    want = twin(x, weight, bias)
    assert ((out.double() - want).abs() <= allowed(x, weight, want)).all()


@every_set
@settings(max_examples=15)
@given(
    rows=ROWS,
    inputs=st.integers(1, 100),
    outputs=OUTPUTS,
    scale=st.sampled_from([2.0**-8, 2.0**-5, 2.0**-3]),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_gated_rounds_where_separate_operations_round(
    which: Which,
    rows: int,
    inputs: int,
    outputs: int,
    scale: float,
    with_bias: bool,
    seed: int,
) -> None:
    """Exact sums, so that all that differs is the activation: by two units of the last place."""
    isa, dtype, activation = which
    size = (outputs, inputs)
    x, gate, up, *biases = make(seed, dtype, (rows, inputs), size, size, (outputs,), (outputs,))
    gate = gate * scale
    given_biases = biases if with_bias else None
    got = linears(isa).bind_gated(gate, up, activation, given_biases)(x)
    want = gated_twin(x, (gate, up), given_biases or (None, None), activation)
    units = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 2)
    # Far below zero all forms are as good as nothing.
    torch.testing.assert_close(got, want, rtol=units, atol=units * 1e-2)


@every_set
def test_activations_agree_with_torch_over_their_whole_range(which: Which) -> None:
    """One input, so that a gate is x itself: the activation is within a unit of torch's."""
    isa, dtype, _ = which
    x = torch.linspace(-30, 30, MOST_ROWS * 32).reshape(MOST_ROWS, 32).to(dtype)
    eye, nothing = torch.eye(32, dtype=dtype), torch.zeros(32, 32, dtype=dtype)
    for name in ACTIVATIONS if which == SETS[0] else (which[2],):
        one = torch.ones(32, dtype=dtype)
        got = linears(isa).bind_gated(eye, nothing, name, [None, one])(x)
        want = ACTIVATIONS[name](x)
        units = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 1)
        torch.testing.assert_close(got, want, rtol=units, atol=2e-6)


@every_set
def test_a_row_is_the_same_alone_and_in_any_batch(which: Which, use_threads: Use) -> None:
    isa, dtype, activation = which
    generator = torch.Generator().manual_seed(5)
    x, gate, up = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((70, 200), (600, 200), (600, 200))
    )
    own = invariant_linears(isa)
    products = own.bind([gate, up]), own.bind_gated(gate, up, activation)
    use_threads(1)
    whole_batch = [*products[0](x), products[1](x)]
    for threads in (1, 2, 3):
        use_threads(threads)
        for rows in (slice(0, 1), slice(3, 5), slice(7, 24), slice(30, 70)):
            part = [*products[0](x[rows]), products[1](x[rows])]
            for got, want in zip(part, whole_batch, strict=True):
                assert torch.equal(got, want[rows])


@every_set
def test_a_row_of_many_inputs_is_the_same_alone_and_among_many(which: Which) -> None:
    """Many rows share weights that became floats, some steps of them at a time."""
    isa, dtype, _ = which
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(KEPT_ROWS + 5, 2 * LANES * KEPT_STEPS + 37, generator=generator).to(dtype)
    weight = torch.randn(40, x.shape[1], generator=generator).to(dtype)
    product = invariant_linears(isa).bind([weight])
    alone = torch.cat([product(row[None])[0] for row in x])
    for rows in (KEPT_ROWS - 1, KEPT_ROWS, KEPT_ROWS + 1, KEPT_ROWS + 5):
        assert torch.equal(product(x[:rows])[0], alone[:rows])


@every_set
def test_sums_that_cancel_are_the_same_in_any_batch(which: Which) -> None:
    """What is left of large numbers shows the order in which they were added up."""
    isa, dtype, _ = which
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(2 * LANES + 9, 300, generator=generator)
    x *= 2.0 ** torch.randint(0, 6, (300,), generator=generator)
    weight = torch.randn(40, 300, generator=generator)
    again = torch.randperm(150, generator=generator)
    x[:, 150:], weight[:, 150:] = x[:, again], -weight[:, again]
    x, weight = x.to(dtype), weight.to(dtype)
    product = invariant_linears(isa).bind([weight])
    alone = torch.cat([product(row[None])[0] for row in x])
    assert alone.count_nonzero() > alone.numel() // 2  # sums in float32, of terms whose sum is 0
    for rows in (2, 5, 6, LANES, LANES + 1, 2 * LANES, 2 * LANES + 9):
        assert torch.equal(product(x[:rows])[0], alone[:rows])


@every_set
def test_what_is_no_number_stays_in_its_row_and_its_output(which: Which) -> None:
    isa, dtype, _ = which
    x, weight = make(3, dtype, (20, 53), (40, 53))
    clean = twin(x, weight, None).to(dtype)
    x[17, 52], weight[39, 0] = torch.nan, torch.inf
    (out,) = linears(isa).bind([weight])(x)
    assert out[17].isnan().all()
    assert not out[:17, 39].isfinite().any()
    mixed = torch.ones(20, 40, dtype=torch.bool)
    mixed[17], mixed[:, 39] = False, False
    assert torch.equal(out[mixed], clean[mixed])
