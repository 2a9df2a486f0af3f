"""The engine on a device that is not there: the same tokens, and few waits of the host."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import pretend
from conformance.covering import only
from pretend import Gpu, PretendAttention, PretendMemory
from quire import LLM, SamplingParams
from quire.engine import assembly
from quire.kv import STRATEGIES
from tiny import CONFIGS, tiny_model, tokens

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
_OTHERS = [strategy for strategy in STRATEGIES if strategy != "paged"]
SIZES: dict[str, Any] = dict(
    attention_backend="sdpa",  # kernels in an interpreter know no pretended device
    max_model_len=64,
    kv_cache_memory_bytes="64MB",
    max_num_seqs=4,
    max_num_batched_tokens=64,
)
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (5, 17, 33)]


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with pretend.cuda() as found:
        yield found


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that reads what lies on the device."""
    monkeypatch.setattr(assembly, "choose_backend", lambda *_, **__: PretendAttention())


def expected(model: PreTrainedModel, num_tokens: int = 8) -> list[tuple[int, ...]]:
    """What Transformers generates, on the CPU."""
    options = dict(max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [
        tuple(model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist())
        for ids in PROMPTS
    ]


def on(gpu: Gpu, model: PreTrainedModel, **options: Any) -> LLM:
    return LLM(model.to("cuda"), provider=PretendMemory(gpu), **{**SIZES, **options})


def generated(llm: LLM, params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, params)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "each",
    only(
        [*((name, "paged") for name in CONFIGS), *(("gemma3", each) for each in _OTHERS)],
        ("gemma2", "paged"),
        ("gpt_oss", "paged"),
    ),
)
def test_tokens_are_those_of_generate(each: tuple[str, str], gpu: Gpu) -> None:
    name, strategy = each
    model = tiny_model(name)
    want = expected(model)
    llm = on(gpu, model, cache=strategy)
    assert llm.attention_backend == "sdpa"
    assert generated(llm) == want


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "each",
    only(
        [
            *((name, "paged") for name in ("llama", "deepseek_v3", "gpt_oss")),
            *(("gemma3", strategy) for strategy in STRATEGIES),
        ],
        ("deepseek_v3", "paged"),
        ("gemma3", "growing"),
        ("gemma3", "virtual"),
    ),
)
def test_graphs_give_what_eager_steps_give(each: tuple[str, str], gpu: Gpu, kernels: None) -> None:
    name, strategy = each
    model = tiny_model(name)
    want = expected(model)
    llm = on(gpu, model, cache=strategy)
    gpu.reset()
    assert generated(llm) == want
    assert gpu.num_replays == GREEDY.max_tokens - 1  # all but the step that computes the prompts


def test_a_model_may_be_on_another_device_than_the_current_one(kernels: None) -> None:
    with pretend.cuda(num_devices=2) as gpu:
        model = tiny_model("llama")
        want = expected(model)
        memory = PretendMemory(gpu, index=1)
        llm = LLM(model.to("cuda:1"), provider=memory, **SIZES)
        gpu.reset()
        assert generated(llm) == want
        assert gpu.num_replays == GREEDY.max_tokens - 1
        assert gpu.current == 0


def test_a_step_waits_once_and_copies_once(gpu: Gpu, kernels: None) -> None:
    llm = on(gpu, tiny_model("gemma3"), max_num_batched_tokens=16)
    watch = []
    llm.engine.watch = lambda plan: watch.append((len(gpu.waits), gpu.num_uploads))
    gpu.reset()
    generated(llm)
    watch.append((len(gpu.waits), gpu.num_uploads))
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(watch)]
    assert len(steps) > 8
    assert max(waits for waits, _ in steps) <= 1
    assert {uploads for _, uploads in steps} == {1}
