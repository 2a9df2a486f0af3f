"""Options are checked when they are given; an error names the option, its value and its limit."""

import os
from dataclasses import fields

import pytest

from quire.config import EngineConfig, as_rank
from quire.errors import ConfigError


def test_defaults_work_and_there_are_few_options() -> None:
    EngineConfig()
    assert (
        len(fields(EngineConfig)) <= 41
    )  # docs/decisions/0062, 0069, 0070, 0075, 0112, 0116, 0134, 0136, 0152
    assert all(option.metadata["help"].endswith(".") for option in fields(EngineConfig))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"cache": "magic"},
            "cache='magic' is no cache strategy; known: contiguous, growing, paged, virtual",
        ),
        ({"batch_invariant": "no"}, "batch_invariant='no' must be true or false"),
        ({"enable_prefix_caching": None}, "enable_prefix_caching=None must be true or false"),
        ({"device": "gpu"}, "device 'gpu' is unknown; known: auto, cpu, cuda, cuda:1"),
        ({"device": "cuda:"}, "device 'cuda:' is unknown"),
        ({"dtype": "int3"}, "dtype 'int3' is unknown"),
        (
            {"kv_cache_dtype": "int8"},
            "kv_cache_dtype 'int8' is unknown; known: auto, float32, bfloat16, float16, fp8, "
            "fp8_e4m3, int8_per_token_head",
        ),
        ({"limit_mm_per_prompt": "cat=2"}, "limit_mm_per_prompt: unknown 'cat'"),
        ({"limit_mm_per_prompt": "{"}, "limit_mm_per_prompt '{' is not JSON"),
        ({"limit_mm_per_prompt": "image=x"}, "limit_mm_per_prompt: image='x' must be a whole"),
        ({"limit_mm_per_prompt": "image=²"}, "limit_mm_per_prompt: image='²' must be a whole"),
        ({"limit_mm_per_prompt": {"image": -1}}, "limit_mm_per_prompt: image=-1 must be from 0"),
        ({"growth": "wild"}, "growth 'wild' is unknown"),
        ({"block_size": 0}, "block_size=0 must be from 1 to"),
        ({"max_model_len": -5}, "max_model_len=-5 must be"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0 must be from 1 to"),
        ({"budget": "vlm"}, "budget 'vlm' is unknown; known: auto, vllm, mistralrs, llamacpp"),
        ({"memory_utilization": 1.5}, "memory_utilization=1.5 must be above 0 and at most 1"),
        ({"memory_utilization": 0}, "memory_utilization=0 must be above 0"),
        ({"memory_utilization": float("nan")}, "memory_utilization=nan must be above 0"),
        ({"memory_mode": "mine"}, "memory_mode 'mine' is unknown; known: shared, dedicated"),
        ({"residency": "always"}, "residency 'always' is unknown; known: on-demand, prefault"),
        ({"max_modle_len": 5}, "unknown option 'max_modle_len'; did you mean 'max_model_len'?"),
        ({"zzz": 1}, "unknown option 'zzz'; known: attention_backend"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(**options)
    assert said in str(caught.value)


def test_sizes_may_be_words() -> None:
    config = EngineConfig.from_options(kv_cache_memory_bytes="1.5GiB")
    assert config.kv_cache_memory_bytes == 3 * 2**29


# -- the environment -------------------------------------------------------------------------------


def test_every_option_may_be_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "QUIRE_MAX_NUM_SEQS": "8",
        "QUIRE_MAX_MODEL_LEN": "4096",
        "QUIRE_WATERMARK": "0.25",
        "QUIRE_MEMORY_UTILIZATION": "0.5",
        "QUIRE_ENABLE_PREFIX_CACHING": "False",
        "QUIRE_KV_CACHE_MEMORY_BYTES": "1.5GiB",
        "QUIRE_MEMORY_MODE": "dedicated",
        "QUIRE_CACHE": "virtual",
        "QUIRE_SEED": "",  # as good as unset
    }
    for name, text in said.items():
        monkeypatch.setenv(name, text)
    assert EngineConfig.from_options() == EngineConfig(
        max_num_seqs=8,
        max_model_len=4096,
        watermark=0.25,
        memory_utilization=0.5,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=3 * 2**29,
        memory_mode="dedicated",
        cache="virtual",
    )
    assert EngineConfig() == EngineConfig(max_num_seqs=64), "only from_options looks there"


def test_an_argument_counts_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_BLOCK_SIZE", "many")
    assert EngineConfig.from_options(block_size=32).block_size == 32


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("QUIRE_MAX_NUM_SEQS", "many", "QUIRE_MAX_NUM_SEQS: 'many' is not a whole number"),
        ("QUIRE_MAX_NUM_SEQS", "0", "QUIRE_MAX_NUM_SEQS: max_num_seqs=0 must be from 1"),
        ("QUIRE_WATERMARK", "nan", "QUIRE_WATERMARK: 'nan' is not a number"),
        ("QUIRE_ENABLE_PREFIX_CACHING", "maybe", "'maybe' is neither of 1, true, on, 0"),
        ("QUIRE_BUDGET", "vlm", "QUIRE_BUDGET: budget 'vlm' is unknown"),
        (
            "QUIRE_KV_CACHE_MEMORY_BYTES",
            "much",
            "QUIRE_KV_CACHE_MEMORY_BYTES: 'much' is not a size",
        ),
        ("VLLM_CPU_KVCACHE_SPACE", "inf", "VLLM_CPU_KVCACHE_SPACE: 'inf' is not a number"),
        ("VLLM_CPU_KVCACHE_SPACE", "-4", "VLLM_CPU_KVCACHE_SPACE: kv_cache_memory_bytes=-4,294"),
    ],
)
def test_a_wrong_value_names_the_variable(
    name: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options()
    assert said in str(caught.value)
    assert str(caught.value).startswith("environment variable ")


@pytest.mark.parametrize(("said", "meant"), [("1", True), ("0", False), ("on", True)])
def test_vllms_name_for_batch_invariance_counts_last(
    monkeypatch: pytest.MonkeyPatch, said: str, meant: bool
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", said)
    assert EngineConfig.from_options().batch_invariant is meant
    assert EngineConfig.from_options(batch_invariant=not meant).batch_invariant is not meant
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "0")
    assert not EngineConfig.from_options().batch_invariant
    monkeypatch.delenv("QUIRE_BATCH_INVARIANT")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "maybe")
    with pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT: 'maybe' is neither of"):
        EngineConfig.from_options()


