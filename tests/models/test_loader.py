"""From a name or a folder to a model, or to one sentence that says why not.

Each broken folder is a whole one with one thing wrong. What Transformers would let through with a
warning (tensors that are missing become random numbers) is refused too.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ModelNotLoadable, QuireError
from quire.models.loader import adopt, load
from quire.spec import ModelSpec
from tiny import tiny_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, as Transformers writes it."""
    folder = tmp_path_factory.mktemp("whole")
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    tiny_model("llama").save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture
def shards(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; None removes one."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def refusal(source: Any, error: type[QuireError] = ModelNotLoadable, **options: Any) -> str:
    """What the refusal says, on one line."""
    with pytest.raises(QuireError) as caught:
        load(source, **options)
    assert caught.type is error
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- what loads -----------------------------------------------------------------------------------


def test_a_folder_loads_in_its_own_dtype(folder: Path) -> None:
    loaded = load(folder)
    assert loaded.name == str(folder)
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert loaded.spec.groups[0].spec.dtype == "float32"
    assert loaded.tokenizer is None
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(loaded.model(ids).logits, tiny_model("llama")(ids).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_can_be_asked_for(folder: Path, dtype: str) -> None:
    loaded = load(str(folder), dtype=dtype)
    assert loaded.model.dtype == getattr(torch, dtype)
    assert loaded.spec.groups[0].spec.dtype == dtype


def test_shards_load(shards: Path) -> None:
    assert load(shards).model.num_parameters() == tiny_model("llama").num_parameters()


def test_files_that_are_not_loaded_do_not_matter(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_bytes(b"cut")
    (folder / INDEX).write_text("not JSON")
    load(folder)


def test_the_spec_is_the_one_that_a_plan_is_made_from(folder: Path) -> None:
    assert load(folder).spec == ModelSpec.from_file(folder)
    assert load().spec == ModelSpec.from_file(load().model.config._name_or_path)


def test_without_a_name_it_is_the_demo_model() -> None:
    loaded = load()
    assert loaded.name == "demo"
    assert loaded.tokenizer is not None


# -- names and options ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["owner/no-such-model", "no-such-model", "a/b/c", "a\0b", "x" * 99]
)
def test_an_unknown_name_is_refused(name: str) -> None:
    message = refusal(name)
    assert repr(name) in message
    assert "hub did not give it" in message


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at", Path("nowhere"), "~no-user-here/x"])
def test_a_folder_that_is_not_there_is_refused(name: str | Path) -> None:
    assert " folder" in refusal(name)


def test_a_file_is_not_a_folder(folder: Path) -> None:
    assert "is a file: give the folder" in refusal(folder / WEIGHTS)


def test_a_name_too_long_for_any_file_is_refused() -> None:
    assert len(refusal("x" * 5000)) < 5200
    assert "is not a folder" in refusal("/" + "x" * 5000)


@pytest.mark.parametrize("dtype", ["float8", "int8", "", None, 3])
def test_an_unknown_dtype_is_refused(folder: Path, dtype: Any) -> None:
    assert "known: auto, float32" in refusal(folder, ConfigError, dtype=dtype)


# -- config.json ----------------------------------------------------------------------------------


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "has no config.json" in refusal(tmp_path)


def test_without_config_json_it_is_no_model(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


@pytest.mark.parametrize("text", ["", "{", "not JSON", '{"a": }', "\udcff\udcfe", "[" * 100_000])
def test_a_config_that_is_not_json_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize("text", ["[]", "3", '"llama"', "null"])
def test_a_config_that_is_no_object_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "not a JSON object" in refusal(folder)


@pytest.mark.parametrize(
    "field",
    ["num_hidden_layers", "hidden_size", "max_position_embeddings"],
)
def test_a_config_without_a_needed_field_is_refused_by_its_name(folder: Path, field: str) -> None:
    """Transformers would fill it with a default of its own, for another model."""
    changes = {"head_dim": None} if field == "hidden_size" else {}
    edit_config(folder, **{field: None}, **changes)
    assert field in refusal(folder, ConfigError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", -1),
        ("num_hidden_layers", "four"),
        ("num_key_value_heads", 0),
        ("head_dim", 1.5),
        ("max_position_embeddings", {}),
        ("dtype", "float3"),
    ],
)
def test_a_field_that_cannot_be_is_refused_by_its_name(
    folder: Path, field: str, value: object
) -> None:
    edit_config(folder, **{field: value})
    assert field in refusal(folder, ConfigError)


@pytest.mark.parametrize("model_type", [None, "no_such_model", "bert", 7])
def test_a_model_type_that_cannot_run_is_refused(folder: Path, model_type: object) -> None:
    edit_config(folder, model_type=model_type, architectures=None)
    with pytest.raises((ModelNotLoadable, ConfigError)):
        load(folder)


def test_a_model_of_recurrent_layers_alone_is_loaded(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, MambaConfig

    config = MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with LLM(folder, kv_cache_memory_bytes="1MB", max_model_len=64) as llm:
        (said,) = llm.generate([[3, 4, 5]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(said.token_ids) == 3


def test_code_in_the_folder_is_never_run(folder: Path) -> None:
    edit_config(folder, model_type="special", auto_map={"AutoConfig": "evil.Config"})
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    refusal(folder)
    assert not (folder / "ran").exists()


# -- weights --------------------------------------------------------------------------------------


def test_without_weights_it_is_no_model(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert f"has no weights: neither {WEIGHTS}" in refusal(folder)


HEADER_LENGTH = 8


@pytest.mark.parametrize(
    "cut",
    [
        lambda size, header: 0,
        lambda size, header: 4,
        lambda size, header: HEADER_LENGTH,
        lambda size, header: HEADER_LENGTH + header // 2,
        lambda size, header: HEADER_LENGTH + header,
        lambda size, header: size // 2,
        lambda size, header: size - 1,
    ],
    ids=["empty", "in-length", "no-header", "in-header", "no-data", "half", "last-byte"],
)
def test_weights_that_are_cut_short_are_refused(
    folder: Path, cut: Callable[[int, int], int]
) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    header = int.from_bytes(whole[:HEADER_LENGTH], "little")
    (folder / WEIGHTS).write_bytes(whole[: cut(len(whole), header)])
    message = refusal(folder)
    assert WEIGHTS in message
    assert "corrupt or truncated" in message


@pytest.mark.parametrize("length", [0, 1, 2**40, 2**64 - 1])
def test_a_wrong_header_length_is_refused(folder: Path, length: int) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(length.to_bytes(HEADER_LENGTH, "little") + whole[HEADER_LENGTH:])
    assert "corrupt or truncated" in refusal(folder)


@pytest.mark.parametrize("damage", [b"{", b"\0" * 200, b"\xff" * 200])
def test_a_damaged_header_is_refused(folder: Path, damage: bytes) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    end = HEADER_LENGTH + len(damage)
    (folder / WEIGHTS).write_bytes(whole[:HEADER_LENGTH] + damage + whole[end + 1 :])
    assert "corrupt or truncated" in refusal(folder)


def test_a_folder_in_place_of_the_weights_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    refusal(folder)


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_missing_shard_is_refused_by_name(shards: Path, which: int) -> None:
    shard = sorted(shards.glob("*.safetensors"))[which]
    shard.unlink()
    message = refusal(shards)
    assert shard.name in message
    assert INDEX in message


def test_a_shard_that_is_cut_short_is_refused_by_name(shards: Path) -> None:
    shard = sorted(shards.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert shard.name in refusal(shards)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_maps_nothing_is_refused(shards: Path, text: str) -> None:
    (shards / INDEX).write_text(text)
    assert INDEX in refusal(shards)


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name",
    ["model.layers.2.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"],
)
def test_a_missing_tensor_is_refused_by_name(folder: Path, name: str) -> None:
    edit_weights(folder, lambda tensors: tensors.__delitem__(name))
    message = refusal(folder)
    assert "lack 1 of the model's tensors" in message
    assert name in message


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=6)
    assert "lack 18 of the model's tensors: model.layers.4." in refusal(folder)


@pytest.mark.parametrize(
    ("field", "value", "shapes"),
    [
        ("intermediate_size", 128, "[64, 96], and config.json asks for [64, 128]"),
        ("hidden_size", 32, "[199, 64], and config.json asks for [199, 32]"),
        ("vocab_size", 500, "[199, 64], and config.json asks for [500, 64]"),
        ("num_key_value_heads", 4, "[32, 64], and config.json asks for [64, 64]"),
        ("num_attention_heads", 8, "[64, 64], and config.json asks for [64, 128]"),
    ],
)
def test_weights_of_another_shape_are_refused_with_both(
    folder: Path, field: str, value: int, shapes: str
) -> None:
    edit_config(folder, **{field: value})
    message = refusal(folder)
    assert "do not match config.json" in message
    assert shapes in message


def test_tensors_that_the_model_does_not_have_are_left_aside(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update(extra=torch.zeros(3)))
    load(folder)


def test_tied_weights_are_not_missing(folder: Path) -> None:
    model = tiny_model("gemma2")
    model.save_pretrained(folder)
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(load(folder).model(ids).logits, model(ids).logits)


# -- models in memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("model", [3, b"name", [], torch.nn.Linear(2, 2), LLM])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="a Transformers model, not"):
        LLM(model)


def test_a_model_in_training_is_refused() -> None:
    model = tiny_model("llama").train()
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM is in training mode.*model.eval"):
        adopt(model)
    assert model.training


def test_a_model_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="is on meta: move it to the CPU or to a GPU"):
        adopt(tiny_model("llama").to("meta"))


def test_an_adopted_model_keeps_its_dtype() -> None:
    loaded = adopt(tiny_model("llama").half())
    assert loaded.spec.groups[0].spec.dtype == "float16"
    assert loaded.name == "LlamaForCausalLM"


def test_a_tokenizer_beside_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="goes with a model in memory"):
        LLM(folder, tokenizer=object())
