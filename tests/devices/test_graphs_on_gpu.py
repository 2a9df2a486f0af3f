"""Graphs and waits on a GPU, where there is one: what the tests beside this one pretend."""

import logging
from typing import Any

import pytest
import torch

import target
from models.test_recurrent import HYBRIDS, PURE
from quire import LLM, SamplingParams
from quire.engine.runner import ModelRunner
from quire.strategies import STRATEGIES
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
    """Rows of nobody leave them alone, and so does what was captured before they were there."""
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
    assert [len(completion.token_ids) for completion in completions] == [8] * len(PROMPTS)
    assert {completion.finish_reason for completion in completions} == {"length"}
