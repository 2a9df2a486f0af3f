"""The Triton kernels in an engine on the pretended device: in graphs, padded, on placed numbers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pretend
from devices.interpreted import launch_there
from pretend import Gpu, PretendMemory
from quire import LLM, SamplingParams
from tiny import CONFIGS, random_model, tokens

PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (5, 17, 9)]
SIZES: dict[str, Any] = dict(
    max_model_len=24, kv_cache_memory_bytes="32MB", max_num_seqs=4, max_num_batched_tokens=16
)
NEW = 3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    launch_there(monkeypatch)
    with pretend.cuda() as found:
        yield found


@pytest.mark.full
def test_captured_steps_give_the_tokens_of_generate(gpu: Gpu) -> None:
    config = CONFIGS["gemma3"]()
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]  # a layer of each kind
    model = random_model(config)
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
