"""Every kernel beside its twin, alone. Sources end where memory ends, so a byte too far is a crash.

Tolerances: a float32 sum is off by some units of the last place of what was added up; weights of
pairs by what a polynomial of degree 3 and a bfloat16 leave.
"""

from collections.abc import Callable
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from llvmlite import ir

from attention import twins
from attention.alone import Alone, ending
from attention.machines import isa_or_skip
from quire.attention.cpu.call_frame import KEYS, TILE, AttendShape, Layout
from quire.attention.cpu.decode_kernel import write_rows
from quire.attention.cpu.prefill_kernel import write_panels
from quire.attention.cpu.thread_loop import write_finish_row, write_merge
from quire.kernels import amx
from quire.kernels.language import LANES, LOG2_E, LOWEST, Code
from quire.kernels.number_formats import KIND_BYTES, kind_factor

UNIT = 2.0**-23
SHAPES = MappingProxyType(
    {
        "bf16": AttendShape(
            kv_heads=1, sharing=3, key_dim=40, value_dim=24, kind="bf16", query_kind="bf16"
        ),
        "f16": AttendShape(
            kv_heads=1,
            sharing=7,
            key_dim=24,
            value_dim=100,
            kind="f16",
            query_kind="f16",
            sinks=True,
        ),
        "i8": AttendShape(
            kv_heads=1,
            sharing=1,
            key_dim=72,
            value_dim=72,
            kind="i8",
            query_kind="bf16",
            sinks=True,
        ),
        "f8": AttendShape(
            kv_heads=1, sharing=16, key_dim=19, value_dim=35, kind="f8", query_kind="f32"
        ),
        "f32": AttendShape(
            kv_heads=1, sharing=2, key_dim=128, value_dim=64, kind="f32", query_kind="f32"
        ),
        "latent": AttendShape(
            kv_heads=1,
            sharing=2,
            key_dim=24,
            value_dim=72,
            kind="bf16",
            query_kind="bf16",
            latent=True,
        ),
        "latent i8": AttendShape(
            kv_heads=1,
            sharing=2,
            key_dim=8,
            value_dim=40,
            kind="i8",
            query_kind="bf16",
            latent=True,
        ),
    }
)
# Each is a compilation. What an instruction set changes: the registers, pairs, tiles, float16.
SETS = (
    *(("native", name) for name in SHAPES),
    ("pairs", "bf16"),
    ("avx512", "bf16"),
    ("avx2", "bf16"),
    ("avx2", "f16"),
    ("avx2", "i8"),
    ("sse", "f16"),
    ("sse", "f8"),
    ("sse", "latent i8"),
)


def those(wanted: Callable[[AttendShape], bool]) -> pytest.MarkDecorator:
    sets = [which for which in SETS if wanted(SHAPES[which[1]])]
    return pytest.mark.parametrize("which", sets, ids=["-".join(which) for which in sets])


every_set = those(lambda shape: True)
row_sets = those(lambda shape: not shape.latent)  # a latent goes through panels always
scaled_sets = those(lambda shape: shape.kind == "i8" and not shape.latent)
COUNTS = (1, 2, 15, 16, 17, 33, 63, 64)  # tokens of a tile


class Kernels:
    """The kernels of one shape on one instruction set, and how their operands are laid out."""

    def __init__(self, which: tuple[str, str]) -> None:
        isa = isa_or_skip(which[0])
        self.shape = SHAPES[which[1]]
        layout = Layout(self.shape, isa)
        self.panel, self.row = self.shape.panel_shape(isa), self.shape.row_shape(isa)
        self.row_bytes = layout.row_bytes
        self.area_bytes = layout.area_bytes
        self.tiles = isa.amx and self.panel.pairs
        self.run = alone(which)

    def multiply(self, name: str, *arguments: Any) -> None:
        if self.tiles:
            self.run("shape_tiles")
        self.run(name, *arguments)
        if self.tiles:
            self.run("release_tiles")


