"""A GPU's own memory under an engine, for real: measured, claimed, swapped, given back.

What others do with the device meanwhile is not known: figures of the driver are held to within what
graphs and libraries keep.
"""

import itertools
from typing import Any

import pytest
import torch

import target
from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.kv import STRATEGIES
from quire.memory.by_device import memory_for
from tiny import tiny_model, tokens

pytestmark = pytest.mark.gpu

MIB = 2**20
SPARE_BYTES = 512 * MIB  # graphs, workspaces, kernels
CACHES: dict[str, dict[str, Any]] = {
    **{name: {"cache": name, "enable_prefix_caching": False} for name in STRATEGIES},
    "virtual-shared": {"cache": "virtual"},
}
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (50, 40, 60, 55)]


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(target.device())
    return free


@pytest.mark.parametrize("cache", CACHES)
def test_what_is_claimed_at_the_start_is_there_and_goes_back(cache: str) -> None:
    model = tiny_model("qwen3").to(target.device())
    before = free_bytes()
    with LLM(
        model,
        residency="prefault",
        kv_cache_memory_bytes="2GiB",
        max_model_len=256,
        max_num_seqs=8,
        **CACHES[cache],
    ) as llm:
        terms = {term.label for term in llm.ledger.terms}
        assert "asked for" in terms
        assert before - free_bytes() >= 2048 * MIB - SPARE_BYTES
        llm.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
        assert llm.memory.committed_bytes == llm.usage().committed_bytes
        assert before - free_bytes() <= 2048 * MIB + SPARE_BYTES
    assert free_bytes() >= before - SPARE_BYTES


def test_a_step_is_measured_and_others_are_told_apart() -> None:
    with LLM(tiny_model("qwen3").to(target.device()), max_model_len=256) as llm:
        terms = {term.label: term for term in llm.ledger.terms}
    assert terms["activations"].source.startswith("measured")
    assert terms["activations"].num_bytes < 0
    assert "by others and the driver" in terms["used"].source


def test_locking_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="set residency=prefault"):
        memory_for(target.device(), "lock")


@pytest.mark.parametrize("cache", CACHES)
def test_tokens_are_the_same_after_a_swap(cache: str) -> None:
    """The sequence that makes room is chosen here: on such large pages, tiny models lack none."""
    model = tiny_model("llama").to(target.device())
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    options = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": "256MiB"}

    def outputs(*turns: int) -> list[list[int]]:
        with LLM(model, **options, **CACHES[cache], swap_space="64MiB") as llm:
            scheduler = llm.engine.scheduler
            scheduler.costs.note_step = lambda *_: None  # type: ignore[method-assign]
            plan, numbers = scheduler.plan, itertools.count()

            def make_room_and_plan(drafts: Any) -> Any:  # in a plan: what it takes is saved first
                if next(numbers) in turns:
                    scheduler._preempt(scheduler._queues.running[-1], "a test")
                return plan(drafts)

            scheduler.plan = make_room_and_plan  # type: ignore[method-assign]
            started = [llm.start(llm.request(p, params), lambda _: None)[0] for p in PROMPTS]
            while scheduler.has_unfinished:
                llm.engine.step()
            stats = scheduler.statistics
            assert stats.num_swaps == len(turns)
            assert (stats.loaded_bytes > 0) == bool(turns)
            return [sequence.output_token_ids for sequence in started]

    assert outputs(3, 9, 10, 21) == outputs()
