"""Graphs and waits on a GPU, where there is one: what the tests beside this one pretend."""

import logging
from typing import Any

import pytest
import torch

import target
from models.test_recurrent import HYBRIDS, PURE
from quire import LLM, SamplingParams
from quire.engine.runner import ModelRunner
from quire.kv import STRATEGIES
from tiny import random_model, tiny_model, tokens

pytestmark = pytest.mark.gpu

PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (3, 17, 40, 1, 29)]
SIZES: dict[str, Any] = dict(max_model_len=128, kv_cache_memory_bytes="256MiB", max_num_seqs=8)


def texts(name: str = "gemma3", **options: Any) -> list[tuple[int, ...]]:
    """Of lengths that have steps of five sequences, of four, and so on."""
    lengths = range(8, 28, 4)
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in lengths]
    recurrent = {**HYBRIDS, **PURE}
    model = random_model(recurrent[name]()) if name in recurrent else tiny_model(name)
    if hasattr(model.config, "num_local_experts") or hasattr(model.config, "num_experts"):
        # In float32 torch's product of groups asks the host how large they are.
        model.set_experts_implementation("batched_mm")
    prompts = [[token % 99 for token in prompt] for prompt in PROMPTS]
    with LLM(model.to(target.device()), **SIZES, **options) as llm:
        return [completion.token_ids for completion in llm.generate(prompts, params)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_graphs_give_what_eager_steps_give(
    strategy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    captured = texts(cache=strategy, attention_backend="triton")
    assert "4 CUDA graphs of decode steps, up to 8 sequences" in caplog.text
    assert "runs without CUDA graphs" not in caplog.text
    monkeypatch.setattr(ModelRunner, "capture", lambda *_, **__: None)
    assert texts(cache=strategy, attention_backend="triton") == captured


@pytest.mark.parametrize("name", [*HYBRIDS, *PURE])
def test_states_are_those_of_eager_steps(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Padding leaves them alone, and so does what was captured before they were there."""
    caplog.set_level(logging.INFO)
    captured = texts(name, attention_backend="triton")
    assert "4 CUDA graphs of decode steps, up to 8 sequences" in caplog.text
    assert "runs without CUDA graphs" not in caplog.text
    monkeypatch.setattr(ModelRunner, "capture", lambda *_, **__: None)
    assert texts(name, attention_backend="triton") == captured


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_step_waits_for_nothing_but_its_tokens(backend: str) -> None:
    """Which come by a wait that was meant: torch raises at each that was not."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(tiny_model("llama").to(target.device()), attention_backend=backend, **SIZES) as llm:
        llm.generate(PROMPTS, params)  # what is done only the first time
        torch.cuda.set_sync_debug_mode("error")
        try:
            completions = llm.generate([[*prompt, 7] for prompt in PROMPTS], params)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert {completion.choices[0].detail for completion in completions} == {""}
    assert [len(completion.token_ids) for completion in completions] == [8] * len(PROMPTS)
    assert {completion.finish_reason for completion in completions} == {"length"}


def test_a_capture_that_fails_leaves_all_others_as_they_were(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What torch has on its books of it is the whole process's."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    options = dict(attention_backend="triton", **SIZES)
    asking = tiny_model("llama").to(target.device())
    layer = asking.model.layers[1].mlp
    act = layer.act_fn

    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return act(x) if bool((x == x).all()) else x

    layer.act_fn = Asks()
    with LLM(tiny_model("llama").to(target.device()), **options) as llm:
        before = [completion.token_ids for completion in llm.generate(PROMPTS, params)]
        with LLM(asking, **options) as other:
            assert "runs without CUDA graphs" in caplog.text
            other.generate(PROMPTS, params)
            after = [completion.token_ids for completion in llm.generate(PROMPTS, params)]
    assert after == before
    torch.rand(2, device=target.device())
    torch.cuda.empty_cache()
    assert "torch keeps memory" not in caplog.text
