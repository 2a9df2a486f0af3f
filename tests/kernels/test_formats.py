"""Elements of memory become floats and floats become them, to the bit; and 2 ** x."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir

from attention import twins
from attention.alone import Alone, ending
from attention.machines import ISAS, isa_or_skip
from quire.kernels.language import INTS, LANES, LINE_BYTES, Code, Int, exp2
from quire.kernels.number_formats import KIND_BYTES, kind_factor, load_as, pair_bf16, store_as

DEGREES = {3: 1.6e-4, 4: 4e-6, 5: 1.1e-7, 6: 3e-9}  # relative errors
FLOAT = 2.0**-23  # of one operation's result
COUNTS = (1, 3, 6, 11)  # elements of a row that are there
KINDS = tuple(KIND_BYTES)


def bits_type(kind: str) -> type[np.unsignedinteger]:
    return {1: np.uint8, 2: np.uint16, 4: np.uint32}[KIND_BYTES[kind]]


def _dot(code: Code, source: Int, target: Int, n: Int) -> None:
    """a · b of pairs added to c: three vectors after one another."""
    a, b, c = (code.read(source + n * LINE_BYTES * 3 + LINE_BYTES * i, INTS) for i in range(3))
    total = code.b.bitcast(c, code.floats(0.0).type)
    code.store(code.dot_pairs(total, a, b), target + n * LINE_BYTES)


@cache
def formats(isa_name: str) -> Alone:
    """Kernels around each function: (source, target, vectors)."""
    isa = isa_or_skip(isa_name)

    def kernel(module: ir.Module, name: str, body) -> None:  # type: ignore[no-untyped-def]
        code = Code(module, name, 3, isa)
        source, target, count = code.params
        code.each(count, lambda n: body(code, source, target, n))
        code.end()

    def write(module: ir.Module) -> None:
        for kind, size in KIND_BYTES.items():

            def load(code: Code, source: Int, target: Int, n: Int, kind=kind, size=size) -> None:  # type: ignore[no-untyped-def]
                found = load_as(code, source + n * (LANES * size), kind)
                code.store(found, target + n * LINE_BYTES)

            def store(code: Code, source: Int, target: Int, n: Int, kind=kind, size=size) -> None:  # type: ignore[no-untyped-def]
                value = code.load(source + n * LINE_BYTES)
                store_as(code, value, target + n * (LANES * size), kind)

            def part(code: Code, source: Int, target: Int, n: Int, kind=kind) -> None:  # type: ignore[no-untyped-def]
                for i, elements in enumerate(COUNTS):
                    place = target + n * LINE_BYTES * len(COUNTS) + i * LINE_BYTES
                    code.store(load_as(code, source, kind, elements), place)

            kernel(module, f"load_{kind}", load)
            kernel(module, f"part_{kind}", part)
            kernel(module, f"store_{kind}", store)
        for degree in DEGREES:

            def power(code: Code, source: Int, target: Int, n: Int, degree=degree) -> None:  # type: ignore[no-untyped-def]
                value = code.load(source + n * LINE_BYTES)
                code.store(exp2(code, value, degree), target + n * LINE_BYTES)

            kernel(module, f"exp2_{degree}", power)

        def pair(code: Code, source: Int, target: Int, n: Int) -> None:
            low, high = (code.load(source + n * LINE_BYTES * 2 + LINE_BYTES * i) for i in (0, 1))
            code.write(pair_bf16(code, low, high), target + n * LINE_BYTES)

        kernel(module, "pair_bf16", pair)
        if isa.bf16_dot:
            kernel(module, "dot_pairs", _dot)

    return Alone(isa, "formats", write)


def load(isa_name: str, kind: str, bits: np.ndarray) -> np.ndarray:
    out = ending(np.zeros(bits.shape, np.float32))
    formats(isa_name)(f"load_{kind}", ending(bits), out, len(bits) // LANES)
    return twins.wide(out)


def store(isa_name: str, kind: str, x: np.ndarray) -> np.ndarray:
    out = ending(np.zeros(x.shape, bits_type(kind)))
    formats(isa_name)(f"store_{kind}", ending(x), out, len(x) // LANES)
    return out


def padded(x: np.ndarray) -> np.ndarray:
    return np.pad(x, (0, -len(x) % LANES))


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal numbers, or both none; and the same sign where both are zero."""
    np.testing.assert_array_equal(got, want)
    there = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[there]), np.signbit(want[there]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["f16", "bf16", "i8", "f8"])
