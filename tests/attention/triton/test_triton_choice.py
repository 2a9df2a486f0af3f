"""When attention is by Triton, and in what words it is not."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import quire
from attention.triton.interpreter import backend
from quire.attention import choose_backend
from quire.attention.triton import launch as gpu
from quire.errors import ConfigError
from quire.spec import FullAttention, LatentAttention
from tiny import CONFIGS, random_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def layer(dtype: str = "bfloat16", width: int = 16) -> FullAttention:
    return FullAttention(num_kv_heads=2, head_dim=width, dtype=dtype)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where TRITON_INTERPRET is not set."""
    monkeypatch.setattr(gpu, "interpreted", lambda: False)


def test_in_the_interpreter_it_is_found_by_its_name_alone() -> None:
    assert choose_backend("triton", [layer()], CPU).name == "triton"
    assert choose_backend("auto", [layer()], CPU).name == "cpu"


@pytest.mark.usefixtures("compiled")
def test_it_needs_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"it runs on CUDA, not on cpu .*TRITON_INTERPRET=1"):
        choose_backend("triton", [layer()], CPU)
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        choose_backend("triton", [layer()], CUDA)
    with caplog.at_level(logging.INFO, "quire"):
        assert choose_backend("auto", [layer()], CUDA).name == "sdpa"
    assert "triton cannot serve: torch sees no CUDA device" in caplog.text


def no_compiler(index: int) -> dict[str, int]:
    raise RuntimeError("Failed to find C compiler.\n  Please specify via CC")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("capability", "asked", "why"),
    [
        ((7, 5), lambda index: {}, "Turing has compute capability 7.5, and it needs 8.0"),
        ((8, 0), no_compiler, "Triton cannot use Turing: Failed to find C compiler. Please"),
        ((8, 0), lambda index: {"max_shared_mem": 65536}, None),
    ],
)
def test_it_needs_ampere_and_a_triton_that_works(
    capability: tuple[int, int], asked: Any, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(
        name="Turing", major=capability[0], minor=capability[1], multi_processor_count=40
    )
    limits = SimpleNamespace(get_device_properties=asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        gpu.triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=limits))
    )
    found = backend().unsupported(layer(), CUDA)
    assert found is None if why is None else why in str(found)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "this torch is for AMD's" in str(backend().unsupported(layer(), CUDA))


def test_without_triton_torch_attends_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [n for n in sys.modules if n.startswith("quire.attention.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(sys.modules["quire.attention"], "triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.INFO, "quire"):
        assert choose_backend("auto", [layer()], CUDA).name == "sdpa"
    assert "Triton cannot be imported" in caplog.text
    with pytest.raises(ConfigError, match="Triton cannot be imported"):
        choose_backend("triton", [layer()], CPU)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (layer("float64"), "no kernel for torch.float64"),
        (layer("float8_e5m2"), "no kernel for torch.float8_e5m2"),
        (layer(width=576), "entries of 576 elements, 512 at most"),
        (LatentAttention(latent_dim=512, rope_dim=64, dtype="int8"), None),
    ],
)
def test_which_layers_it_serves(spec: FullAttention, why: str | None) -> None:
    found = backend().unsupported(spec, CPU)
    assert found is None if why is None else why in str(found)


def test_queries_that_do_not_fit_are_refused() -> None:
    from conformance.attention_cases import make_case

    case = make_case(layer(), sharing=1, chunks=((3, 1),))
    for q, why in (
        (case.q[:, :1], "queries of 1 heads of 16 do not fit 2 heads of 16"),
        (case.q[..., :8], "queries of 2 heads of 8"),
        (case.q.double(), "no kernel for queries in torch.float64"),
    ):
        with pytest.raises(ValueError, match=why):
            backend().attend(q, case.view, case.fresh_batch(), spec=case.spec, scale=1.0)


@pytest.mark.full  # tests/devices/test_triton.py has it in graphs
def test_an_engine_gives_the_same_tokens() -> None:
    config = CONFIGS["llama"]()
    config.num_hidden_layers = 2
    model = random_model(config)
    options = {"max_model_len": 24, "max_num_seqs": 2, "kv_cache_memory_bytes": "16MB"}
    params = quire.SamplingParams(max_tokens=2, temperature=0.0)
    found = []
    for name in ("cpu", "triton"):
        with quire.LLM(model, attention_backend=name, **options) as llm:
            assert llm.attention_backend == name
            outputs = llm.generate([[3, 5, 7], [11]], params)
            found.append([output.token_ids for output in outputs])
    assert found[0] == found[1]
