"""What a bound product is to its callers: any input works, what has no kernel is said in words."""

import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attention.machines import isa_or_skip, kernel_folder
from layers.products import ACTIVATIONS, MOST_ROWS, linears
from quire.kernels.language import LANES
from quire.kernels.player import Player
from quire.layers.cpu import CpuLinear, linear
from quire.layers.cpu.linear_frame import BLOCK, FRAME, ProductShape, items_of
from quire.models.recorded.recordings import SIZES

Use = Callable[[int], None]


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(48, 40).bfloat16()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Inputs that went to torch."""
    found: list[Tensor] = []
    own = functional.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found.append(x)
        return own(x, weight, bias)

    monkeypatch.setattr(linear.functional, "linear", counted)
    return found


@pytest.mark.parametrize("shape", [(40,), (1, 40), (7, 40), (2, 3, 40), (1, 2, 1, 40)])
def test_leading_dimensions_stay(
    shape: tuple[int, ...], weight: Tensor, calls: list[Tensor]
) -> None:
    x = torch.randn(shape).bfloat16()
    (out,) = linears("native").bind([weight])(x)
    gated = linears("native").bind_gated(weight, weight, "silu")(x)
    assert not calls
    want = functional.linear(x.float(), weight.float())
    assert out.shape == gated.shape == want.shape
    torch.testing.assert_close(out.float(), want, rtol=2**-7, atol=0.05)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.expand(6, 40),  # one row again and again
        lambda x: x.expand(5, 6, 40).transpose(0, 1),
        lambda x: x.expand(40, 40).contiguous().T,  # a row's elements lie apart
        lambda x: x.expand(9, 40)[::2],
        lambda x: torch.cat([x, x], 1)[:, 3:43],
    ],
)
def test_any_strides(make: Callable[[Tensor], Tensor], weight: Tensor, calls: list[Tensor]) -> None:
    x = make(torch.randn(1, 40).bfloat16())
    product = linears("native").bind([weight])
    assert torch.equal(product(x)[0], product(x.clone().contiguous())[0])
    assert not calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_torch_is_given_few_numbers_of_rows(dtype: torch.dtype, calls: list[Tensor]) -> None:
    """What it compiles for each of them in 16 bits stays for good."""
    weights = [torch.randn(width, 40).to(dtype) for width in (48, 32)]
    biases = [torch.randn(48).to(dtype), None]
    product = CpuLinear(kernel_dir=kernel_folder(), most_rows=2).bind(weights, biases)
    asked = [3, 15, 16, 17, 64, 65, 100, 250, 257, 300, 511, 1025, 2000, 2049]
    given = []
    with torch.inference_mode():
        for num_rows in asked:
            x = torch.randn(1, num_rows, 40).to(dtype)
            del calls[:]
            outs = product(x)
            first, second = (rows.numel() // 40 for rows in calls)
            assert first == second
            given.append(first)
            for out, weight, bias in zip(outs, weights, biases, strict=True):
                want = functional.linear(x, weight, bias)
                assert out.shape == want.shape
                assert out.is_contiguous()
                torch.testing.assert_close(out, want)
    more = [8, 16, 16, 24, 64, 72, 104, 256, 288, 320, 512, 1152, 2048, 2304]
    assert given == (more if dtype.itemsize == 2 else asked)
    sizes = {num_rows + linear.rows_more(num_rows) for num_rows in range(1, 4097)}
    assert len(sizes) == 16 + 8 * 5
    assert all(linear.rows_more(n) <= n / 8 for n in range(64, 4097))
    assert not any(linear.rows_more(size) for size in SIZES if size > 16)  # recorded: no copies


def test_many_rows_or_none_are_torch_s(weight: Tensor, calls: list[Tensor]) -> None:
    products = (
        linears("native").bind([weight, weight]),
        linears("native").bind_gated(weight, weight, "gelu"),
    )
    assert products[0].most_rows == products[1].most_rows == MOST_ROWS
    for rows in (0, MOST_ROWS + 1):
        x = torch.randn(rows, 40).bfloat16()
        want = functional.linear(x, weight)
        del calls[:]
        assert all(torch.equal(out, want) for out in products[0](x))
        assert torch.equal(products[1](x), ACTIVATIONS["gelu"](want) * want)
        assert len(calls) == 4


@pytest.mark.parametrize(
    ("kind", "tiles", "isa", "most"),
    [
        ("bf16", True, {"amx": True}, 128),
        ("bf16", False, {"bf16_convert": True}, 16),
        ("bf16", False, {"bf16_convert": True, "bf16_dot": True}, sys.maxsize),
        ("bf16", False, {"bf16_convert": False}, sys.maxsize),
        ("f16", False, {"features": "+avx512f,+avx512fp16"}, 16),
        ("f16", False, {"features": "+avx2,-avx512fp16"}, sys.maxsize),
        ("f32", False, {"registers": 32}, 16),
        ("f32", False, {"registers": 32, "float_panels": True}, sys.maxsize),
        ("f32", False, {"registers": 8}, 8),
    ],
)
def test_from_how_many_rows_on_torch_is_faster(
    kind: str, tiles: bool, isa: dict[str, Any], most: int
) -> None:
    """As measured: a rule of the CPU and the dtype, so that the same call always goes one way."""
    wide = replace(isa_or_skip("sse"), registers=32)
    assert ProductShape(kind=kind, tiles=tiles).most_rows(replace(wide, **isa)) == most


def test_gradients_are_torch_s(weight: Tensor, calls: list[Tensor]) -> None:
    parameter, x = nn.Parameter(weight), torch.randn(3, 40).bfloat16()
    product = linears("native").bind([parameter])
    (out,) = product(x)
    assert out.requires_grad
    assert len(calls) == 1
    with torch.inference_mode():
        product(x)
    assert len(calls) == 1


def test_another_dtype_or_width_fails_as_torch_does(weight: Tensor) -> None:
    product = linears("native").bind([weight])
    with pytest.raises(RuntimeError, match="dtype"):
        product(torch.randn(3, 40))
    with pytest.raises(RuntimeError, match="shapes"):
        product(torch.randn(3, 41).bfloat16())


def test_weights_may_move_between_calls(weight: Tensor) -> None:
    parameter = nn.Parameter(weight, requires_grad=False)
    product, x = linears("native").bind([parameter]), torch.randn(3, 40).bfloat16()
    first = product(x)[0]
    parameter.data = -weight
    assert torch.equal(product(x)[0], -first)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([torch.zeros(48, 40, dtype=torch.int8)], "no kernel for torch.int8"),
        ([torch.zeros(48, 40, dtype=torch.float64)], "no kernel for torch.float64"),
        ([torch.zeros(48, 40, device="meta")], "not of meta"),
        ([torch.zeros(48, 40), torch.zeros(48, 40).half()], "one dtype"),
        ([torch.zeros(48)], "matrices"),
        ([torch.zeros(48, 40), torch.zeros(48, 41)], "40 and of 41 inputs"),
        ([torch.zeros(BLOCK - 1, 40)], "outputs at a time, of 31"),
        ([torch.zeros(48, 0)], "no inputs"),
        ([torch.zeros(40, 48).T], "side by side"),
    ],
)
def test_what_has_no_kernel_says_so(weights: list[Tensor], reason: str) -> None:
    assert reason in str(linears("native").unsupported(weights))
    with pytest.raises(ValueError, match=reason):
        linears("native").bind(weights)


def test_biases_and_gates_must_fit(weight: Tensor) -> None:
    own = linears("native")
    with pytest.raises(ValueError, match=r"a bias is \[47\]"):
        own.bind([weight], [torch.zeros(47).bfloat16()])
    with pytest.raises(ValueError, match="a bias is"):
        own.bind([weight], [torch.zeros(48)])
    with pytest.raises(ValueError, match="1 biases for 2 weights"):
        own.bind([weight, weight], [None])
    with pytest.raises(ValueError, match="relu"):
        own.bind_gated(weight, weight, "relu")
    with pytest.raises(ValueError, match="up is"):
        own.bind_gated(weight, weight[:40], "silu")


def test_threads_of_a_program_do_not_disturb_each_other() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(800, 128, generator=generator).bfloat16()
    inputs = [torch.randn(n, 128, generator=generator).bfloat16() for n in (1, 5, 40, 90) * 8]
    product = linears("native").bind([weight])
    want = [product(x)[0] for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda x: product(x)[0], inputs))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_it_follows_torch_s_number_of_threads(use_threads: Use) -> None:
    """Enough work for several, and the items are cut anew."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*s, generator=generator).bfloat16() for s in ((4, 256), (1000, 256)))
    product = linears("native").bind([weight])
    found = []
    for threads in (3, 1, 2, 64):
        use_threads(threads)
        found.append(product(x)[0])
    assert all(torch.equal(out, found[0]) for out in found)


