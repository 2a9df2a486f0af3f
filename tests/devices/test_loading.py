"""Weights on a device: all of them, or as many as there is room for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pretend
from pretend import PretendMemory
from quire import LLM, SamplingParams
from quire.errors import ConfigError, ModelNotLoadable
from quire.models import weight_placement as placed
from quire.models.loader import adopt, load
from quire.models.weight_placement import (
    device_map,
    device_of,
    is_offloaded,
    move_to,
    weights_bytes,
)
from tiny import tiny_model

CUDA = torch.device("cuda", 0)
GIB = 2**30


def test_a_model_is_loaded_where_it_is_to_run() -> None:
    params = SamplingParams(max_tokens=5, temperature=0)
    sizes: dict[str, Any] = dict(
        max_model_len=64,
        kv_cache_memory_bytes="16MB",
        max_num_seqs=2,
        dtype="float32",
        attention_backend="sdpa",
    )
    (want,) = LLM(**sizes).generate("A small", params)
    with pretend.cuda() as gpu:
        loaded = load(device="cuda", dtype="float32")
        assert loaded.device == CUDA
        assert all(p.is_cuda for p in loaded.model.parameters())
        llm = LLM(loaded, provider=PretendMemory(gpu), device="cuda", **sizes)
        (got,) = llm.generate("A small", params)
    assert got.text == want.text


def test_weights_that_fit_are_not_spread() -> None:
    with pretend.cuda(total_bytes=16 * GIB):
        assert device_map("some", 14 * GIB, CUDA) == {}


def test_weights_that_do_not_fit_stay_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend.cuda(total_bytes=16 * GIB):
        monkeypatch.setattr(placed, "find_spec", lambda _: None)
        with pytest.raises(
            ConfigError,
            match=r"some take 20.* GiB, and cuda:0 has 16.* GiB free.*quire-kv\[offload\]",
        ):
            device_map("some", 20 * GIB, CUDA)
        monkeypatch.setattr(placed, "find_spec", lambda _: object())
        monkeypatch.setattr(placed, "available_bytes", lambda: 64 * GIB)
        told = device_map("some", 20 * GIB, CUDA)
        assert told["device_map"] == "auto"
        assert told["max_memory"] == {0: int(0.7 * 16 * GIB), "cpu": 64 * GIB}


@pytest.mark.parametrize(
    ("spread", "where", "offloaded"),
    [
        ({"": 0}, CUDA, False),
        ({"model.layers.0": 0, "model.layers.1": "cpu", "lm_head": "disk"}, CUDA, True),
        ({"model": "cuda:1", "lm_head": torch.device("cuda", 1)}, torch.device("cuda", 1), False),
        ({"": "cpu"}, torch.device("cpu"), False),
    ],
)
def test_keys_and_values_lie_where_layers_compute(
    spread: dict[str, Any], where: torch.device, offloaded: bool
) -> None:
    model = tiny_model("llama")
    model.hf_device_map = spread
    assert device_of(model) == where
    assert is_offloaded(model) == offloaded
    assert move_to(model, CUDA) is model  # Accelerate has placed it


def test_a_model_on_several_gpus_is_refused() -> None:
    model = tiny_model("llama")
    model.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(ConfigError, match="spread over cuda:0, cuda:1: load it on one GPU"):
        adopt(model)


def test_no_room_after_all_is_said_in_words() -> None:
    def full(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    model: Any = SimpleNamespace(
        to=full, parameters=lambda: [torch.zeros(2**18)], buffers=list, hf_device_map=None
    )
    with pytest.raises(ModelNotLoadable, match=r"cuda:0 has no room for 1.*MiB of weights"):
        move_to(model, CUDA)


def test_tied_weights_count_once() -> None:
    model = tiny_model("llama")
    untied = weights_bytes(model)
    model.lm_head.weight = model.model.embed_tokens.weight
    assert weights_bytes(model) == untied - model.lm_head.weight.nbytes
