"""Logits on a GPU that is pretended: all is where it must be, and a step is waited for once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # before anything is pretended: it looks at all that torch has

from engine.sampling.cases import plan_of, rows, sequence
from engine.sampling.test_device import EOS, mixed_batch
from quire.engine.plan import Chunk, StepPlan
from quire.engine.sampling import Sampler

pretend = pytest.importorskip("pretend", reason="the tests of the pretended GPU are not there")


@pytest.fixture
def gpu() -> Iterator[Any]:
    with pretend.cuda() as there:
        yield there


def test_a_mixed_batch_is_what_it_is_on_the_host(gpu: Any) -> None:
    batch, drafts, logits = mixed_batch()
    plan = plan_of(batch, drafts)
    want = Sampler(0, EOS, as_on_device=True).sample(logits, plan)
    there = logits.to("cuda")
    gpu.reset()
    assert Sampler(0, EOS).sample(there, plan) == want
    assert gpu.waits == ["stream"]
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
    sampler = Sampler()
    launches = []
    for num_rows in (2, 6):
        gpu.reset()
        sampler.sample(logits, plan_of(batch[:num_rows]))
        assert gpu.waits == ["stream"]
        assert (gpu.num_uploads, gpu.num_downloads) == (num_uploads, 1)
        launches.append(len(gpu.launches))
    assert launches[0] == launches[1], "the number of operations grows with the rows"


def test_prompt_logprobs_come_with_the_tokens(gpu: Any) -> None:
    own = sequence(list(range(20)), prompt_logprobs=2, logprobs=1)
    plan = StepPlan.of([Chunk(sequence=own, start=0, stop=20, samples=True)])
    logits = rows(20)
    (want,) = Sampler(as_on_device=True).sample(logits, plan)
    told, own.prompt_logprobs = own.prompt_logprobs, []
    gpu.reset()
    assert Sampler().sample(logits.to("cuda"), plan) == [want]
    assert own.prompt_logprobs == told
    assert gpu.waits == ["upload", "stream"], "the first is the test's own"


def test_a_step_without_draws_is_not_waited_for(gpu: Any) -> None:
    own = sequence([1, 2, 3])
    plan = StepPlan.of([Chunk(sequence=own, start=0, stop=2, samples=False)])
    gpu.reset()
    assert Sampler().sample(torch.empty(0, 50, device="cuda"), plan) == []
    assert gpu.waits == []