def test_pieces_of_many_rows_are_of_about_one_size(weight: Tensor) -> None:
    """For a few rows that are left, all weights would be read once more."""
    cpu = CpuLinear(kernel_dir=kernel_folder(), batch_invariant=True)
    product, place = cpu.bind([weight]), FRAME.index("num_rows")
    most = ProductShape(kind="bf16", tiles=False).rows_at_once(cpu.kernels.isa, 40)
    for num_rows, pieces in ((most, 1), (most + 1, 2), (3 * most - 1, 3)):
        with cpu.threads.listening():
            (out,) = product(torch.ones(num_rows, 40).bfloat16())
            calls = cpu.threads.take_heard()
        rows = [int(np.frombuffer(call.frame, np.int64)[place]) for call in calls]
        assert len(rows) == pieces
        assert sum(rows) == len(out) == num_rows
        assert max(rows) - min(rows) < pieces * LANES


def test_shapes_of_many_rows_are_not_kept(weight: Tensor) -> None:
    """Prompts have any number of tokens, each of which would be remembered by every layer."""
    cpu = CpuLinear(kernel_dir=kernel_folder(), batch_invariant=True)
    product, x = cpu.bind([weight] * 3), torch.zeros(300, 40).bfloat16()
    product(x)
    tracemalloc.start()
    try:
        for num_rows in range(200, 300):
            product(x[:num_rows])
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left < 20_000  # bytes; of each shape that is kept there are 524


