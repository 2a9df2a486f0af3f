"""Residency as an engine's option: what is backed, kept and given back, and who may ask for it."""

import pytest

import quire
from quire.errors import ConfigError
from quire.memory import HostMemory

MIB = 2**20
GREEDY = quire.SamplingParams(max_tokens=8, temperature=0.0)
OPTIONS = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory_bytes": 8 * MIB}


def text(llm: quire.LLM) -> str:
    return llm.generate("def f(x):", GREEDY)[0].text


def test_prefault_backs_the_capacity_and_keeps_it() -> None:
    with quire.LLM(**OPTIONS) as plain:
        expected = text(plain)
        assert plain._resident.kept_bytes == 0
    with quire.LLM(residency="prefault", **OPTIONS) as llm:
        assert llm._resident.kept_bytes == 8 * MIB
        assert llm.memory.committed_bytes == 0
        assert text(llm) == expected
        assert llm.memory.committed_bytes + llm._resident.kept_bytes == 8 * MIB
        llm.reset_prefix_cache()
        assert llm._resident.kept_bytes == 8 * MIB


def test_a_lowered_capacity_gives_kept_pages_back() -> None:
    with quire.LLM(residency="prefault", **OPTIONS) as llm:
        llm.resize(3 * MIB)
        assert llm.memory.committed_bytes + llm._resident.kept_bytes <= 3 * MIB
        assert text(llm)
        assert llm.memory.committed_bytes + llm._resident.kept_bytes <= 3 * MIB


def test_a_rule_that_commits_whole_backs_at_the_start() -> None:
    options = {**OPTIONS, "kv_cache_memory_bytes": None}
    with quire.LLM(budget="llamacpp", **options) as llm:
        assert llm.ledger.committed_whole
        assert llm._resident.kept_bytes == llm.ledger.require()


def test_locking_is_for_memory_of_our_own() -> None:
    with pytest.raises(ConfigError, match=r"residency=lock .* leave out provider"):
        quire.LLM(residency="lock", provider=HostMemory(), **OPTIONS)
