"""Logits on a GPU that is pretended: all is where it must be, and a step is waited for once."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # before anything is pretended: it looks at all that torch has

import pretend
from engine.sampling.cases import plan_of, rows, sequence
from engine.sampling.test_choices import EOS, mixed_batch
from quire import LLM, SamplingParams
from quire.engine import assembly
from quire.engine.sampling import LogitsSampler
from quire.engine.step_plan import Chunk, StepPlan
from tiny import tiny_model, tokens


@pytest.fixture
def gpu() -> Iterator[Any]:
    with pretend.cuda() as there:
        yield there


def test_a_mixed_batch_is_what_it_is_on_the_host(gpu: Any) -> None:
    batch, drafts, logits = mixed_batch()
    plan = plan_of(batch, drafts)
    want = LogitsSampler(0, EOS).sample(logits, plan)
    there = logits.to("cuda")
    gpu.reset()
    assert LogitsSampler(0, EOS).sample(there, plan) == want
    assert gpu.waits == ["event"]
    assert (gpu.num_uploads, gpu.num_downloads) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "num_uploads"),
    [({"temperature": 0.0}, 0), ({}, 1), ({"top_p": 0.9}, 1), ({"top_k": 20, "logprobs": 2}, 1)],
)
def test_a_step_of_decoding_is_waited_for_once(
    gpu: Any, kind: dict[str, Any], num_uploads: int
) -> None:
    batch = [sequence(seq_id=i, **kind) for i in range(6)]
    logits = rows(8, 300).bfloat16().to("cuda")  # padded, as a recorded step has them
    sampler = LogitsSampler()
    launches = []
    for num_rows in (2, 6):
        gpu.reset()
        sampler.sample(logits, plan_of(batch[:num_rows]))
        assert gpu.waits == ["event"]
        assert (gpu.num_uploads, gpu.num_downloads) == (num_uploads, 1)
        launches.append(len(gpu.launches))
    assert launches[0] == launches[1], "the number of operations grows with the rows"


def test_prompt_logprobs_come_with_the_tokens(gpu: Any) -> None:
    own = sequence(list(range(20)), prompt_logprobs=2, logprobs=1)
    plan = StepPlan.of([Chunk(sequence=own, start=0, stop=20, samples=True)])
    logits = rows(20)
    (want,) = LogitsSampler().sample(logits, plan)
    told, own.prompt_logprobs = own.prompt_logprobs, []
    gpu.reset()
    assert LogitsSampler().sample(logits.to("cuda"), plan) == [want]
    assert own.prompt_logprobs == told
    assert gpu.waits == ["upload", "event"], "the first is the test's own"


def test_of_a_step_without_draws_nothing_comes_back(gpu: Any) -> None:
    """It is waited for all the same: what goes wrong in it must not come up in another one."""
    own = sequence([1, 2, 3])
    plan = StepPlan.of([Chunk(sequence=own, start=0, stop=2, samples=False)])
    gpu.reset()
    torch.ones(3, device="cuda").add_(1)  # a step's work
    assert LogitsSampler().sample(torch.empty(0, 50, device="cuda"), plan) == []
    assert gpu.waits == ["event"]
    assert (gpu.num_uploads, gpu.num_downloads) == (0, 0)


def test_an_engine_waits_once_a_step_whatever_is_asked_of_its_rows() -> None:
    prompts = [tokens(1, 20, seed=seed)[0].tolist() for seed in range(6)]
    params = [
        SamplingParams(max_tokens=9, ignore_eos=True, **kind)
        for kind in (
            {"temperature": 0.0},
            {"seed": 1, "top_p": 0.9},
            {"seed": 2, "top_k": 5, "n": 2, "logprobs": 2},
            {"seed": 3, "repetition_penalty": 1.3, "logit_bias": {4: 1.0}},
            {"temperature": 0.0, "prompt_logprobs": 1, "min_tokens": 3},
            {"seed": 4, "min_p": 0.1},
        )
    ]
    options: dict[str, Any] = dict(max_model_len=64, max_num_batched_tokens=24, max_num_seqs=8)
    options |= dict(kv_cache_memory_bytes="16MB", enable_prefix_caching=False)

    def said(llm: LLM) -> list[list[tuple[int, ...]]]:
        found = llm.generate(prompts, params)
        return [[choice.token_ids for choice in each.choices] for each in found]

    with LLM(tiny_model("llama"), **options) as llm:
        want = said(llm)
    counted: list[tuple[int, int, int]] = []
    with pretend.cuda() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "choose_backend", lambda *_, **__: pretend.PretendAttention())
        model = tiny_model("llama").to("cuda")
        with LLM(model, **options, provider=pretend.PretendMemory(gpu)) as llm:
            llm.engine.watch = lambda _: counted.append(
                (len(gpu.waits), gpu.num_uploads, gpu.num_downloads)
            )
            assert said(llm) == want
    steps = [np.subtract(after, before).tolist() for before, after in pairwise(counted)]
    assert len(steps) > 9
    for num_waits, num_uploads, num_downloads in steps:
        assert num_waits == 1
        assert num_uploads in (1, 2)  # the step's own, and the sampler's
        assert num_downloads in (0, 1)
