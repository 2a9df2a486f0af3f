"""Where a model is found: folders, files, the table, the hub; and what is said where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from quire.errors import ModelNotLoadable
from quire.planner.subject import find_subject
from quire.spec.model_files import find_folder

DEMO = find_folder(None)
assert DEMO is not None


def test_a_config_by_itself_is_an_estimate_and_near_the_files(tmp_path: Path) -> None:
    exact, estimated = find_subject(), find_subject(str(DEMO / "config.json"))
    assert estimated.weights_are_estimated
    assert not exact.weights_are_estimated
    assert estimated.spec == exact.spec
    assert estimated.own.weights_bytes == pytest.approx(exact.own.weights_bytes, rel=0.01)
    assert estimated.own.activation_bytes(512, 4) == exact.own.activation_bytes(512, 4)


def test_a_folder_without_weights_is_an_estimate_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    assert find_subject(str(tmp_path)).weights_are_estimated


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(
    ("said", "is_quantized"),
    [({"quant_method": "gptq", "bits": 4}, True), ({"quant_method": "new"}, True), (None, False)],
)
def test_codes_of_a_quantized_checkpoint_stay_as_they_are(
    tmp_path: Path, field: str, said: Any, is_quantized: bool
) -> None:
    """And their scales; tables and norms get the dtype that is asked for."""
    config = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: said}))
    where = "model.layers.0.self_attn.q_proj"
    tensors = {
        "model.embed_tokens.weight": torch.zeros(64, 8, dtype=torch.bfloat16),
        "model.norm.weight": torch.zeros(8),
        f"{where}.qweight": torch.zeros(8, 3, dtype=torch.int32),
        f"{where}.scales": torch.zeros(3, 5, dtype=torch.float16),
        f"{where}.qweight.absmax": torch.zeros(7, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        found = find_subject(str(tmp_path), dtype=dtype).own.weights_bytes
        assert found == (64 * 8 + 8) * size + 8 * 3 * 4 + (3 * 5 + 7) * (
            2 if is_quantized else size
        )


@pytest.fixture(autouse=True)
def _hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda _: None)


def test_the_hub_gives_a_config_and_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"model.embed_tokens.weight": SimpleNamespace(dtype="BF16", shape=[4096, 256])}
    files = {"model.safetensors": SimpleNamespace(tensors=tensors)}
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: str(DEMO / "config.json"))
    monkeypatch.setattr(
        huggingface_hub,
        "get_safetensors_metadata",
        lambda _: SimpleNamespace(files_metadata=files),
    )
    found = find_subject("owner/something")
    assert found.own.weights_bytes == 4096 * 256 * 2
    assert "from the hub" in found.source


def test_a_hub_that_gives_the_config_alone_leaves_an_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: str(DEMO / "config.json"))
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", refuse)
    assert find_subject("owner/something").weights_are_estimated


def test_a_hub_that_cannot_be_reached_is_said_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(ModelNotLoadable, match=r"no network.*the table has 'Qwen/Qwen3-4B'"):
        find_subject("owner/Qwen3-4Bx")


def refuse(*_: Any) -> Any:
    raise OSError("no network")
