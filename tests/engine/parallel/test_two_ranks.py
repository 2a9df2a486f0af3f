"""Two processes on gloo are one model: the tokens of one process, and as many bytes in each."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conformance.covering import only
from engine.parallel.ranks import (
    CACHES,
    GREEDY,
    OPTIONS,
    PROMPTS,
    Folder,
    Watch,
    generated,
    of_generate,
    texts,
)
from planner.places import host
from quire.config import EngineConfig
from quire.engine import build
from quire.engine.llm import LLM
from quire.engine.parallel.model_part import load_parts
from quire.engine.parallel.worker_group import WorkerGroup
from quire.errors import ConfigError
from quire.kv import STRATEGIES, Usage
from quire.planner.capacity import plan
from quire.planner.sequence_memory import PlannedLengths
from quire.planner.subject import find_subject
from quire.sampling_params import SamplingParams

DEMO = Path(build.__file__).parents[1] / "demo_model"

pytest.importorskip("accelerate", reason="Transformers loads parts of a model with it")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="ranks would be placed on the GPU"),
    pytest.mark.filterwarnings("ignore"),  # of Transformers, about plans and RoPE
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    before = dict(os.environ)
    crew = WorkerGroup(2).start()
    assert dict(os.environ) == before, "the environment says how ranks find each other"
    yield Folder(tmp_path_factory.mktemp("models"), crew)
    crew.close()
    crew.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("cache", only(CACHES, "growing", "paged", "virtual, shared"))
def test_every_strategy_gives_the_tokens_of_one_process_and_of_generate(
    folder: Folder, cache: str
) -> None:
    with folder.alone("llama", **CACHES[cache]) as llm:
        expected = texts(llm.generate(PROMPTS, GREEDY))
    assert generated(folder.ranked("llama", **CACHES[cache])) == expected
    if cache == "paged":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder.of("llama"))
        assert expected == [[of_generate(model, prompt, 16)] for prompt in PROMPTS]


def test_another_tokenizer_is_rank_0s(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    llama, crew = folder.of("llama"), folder.crew
    assert folder.parts("llama").tokenizer is None
    monkeypatch.setattr(build, "load_parts", partial(load_parts, workers=crew))
    with LLM(llama, tokenizer=DEMO, tensor_parallel_size=2, **OPTIONS) as llm:
        assert llm.tokenizer is not None
        assert llm.tokenizer.name_or_path == str(DEMO)


@pytest.mark.parametrize("name", only(["gemma3", "mixtral", "deepseek_v3"], "mixtral"))
def test_windows_experts_and_latents(folder: Folder, name: str) -> None:
    with folder.alone(name) as llm:
        expected, alone = texts(llm.generate(PROMPTS, GREEDY)), llm.spec.bytes_per_token
    llm = folder.ranked(name)
    assert llm.spec.bytes_per_token == (alone if name == "deepseek_v3" else alone // 2)
    assert generated(llm) == expected


def test_logits_are_those_of_one_process_to_rounding(folder: Folder) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=5, prompt_logprobs=5)
    several = []
    for llm in (folder.alone("llama"), folder.ranked("llama")):
        with llm:
            several.append(llm.generate(PROMPTS, params))
    for one, two in zip(*several, strict=True):
        for ours, theirs in ((one, two), (one.choices[0], two.choices[0])):
            name = "prompt_logprobs" if ours is one else "logprobs"
            for a, b in zip(getattr(ours, name), getattr(theirs, name), strict=True):
                assert a.token_id == b.token_id
                assert np.allclose([p for _, p in a.top], [p for _, p in b.top], atol=1e-4)
                assert abs(a.logprob - b.logprob) < 1e-4


def test_samples_with_a_seed_and_guesses_are_the_same(folder: Folder) -> None:
    params = SamplingParams(temperature=0.8, seed=7, n=3, max_tokens=12)
    options = dict(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    for own, asked in ((dict[str, Any](), params), (options, GREEDY)):
        with folder.alone("llama", **own) as llm:
            expected = texts(llm.generate(PROMPTS, asked))
        assert generated(folder.ranked("llama", **own), params=asked) == expected


@pytest.mark.parametrize(
    "swap", only([dict(), dict(swap_space="1MiB"), dict(to_file=True)], dict(swap_space="1MiB"))
)
def test_who_makes_room_goes_on_with_the_same_tokens(
    folder: Folder, swap: dict[str, Any], tmp_path: Any
) -> None:
    options = dict(swap_space="1MiB", swap_path=str(tmp_path)) if "to_file" in swap else swap
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with folder.alone("llama") as llm:
        expected = texts(llm.generate(PROMPTS, params))
    # A token is 1 KiB in one process and 512 bytes in each rank: 6 blocks are too few for all.
    room = 48 * 1024 if options else 2**20
    with folder.ranked("llama", kv_cache_memory_bytes=room, **options) as llm:
        # Whether it is worth its time is not asked here.
        llm.engine.scheduler.costs.note_step = lambda *_: None  # type: ignore[method-assign]
        watch = Watch(llm)

        def crowd(usage: Usage) -> None:
            watch(usage)
            if len(watch.committed) == 6 and not options:  # who would not wait else
                llm.engine.scheduler.preempt_youngest(spare_oldest=True)

        assert texts(llm.generate(PROMPTS, params, observe=crowd)) == expected
        stats = llm.engine.scheduler.statistics
        assert stats.num_preemptions > 0
        assert (stats.num_swaps > 0) == bool(options)


def test_what_begins_alike_is_computed_once_and_what_ends_early_is_given_back(
    folder: Folder,
) -> None:
    with folder.ranked("llama") as llm:
        first = llm.generate([PROMPTS[0]], GREEDY)
        again = llm.generate([PROMPTS[0]], GREEDY, observe=Watch(llm))
        assert again[0].num_cached_tokens >= 32
        assert texts(again) == texts(first)
        for delta in llm.stream(PROMPTS, GREEDY):
            assert delta.token_ids
            break
        assert llm.usage().num_sequences == 0
        assert llm.reset_prefix_cache()
        assert llm.memory.committed_bytes == llm._team.least_committed_bytes == 0  # type: ignore[union-attr]
        llm.resize("512KiB")
        assert texts(llm.generate([PROMPTS[0]], GREEDY, observe=Watch(llm))) == texts(first)


@pytest.mark.parametrize("cache", only(sorted(STRATEGIES), "contiguous", "virtual"))
def test_a_rank_commits_what_the_plan_of_its_files_says(folder: Folder, cache: str) -> None:
    options = dict(OPTIONS, cache=cache, attention_backend="reference", enable_prefix_caching=False)
    asked = PlannedLengths(input_tokens=26, output_tokens=14)
    subject = find_subject(str(folder.of("llama")))
    config = EngineConfig.from_options(**options)
    course = plan(subject, config, host(), num_ranks=2, request=asked, compare=False).cell.course
    llm = folder.ranked("llama", **options)
    with llm:
        watch = Watch(llm)
        params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
        llm.generate([PROMPTS[0][:26]], params, observe=watch)
        assert max(watch.committed) == course.end.committed_bytes > 0
        assert llm.memory.peak_committed_bytes == course.peak_bytes


def test_a_step_that_fails_in_all_ranks_alike_is_done_again(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All fail at the same place, so no rank waits for another, and the crew goes on."""
    with folder.alone("llama") as llm:
        expected = texts(llm.generate(PROMPTS, GREEDY))
    with folder.ranked("llama") as llm:
        forward, wanted = llm.engine._runner._forward, iter([None, 10**6])  # type: ignore[attr-defined]

        def forward_past_the_end(chunks: Any, ids: Any, logits_at: Any, *rest: Any) -> Any:
            past = next(wanted, None)
            return forward(chunks, ids, logits_at if past is None else [past], *rest)

        monkeypatch.setattr(llm.engine._runner, "_forward", forward_past_the_end)
        assert texts(llm.generate(PROMPTS, GREEDY, observe=Watch(llm))) == expected
        assert next(wanted, None) is None


def test_another_thread_may_step(folder: Folder) -> None:
    with folder.ranked("llama") as llm:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(llm.generate(PROMPTS, GREEDY)))
        thread.start()
        thread.join()
        assert texts(found[0]) == texts(llm.generate(PROMPTS, GREEDY))


def test_keys_that_are_not_divided_are_said_to_be_kept_by_all(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "quire"):
        folder.parts("deepseek_v3")
    assert folder.parts("deepseek_v3").spec.bytes_per_token > 0


def test_one_crew_at_a_time(folder: Folder) -> None:
    with pytest.raises(ConfigError, match="in a process group"):
        WorkerGroup(2).start()
