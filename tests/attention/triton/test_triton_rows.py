"""Rows of states by their slots: as torch moves them, but padding, which is left alone."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.triton.interpreter import checking_overflow
from attention.triton.test_triton_addresses import element_addresses, outside, watched
from quire.attention.triton import TritonRows
from quire.attention.triton import writers as rows
from quire.memory import HostMemory
from quire.models.states.recurrent_layers import TorchRows, find_padded_rows

PADDING = -1
SHAPES = [(3, 7), (5,), (4, 2, 3, 1)]


def held_rows(num_rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """With something else between them, as there is between the layers of one sequence."""
    length = torch.Size(shape).numel()
    codes = torch.randint(0, 256, (num_rows, 2, length * dtype.itemsize), dtype=torch.uint8)
    return codes.view(dtype)[:, 1].unflatten(1, shape)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.fixture(autouse=True)
def _short_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_OPTIONS", {**rows._OPTIONS, "ELEMENTS": 8})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_that_torch_moves(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    held, slots = held_rows(6, shape, dtype), torch.tensor([4, 0, 5])
    got = TritonRows().take(held, slots)
    assert torch.equal(bits(got), bits(TorchRows().take(held, slots)))
    new, other = held_rows(3, shape, dtype), held.clone()
    TritonRows().put(held, slots, new)
    TorchRows().put(other, slots, new)
    assert torch.equal(bits(held), bits(other))


def test_padding_reads_zeros_and_is_kept_nowhere() -> None:
    held, slots = held_rows(4, (3, 7), torch.float32), torch.tensor([PADDING, 2, PADDING])
    before = held.clone()
    got = TritonRows().take(held, slots)
    assert torch.equal(bits(got[1]), bits(held[2]))
    assert not bits(got[[0, 2]]).any()
    TritonRows().put(held, slots, torch.ones(3, 3, 7))
    assert torch.equal(held[2], torch.ones(3, 7))
    assert torch.equal(bits(held[[0, 1, 3]]), bits(before[[0, 1, 3]]))


def test_nothing_else_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no page has to lie behind padding."""
    held, slots = held_rows(4, (3, 7), torch.float32), torch.tensor([1, PADDING, 3])
    new = torch.ones(3, 3, 7)
    own = np.concatenate([element_addresses(held[1]), element_addresses(held[3])])
    for call in (
        lambda: TritonRows().take(held, slots),
        lambda: TritonRows().put(held, slots, new),
    ):
        with watched(monkeypatch) as touched:
            out: Any = call()
        theirs = [element_addresses(x) for x in (slots, new, *([] if out is None else [out]))]
        assert not len(outside(touched["load"], [*theirs, own]))
        assert not len(outside(touched["store"], [*theirs, own]))
        everywhere = np.concatenate([*touched["load"], *touched["store"]])
        assert set(own) <= set(everywhere)


def test_what_does_not_fit_is_refused_and_nothing_is_written() -> None:
    held, slots = torch.zeros(4, 3, 7), torch.arange(2)
    for bad, why in (
        ((held, slots.int(), held[:2]), "slots are torch.int32"),
        ((held, slots[None], held[:2]), r"int64 of \[1, 2\]"),
        ((held, slots.to("meta"), held[:2]), "slots are on meta"),
        ((held.transpose(1, 2), slots, held[:2].transpose(1, 2)), "have gaps"),
        ((held, slots, torch.ones(3, 3, 7)), r"rows of \[3, 3, 7\]"),
        ((held, slots, torch.ones(2, 3, 7).half()), r"float16 for 2 slots"),
    ):
        with pytest.raises(ValueError, match=why):
            TritonRows().put(*bad)
    assert not held.any()


def test_rows_may_lie_far_apart() -> None:
    """Addresses are counted in 64 bits."""
    row_bytes, num_rows = 2**28, 20
    memory = HostMemory()
    region = memory.reserve(num_rows * row_bytes)
    last = (num_rows - 1) * row_bytes
    region.commit(last, memory.page_bytes)
    held = region.tensor(torch.uint8).view(num_rows, row_bytes)[:, :16]
    slots, new = torch.tensor([PADDING, num_rows - 1]), torch.arange(32, dtype=torch.uint8)
    with checking_overflow():
        TritonRows().put(held, slots, new.view(2, 16))
        got = TritonRows().take(held, slots)
    assert got.tolist() == [[0] * 16, [*range(16, 32)]]
    assert region.tensor(torch.uint8)[last : last + 16].tolist() == [*range(16, 32)]
    region.close()


def test_there_is_a_reason_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(find_padded_rows(torch.device("cpu")), TritonRows)  # interpreted
    reason = find_padded_rows(torch.device("meta"))
    assert isinstance(reason, str)
    assert "runs on CUDA" in reason
