"""Which backend is chosen, and that each one passed over is named with the reason."""

import logging
import sys
from pathlib import Path

import pytest
import torch

import quire
from quire.attention import BACKENDS, choose_backend
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kv import EVICTION_POLICIES
from quire.spec import FullAttention, LatentAttention
from tiny import tiny_model

CPU = torch.device("cpu")


def layer(dtype: str = "bfloat16") -> FullAttention:
    return FullAttention(num_kv_heads=2, head_dim=16, dtype=dtype)


def test_auto_takes_the_kernels_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quire"):
        assert choose_backend("auto", [layer()], CPU).name == "cpu"
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("INFO", "attention backend: cpu")
    ]


@pytest.mark.parametrize("name", ["cpu", "sdpa", "reference"])
def test_a_name_is_that_backend(name: str) -> None:
    assert choose_backend(name, [layer()], CPU).name == name


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    known = ", ".join(BACKENDS)
    with pytest.raises(ConfigError, match=f"='flash' is no attention backend; known: {known}"):
        choose_backend("flash", [layer()], CPU)


@pytest.mark.parametrize(
    ("device", "why"),
    [("cpu", "it runs on CUDA, not on cpu"), ("cuda", "it is not installed")],
)
def test_flashinfer_says_what_is_missing(
    device: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.attention.flashinfer.backend.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"'flashinfer': flashinfer cannot serve: {why}"):
        choose_backend("flashinfer", [layer()], torch.device(device))


def test_on_a_gpu_flashinfer_is_asked_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.attention.flashinfer.backend.cannot_run", lambda device: None)
    caplog.set_level(logging.INFO, "quire")
    gpu = torch.device("cuda")
    wide = FullAttention(num_kv_heads=2, head_dim=128, dtype="bfloat16")
    found = choose_backend("auto", [wide], gpu)
    assert found.name == "flashinfer"
    # Its plans are made anew for each replay; those of latents are not, and Triton takes those.
    assert (found.replays is None) == (found.make_writer is None)
    latent = LatentAttention(latent_dim=512, rope_dim=64, dtype="bfloat16")
    assert choose_backend("flashinfer", [latent], gpu).replays is None
    assert choose_backend("auto", [layer()], gpu).name != "flashinfer"
    assert "its heads are 64, 128, 256 wide, not 16" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "device", "why"),
    [("float64", "cpu", "no kernel for float64"), ("bfloat16", "meta", "not of meta")],
)
def test_what_the_kernels_cannot_serve_falls_to_torch_aloud(
    dtype: str, device: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    specs = [layer(), layer(dtype)]  # one layer is enough
    with caplog.at_level(logging.INFO, "quire"):
        assert choose_backend("auto", specs, torch.device(device)).name == "sdpa"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert why in record.message
    with pytest.raises(ConfigError, match=why):
        choose_backend("cpu", specs, torch.device(device))


def test_without_llvmlite_torch_attends_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [n for n in sys.modules if n.startswith("quire.attention.cpu")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(sys.modules["quire.attention"], "cpu", raising=False)
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    with caplog.at_level(logging.INFO, "quire"):
        assert choose_backend("auto", [layer()], CPU).name == "sdpa"
    assert "llvmlite cannot be imported" in caplog.text
    with pytest.raises(ConfigError, match="llvmlite cannot be imported"):
        choose_backend("cpu", [layer()], CPU)


def test_an_engine_says_what_it_attends_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_model_len": 64, "kv_cache_memory_bytes": "16MB"}
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("QUIRE_CACHE_DIR", str(tmp_path))  # of a model with few kernels
        with quire.LLM(tiny_model("llama"), **options) as llm:
            assert llm.attention_backend == "cpu"
        assert list(tmp_path.glob("*.o"))
    with quire.LLM(attention_backend="sdpa", **options) as llm:
        assert llm.attention_backend == "sdpa"
    with pytest.raises(ConfigError, match="known: auto, "):
        quire.LLM(attention_backend="flash", **options)
    with pytest.raises(ConfigError, match="it runs on CUDA, not on cpu"):
        quire.LLM(attention_backend="flashinfer", **options)


def test_quires_own_names_are_known_without_a_look_at_what_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It costs 20 ms, which a command's help does not wait for."""

    def looked(**_: str) -> None:
        raise AssertionError("entry points were looked up")

    monkeypatch.setattr("importlib.metadata.entry_points", looked)
    for registry in (BACKENDS, EVICTION_POLICIES):
        monkeypatch.setattr(registry, "_found", None)
    EngineConfig(attention_backend="sdpa", prefix_caching_policy="lru")
    with pytest.raises(AssertionError, match="looked up"):
        EngineConfig(attention_backend="another")
