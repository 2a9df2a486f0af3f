"""An engine with another package's attention and eviction: the tokens are those of generate()."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from plugged import installed_examples
from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.kv import EVICTION_POLICIES, CachedBlock, Score, ScoredPolicy
from tiny import CONFIGS, random_model

SYSTEM = [5, 9, 2, 77, 31, 8, 64, 101, 12, 13, 90, 17, 33, 4, 6, 50]
PROMPTS = [[*SYSTEM, 40 + at % 4, at, 3 * at % 190] for at in range(1, 9)]  # 0 is padding
SIZES = dict(max_model_len=32, max_num_seqs=2, block_size=4)
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def test_tokens_are_those_of_generate(tmp_path: Path) -> None:
    model = random_model(CONFIGS["gpt_oss"]())  # it has sinks, and windows
    options = dict(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    want = [
        tuple(model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist())
        for ids in PROMPTS
    ]
    with (
        installed_examples(tmp_path),
        LLM(
            model,
            attention_backend="einsum",
            prefix_caching_policy="lfu",
            kv_cache_memory_bytes=2**15,
            **SIZES,
        ) as llm,
    ):
        assert llm.attention_backend == "einsum"
        found = llm.generate(PROMPTS, GREEDY)
        assert [each.token_ids for each in found] == want
        assert sum(each.num_cached_tokens for each in found) > 0
        assert llm.accounting.pools.num_evicted_blocks > 0


class Told(ScoredPolicy):
    """A policy that evicts what has ended, and notes what it has seen of each block."""

    seen: ClassVar[list[tuple[int, bool]]] = []

    def score(self, block: CachedBlock, now: int) -> Score:
        self.seen.append((block.depth, block.ended))
        return not block.ended, block.last_used


def test_a_policy_is_told_which_conversations_end_with_a_request() -> None:
    Told.seen.clear()
    ends = replace(GREEDY, cache_hint="ends")
    EVICTION_POLICIES.register("told", Told)
    try:
        with LLM(random_model(CONFIGS["llama"]()), prefix_caching_policy="told", **SIZES) as llm:
            for params, said in ((GREEDY, False), (ends, True), (GREEDY, False)):
                llm.generate([SYSTEM], params)
                whole_blocks = (len(SYSTEM) + GREEDY.max_tokens - 1) // 4
                assert sorted(Told.seen) == [(depth, said) for depth in range(whole_blocks)]
                Told.seen.clear()
    finally:
        EVICTION_POLICIES.unregister("told")


def test_an_unknown_name_is_refused_with_the_group_of_entry_points() -> None:
    for option, group in (
        ("attention_backend", r"quire\.attention_backends"),
        ("prefix_caching_policy", r"quire\.eviction_policies"),
    ):
        with pytest.raises(ConfigError, match=f"{option}='mine' is no .*{group}"):
            LLM(random_model(CONFIGS["llama"]()), **{option: "mine"})
