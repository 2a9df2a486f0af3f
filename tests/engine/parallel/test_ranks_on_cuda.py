"""Two ranks on two devices that are not there: each has its own, and nothing of another's.

What is exchanged goes by gloo. So this says that all is in its place, and nothing of NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from engine.parallel.ranks import (
    CACHES,
    OPTIONS,
    Folder,
    Watch,
    generated,
    of_generate,
    texts,
)
from engine.parallel.ranks import PROMPTS as ALL_PROMPTS
from pretend import Gpu, ranks
from quire.engine.llm import LLM
from quire.kv import Usage
from quire.sampling_params import SamplingParams

pytest.importorskip("accelerate", reason="Transformers loads parts of a model with it")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there are real ones"),
    pytest.mark.filterwarnings("ignore"),  # of Transformers, about plans and RoPE
]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with ranks.cuda_ranks() as found:
        yield found


@pytest.fixture(scope="module")
def by_option(gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Folder]]:
    """An LLM of a folder and two options, and the folder. Its two processes end with it."""
    folder = Folder(tmp_path_factory.mktemp("models"), None)
    torch.cuda.set_device(1)
    with LLM(folder.of("llama"), tensor_parallel_size=2, device="cuda", **OPTIONS) as llm:
        assert gpu.current == 1, "the user's choice"
        torch.cuda.set_device(0)
        assert llm._ranks is not None
        folder.crew = llm._ranks.workers
        yield llm, folder
    assert not torch.distributed.is_initialized()


@pytest.fixture(scope="module")
def folder(by_option: tuple[LLM, Folder]) -> Folder:
    return by_option[1]


# Two of the prompts, and few tokens: every operation is one of Python's here.
PROMPTS = ALL_PROMPTS[:2]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def expected(folder: Folder, name: str, params: Any = GREEDY, **options: Any) -> Any:
    """Of one process, on the CPU."""
    with folder.alone(name, device="cpu", **options) as llm:
        return texts(llm.generate(PROMPTS, params))


@pytest.mark.parametrize(
    "cache",
    [
        "paged",
        *(
            pytest.param(c, marks=pytest.mark.full)
            for c in ("contiguous", "growing", "virtual", "virtual, shared")
        ),
    ],
)
def test_every_strategy_gives_the_tokens_of_one_process_and_of_generate(
    folder: Folder, cache: str
) -> None:
    want = expected(folder, "llama", **CACHES[cache])
    llm = folder.ranked("llama", **CACHES[cache])
    assert llm.attention_backend == "pretend"
    assert generated(llm, PROMPTS, GREEDY) == want
    if cache == "paged":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder.of("llama"))
        assert want == [[of_generate(model, prompt, 8)] for prompt in PROMPTS]


@pytest.mark.full  # on a CPU: test_two_ranks.py
@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3", "mixtral"])
def test_windows_experts_and_latents(folder: Folder, name: str) -> None:
    assert generated(folder.ranked(name), PROMPTS, GREEDY) == expected(folder, name)


@pytest.mark.full
def test_samples_with_a_seed_are_chosen_on_the_device(folder: Folder) -> None:
    params = SamplingParams(temperature=0.8, seed=7, n=2, max_tokens=6, logprobs=2)
    want = expected(folder, "llama", params)
    assert generated(folder.ranked("llama"), PROMPTS, params) == want


@pytest.mark.full  # on a CPU: test_two_ranks.py
def test_who_makes_room_goes_on_with_the_same_tokens(folder: Folder) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    want = expected(folder, "llama", params)
    # A token is 512 bytes in each rank: 5 blocks are too few for both.
    with folder.ranked("llama", kv_cache_memory_bytes=40 * 1024, swap_space="1MiB") as llm:
        llm.engine.scheduler.costs.note_step = lambda *_: None  # type: ignore[method-assign]
        assert texts(llm.generate(PROMPTS, params, observe=Watch(llm))) == want
        assert llm.engine.scheduler.statistics.num_swaps > 0


def test_a_step_waits_once_and_copies_once(folder: Folder, gpu: Gpu) -> None:
    with folder.ranked("llama") as llm:
        watch: list[tuple[int, int]] = []

        def note(_: Usage) -> None:
            watch.append((len(gpu.waits), gpu.num_uploads))

        llm.generate(PROMPTS, replace(GREEDY, max_tokens=12), observe=note)
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(watch)]
    assert len(steps) > 8
    assert set(steps) == {(1, 1)}


def test_the_option_takes_as_many_devices_as_there_are_ranks(
    by_option: tuple[LLM, Folder], gpu: Gpu
) -> None:
    llm, folder = by_option
    assert llm.ledger.committed_whole is False
    assert str(llm.engine._runner.device) == "cuda:0"  # type: ignore[attr-defined]
    gpu.free_bytes = gpu.total_bytes // 2  # of this rank's device
    assert texts(llm.generate(PROMPTS, GREEDY, observe=Watch(llm))) == expected(folder, "llama")
    assert llm.elastic.memory is not None
    assert llm.elastic.memory.available_bytes == gpu.free_bytes
    gpu.free_bytes = 2 * gpu.total_bytes  # so that the other's is the least
    assert llm._elastic._gauge.read().available_bytes == gpu.total_bytes
