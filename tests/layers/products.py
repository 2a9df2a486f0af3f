"""Products in all the ways they are computed here, and their slow twin.

Whole inputs and weights have sums that float32 holds exactly, in whatever order: then a result is
the nearest number to the true one, bit by bit.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from attention.machines import isa_or_skip, kernel_folder
from quire.layers.cpu import CpuLinear

MOST_ROWS = 96  # of these tests, whatever is faster
ACTIVATIONS = MappingProxyType(
    {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    }
)
# What an instruction set changes: tiles, pairs, panels of floats, the registers, float16. Each is a
# compilation.
SETS = (
    ("native", torch.bfloat16, "silu"),
    ("native", torch.float16, "gelu"),
    ("panels", torch.float32, "gelu_tanh"),
    ("avx512", torch.float32, "gelu_tanh"),
    ("pairs", torch.bfloat16, "gelu_tanh"),
    ("avx2", torch.bfloat16, "gelu"),
    ("avx2", torch.float16, "silu"),
    ("sse", torch.float32, "silu"),
)
Which = tuple[str, torch.dtype, str]


def name_of(which: Which) -> str:
    return f"{which[0]}-{which[1]}".replace("torch.", "")


@cache
def linears(isa: str) -> CpuLinear:
    return CpuLinear(isa_or_skip(isa), kernel_folder(), most_rows=MOST_ROWS)


@cache
def invariant_linears(isa: str) -> CpuLinear:
    """Those whose rows do not depend on how many there are."""
    return CpuLinear(isa_or_skip(isa), kernel_folder(), most_rows=MOST_ROWS, batch_invariant=True)


def whole(generator: torch.Generator, *shape: int) -> Tensor:
    """Numbers from -4 to 4, as float64."""
    return torch.randint(-4, 5, shape, generator=generator).double()


def twin(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float64, not rounded."""
    result = x.double() @ weight.double().T
    return result if bias is None else result + bias.double()


def gated_twin(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str
) -> Tensor:
    """Rounded where torch's separate operations round."""
    gate, up = (
        twin(x, weight, bias).to(x.dtype) for weight, bias in zip(weights, biases, strict=True)
    )
    act: Callable[[Tensor], Tensor] = ACTIVATIONS[activation]
    return (act(gate.double()).to(x.dtype).double() * up.double()).to(x.dtype)


def allowed(x: Tensor, weight: Tensor, want: Tensor) -> Tensor:
    """How far a sum in float32, rounded once, may be from the true one, in any order."""
    info = torch.finfo(x.dtype)
    magnitude = x.double().abs() @ weight.double().abs().T
    added_up = (x.shape[-1] + 4) * 2.0**-24 * magnitude
    return added_up + info.eps / 2 * (want.abs() + added_up) + info.smallest_normal
