"""Products touch what is theirs: memory ends where weights, inputs, biases and outputs end."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.alone import ending
from layers.products import SETS, Which, linears, name_of, twin, whole
from quire.kernels.threads import Scratch
from quire.layers.cpu import linear

# Rests of rows, inputs and outputs; even inputs go by tiles where there are any.
SIZES = (
    *((1, 32, 32), (1, 2, 33), (3, 33, 63), (16, 62, 64)),
    *((17, 64, 65), (33, 100, 47), (65, 7, 50)),
)
every_set = pytest.mark.parametrize("which", SETS, ids=name_of)


def at_the_end(x: Tensor) -> Tensor:
    """A copy; to touch one byte behind it ends the process."""
    raw = torch.from_numpy(ending(x.contiguous().view(torch.uint8).numpy()))
    return raw.view(x.dtype).view(x.shape)


def guarded_empty(*size: Any, dtype: torch.dtype) -> Tensor:
    """As ``torch.empty``, of numbers that are none."""
    (shape,) = size
    return at_the_end(torch.full(shape, torch.nan).to(dtype))


@pytest.fixture
def guarded_outs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What products write into ends where memory ends, too."""
    monkeypatch.setattr(linear, "torch", SimpleNamespace(**{**vars(torch), "empty": guarded_empty}))


def make(dtype: torch.dtype, sizes: tuple[int, int, int]) -> tuple[Tensor, Sequence[Tensor]]:
    rows, inputs, outputs = sizes
    generator = torch.Generator().manual_seed(9)
    x = whole(generator, rows, inputs).to(dtype)
    return x, [whole(generator, *s).to(dtype) for s in ((outputs, inputs), (outputs,))]


@every_set
@pytest.mark.usefixtures("guarded_outs")
def test_nothing_behind_the_last_element_is_touched(which: Which) -> None:
    isa, dtype, activation = which
    for sizes in SIZES:
        x, (weight, bias) = make(dtype, sizes)
        want = twin(x, weight, bias).to(dtype)
        x, weight, bias = (at_the_end(tensor) for tensor in (x, weight, bias))
        for out in linears(isa).bind([weight] * 2, [bias] * 2)(x):
            assert torch.equal(out, want)
        gated = linears(isa).bind_gated(weight, weight, activation, [bias] * 2)(x)
        assert gated.isfinite().all()


@every_set
def test_nothing_before_or_between_rows_is_written(which: Which) -> None:
    """Weights of other rows, and what lies beside outputs, stay as they are."""
    isa, dtype, _ = which
    for sizes in SIZES:
        x, (weight, bias) = make(dtype, sizes)
        before = [tensor.clone() for tensor in (x, weight, bias)]
        room = torch.full((sizes[0] + 2, sizes[2]), 7.0, dtype=dtype)
        product = linears(isa).bind([weight], [bias])
        want = product(x)[0]
        with pytest.MonkeyPatch.context() as patch:
            fake = SimpleNamespace(
                **{**vars(torch), "empty": lambda *_, room=room, **__: room[1:-1]}
            )
            patch.setattr(linear, "torch", fake)
            product(x)
        assert torch.equal(room[1:-1], want)
        assert (room[0] == 7).all()
        assert (room[-1] == 7).all()
        for tensor, own in zip((x, weight, bias), before, strict=True):
            assert torch.equal(tensor, own)


@every_set
def test_what_lies_in_working_memory_changes_no_bit(
    which: Which, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads get memory as it comes: all NaN here, all zeros there."""
    isa, dtype, activation = which
    for sizes in SIZES:
        x, (weight, bias) = make(dtype, sizes)
        found = []
        for byte in (0, 0xFF):
            product = linears(isa).bind_gated(weight, weight, activation, [bias] * 2)
            fresh = Scratch()
            fresh.give_back(torch.full((2**21,), byte, dtype=torch.uint8))
            monkeypatch.setattr(product._product, "_scratch", fresh)
            found.append(product(x))
        assert found[0].isfinite().all()
        assert torch.equal(*found)


@pytest.mark.parametrize("which", SETS[:1], ids=name_of)
def test_mapped_weights_are_read_where_they_lie(which: Which, tmp_path: Any) -> None:
    isa, dtype, _ = which
    x, (weight, _) = make(dtype, (5, 96, 64))
    path = tmp_path / "weights"
    weight.view(torch.uint8).numpy().tofile(path)
    mapped = np.memmap(path, np.uint8, mode="r")
    with pytest.warns(UserWarning, match="not writable"):
        found = torch.from_numpy(mapped).view(dtype).view(weight.shape)
    (out,) = linears(isa).bind([found])(x)
    assert torch.equal(out, twin(x, weight, None).to(dtype))