@cache
def alone(which: tuple[str, str]) -> Alone:
    isa, shape = isa_or_skip(which[0]), SHAPES[which[1]]
    panel = shape.panel_shape(isa)

    def write(module: ir.Module) -> None:
        write_panels(module, panel, isa)
        if not shape.latent:
            write_rows(module, shape.row_shape(isa), isa)
        if isa.amx and panel.pairs:
            amx.write_shape(Code(module, "shape_tiles", 0, isa))
            amx.write_release(Code(module, "release_tiles", 0, isa))
        write_finish_row(Code(module, "finish_row", 5, isa), shape)
        write_merge(Code(module, "merge", 3, isa), shape)

    return Alone(isa, f"kernels of {shape}", write)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def elements(rng: np.random.Generator, kind: str, *size: int) -> tuple[Any, Any]:
    """Random elements of a kind: their bits, and what ``load_as`` makes of them."""
    if kind == "i8":
        bits = rng.integers(0, 256, size).astype(np.uint8)
    elif kind == "f8":
        bits = rng.integers(0, 0x7F, size).astype(np.uint8) | (
            rng.integers(0, 2, size) << 7
        ).astype(np.uint8)
    else:
        x = rng.standard_normal(size).astype(np.float32)
        bits = {
            "f32": lambda: x.view(np.uint32),
            "f16": lambda: x.astype(np.float16).view(np.uint16),
            "bf16": lambda: (x.view(np.uint32) >> 16).astype(np.uint16),
        }[kind]()
    return bits, twins.decode(kind, bits) / kind_factor(kind)


def strided(bits: Any, extra: int) -> tuple[Any, int]:
    """Rows with other bytes between them; none behind the last one."""
    rows, width = bits.shape
    size = bits.itemsize
    stride = (width + extra) * size
    wide = np.full((rows, width + extra), -1).astype(bits.dtype)
    wide[:, :width] = bits
    return ending(wide.reshape(-1)[: rows * (width + extra) - extra]), stride


def words(x: Any, *, pairs: bool) -> Any:
    """Rows of numbers as they are multiplied: float32, or bfloat16 pairs."""
    x = np.ascontiguousarray(x, np.float32)
    return (x.view(np.uint32) >> 16).astype(np.uint16) if pairs else x


def columns(rows: Any, width: int) -> Any:
    """Zeros up to ``width``."""
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))


def one(x: float) -> Any:
    return ending(np.array([x], np.float32))


def near(got: Any, want: Any, *, units: float = 64, relative: float = 0.0) -> None:
    scale = max(np.abs(want).max(), 1e-30)
    np.testing.assert_allclose(got, want, rtol=relative, atol=units * UNIT * scale)


# -- one query a sequence -------------------------------------------------------------------------


