"""What runs in place of a part: found by structure, accepted by trial, refused in words."""

import gc
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import NewGELUActivation, QuickGELUActivation

from attention.machines import kernel_folder
from layers.products import linears
from quire.layers.cpu import CpuLinear
from quire.layers.cpu.packed_weight import PackedForm, quantize
from quire.layers.fused import (
    Activations,
    FusedModule,
    GatedLayers,
    Linears,
    Norms,
    Rotation,
    Rotations,
    agrees,
)
from quire.layers.packed_linear import PackedLinear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


class Rms(nn.Module):
    """One of the ways to write it, with the weights that a model begins with."""

    def __init__(self, write: Callable[[Tensor, Tensor, Tensor], Tensor], width: int = 48) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-5
        self._write = write

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self._write(
            x, wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps), self.weight
        )


KNOWN: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "llama": lambda x, h, w: w * h.to(x.dtype),
    "gemma": lambda x, h, w: (h * (1.0 + w.float())).type_as(x),
    "olmo": lambda x, h, w: (w * h).to(x.dtype),
}
UNKNOWN: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "halved": lambda x, h, w: w * h.to(x.dtype) / 2,
    "from the mean": lambda x, h, w: w * (h - h.mean(-1, keepdim=True)).to(x.dtype),
    "clipped": lambda x, h, w: w * h.clamp(-1, 1).to(x.dtype),
    "other weight": lambda x, h, w: w.abs() * h.to(x.dtype),
}


def found(stand_in: FusedModule | str | None) -> FusedModule:
    assert isinstance(stand_in, FusedModule), stand_in
    return stand_in


def refused(stand_in: FusedModule | str | None) -> str:
    assert isinstance(stand_in, str), stand_in
    return stand_in


# -- norms ----------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("name", KNOWN)
def test_each_form_of_norm_is_told_from_the_others(name: str, dtype: torch.dtype) -> None:
    """By other weights than those it has: with ones, the forms are alike."""
    module = Rms(KNOWN[name]).to(dtype)
    stand_in = found(Norms(linears("native")).find(module))
    assert torch.equal(module.weight, torch.ones(48, dtype=dtype))
    with torch.no_grad():
        module.weight.normal_()  # as if other weights were loaded later
    x = torch.randn(1, 5, 3, 48).to(dtype)
    assert agrees(stand_in.forward(x), module(x))


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_norms_run_as_they_are(name: str) -> None:
    assert "no root mean square norm" in refused(Norms(linears("native")).find(Rms(UNKNOWN[name])))


def test_a_norm_with_a_gate_gets_it() -> None:
    """Mamba's takes a second input, and is an ordinary norm without."""

    class Gated(Rms):
        def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
            return super().forward(x if gate is None else x * functional.silu(gate))

    module = Gated(KNOWN["llama"])
    stand_in = found(Norms(linears("native")).find(module))
    x, gate = torch.randn(2, 1, 4, 48)
    assert agrees(stand_in.forward(x), module(x))
    assert torch.equal(stand_in.forward(x, gate), module(x, gate))
    assert torch.equal(stand_in.forward(x, gate=gate), module(x, gate))


def test_a_norm_of_another_dtype_than_its_weights_runs_as_it_is() -> None:
    module = Rms(KNOWN["gemma"]).bfloat16()
    stand_in = found(Norms(linears("native")).find(module))
    x = torch.randn(1, 4, 48)
    assert torch.equal(stand_in.forward(x), module(x))
    module.half()  # in place, so that the parameter is still the same one
    x = torch.randn(1, 4, 48).half()
    assert torch.equal(stand_in.forward(x), module(x))


@pytest.mark.parametrize("module", [nn.Linear(4, 4), nn.SiLU(), nn.Embedding(4, 4), nn.Identity()])
def test_what_is_no_norm_is_passed_over(module: nn.Module) -> None:
    assert Norms(linears("native")).find(module) is None


def test_layer_norms_and_wide_dtypes_are_refused() -> None:
    norms = Norms(linears("native"))
    assert "more than one" in refused(norms.find(nn.LayerNorm(32)))
    assert "float64" in refused(norms.find(Rms(KNOWN["llama"]).double()))


# -- linear layers --------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer(dtype: torch.dtype, bias: bool) -> None:
    module = nn.Linear(40, 48, bias=bias).to(dtype)
    stand_in = found(Linears(linears("native")).find(module))
    for num_rows in (1, 7, 200):
        x = torch.randn(1, num_rows, 40).to(dtype)
        with torch.inference_mode():
            assert agrees(stand_in.forward(x), module(x), of_sums=True)


