"""The table and the JSON of hit rates, and the flags that cannot be."""

import json
from pathlib import Path

import pytest

from quire.cli.hit_rates import hit_rates
from quire.errors import ConfigError
from traces import files


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(files.written(tmp_path, "m.jsonl", files.rows(files.MOONCAKE)))


def test_the_tables(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    hit_rates(trace, cache_tokens="1.6k,1M")
    out = " ".join(capsys.readouterr().out.split())
    assert "percent of 3,200 prompt tokens (mooncake, blocks of 512)" in out
    # 1,024 tokens are found once more: 32 %.
    for line in ("choice", "lru", "optimum", "1.6k", "1M", "32.0", "seen for the first time"):
        assert line in out
    assert "3 requests. A cache of 3.072k tokens evicts nothing." in out
    assert "refuse some" not in out
    hit_rates(trace, cache_tokens="512", policies="lru")
    assert "The longest prompt has 1,536 tokens in blocks: a smaller cache refuses such" in (
        capsys.readouterr().out
    )


def test_as_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    hit_rates(trace, policies="lru", whole_blocks=True, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["trace_format"] == "mooncake"
    assert found["infinite"]["hit_tokens"] == 1024
    (only,) = found["policies"]["lru"]
    assert only["hit_fraction"] == 0.32
    assert only["evicted_tokens"] == 0
    assert only["partial_tokens"] == 3200 - 512 * (2 + 2 + 1)


LLAMA = "meta-llama/Llama-3.1-8B"


def test_tiers_behind_each_cache(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = dict(cache_tokens="1.6k,1M", policies="lru", model=LLAMA, tier_speed=["memory=25,25"])
    hit_rates(trace, **asked, kv_tier=["memory:?size=1GiB"], as_json=True)  # type: ignore[arg-type]
    found = json.loads(capsys.readouterr().out)
    (tier,) = found["tiers"]
    assert (tier["name"], tier["block_size"], tier["capacity_bytes"]) == ("memory", 16, 2**30)
    small, large = found["behind"]["caches"]
    # What a cache of any size finds, both find together; in the large one all of it is at hand.
    assert small["hit_tokens"] == large["hit_tokens"] == large["pool_hit_tokens"] == 1024
    assert small["pool_hit_tokens"] + small["tiers"][0]["hit_tokens"] == 1024
    assert large["tiers"][0]["num_loads"] == 0
    assert small["saved_s"] >= 0 == large["saved_s"]
    hit_rates(trace, **asked, kv_tier=["memory:?size=1GiB", "file:/kv"])  # type: ignore[arg-type]
    out = " ".join(capsys.readouterr().out.split())
    for words in ("with blocks of meta-llama", "found in the cache", "found in file:/kv", "saved"):
        assert words in out


def test_skipped_rows_are_told(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Path(trace).open("a") as file:
        file.write("nothing\n")
    hit_rates(trace, max_skipped=1)
    assert "1 rows were skipped; the first is line 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"policies": "fifo"}, "--policies 'fifo' is unknown; known: choice, "),
        ({"cache_tokens": "many"}, "'many' is not a count: write e.g. 4M"),
        ({"cache_tokens": "1"}, "a cache of 1 tokens is smaller than one block"),
        ({"warmup_fraction": 1.0}, "--warmup-fraction 1.0 must be"),
        ({"max_skipped": -1}, "--max-skipped -1"),
        ({"block_size": 500}, "--block-size 500"),
        ({"trace_format": "x"}, "'x' is none of azure"),
        ({"kv_tier": ["memory:"]}, "needs a size"),
        ({"kv_tier": ["file:/kv"], "tier_speed": ["redis=1,1"]}, "'redis': they are of file"),
        ({"tier_size": ["redis=1GiB"]}, "no kv_tier is of the kind 'redis': there is none"),
        ({"kv_tier": ["file:/kv"], "device": "abacus"}, "abacus"),
        ({"model": "demo"}, "is of use with --kv-tier only"),
    ],
)
def test_what_cannot_be_asked(trace: str, option: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hit_rates(trace, **option)  # type: ignore[arg-type]
