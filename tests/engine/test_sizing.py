"""The engine's capacity comes from a ledger, which it keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import quire
from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.kv_sizing import kv_needs, ledger_for
from quire.errors import ConfigError, MemoryUnavailable
from quire.memory import by_device
from quire.memory.budget import Footprint, Needs
from quire.memory.machine import Machine
from quire.memory.machine.probe import MemoryBound
from quire.models.loader import load
from quire.spec import ModelSpec
from tiny import tiny_model

MIB, GIB = 2**20, 2**30
QWEN3_4B = ModelSpec.from_config(
    {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 2560,
        "max_position_embeddings": 40960,
        "dtype": "bfloat16",
    }
)
OWN = Footprint(
    weights_bytes=8 * GIB,
    counted_bytes=0,
    hidden_size=2560,
    widest_rows=9728,
    vocab_size=151_936,
    item_bytes=2,
)


def needs_of(**options: Any) -> Needs:
    return kv_needs(EngineConfig(**options), "qwen", QWEN3_4B, OWN, 4096)


def test_a_models_needs_are_those_of_its_spec() -> None:
    needs = needs_of()
    assert needs.bytes_per_token == 147_456
    assert needs.context_tokens == 40_960
    assert needs.least_bytes == 128 * 147_456
    assert needs_of(kv_cache_dtype="fp8").bytes_per_token == 147_456 // 2


def test_a_whole_range_is_the_least_that_contiguous_can_use() -> None:
    needs = needs_of(cache="contiguous", max_model_len=8192)
    assert needs.least_bytes == 8192 * 147_456
    by_request = needs_of(cache="contiguous", max_model_len=8192, reserve="request")
    assert by_request.least_bytes == 128 * 147_456


@pytest.mark.parametrize("cache", ["contiguous", "growing", "paged", "virtual"])
def test_the_most_is_all_sequences_at_their_longest(cache: str) -> None:
    most = needs_of(cache=cache, max_num_seqs=4, max_model_len=4096).most_bytes
    assert most is not None
    full = 4 * 4096 * 147_456
    assert full < most < full * (2.2 if cache == "growing" else 1.1)


def test_what_a_step_takes_grows_with_its_tokens() -> None:
    few, many = (needs_of(max_num_batched_tokens=n).activation_bytes for n in (1, 8192))
    assert few < many


def test_graphs_compute_with_a_batch_of_one_layers_states() -> None:
    """Of the widest: as it was, as it is then, and once in between."""
    spec = ModelSpec.from_config(
        {
            "model_type": "mamba",
            "num_hidden_layers": 48,
            "hidden_size": 2560,
            "intermediate_size": 5120,
            "state_size": 16,
            "conv_kernel": 4,
            "dtype": "bfloat16",
        }
    )
    config = EngineConfig(max_num_seqs=64, max_model_len=4096)
    needs = kv_needs(config, "mamba", spec, OWN, 4096, on_gpu=True)
    layer_bytes = 5120 * 4 * 2 + 5120 * 16 * 4  # a convolution and a scan
    assert needs.graph_bytes == OWN.graph_bytes(64) + 3 * 64 * layer_bytes
    assert not kv_needs(config, "mamba", spec, OWN, 4096).graph_bytes


def test_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len=50,000 is more than qwen was made for"):
        needs_of(max_model_len=50_000)


def test_options_choose_the_rule() -> None:
    bound = MemoryBound(source="MemAvailable", limit_bytes=64 * GIB, used_bytes=4 * GIB)
    machine = Machine(bounds=(bound,), ram_bytes=64 * GIB, ram_used_bytes=4 * GIB)
    config = EngineConfig(budget="vllm", memory_utilization=0.5)
    ledger = ledger_for(config, needs_of(), machine)
    assert ledger.rule == "vllm"
    assert ledger.terms[1].num_bytes == -32 * GIB
    given = ledger_for(replace(config, kv_cache_memory_bytes=GIB), needs_of(), machine)
    assert given.require() == GIB


def test_an_llm_keeps_its_ledger_and_its_cache_has_that_capacity() -> None:
    with LLM(load(), max_num_seqs=2, max_model_len=512) as llm:
        assert llm.ledger.rule == "auto"
        assert 2 * 512 * 4096 <= llm.ledger.kv_bytes < 2 * 2 * 512 * 4096
    with LLM(load(), kv_cache_memory_bytes="3MiB") as llm:
        assert llm.ledger.kv_bytes == 3 * MIB


def test_an_llm_that_cannot_have_its_memory_says_what_it_could_have() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes") as refused:
        LLM(load(), kv_cache_memory_bytes="900TiB")
    assert "the most that fits" in str(refused.value)


def test_a_full_house_fits_below_the_cap() -> None:
    """The cap is no limit to what it promises: all sequences run to their longest at once."""
    from quire import SamplingParams

    params = SamplingParams(max_tokens=29, ignore_eos=True)
    for cache in ("contiguous", "growing", "paged", "virtual"):
        with LLM(load(), cache=cache, max_num_seqs=3, max_model_len=32) as llm:
            assert llm.ledger.bound == "max_num_seqs × max_model_len"
            done = llm.generate([[1, 2, 3], [4, 5, 6], [7, 8, 9]], params)
            assert [len(one.token_ids) for one in done] == [29] * 3


def test_only_a_rule_that_asks_what_this_process_has_has_its_pages_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system counts them one by one: tens of milliseconds in a process with gigabytes."""
    asked: list[str] = []
    for name in ("read_limits", "read_machine"):
        own = getattr(by_device, name)
        monkeypatch.setattr(
            by_device, name, lambda name=name, own=own, **told: asked.append(name) or own(**told)
        )
    model = tiny_model("llama")
    options: dict[str, Any] = dict(max_model_len=64, max_num_seqs=2)
    by_share = {"budget": "vllm", "memory_utilization": 0.1}
    for given in ({"kv_cache_memory_bytes": "1MiB", "budget": "llamacpp"}, {}, by_share):
        LLM(model, **options, **given).close()
    assert set(asked) == {"read_limits"}
    LLM(model, **options, budget="llamacpp").close()
    assert asked[-1] == "read_machine"


# -- a system that does not say how much memory there is -------------------------------------------


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_device, "tells_memory", lambda: False, raising=False)

    def read_machine(*_: object, **__: object) -> Machine:
        raise MemoryUnavailable("the system does not say how much memory there is")

    monkeypatch.setattr(by_device, "read_machine", read_machine)


@pytest.mark.usefixtures("silent")
def test_where_nothing_is_told_what_is_stated_is_given(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    with LLM(model, max_model_len=64, kv_cache_memory_bytes="1MiB") as llm:
        (got,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(got.token_ids) == 4
        assert llm.ledger.kv_bytes == 2**20
        assert "not checked" in llm.ledger.room_source
    with quire.cache(model, "paged", kv_cache_memory_bytes="1MiB", max_model_len=64) as cache:
        assert cache.usage().num_tokens == 0
    told = [r.getMessage() for r in caplog.records if "cannot check" in r.getMessage()]
    assert len(told) == 2
    assert all("kv_cache_memory_bytes=1.00 MiB is used as stated" in each for each in told)


@pytest.mark.usefixtures("silent")
def test_where_nothing_is_told_the_option_to_state_is_named() -> None:
    model = tiny_model("llama")
    with pytest.raises(MemoryUnavailable, match="state the KV budget, kv_cache_memory_bytes"):
        LLM(model, max_model_len=64)
    with pytest.raises(MemoryUnavailable, match="state the KV budget, kv_cache_memory_bytes"):
        quire.cache(model, "paged", max_model_len=64)