def test_linear_layers_of_other_kinds_are_refused() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    finds = Linears(linears("native"))
    assert "another kind" in refused(finds.find(Odd(40, 48)))
    hooked = nn.Linear(40, 48)
    hooked.register_forward_hook(lambda *_: None)
    assert "not torch's own" in refused(finds.find(hooked))

    class Quantized(nn.Parameter):
        pass

    quantized = nn.Linear(40, 48, bias=False)
    quantized.weight = Quantized(torch.randn(48, 40))
    assert "not torch's own" in refused(finds.find(quantized))


class Attention(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, 64)
        self.k_proj = nn.Linear(width, 32, bias=False)
        self.v_proj = nn.Linear(width, 32)


@torch.inference_mode()
def test_siblings_are_right_in_any_order_and_with_any_inputs() -> None:
    """The first to be called computes all; none gets what was computed from another input."""
    module = Attention()
    own = module.q_proj, module.k_proj, module.v_proj
    parts = Linears(linears("native")).find_siblings(module)
    assert [part.module for part in parts] == list(own)
    inputs = [torch.randn(1, count, 32) for count in (3, 1, 200)]
    calls = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 0), (1, 0), (2, 1), (2, 1), (0, 2), (2, 2), (1, 2)]
    for layer, number in [*calls, *reversed(calls)]:
        x = inputs[number]
        assert agrees(parts[layer].forward(x), own[layer](x), of_sums=True)


@torch.inference_mode()
def test_siblings_compute_once_and_keep_nothing() -> None:
    module = Attention()
    cpu = linears("native")
    parts = Linears(cpu).find_siblings(module)
    (together,) = {part.forward.__closure__[1].cell_contents for part in parts}  # type: ignore[index]
    x = torch.randn(1, 2, 32)
    first = parts[0].forward(x)
    assert set(together._waiting) == {1, 2}
    assert parts[2].forward(x) is not first
    parts[1].forward(x)
    assert together._input is None
    assert not together._waiting


@pytest.mark.parametrize("change", ["subclass", "width", "dtype", "missing"])
def test_siblings_that_are_not_alike_run_alone(change: str) -> None:
    module = Attention()
    if change == "subclass":
        module.k_proj = type("Odd", (nn.Linear,), {})(32, 32)
    elif change == "width":
        module.v_proj = nn.Linear(16, 32)
    elif change == "dtype":
        module.v_proj.bfloat16()
    else:
        del module.k_proj
    assert Linears(linears("native")).find_siblings(module) == []


# -- gated layers ---------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, act: nn.Module, *, bias: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(32, 96, bias=bias)
        self.up_proj = nn.Linear(32, 96, bias=bias)
        self.down_proj = nn.Linear(96, 32, bias=bias)
        self.act_fn = act
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * self.scale


def gated() -> GatedLayers:
    cpu = linears("native")
    return GatedLayers(cpu, Linears(cpu))


@every_dtype
@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh")])
@torch.inference_mode()
def test_a_gated_layer_for_few_rows_and_many(act: nn.Module, dtype: torch.dtype) -> None:
    module = Mlp(act, bias=True).to(dtype)
    stand_in = found(gated().find(module))
    for num_rows in (1, 7, 200):
        x = torch.randn(1, num_rows, 32).to(dtype)
        assert agrees(stand_in.forward(x), module(x), of_sums=True)


