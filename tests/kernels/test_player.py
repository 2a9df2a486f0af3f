"""Calls made again by threads that stay together: one after the other, from whichever thread."""

import struct
from collections.abc import Iterator
from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.machines import kernel_folder
from quire.kernels.player import Player
from quire.kernels.threads import KernelCall
from quire.layers.cpu import CpuLinear
from quire.layers.cpu.row_kernels import Sums

SIZE = 96


@pytest.fixture(autouse=True, scope="module")
def _more_threads_than_processors() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cpu() -> CpuLinear:
    return CpuLinear(kernel_dir=kernel_folder())


def heard(
    cpu: CpuLinear, tensors: list[torch.Tensor], additions: list[tuple[int, ...]]
) -> list[KernelCall]:
    """What adds tensors up, into others of them: (a, b, sum, threads)."""
    sums = Sums(cpu.kernels, cpu.threads)
    with cpu.threads.listening():
        for a, b, out, _ in additions:
            sums(tensors[a], tensors[b], tensors[out])
        calls = cpu.threads.take_heard()
    return [
        call._replace(num_threads=num_threads)
        for call, (*_, num_threads) in zip(calls, additions, strict=True)
    ]


index = st.integers(0, 3)


@settings(max_examples=60)
@given(st.lists(st.tuples(index, index, index, st.integers(1, 4)), min_size=1, max_size=40))
def test_each_call_finds_what_those_before_it_have_left(additions: list[tuple[int, ...]]) -> None:
    cpu = CpuLinear(kernel_dir=kernel_folder())
    rows = 4096  # several items for the threads
    tensors = [torch.full((rows, SIZE), float(n + 1)) for n in range(4)]
    want = [tensor.clone() for tensor in tensors]
    player = Player(heard(cpu, tensors, additions), cpu.kernels, cpu.threads)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    for _ in range(2):
        player()
        for a, b, out, _ in additions:
            want[out] = want[a] + want[b]
        for got, wanted in zip(tensors, want, strict=True):
            assert torch.equal(got, wanted)
        for number, tensor in enumerate(tensors):
            tensor.fill_(number + 1)
            want[number] = torch.full((rows, SIZE), float(number + 1))


def test_words_and_threads_may_be_changed_between_two_times(cpu: CpuLinear) -> None:
    tensors = [torch.full((512, SIZE), float(n)) for n in range(4)]
    calls = heard(cpu, tensors, [(0, 1, 2, 1), (2, 1, 3, 1)])
    player = Player(calls, cpu.kernels, cpu.threads)
    num_words = len(calls[0].frame) // 8
    frame = slice(player.starts[0], player.starts[0] + num_words)
    words = struct.unpack(f"{num_words}q", calls[0].frame)
    other = torch.full((512, SIZE), 10.0)
    player.frames[frame] = [
        other.data_ptr() if word == tensors[0].data_ptr() else word for word in words
    ]
    for num_threads in (1, 3, 4):
        player.set_threads(np.array([0]), num_threads)
        tensors[2].zero_()
        player()
        assert bool((tensors[2] == 11).all())
        assert bool((tensors[3] == 12).all())


def test_a_single_call_is_made_once(cpu: CpuLinear) -> None:
    tensors = [torch.ones(8, SIZE) for _ in range(2)]
    player = Player(heard(cpu, tensors, [(0, 1, 0, 1)]), cpu.kernels, cpu.threads)
    tensors[0].fill_(1)
    player()
    assert bool((tensors[0] == 2).all())


def test_nothing_is_noted_that_is_not_asked_for(cpu: CpuLinear) -> None:
    """Nor what another thread does."""
    sums, three = Sums(cpu.kernels, cpu.threads), [torch.ones(8, SIZE)] * 3
    sums(*three)
    with cpu.threads.listening():
        other = Thread(target=sums, args=three)
        other.start()
        other.join()
        assert not cpu.threads.take_heard()
        sums(*three)
        assert len(cpu.threads.take_heard()) == 1
        with pytest.raises(RuntimeError, match="already"), cpu.threads.listening():
            pass
    sums(*three)
    assert not cpu.threads.take_heard()
