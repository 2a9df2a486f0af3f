"""Which device: what is chosen, and what is said where it cannot be."""

import logging

import pytest
import torch

import pretend
from quire import LLM
from quire import devices as choice
from quire.devices import choose_device, refuse_other_device
from quire.errors import ConfigError
from quire.models.loader import load


def test_auto_is_a_gpu_where_there_is_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pretend.cuda(num_devices=2):
        assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
        assert choose_device("cuda:1") == torch.device("cuda", 1)
        assert choose_device("cpu") == torch.device("cpu")
    assert "device: cuda:0 (pretended)" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_auto_is_the_cpu_elsewhere_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose_device("auto") == torch.device("cpu")
    assert "device: cpu, for torch" in caplog.text
    with pytest.raises(ConfigError, match=r"device=cuda: .*; or leave it out, for the CPU"):
        choose_device("cuda")
    with pytest.raises(ConfigError, match="device=cuda:1"):
        LLM(device="cuda:1")


def test_a_gpu_that_cannot_be_used_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError(message + "\nCompile with `TORCH_USE_CUDA_DSA`")

        monkeypatch.setattr(torch.cuda, "mem_get_info", fail)

    with pretend.cuda():
        with pytest.raises(ConfigError, match=r"there is no cuda:3, only cuda:0: choose one"):
            choose_device("cuda:3")
        refused("CUDA error: out of memory")
        with pytest.raises(ConfigError, match=r"gives no memory.*\(CUDA error: out of memory\)"):
            choose_device("cuda")
        assert choose_device("auto") == torch.device("cpu")


def test_a_gpu_whose_memory_cannot_be_mapped_is_refused_or_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(choice, "why_no_memory", lambda device: "cuda-bindings are not there")
    with pretend.cuda():
        assert choose_device("auto") == torch.device("cpu")
        assert "device: cpu, for cuda-bindings are not there" in caplog.text
        with pytest.raises(ConfigError, match="device=cuda: cuda-bindings are not there"):
            choose_device("cuda")


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "was built without CUDA: for a GPU install one that has it"),
        ("12.8", r"CUDA does not start \(The NVIDIA driver on your system is too old"),
    ],
)
def test_no_cuda_says_what_is_missing(
    version: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    with pytest.raises(ConfigError, match=said):
        choose_device("cuda")


def test_a_model_in_memory_stays_where_it_is() -> None:
    here = torch.device("cuda", 1)
    for name in ("auto", "cuda", "cuda:1"):
        refuse_other_device(name, here)
    for name in ("cpu", "cuda:0"):
        with pytest.raises(ConfigError, match=f"device={name} is not where the model is, cuda:1"):
            refuse_other_device(name, here)
    with pytest.raises(ConfigError, match=r"device=cuda is not .* cpu: move it \(model.to"):
        LLM(load(), device="cuda")
