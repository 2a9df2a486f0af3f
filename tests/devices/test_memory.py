"""The budget on a device that is not there: measured, told apart, and refused in words."""

from collections.abc import Iterator
from typing import Any

import pytest

import pretend
from pretend import Gpu, PretendMemory
from quire import LLM
from quire.engine import build
from quire.errors import ConfigError, MemoryUnavailable
from tiny import tiny_model

GIB = 2**30


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with pretend.cuda() as found:
        yield found


def on(gpu: Gpu, **options: Any) -> LLM:
    defaults: dict[str, Any] = dict(
        max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, attention_backend="sdpa"
    )
    return LLM(tiny_model("llama").to("cuda"), provider=PretendMemory(gpu), **defaults, **options)


def test_the_ledger_is_the_devices_with_a_measured_step(gpu: Gpu) -> None:
    gpu.free_bytes = gpu.total_bytes // 2
    with on(gpu, memory_mode="dedicated") as llm:
        terms = {term.label: term for term in llm.ledger.terms}
        assert terms["limit"].num_bytes == gpu.total_bytes
        assert terms["used"].num_bytes == gpu.free_bytes - gpu.total_bytes
        assert "by others and the driver" in terms["used"].source
        assert terms["activations"].source.startswith("measured")
        assert terms["CUDA graphs"].num_bytes < 0
        assert llm.elastic.memory is None
        llm.step()
        assert llm.elastic.memory is not None
        assert llm.elastic.memory.total_bytes == gpu.total_bytes


def test_memory_that_others_have_is_a_refusal_with_the_ledger(gpu: Gpu) -> None:
    gpu.free_bytes = 2**16
    with pytest.raises(ConfigError, match=r"budget=vllm: .* for KV is more than .* available"):
        on(gpu, budget="vllm")


@pytest.mark.parametrize(
    ("free_bytes", "error", "says"),
    [(2**16, ConfigError, "by others and the driver"), (GIB, MemoryUnavailable, "no step fits")],
)
def test_a_step_that_does_not_fit_shows_the_ledger_first(
    free_bytes: int,
    error: type[Exception],
    says: str,
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> int:
        raise MemoryUnavailable("no step fits")

    gpu.free_bytes = free_bytes
    monkeypatch.setattr(build, "measured_step_bytes", fails)
    with pytest.raises(error, match=says):
        on(gpu, memory_mode="dedicated")