@pytest.mark.parametrize(("has_tiles", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_a_gated_layer_of_rounded_inputs(has_tiles: bool, dtype: torch.dtype, scale: float) -> None:
    """One rounding before the last product may be some steps of its inputs, also beside torch's."""
    cpu = linears("native")
    cpu.kernels.isa = replace(cpu.kernels.isa, amx=has_tiles)
    finds = GatedLayers(cpu, Linears(cpu))
    for seed in range(3):
        module = Mlp(nn.SiLU(), scale=scale)
        generator = torch.Generator().manual_seed(seed)
        for name, (outputs, inputs) in {
            "gate_proj": (256, 128), "up_proj": (256, 128), "down_proj": (128, 256),
        }.items():  # fmt: skip
            weight = 0.02 * torch.randn(outputs, inputs, generator=generator)
            packed = quantize(weight, PackedForm(bits=8, group_size=128))
            layer = PackedLinear(packed, None, dtype)
            layer.rounds_inputs = True
            setattr(module, name, layer)
        assert isinstance(finds.find(module), FusedModule) == (scale == 1.0)


def test_other_gated_layers_run_as_they_are() -> None:
    finds = gated()
    assert "something else" in refused(finds.find(Mlp(nn.SiLU(), scale=1.5)))
    assert isinstance(finds.find(Mlp(nn.SiLU())), FusedModule)  # one class, two settings
    assert "an activation" in refused(finds.find(Mlp(nn.ReLU())))
    assert "another kind" in refused(finds.find(with_odd_up()))
    assert finds.find(Attention()) is None


def test_parts_that_take_something_else_run_as_they_are() -> None:
    class Routed(Mlp):
        def forward(self, x: Tensor, experts: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * experts

    class Crossed(Rms):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + other)

    assert "something else" in refused(gated().find(Routed(nn.SiLU())))
    assert "an activation" in refused(gated().find(Mlp(nn.CosineSimilarity())))
    norms = Norms(linears("native"))
    assert "no root mean square norm" in refused(norms.find(Crossed(KNOWN["llama"])))


def test_a_norm_is_tried_again_with_other_settings() -> None:
    class Scaled(Rms):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    norms, twice = Norms(linears("native")), Scaled(KNOWN["llama"])
    twice.scale = 2.0
    assert isinstance(norms.find(Scaled(KNOWN["llama"])), FusedModule)
    assert isinstance(norms.find(twice), str)


def with_odd_up() -> Mlp:
    module = Mlp(nn.SiLU())
    module.up_proj = type("Odd", (nn.Linear,), {})(32, 96, bias=False)
    return module


def other_weight(module: Mlp) -> None:
    module.gate_proj.weight = nn.Parameter(torch.zeros(96, 32))


def other_part(module: Mlp) -> None:
    module.act_fn = nn.ReLU()


def hook_inside(module: Mlp) -> None:
    module.up_proj.register_forward_hook(lambda *_: None)


def own_forward(module: Mlp) -> None:
    module.forward = lambda x: x  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [other_weight, other_part, hook_inside, own_forward])
def test_a_part_that_was_changed_does_not_hold(change: Callable[[Mlp], Any]) -> None:
    module = Mlp(nn.SiLU())
    stand_in = found(gated().find(module))
    assert stand_in.holds()
    change(module)
    assert not stand_in.holds()


# -- rotary positions -----------------------------------------------------------------------------


def halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turn(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    return turn(q), turn(k)


def pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    def turn(x: Tensor) -> Tensor:
        partner = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * cos[:, None] + partner * sin[:, None]

    return turn(q), turn(k)


def heads(dtype: torch.dtype, num_tokens: int = 6) -> list[Tensor]:
    q, k = torch.randn(1, num_tokens, 4, 32), torch.randn(1, num_tokens, 2, 32)
    cos, sin = torch.randn(2, 1, num_tokens, 32)
    return [x.to(dtype) for x in (q.transpose(1, 2), k.transpose(1, 2), cos, sin)]


@every_dtype
def test_halves_are_turned_by_the_kernel(dtype: torch.dtype) -> None:
    calls = []

    def own(*args: Any) -> Any:
        calls.append(args)
        return halves(*args)

    rotation = Rotation(own, linears("native"))
    for num_tokens in (6, 1, 9):
        given = heads(dtype, num_tokens)
        for got, want in zip(rotation(*given), halves(*given), strict=True):
            assert agrees(got, want, of_sums=True)
    assert len(calls) == 1  # the trial


def test_pairs_are_left_to_the_model() -> None:
    rotation = Rotation(pairs, linears("native"))
    given = heads(torch.float32)
    for _ in range(2):
        for got, want in zip(rotation(*given), pairs(*given), strict=True):
            assert torch.equal(got, want)


def test_what_is_given_otherwise_is_left_to_the_model() -> None:
    rotation = Rotation(halves, linears("native"))
    q, k, cos, sin = heads(torch.bfloat16)
    rotation(q, k, cos, sin)
    ways: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((q.transpose(1, 2), k.transpose(1, 2), cos, sin), {"unsqueeze_dim": 2}),
        ((q, k, cos.float(), sin.float()), {}),
        ((q, k, cos[:, :1], sin[:, :1]), {}),
        ((q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1), cos, sin), {}),
    ]
    for args, kwargs in ways:
        for got, want in zip(rotation(*args, **kwargs), halves(*args, **kwargs), strict=True):
            assert torch.equal(got, want)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    seen.append(len(q))
    return halves(q, k, cos, sin)