def test_every_element_that_there_is_is_loaded(isa: str, kind: str) -> None:
    bits = np.arange(2 ** (8 * KIND_BYTES[kind]), dtype=bits_type(kind))
    want = twins.decode(kind, bits)
    got = load(isa, kind, bits) * kind_factor(kind)
    same(got, want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_behind_a_row_s_end_are_zeros_and_nothing_is_read(isa: str, kind: str) -> None:
    bits = np.full(COUNTS[-1], 0x22222222 >> (32 - 8 * KIND_BYTES[kind]), bits_type(kind))
    full = twins.decode(kind, bits) / kind_factor(kind)
    for count in COUNTS:
        # The memory ends behind the longest row; what is behind a shorter one is another row.
        out = ending(np.full((len(COUNTS), LANES), np.nan, np.float32))
        formats(isa)(f"part_{kind}", ending(bits), out, 1)
        got = out[COUNTS.index(count)]
        np.testing.assert_array_equal(got, np.pad(full[:count], (0, LANES - count)))


def interesting(kind: str) -> np.ndarray:
    """Each number of a short format, the middle to the next one, and what is beside that middle."""
    bits = np.arange(2 ** (8 * KIND_BYTES[kind]), dtype=bits_type(kind))
    values = twins.decode(kind, bits)
    values = np.unique(values[np.isfinite(values)])
    if kind == "bf16":  # every 7th of many
        values = values[::7]
    middles = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    infinite = np.float32(np.inf)
    beside = [np.nextafter(middles, s * infinite) for s in (-1, 1)]
    special = np.array(
        [np.inf, -np.inf, 0.0, -0.0, 448.0, 464.0, 464.1, -1e9, 65504.0, 65519.9, 65520.0, 1e-45,
         -1e-45, 3.4028235e38, 3.39e38, 2.0**-127, 1e-39, 2.0**-25, 2.0**-10, 2.0**-9 * 1.5],
        np.float32,
    )  # fmt: skip
    return padded(np.concatenate([values.astype(np.float32), middles, *beside, special]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["f16", "bf16", "f8"])
def test_a_float_becomes_the_nearest_element_and_ties_the_even_one(isa: str, kind: str) -> None:
    x = interesting(kind)
    same(twins.decode(kind, store(isa, kind, x)), twins.nearest(kind, x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["f16", "bf16", "f8", "f32"])
def test_what_is_no_number_is_stored_as_none(isa: str, kind: str) -> None:
    signs = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32)
    x = padded(signs).view(np.float32)
    assert np.isnan(twins.decode(kind, store(isa, kind, x))[:4]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_whole_floats_become_int8(isa: str) -> None:
    x = padded(np.arange(-128, 128).astype(np.float32))
    same(twins.decode("i8", store(isa, "i8", x)), x.astype(np.float64))


floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=20)
@given(x=st.lists(floats, min_size=LANES, max_size=LANES))
def test_any_floats_are_rounded_as_the_equation_says(isa: str, x: list[float]) -> None:
    values = np.array(x, np.float32)
    for kind in ("f16", "bf16", "f8", "f32"):
        same(twins.decode(kind, store(isa, kind, values)), twins.nearest(kind, values))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("degree", DEGREES)
def test_exp2_is_as_near_as_its_degree_says(isa: str, degree: int) -> None:
    middle = np.linspace(-126, 127, 40_000)
    x = padded(np.concatenate([middle, np.linspace(-1, 1, 10_000), np.arange(-126, 128)]))
    x = x.astype(np.float32)
    got = ending(np.zeros_like(x))
    formats(isa)(f"exp2_{degree}", ending(x), got, len(x) // LANES)
    want = np.exp2(x.astype(np.float64))
    assert np.abs(got / want - 1).max() <= DEGREES[degree] + 3 * FLOAT
    assert got[x == 0] == pytest.approx(1.0, abs=DEGREES[degree] + FLOAT)


@pytest.mark.parametrize("isa", ISAS)
def test_exp2_of_what_is_far_below_is_next_to_nothing(isa: str) -> None:
    x = padded(np.array([-127.0, -1e4, -1e30, -3e38, -np.inf], np.float32))
    got = ending(np.zeros_like(x))
    for degree in DEGREES:
        formats(isa)(f"exp2_{degree}", ending(x), got, len(x) // LANES)
        assert (got[:5] >= 0).all()
        assert (got[:5] <= 2.0**-125).all()


@pytest.mark.parametrize("isa", ISAS)
def test_pairs_are_low_and_high_and_multiply_as_such(isa: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 2, LANES)).astype(np.float32)
    words = ending(np.zeros((20, LANES, 2), np.uint16))
    formats(isa)("pair_bf16", ending(x), words, 20)
    same(twins.decode("bf16", words), twins.bf16(x.transpose(0, 2, 1)))
    given_ = np.zeros((10, 3, LANES), np.uint32)
    a, b = words[:10].copy(), words[10:].copy()
    total = rng.standard_normal((10, LANES)).astype(np.float32)
    given_[:, 0], given_[:, 1] = (w.view(np.uint32)[..., 0] for w in (a, b))
    given_[:, 2] = total.view(np.uint32)
    if not isa_or_skip(isa).bf16_dot:
        return
    got = ending(np.zeros((10, LANES), np.float32))
    formats(isa)("dot_pairs", ending(given_), got, 10)
    want = total + (twins.decode("bf16", a) * twins.decode("bf16", b)).sum(-1)
    np.testing.assert_allclose(got, want, rtol=0, atol=4 * FLOAT * np.abs(want).max())
