"""Options are checked when they are given; an error names the option, its value and its limit."""

from dataclasses import fields

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError


def test_defaults_work_and_there_are_few_options() -> None:
    EngineConfig()
    assert len(fields(EngineConfig)) <= 25
    assert all(option.metadata["help"].endswith(".") for option in fields(EngineConfig))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"cache": "magic"},
            "cache 'magic' is unknown; known: contiguous, growing, paged, virtual",
        ),
        ({"dtype": "int3"}, "dtype 'int3' is unknown"),
        (
            {"kv_cache_dtype": "int8"},
            "kv_cache_dtype 'int8' is unknown; known: auto, float32, bfloat16, float16, fp8, "
            "fp8_e4m3, int8_per_token_head",
        ),
        ({"growth": "wild"}, "growth 'wild' is unknown"),
        ({"block_size": 0}, "block_size=0 must be from 1 to"),
        ({"max_model_len": -5}, "max_model_len=-5 must be"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0 must be from 1 to"),
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
