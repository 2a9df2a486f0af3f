"""What is trusted to take each row by itself does; what may not is named."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import UnsupportedModel
from quire.models.row_watch import RowsApart

WIDTH = 33
Function = Callable[[Tensor], Tensor]
# On rows [T, W]; any number of them, from any one on.
TRUSTED: dict[str, Function] = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "log": lambda x: torch.log(x.abs() + 1),
    "sin": lambda x: torch.sin(100 * x),
    "cos": lambda x: torch.cos(100 * x),
    "a root": lambda x: torch.sqrt(x.abs()),
    "a square": lambda x: x.pow(2),
    "a reciprocal": torch.reciprocal,
    "a root in float32": lambda x: (x.float().abs() + 1).pow(-0.5),
    "a norm": lambda x: x * (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt().to(x.dtype),
    "layer_norm": partial(functional.layer_norm, normalized_shape=(WIDTH,)),
    "softmax": lambda x: x.softmax(-1),
    "a sum": lambda x: x.sum(-1),
    "variance": lambda x: x.var(-1),
    "a gate": lambda x: torch.relu(x) * x + 2 / x,
    "angles": lambda x: (x[:, :1, None] @ x[:, None, :1].float().to(x.dtype)).sin(),
    "dropout": partial(functional.dropout, training=False),
}
REFUSED: dict[str, tuple[Function, str]] = {
    "a product": (lambda x: x @ x[:WIDTH], "matmul of"),
    "silu": (functional.silu, "silu"),
    "gelu": (functional.gelu, "gelu"),
    "sigmoid": (torch.sigmoid, "sigmoid"),
    "a root of 16 bits": (lambda x: x.bfloat16().abs().rsqrt(), "rsqrt"),
    "a sum over rows": (lambda x: x.sum(0), "sum of"),
    "a sum of a long row": (lambda x: x.repeat(1, 1000).sum(-1), "sum of"),
    "a mean of all": (lambda x: x.mean(), "mean of"),
    "a sum with a factor": (lambda x: torch.add(x, x, alpha=0.3), "add of"),
    "a cube": (lambda x: x.pow(3), "pow of"),
    "noise": (lambda x: functional.dropout(x, training=True), "dropout"),
}


def watched(function: Function, x: Tensor) -> None:
    """The second pass of a model that is this function."""
    apart = RowsApart()
    with torch.inference_mode():
        for _ in range(2):
            with apart.required(version=1):
                function(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRUSTED)
def test_what_is_trusted_does_not_look_at_other_rows(name: str, dtype: torch.dtype) -> None:
    function = TRUSTED[name]
    x = torch.randn(70, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    watched(function, x)
    whole = function(x)
    for start in (0, 1, 5, 33):
        for count in (1, 2, 3, 17, 37):
            part = function(x[start : start + count].clone())
            assert torch.equal(part, whole[start : start + count]), (start, count)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_is_named(name: str) -> None:
    function, said = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=f"batch_invariant: torch computes .*{said}"):
        watched(function, torch.randn(40, WIDTH))


def test_it_looks_again_when_the_model_has_changed() -> None:
    apart, x = RowsApart(), torch.randn(40, WIDTH)
    for version, function in ((1, torch.exp), (1, torch.sigmoid), (2, torch.sigmoid)):
        with apart.required(version):
            function(x)
        if function is torch.exp:
            with apart.required(version):
                function(x)
    for _ in range(2):  # and does not forget
        with pytest.raises(UnsupportedModel), apart.required(2):
            torch.sigmoid(x)
