"""Headers of weight files: all the bytes of a model, and none of its weights read."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ModelNotLoadable
from quire.models.footprint import footprint
from quire.models.loader import load
from quire.planner.subject import find_subject
from quire.planner.weights import read_header, stored_tensors
from quire.spec.model_files import find_folder
from tiny import tiny_model

KINDS = ("llama", "gemma3", "gpt_oss", "deepseek_v3")


def saved(name: str, folder: Path) -> Any:
    model = tiny_model(name)
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


def tables_in_no_file(model: Any) -> int:
    kept = set(model.state_dict())
    return sum(tensor.nbytes for name, tensor in model.named_buffers() if name not in kept)


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_has_the_bytes_of_the_model_it_becomes(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    own, planned = footprint(model), find_subject(str(tmp_path)).own
    assert planned.weights_bytes == own.weights_bytes - tables_in_no_file(model)
    assert planned.activation_bytes(512, 4) == own.activation_bytes(512, 4)


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_the_demo_model_in_every_dtype(dtype: str) -> None:
    loaded, subject = load(dtype=dtype), find_subject(dtype=dtype)
    tables = tables_in_no_file(loaded.model)
    assert subject.own.weights_bytes == footprint(loaded.model).weights_bytes - tables
    assert subject.spec == loaded.spec


def test_a_tied_head_is_loaded_once(tmp_path: Path) -> None:
    folder = find_folder(None)
    assert folder is not None
    tensors = stored_tensors(folder)
    assert tensors is not None
    assert not any(name.endswith("lm_head.weight") for name in tensors)
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True


@given(st.binary(max_size=64))
def test_no_bytes_make_a_traceback(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        file.write_bytes(content)
        with pytest.raises(ModelNotLoadable, match="is not a safetensors file"):
            read_header(file)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotLoadable, match=r"model-00001-of-00002.safetensors is missing"):
        stored_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelNotLoadable, match="does not map tensors"):
        stored_tensors(tmp_path)
