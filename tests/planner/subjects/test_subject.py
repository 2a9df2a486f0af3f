"""Where a model is found: folders, files, the table, the hub; and what is said where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

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
    config = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: said}))
    (tmp_path / "model.safetensors").symlink_to(DEMO / "model.safetensors")
    found = find_subject(str(tmp_path), dtype="float32").own.weights_bytes
    stored = find_subject().own.weights_bytes
    assert find_subject(dtype="float32").own.weights_bytes == 2 * stored
    assert found == (stored if is_quantized else 2 * stored)


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