def test_vllms_name_for_kv_memory_counts_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2.5")
    with caplog.at_level("INFO"):
        assert EngineConfig.from_options().kv_cache_memory_bytes == 5 * 2**29
    assert "VLLM_CPU_KVCACHE_SPACE says 2.5 GiB" in caplog.text
    assert EngineConfig.from_options(budget="vllm").kv_cache_memory_bytes is None
    assert EngineConfig.from_options(kv_cache_memory_bytes=7).kv_cache_memory_bytes == 7
    monkeypatch.setenv("QUIRE_KV_CACHE_MEMORY_BYTES", "1GiB")
    assert EngineConfig.from_options().kv_cache_memory_bytes == 2**30
    monkeypatch.delenv("QUIRE_KV_CACHE_MEMORY_BYTES")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")  # vLLM's default: its own choice
    assert EngineConfig.from_options().kv_cache_memory_bytes is None


def test_a_rank_is_named_in_the_environment_only_while_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    before = dict(os.environ)
    with as_rank(3, "lo"):
        assert os.environ["LOCAL_RANK"] == "3"
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7", "as the user said"
    assert dict(os.environ) == before
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with as_rank(1, "lo"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert not {"LOCAL_RANK", "GLOO_SOCKET_IFNAME"} & os.environ.keys()
