"""The device that is not there: what it gives, what it refuses, what it counts."""

import pytest
import torch
from torch import nn

import pretend
from pretend import PretendMemory, PretendTensor
from tiny import tiny_model, tokens


def test_results_are_those_of_the_cpu() -> None:
    x = torch.randn(3, 4)
    with pretend.cuda():
        placed = x.to("cuda")
        got = torch.softmax(placed @ placed.T + torch.arange(3, device="cuda"), -1)
        assert isinstance(got, PretendTensor)
        assert str(got.device) == "cuda:0"
        assert got.is_cuda
        assert torch.equal(got.cpu(), torch.softmax(x @ x.T + torch.arange(3), -1))
        placed[1:, 0] = 7
        assert placed[:, 0].tolist()[1:] == [7, 7]
        assert torch.tensor([1, 2], device="cuda").tolist() == [1, 2]


def test_two_devices_in_one_operation_are_refused() -> None:
    with pretend.cuda(num_devices=2):
        here = torch.ones(3, device="cuda")
        for other in (torch.ones(3), torch.ones(3, device="cuda:1")):
            with pytest.raises(RuntimeError, match="on the same device"):
                here + other
        assert (here * torch.tensor(2.0)).tolist() == [2, 2, 2]  # a number, wherever it is
        with pytest.raises(RuntimeError, match="on the same device"):
            here.index_copy_(0, torch.tensor([1]), here[:1])
        with pytest.raises(TypeError, match="cuda"):
            here.numpy()


def test_each_wait_of_the_host_is_counted() -> None:
    with pretend.cuda() as gpu:
        x = torch.arange(4, device="cuda")
        pinned = torch.empty(4, dtype=torch.long, pin_memory=True)
        gpu.reset()
        x.copy_(pinned, non_blocking=True)
        x + 1
        x[x == 1] = 0  # a masked_fill
        assert not gpu.waits
        waits = [
            lambda: x[0].item(),
            lambda: x.tolist(),
            lambda: bool(x[1] == 1),
            lambda: x.cpu(),
            lambda: x.nonzero(),
            lambda: x[x > 1],
            lambda: x[torch.tensor([1])],  # the index is copied first
            lambda: x.copy_(pinned),
            lambda: torch.arange(4).to("cuda", non_blocking=True),  # not from pinned memory
            lambda: torch.tensor([1], device="cuda"),
            lambda: torch.cuda.synchronize(),
        ]
        for number, wait in enumerate(waits, 1):
            wait()
            assert len(gpu.waits) == number


def test_launches_are_counted_and_views_are_none() -> None:
    with pretend.cuda() as gpu, torch.inference_mode():
        x = torch.ones(4, 4, device="cuda")
        gpu.reset()
        x.view(2, 8)[:, 1:].transpose(0, 1)
        assert not gpu.launches
        x @ x
        x.add_(1)
        assert len(gpu.launches) == 2


def test_pinned_memory_is_in_flight_until_the_host_has_waited() -> None:
    with pretend.cuda():
        pinned, event = torch.zeros(2, pin_memory=True), torch.cuda.Event()
        x = torch.ones(2, device="cuda")
        pinned.copy_(x, non_blocking=True)
        event.record()
        assert not event.query()
        assert pinned.tolist() != [1, 1]
        event.synchronize()
        assert event.query()
        assert pinned.tolist() == [1, 1]
        x.copy_(pinned, non_blocking=True)
        pinned.zero_()
        with pytest.raises(AssertionError, match="pinned memory was changed"):
            torch.cuda.synchronize()


def test_a_graph_does_nothing_until_it_is_replayed() -> None:
    with pretend.cuda() as gpu, torch.inference_mode():
        x, kept = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x * 2).view(3, 1)
            kept.add_(y[:, 0])
        assert kept.tolist() == [0, 0, 0]
        for step in range(2):
            x.fill_(step)
            graph.replay()
            assert y.flatten().tolist() == [2 * step] * 3
        assert kept.tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(graph):
            x.sum().item()
        assert gpu.capturing is None


def test_modules_can_be_moved_and_tied_weights_stay_tied() -> None:
    model = tiny_model("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    ids = tokens(1, 7)
    with torch.inference_mode():
        want = model(ids).logits
    with pretend.cuda(), torch.inference_mode():
        assert model.to("cuda").device.type == "cuda"
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert isinstance(model.lm_head.weight, nn.Parameter)
        got = model(ids.to("cuda")).logits
        assert torch.equal(got.cpu(), want)
        with pytest.raises(RuntimeError, match="on the same device"):
            model(ids)


def test_kernels_are_launched_on_the_device_that_is_current() -> None:
    with pretend.cuda(num_devices=2) as gpu:
        x = torch.zeros(2, device="cuda:1")
        with pytest.raises(RuntimeError, match="cannot be accessed"):
            gpu.kernel(torch.Tensor.fill_, x, 1)
        with torch.cuda.device(1):
            assert torch.zeros(1, device="cuda").device == x.device
            gpu.kernel(torch.Tensor.fill_, x, 1)
        assert x.tolist() == [1, 1]
        assert torch.cuda.current_device() == 0


def test_memory_is_seen_as_the_devices() -> None:
    with pretend.cuda() as gpu:
        region = PretendMemory(gpu).reserve(2**16)
        region.commit(0, region.nbytes)
        held = region.tensor(torch.float32)
        held[5] = 3
        assert held.is_cuda
        assert region.tensor(torch.float32)[5].item() == 3
        region.close()
