"""The Triton kernels in an engine on the pretended device: in graphs, padded, on placed numbers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pretend
from devices.interpreted import launch_there
from pretend import Gpu, PretendMemory
from quire import LLM, SamplingParams
from tiny import tiny_model, tokens

PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (5, 17, 9)]
SIZES: dict[str, Any] = dict(
    max_model_len=64, kv_cache_memory_bytes="32MB", max_num_seqs=4, max_num_batched_tokens=32
)
NEW = 4


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    launch_there(monkeypatch)
    with pretend.cuda() as found:
        yield found


def test_captured_steps_give_the_tokens_of_generate(gpu: Gpu) -> None:
    model = tiny_model("gemma3")
    options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    want = [
        tuple(model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist()) for p in PROMPTS
    ]
    llm = LLM(model.to("cuda"), provider=PretendMemory(gpu), **SIZES)
    assert llm.attention_backend == "triton"
    gpu.reset()
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    assert [c.token_ids for c in llm.generate(PROMPTS, params)] == want
    assert gpu.num_replays == NEW - 1