@pytest.mark.parametrize("widths", [(32,), (33, 100), (1024, 512, 512), (8192,)])
@pytest.mark.parametrize("threads", [1, 2, 64])
def test_items_hold_every_output_once(widths: tuple[int, ...], threads: int) -> None:
    items = items_of(widths, 2048, threads).tolist()
    for matrix, width in enumerate(widths):
        own = [(start, stop) for m, start, stop in items if m == matrix]
        assert [start for start, _ in own] == [0, *(stop for _, stop in own[:-1])]
        assert own[-1][1] == width
        assert all(start % BLOCK == 0 for start, _ in own)
    blocks = sum(-(-width // BLOCK) for width in widths)
    assert len(items) >= min(blocks, 4 * threads)


def test_a_call_that_is_made_again_finds_its_plan_after_other_numbers_of_threads(
    use_threads: Use,
) -> None:
    """Its frame has the address of a plan's items: of one that was dropped, others write there."""
    cpu = CpuLinear(kernel_dir=kernel_folder())
    product = cpu.bind([torch.randn(64 * BLOCK, 64)])
    x = torch.randn(3, 64)
    use_threads(1)
    with cpu.threads.listening(), cpu.scratch.apart():
        (out,) = product(x)
        want = out.clone()
        scratch = cpu.scratch.take(0)  # kept as long as the call may be made
        player = Player(cpu.threads.take_heard(), cpu.kernels, cpu.threads)
    items = items_of([len(want[0])], x[0].nbytes, 1)
    use_threads(2)
    product(x)
    use_threads(1)
    others = [np.zeros_like(items) for _ in range(100)]
    out.zero_()
    player()
    assert torch.equal(out, want)
    assert len(others) == 100
    assert scratch.numel()


# The last two leave many rows to torch without the option.
@pytest.mark.parametrize(
    ("isa", "dtype"),
    [("native", torch.bfloat16), ("sse", torch.float32), ("avx512", torch.float32)],
)
def test_a_batch_invariant_product_is_never_torchs(
    isa: str, dtype: torch.dtype, calls: list[Tensor]
) -> None:
    """Nor does a row's result depend on how many others there are, or on which they are."""
    cpu = CpuLinear(isa_or_skip(isa), kernel_folder(), batch_invariant=True)
    weights = [torch.randn(width, 333).to(dtype) for width in (48, 33)]
    product, gated = cpu.bind(weights), cpu.bind_gated(weights[0], weights[0], "silu")
    x = torch.randn(300, 333).to(dtype)
    wanted = [*product(x), gated(x)]
    want = x.float() @ weights[1].float().T
    torch.testing.assert_close(wanted[1].float(), want, rtol=2**-7, atol=0.1)
    for start, count in ((0, 1), (5, 2), (30, 129), (299, 1), (43, 257)):
        some = x[start : start + count]
        for got, whole in zip([*product(some), gated(some)], wanted, strict=True):
            assert torch.equal(got, whole[start : start + count]), (start, count)
    assert not calls