@row_sets
def test_dot_rows(which: tuple[str, str], rng: np.random.Generator) -> None:
    kernels = Kernels(which)
    row = kernels.row
    width = row.query_row_bytes // (2 if row.pairs else 4)
    for count in COUNTS:
        bits, k = elements(rng, row.kind, count, row.key_dim)
        _, q = elements(rng, "bf16", row.queries, row.key_dim)
        keys, stride = strided(bits, 3)
        queries = ending(words(columns(q, width), pairs=row.pairs))
        scores = ending(np.full(row.score_bytes // 4, np.nan, np.float32))
        kernels.run("dot_rows", keys, stride, queries, scores, count)
        got = scores[: row.queries * TILE].reshape(row.queries, TILE)[:, :count]
        near(got, twins.dot_rows(q, k))


@row_sets
def test_weigh_rows(which: tuple[str, str], rng: np.random.Generator) -> None:
    kernels = Kernels(which)
    row, c = kernels.row, 0.7
    for count in COUNTS:
        for m in (LOWEST, -3.0, 0.5, 1000.0):  # nothing yet, below, among and above the scores
            s = rng.standard_normal((row.queries, TILE)).astype(np.float32)
            old_m = np.full(row.queries, m, np.float32)
            old_l = np.full(row.queries, 0.0 if m == LOWEST else 1.5, np.float32)
            old_o = rng.standard_normal((row.queries, row.out_row_bytes // 4)).astype(np.float32)
            if m == LOWEST:
                old_o[:] = 0.0
            scores, new_m, new_l, new_o = map(ending, (s, old_m, old_l, old_o))
            scores[:, count:] = np.nan  # what dot_rows left there
            kernels.run("weigh_rows", scores, count, one(c), new_m, new_l, new_o)
            want = twins.weigh_rows(s[:, :count].astype(float), c, old_m, old_l, old_o)
            for got, wanted in zip((scores[:, :count], new_m, new_l, new_o), want, strict=True):
                near(got, wanted)


@row_sets
def test_add_rows(which: tuple[str, str], rng: np.random.Generator) -> None:
    kernels = Kernels(which)
    row = kernels.row
    for count in COUNTS:
        bits, v = elements(rng, row.kind, count, row.value_dim)
        values, stride = strided(bits, 5)
        p = rng.random((row.queries, TILE)).astype(np.float32)
        o = rng.standard_normal((row.queries, row.out_row_bytes // 4)).astype(np.float32)
        weights, out = ending(p), ending(o)
        weights[:, count:] = np.nan
        kernels.run("add_rows", values, stride, weights, out, count)
        want = twins.add_rows(p[:, :count], v, o[:, : row.value_dim])
        near(out[:, : row.value_dim], want)


@scaled_sets
def test_scale_rows(which: tuple[str, str], rng: np.random.Generator) -> None:
    kernels = Kernels(which)
    row = kernels.row
    for count in COUNTS:
        s = rng.standard_normal((row.queries, TILE)).astype(np.float32)
        by = rng.random(TILE).astype(np.float32)
        scores = ending(s)
        kernels.run("scale_rows", scores, ending(by), count)
        np.testing.assert_array_equal(scores[:, :count], (s * by)[:, :count])


# -- panels ---------------------------------------------------------------------------------------


def copies(kernels: Kernels) -> list[tuple[str, str, int, int, int, bool]]:
    """(kernel, kind of its source, width, offset in the target's row, its width, scaled) ."""
    panel = kernels.panel
    target = panel.key_words * panel.word_elements
    scaled = panel.kind == "i8" and len(panel.key_parts) > 1
    found, begin = [], 0
    for number, width in enumerate(panel.key_parts):
        found.append((f"copy_keys_{number}", panel.kind, width, begin, target, scaled))
        found.append((f"copy_query_{number}", panel.query_kind, width, begin, target, False))
        begin += width
    element = 2 if panel.pairs else 4
    value_row = panel.value_row_bytes // element
    return [*found, ("copy_values", panel.kind, panel.value_dim, 0, value_row, scaled)]


@every_set
def test_rows_are_copied_with_zeros_behind_the_last_part(
    which: tuple[str, str], rng: np.random.Generator
) -> None:
    kernels = Kernels(which)
    panel = kernels.panel
    word = "bf16" if panel.pairs else "f32"
    for name, kind, width, begin, target_width, scaled in copies(kernels):
        for count in (1, 5, KEYS):
            bits, x = elements(rng, kind, count, width)
            scales = rng.random(count).astype(np.float32)
            source, stride = strided(bits, 3)
            fill = np.uint16(0xFFFF) if panel.pairs else np.uint32(0xFFFFFFFF)
            target = ending(np.full((count, target_width), fill))
            kernels.run(name, source, stride, count, target, target.strides[0], ending(scales))
            got = twins.decode(word, target)
            if scaled:
                want = twins.nearest(word, (x * scales[:, None]).astype(np.float32))
            else:
                want = twins.nearest(word, x)
            np.testing.assert_array_equal(got[:, begin : begin + width], want)
            assert (target[:, :begin] == fill).all()
            last = name == "copy_values" or begin + width == sum(panel.key_parts)
            behind = target[:, begin + width :]
            assert (behind == (0 if last else fill)).all(), name


@every_set
def test_transpose(which: tuple[str, str], rng: np.random.Generator) -> None:
    kernels = Kernels(which)
    for rows, cols in ((1, 1), (2, 3), (4, 1)):
        x = rng.integers(0, 2**32, (rows * LANES, cols * LANES)).astype(np.uint32)
        source, stride = strided(x, 2)
        target = ending(np.zeros((cols * LANES, rows * LANES), np.uint32))
        kernels.run("transpose", source, stride, target, target.strides[0], rows, cols)
        np.testing.assert_array_equal(target, x.T)


@every_set
def test_pair_values(which: tuple[str, str], rng: np.random.Generator) -> None:
    kernels = Kernels(which)
    panel = kernels.panel
    if not panel.pairs:
        return  # then there is no such kernel
    rows = rng.integers(0, 2**16, (KEYS, panel.value_row_bytes // 2)).astype(np.uint16)
    want = rows[:, : panel.value_rows].reshape(KEYS // 2, 2, -1).transpose(0, 2, 1)
    if kernels.tiles:  # [d][t / 2] words; else [t / 2][d]
        want = want.transpose(1, 0, 2)
    found = ending(np.zeros(want.shape, np.uint16))
    kernels.run("pair_values", ending(rows), found)
    np.testing.assert_array_equal(found, want)


def panels_of(x: Any, *, pairs: bool) -> Any:
    """[n, sum] → panels [n / 16][words][16]: what is summed over goes down."""
    element = words(x, pairs=pairs).view(np.uint32)  # [n, words]
    return np.ascontiguousarray(element.reshape(-1, LANES, element.shape[1]).transpose(0, 2, 1))


@every_set
def test_score(which: tuple[str, str], rng: np.random.Generator) -> None:
    kernels = Kernels(which)
    panel = kernels.panel
    width = panel.key_words * panel.word_elements
    for num_panels in (1, 2, 3, 8):
        _, k = elements(rng, "bf16", KEYS, width)
        _, q = elements(rng, "bf16", num_panels * LANES, width)
        found = ending(np.full((num_panels, KEYS, LANES), np.nan, np.float32))
        keys, queries = words(k, pairs=panel.pairs), panels_of(q, pairs=panel.pairs)
        kernels.multiply("score", ending(keys), ending(queries), found, num_panels)
        want = twins.score(k, q).reshape(KEYS, num_panels, LANES).transpose(1, 0, 2)
        near(found, want)


@every_set
def test_add_values(which: tuple[str, str], rng: np.random.Generator) -> None:
    kernels = Kernels(which)
    panel = kernels.panel
    for num_panels in (1, 2, 5):
        _, v = elements(rng, "bf16", KEYS, panel.value_rows)
        _, p = elements(rng, "bf16", num_panels * LANES, KEYS)
        o = rng.standard_normal((num_panels, panel.value_rows, LANES)).astype(np.float32)
        if kernels.tiles:  # [d][t / 2] words
            values = words(v.T, pairs=True)
        elif panel.pairs:  # [t / 2][d] words
            values = words(v.reshape(KEYS // 2, 2, -1).transpose(0, 2, 1), pairs=True)
        else:
            values = words(columns(v, panel.value_row_bytes // 4), pairs=False)
        found = ending(o)
        weights = panels_of(p, pairs=panel.pairs)
        kernels.multiply("add_values", ending(values), ending(weights), found, num_panels)
        for n in range(num_panels):
            near(found[n], twins.add_values(v, p[n * LANES : (n + 1) * LANES].T, o[n]))


@every_set
def test_cap_scores(which: tuple[str, str], rng: np.random.Generator) -> None:
    kernels = Kernels(which)
    s = np.concatenate([rng.standard_normal(62) * 30, [1e4, -1e4, 0.0, 1e-6] * 8])
    s = s[: len(s) // LANES * LANES].astype(np.float32)
    for scale, most in ((0.1, 2.0), (1.0, 30.0)):
        scores = ending(s)
        factors = np.array([2 * LOG2_E * scale / most, 0, most, 0], np.float32)
        kernels.run("cap_scores", scores, len(s), ending(factors))
        near(scores, twins.cap(s.astype(float), scale, most), units=16)


@scaled_sets
def test_scale_panel(which: tuple[str, str], rng: np.random.Generator) -> None:
    kernels = Kernels(which)
    s = rng.standard_normal((KEYS, LANES)).astype(np.float32)
    by = rng.random(KEYS).astype(np.float32)
    scores = ending(s)
    kernels.run("scale_panel", scores, ending(by))
    np.testing.assert_array_equal(scores, s * by[:, None])


# What a query of a panel reads of tokens [100, 164): first and last one.
REACHES: MappingProxyType[str, Callable[[int], tuple[int, int]]] = MappingProxyType(
    {
        "causal": lambda i: (0, 100 + 4 * i),
        "sliding": lambda i: (90 + 3 * i, 100 + 3 * i),
        "chunked": lambda i: (128, 130 + i),
        "padding": lambda i: (0, 163) if i < 9 else (0, -1),
        "not here": lambda i: (300, 400),
    }
)


@every_set
@pytest.mark.parametrize("reach", [None, *REACHES])
def test_weigh(which: tuple[str, str], reach: str | None, rng: np.random.Generator) -> None:
    kernels = Kernels(which)
    panel, first, c = kernels.panel, 100, 0.9
    scaled = kernels.shape.kind == "i8" and not kernels.shape.latent
    # Weights that go on as bfloat16 need no better polynomial.
    relative = 3e-4 if panel.pairs else 1e-6
    reaches = np.array([REACHES[reach or "causal"](i) for i in range(LANES)], np.int32)
    token = first + np.arange(KEYS)[:, None]
    read = (token >= reaches[:, 0]) & (token <= reaches[:, 1]) if reach else None
    for m in (LOWEST, -40.0, 0.0, 60.0):
        s = (rng.standard_normal((KEYS, LANES)) * 5).astype(np.float32)
        sums = np.full(LANES, 0.0 if m == LOWEST else 1.5, np.float32)
        o = rng.standard_normal((panel.value_rows, LANES)).astype(np.float32)
        if m == LOWEST:
            o[:] = 0.0
        by = rng.random(KEYS).astype(np.float32)
        scores, out = ending(s), ending(o)
        if read is not None:
            scores[~read] = np.nan  # of keys that were not written
        state = ending(np.stack([np.full(LANES, m, np.float32), sums]))
        weights = ending(np.zeros((panel.weight_words, LANES), np.uint32))
        kernels.run(
            "weigh" if reach is None else "weigh_masked",
            scores, weights, one(c), state, out, first, ending(np.ascontiguousarray(reaches.T)),
            ending(by),
        )  # fmt: skip
        p, new, want_sums, want_out = twins.weigh(
            s.astype(float), c, np.float64(np.float32(m)), sums, o, read
        )
        if scaled:
            p = p * by[:, None]
        near(state[0], new, units=4)
        near(state[1], want_sums, relative=relative)
        near(out, want_out, relative=1e-5)
        if panel.pairs:
            halves = twins.decode("bf16", weights.view(np.uint16).reshape(KEYS // 2, LANES, 2))
            got = halves.transpose(0, 2, 1).reshape(KEYS, LANES)
            np.testing.assert_allclose(got, p, rtol=relative + 2.0**-8, atol=1e-30)
        else:
            near(weights.view(np.float32), p, relative=relative)
        if read is not None:
            assert (twins.decode("f32", weights)[:, ~read.any(0)] == 0).all()


# -- results --------------------------------------------------------------------------------------


@every_set
def test_finish_row(which: tuple[str, str], rng: np.random.Generator) -> None:
    kernels = Kernels(which)
    shape = kernels.shape
    kind, width = shape.query_kind, shape.value_dim
    tolerance = {"f32": 1e-6, "f16": 2.0**-11, "bf16": 2.0**-8}[kind]
    smallest = {"f32": 0.0, "f16": 2.0**-25, "bf16": 0.0}[kind]  # rounds to nothing
    for m, sink in ((3.0, 1.0), (-20.0, 9.0), (40.0, -50.0)):
        o = rng.standard_normal(kernels.row_bytes // 4).astype(np.float32)
        target = ending(np.zeros(width * KIND_BYTES[kind], np.uint8))
        kernels.run("finish_row", one(m), one(2.5), ending(o), target, one(sink))
        got = twins.decode(kind, target.view({4: np.uint32, 2: np.uint16}[KIND_BYTES[kind]]))
        want = twins.finish(m, 2.5, o[:width].astype(float), sink if shape.sinks else None)
        np.testing.assert_allclose(
            got, want * kind_factor(shape.kind), rtol=tolerance, atol=smallest
        )


@every_set
def test_merge(which: tuple[str, str], rng: np.random.Generator) -> None:
    kernels = Kernels(which)
    width = kernels.row_bytes // 4
    for num_parts, num_rows in ((2, 1), (3, 16), (5, 7)):
        m = (rng.standard_normal((num_parts, num_rows)) * 20).astype(np.float32)
        sums = rng.random((num_parts, num_rows)).astype(np.float32)
        o = rng.standard_normal((num_parts, num_rows, width)).astype(np.float32)
        m[1, 0], sums[1, 0], o[1, 0] = LOWEST, 0.0, 0.0  # a part in which this row reads nothing
        m[0, -1], sums[0, -1], o[0, -1] = LOWEST, 0.0, 0.0
        parts = np.zeros((num_parts, kernels.area_bytes(num_rows) // 4), np.float32)
        parts[:, :num_rows], parts[:, num_rows : 2 * num_rows] = m, sums
        body = slice(2 * num_rows, 2 * num_rows + num_rows * width)
        parts[:, body] = o.reshape(num_parts, -1)
        areas = ending(parts)
        kernels.run("merge", areas, num_parts, num_rows)
        top, want_sums, want_o = twins.merge(*(x.astype(float) for x in (m, sums, o)))
        np.testing.assert_array_equal(areas[0, :num_rows], top)
        near(areas[0, num_rows : 2 * num_rows], want_sums)
        near(areas[0, body].reshape(num_rows, width), want_o)
        np.testing.assert_array_equal(areas[1:], parts[1:])