seen: list[int] = []


def renaming(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As Transformers 5.24 decorates a forward, and again."""

    @wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        if "old" in kwargs:
            kwargs["new"] = kwargs.pop("old")
        return forward(*args, **kwargs)

    return called


class Kept:
    """A decorator that keeps what it calls in an attribute."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.__wrapped__ = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


def keeping(forward: Callable[..., Any]) -> Callable[..., Any]:
    kept = Kept(forward)

    @wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        return kept(*args, **kwargs)

    return called


def attention(decorate: Callable[[Callable[..., Any]], Callable[..., Any]]) -> nn.Module:
    def forward(self: nn.Module, *given: Tensor, new: float = 1.0) -> Any:
        q, k = apply_rotary_pos_emb(*given)
        return q * new, k * new

    made: nn.Module = type("Attention", (nn.Module,), {"forward": decorate(forward)})()
    return made


def test_a_decorated_forward_is_exchanged_within_its_decorators() -> None:
    module = attention(lambda forward: renaming(renaming(forward)))
    found = Rotations(linears("native")).find(module)
    assert found is not None
    given = heads(torch.float32)
    found.forward(*given)  # a new shape is tried on the function itself
    seen.clear()
    for name in ("old", "new"):
        got, want = found.forward(*given, **{name: 2.0}), halves(*given)
        assert all(agrees(g, 2 * w, of_sums=True) for g, w in zip(got, want, strict=True))
    assert not seen
    names = [[*inspect.signature(each).parameters] for each in (found.forward, module.forward)]
    assert names[0] == names[1]
    module(*given)
    assert seen, "the module itself is as it was"
    seen.clear()  # the function reads it, so another one would count as a change
    assert found.holds()


def test_a_forward_whose_decorator_keeps_it_out_of_sight_is_left_alone() -> None:
    assert Rotations(linears("native")).find(attention(keeping)) is None


# -- the comparison -------------------------------------------------------------------------------


@every_dtype
def test_agreement_is_one_rounding(dtype: torch.dtype) -> None:
    want = torch.tensor([1.0, -3.0, 0.0, 1e-3]).to(dtype)
    eps = max(torch.finfo(dtype).eps, 16 * torch.finfo(torch.float32).eps)
    assert agrees(want, want)
    assert agrees((want.double() * (1 + 0.9 * eps)).to(dtype), want)
    assert not agrees((want.double() * (1 + 2.5 * eps)).to(dtype), want)
    assert not agrees(want.double(), want)
    assert not agrees(want[:3], want)
    assert not agrees(torch.full_like(want, torch.nan), want)


@torch.inference_mode()
def test_what_was_bound_outlives_who_bound_it() -> None:
    """Machine code goes when it is not needed any more, and not before."""
    module, norm = nn.Linear(40, 48), Rms(KNOWN["llama"])
    cpu = CpuLinear(kernel_dir=kernel_folder())
    linear = found(Linears(cpu).find(module))
    rms = found(Norms(cpu).find(norm))
    del cpu
    gc.collect()
    x = torch.randn(1, 3, 40)
    assert agrees(linear.forward(x), module(x), of_sums=True)
    x = torch.randn(1, 3, 48)
    assert agrees(rms.forward(x), norm(x))


@pytest.mark.parametrize(
    ("own", "found"),
    [
        (nn.SiLU(), True),
        (nn.GELU(), True),
        (nn.GELU(approximate="tanh"), True),
        (NewGELUActivation(), True),
        (QuickGELUActivation(), False),
        (nn.ReLU(), False),  # which torch computes in one way
        (nn.Dropout(0.0), False),
        (nn.Identity(), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_alone_takes_each_element_alike(
    own: nn.Module, found: bool, dtype: torch.dtype
) -> None:
    """torch computes the last few of a thread's share by other code."""
    part = Activations(CpuLinear(kernel_dir=kernel_folder()), {}).find(own.eval())
    if not found:
        assert part is None
        return
    assert isinstance(part, FusedModule)
    x = 3 * torch.randn(9, 1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        whole = part.forward(x)
        # In 16 bits some formulas round in between; ours does not.
        rtol = 2**-8 if dtype.itemsize < 4 else 1e-4
        torch.testing.assert_close(whole.float(), own(x.float()), rtol=rtol, atol=1e-5)
        for start in range(9):
            assert torch.equal(part.forward(x[start : start + 2]), whole[start : start + 2])
