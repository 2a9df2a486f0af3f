"""What fails on a GPU at the start leaves an engine with the right tokens, and is said aloud."""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import pretend
from attention.pretend_flashinfer import pretended_backend
from benchmarks.gpu.attention import DECODE, small, step
from benchmarks.gpu.setting import Setting
from devices.test_engine import expected, generated, on
from pretend import Gpu, PretendAttention
from quire import LLM
from quire.attention import AttentionBackend, AttentionFailed, SdpaAttention, choose
from quire.attention.trial import TriedAttention
from quire.config import EngineConfig
from quire.engine import assembly
from quire.engine.fallbacks import OtherAttention
from quire.engine.runner import ModelRunner
from quire.engine.sampling import sampler
from quire.errors import ConfigError, MemoryUnavailable, UnsupportedModel
from tiny import CONFIGS, random_model


class CompilationError(Exception):
    """As Triton's, which is no RuntimeError."""


class Faulty(PretendAttention):
    """Kernels of ours that fail, or give something else."""

    name = "triton"

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault
        if fault.startswith("write"):
            own = self.make_writer

            def make(view: Any) -> Any:
                return FaultyWriter(fault, own(view))

            self.make_writer = make  # type: ignore[assignment]

    def attend(self, q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if self._fault == "does not compile":
            raise CompilationError("ptxas fatal: out of shared memory")
        if self._fault == "cannot be launched":
            raise RuntimeError("Triton Error [CUDA]: invalid argument")
        out = super().attend(q, *args, **options)
        # As much as a model in 16 bits may be off, which its logits are forgiven.
        return out * 1.03 if self._fault == "is a little wrong" else out


class FaultyWriter:
    def __init__(self, fault: str, own: Any) -> None:
        self._fault, self._own = fault, own

    def __call__(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if self._fault == "writes nothing":
            return
        raise PermissionError("[Errno 13] Permission denied: '/root/.triton'")


FAULTS = {
    "does not compile": "attention by triton fails here: CompilationError('ptxas fatal",
    "cannot be launched": "attention by triton fails here: RuntimeError('Triton Error",
    "is a little wrong": "attention by triton gives other results than torch's",
    "writes nothing": "runs in none of the ways",
    "write is refused": "Permission denied: '/root/.triton'",
}


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with pretend.cuda() as found:
        yield found


@cache
def texts() -> list[tuple[int, ...]]:
    return expected(small_model())


def small_model() -> PreTrainedModel:
    config = CONFIGS["llama"]()
    config.num_hidden_layers = 2
    return random_model(config)


def case() -> tuple[PreTrainedModel, list[tuple[int, ...]]]:
    """A model, and its texts: it is moved, so that each test has its own."""
    return small_model(), texts()


def served_by(monkeypatch: pytest.MonkeyPatch, **backends: Callable[[], AttentionBackend]) -> None:
    """These, with torch's; the others say that they are not there."""

    def find(name: str, *_: Any) -> AttentionBackend | str:
        made = {"sdpa": SdpaAttention, **backends}.get(name)
        return f"{name} is not installed" if made is None else made()

    monkeypatch.setattr(choose, "_find", find)


def auto(gpu: Gpu, model: PreTrainedModel, **options: Any) -> LLM:
    return on(gpu, model, **{"attention_backend": "auto", **options})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_kernels_that_fail_are_passed_over_for_torchs(
    fault: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served_by(monkeypatch, triton=lambda: Faulty(fault))
    model, want = case()
    with auto(gpu, model) as llm:
        assert llm.attention_backend == "sdpa"
        assert generated(llm) == want
    (said,) = [r for r in caplog.records if "attention backend: sdpa instead" in r.message]
    assert said.levelno == logging.WARNING
    assert FAULTS[fault] in said.message


@pytest.mark.parametrize(
    ("factor", "is_right"), [(1.0, True), (1.01, True), (1.03, False), (float("nan"), False)]
)
def test_results_in_16_bits_are_held_against_torchs(factor: float, is_right: bool) -> None:
    q, view, batch = step(Setting(emulated=True, seed=0, rounds=1), small(DECODE[0]))

    class Own(SdpaAttention):
        def attend(self, *args: Any, **options: Any) -> torch.Tensor:
            return super().attend(*args, **options) * factor

    refused = nullcontext() if is_right else pytest.raises(AttentionFailed, match="other results")
    with refused:
        TriedAttention(Own()).attend(q, view, batch, spec=small(DECODE[0]).spec, scale=0.1)


def test_what_a_kernel_did_wrong_is_said_in_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(sys.modules["quire.attention.trial"], "wait_for", lost)
    q, view, batch = step(Setting(emulated=True, seed=0, rounds=1), small(DECODE[0]))
    with pytest.raises(AttentionFailed, match=r"fails here: .*illegal memory access"):
        TriedAttention(SdpaAttention()).attend(
            q, view, batch, spec=small(DECODE[0]).spec, scale=0.1
        )


def test_memory_that_cannot_be_given_back_after_a_fault_is_not_its_cause(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A small copy of the model has a cache too, where the model is in 16 bits."""
    refusals = []

    def refused(memory: Any) -> None:
        refusals.append(memory)
        raise MemoryUnavailable("cuMemUnmap failed: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(assembly, "give_back_kept", refused)
    served_by(monkeypatch, triton=lambda: Faulty("cannot be launched"))
    with auto(gpu, small_model().bfloat16()) as llm:
        assert llm.attention_backend == "sdpa"
    assert refusals
    assert FAULTS["cannot be launched"] in caplog.text


def test_what_was_asked_for_is_refused_with_the_option(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_by(monkeypatch, triton=lambda: Faulty("does not compile"))
    model = small_model()
    with pytest.raises(ConfigError, match=r"=triton: .*ptxas.* With attention_backend=sdpa torch"):
        on(gpu, model, attention_backend="triton")
    served_by(monkeypatch, triton=lambda: Faulty("writes nothing"))
    with pytest.raises(UnsupportedModel, match=r"=triton: .* With attention_backend=sdpa torch"):
        on(gpu, model, attention_backend="triton")


@pytest.mark.parametrize("triton_works", [True, False])
def test_flashinfer_that_cannot_compile_is_passed_over_for_ours(
    triton_works: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("[Errno 2] No such file or directory: 'ninja'")

    library = type("flashinfer", (), {"__getattr__": lambda *_: no_compiler})()
    monkeypatch.setattr("quire.attention.flashinfer.backend.refused", lambda q, view: None)

    def flashinfer() -> AttentionBackend:
        backend = pretended_backend(real=False)
        backend._library = library
        return backend

    def ours() -> AttentionBackend:
        return Faulty("" if triton_works else "does not compile")

    served_by(monkeypatch, flashinfer=flashinfer, triton=ours)
    model, want = case()
    with auto(gpu, model) as llm:
        assert llm.attention_backend == ("triton" if triton_works else "sdpa")
        assert generated(llm) == want
    said = re.findall(r"attention backend: (\w+) instead, since .*'ninja'", caplog.text)
    assert said == ["triton"]


def test_a_gpu_that_is_lost_to_the_process_is_said_with_what_to_do(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_by(monkeypatch, triton=lambda: Faulty("cannot be launched"))

    def lost(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("quire.engine.fallbacks.wait_for", lost)
    with pytest.raises(ConfigError, match="start another process, with attention_backend=sdpa"):
        auto(gpu, small_model())


@pytest.mark.parametrize(
    ("device", "error"),
    [
        ("cpu", RuntimeError("anything")),
        ("cuda", ConfigError("max_model_len=1,000,000 is more than the model was made for")),
        ("cuda", MemoryUnavailable("CUDA device 0 refused 2 MiB")),
        ("cuda", torch.OutOfMemoryError("CUDA out of memory")),
    ],
)
def test_other_errors_are_not_laid_to_attention(device: str, error: Exception) -> None:
    loaded: Any = SimpleNamespace(device=torch.device(device))
    with pytest.raises(type(error)) as raised:
        OtherAttention(EngineConfig(), loaded).instead(error)
    assert raised.value is error


def test_where_kernels_are_compiled_the_trial_is_long_and_ends_one_by_one(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that those for many queries, for one, and for a walk that is split are all tried."""
    chunks: list[tuple[int, int]] = []
    own = ModelRunner._trial_chunk

    def seen(self: ModelRunner, trial: Any, start: int, stop: int) -> torch.Tensor:
        chunks.append((start, stop))
        return own(self, trial, start, stop)

    monkeypatch.setattr(ModelRunner, "_trial_chunk", seen)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    on(gpu, small_model(), max_model_len=512).close()
    assert {*chunks} >= {(0, 256), (256, 510), (510, 511), (511, 512)}


def test_enforce_eager_captures_nothing_and_takes_no_memory_for_it(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_by(monkeypatch, triton=lambda: Faulty(""))
    model, want = case()
    with auto(gpu, model, enforce_eager=True) as llm:
        gpu.reset()
        assert generated(llm) == want
        assert not gpu.num_replays
        assert "CUDA graphs" not in {term.label for term in llm.ledger.terms}


def test_a_replay_that_is_refused_is_the_last_one(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served_by(monkeypatch, triton=lambda: Faulty(""))
    model, want = case()
    with auto(gpu, model) as llm:

        def refused(*_: Any) -> None:
            raise RuntimeError("CUDA error: operation not supported")

        monkeypatch.setattr("pretend.runtime.Graph.replay", refused)
        assert generated(llm) == want
        assert generated(llm) == want
    assert caplog.text.count("runs without CUDA graphs: a replay was refused") == 1


def test_without_a_stream_for_graphs_steps_are_run(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served_by(monkeypatch, triton=lambda: Faulty(""))

    def refused(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of resources")

    monkeypatch.setattr("quire.models.cuda_graphs.torch.cuda.Stream", refused)
    model, want = case()
    with auto(gpu, model) as llm:
        assert generated(llm) == want
    assert "runs without CUDA graphs: RuntimeError('CUDA error: out of resources')" in caplog.text


def test_tokens_that_a_device_cannot_choose_the_host_does(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = sampler.Choices

    def lacks(logits: torch.Tensor, work: Any) -> Any:
        if logits.is_cpu:
            return own(logits, work)
        raise NotImplementedError("\"argmax_cuda\" not implemented for 'BFloat16'")

    monkeypatch.setattr(sampler, "Choices", lacks)
    model, want = case()
    with on(gpu, model) as llm:
        assert generated(llm) == want
    assert caplog.text.count("tokens are chosen by the host, which takes longer, since") == 2
    assert "argmax_cuda" in caplog.text


def test_tokens_that_a_device_chooses_otherwise_the_host_does(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = sampler.Choices

    def last_of_equals(logits: torch.Tensor, work: Any) -> Any:
        choices = own(logits, work)
        if not logits.is_cpu:
            choices.tokens[0] = logits.shape[-1] - 1
        return choices

    monkeypatch.setattr(sampler, "Choices", last_of_equals)
    model, want = case()
    with on(gpu, model) as llm:
        assert generated(llm) == want
    assert "since cuda:0 chooses others" in caplog.text


def test_without_pinned_memory_copies_are_waited_for(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = torch.empty

    def refused(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", refused)
    model, want = case()
    with on(gpu, model, swap_space="16MiB") as llm:
        assert generated(llm) == want
    assert "no memory can be pinned" in caplog.text
    assert "docker run --ulimit memlock=-1" in caplog.text
    assert "swap_space: steps wait for what is saved and brought back" in caplog.text
