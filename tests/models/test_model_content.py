"""What a model computes by: each change of it has another name, and none has a name by chance."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from forks import run_fork
from models.test_switched import SWITCHES, Owner
from quire.models import file_hashes
from quire.models import model_content as model_content_module
from quire.models.file_hashes import CannotName, KeptHashes
from quire.models.loader import LoadedModel, adopt, load
from quire.models.model_content import (
    ModelContent,
    adapter_content,
    content_of_files,
    model_content,
)
from tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3").save_pretrained(path, max_shard_size="100KB")
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptHashes:
    monkeypatch.setattr(file_hashes, "_CLOCK_STEP_NS", 0)  # the files are young
    return KeptHashes(tmp_path / "kept")


def own(source: Any = None, **options: Any) -> LoadedModel:
    """Load a model as an engine does, which then has it alone."""
    return replace(load(source, **options), is_private=True)


def names(content: ModelContent) -> dict[str, Any]:
    return {**content.config, **content.code, "weights": content.weights, "dtype": content.dtype}


def changed(one: ModelContent, other: ModelContent) -> set[str]:
    first, second = names(one), names(other)
    return {n for n in first.keys() | second.keys() if first.get(n) != second.get(n)}


# -- by its files ------------------------------------------------------------------------------


def test_a_copy_of_a_folder_is_the_same_model(saved: Path, folder: Path, kept: KeptHashes) -> None:
    first, second = (model_content(own(path), kept) for path in (saved, folder))
    assert first == second
    assert first.weights.startswith("files ")
    assert not [name for name in names(first) if "path" in name]
    assert first.code.keys() == {"torch", "transformers"}


def test_a_folder_has_the_name_of_the_model_it_becomes(folder: Path, kept: KeptHashes) -> None:
    """Without the model: for ``quire doctor``."""
    loaded = own(folder)
    config = AutoConfig.from_pretrained(folder)
    assert content_of_files(loaded.files, config, loaded.dtype, kept) == model_content(loaded, kept)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss", "deepseek_v3"])
def test_each_kind_of_model_has_one_name_with_and_without_weights(
    name: str, tmp_path: Path, kept: KeptHashes
) -> None:
    tiny_model(name).save_pretrained(tmp_path / name)
    loaded = own(tmp_path / name)
    config = AutoConfig.from_pretrained(tmp_path / name)
    assert content_of_files(loaded.files, config, loaded.dtype, kept) == model_content(loaded, kept)


def test_one_bit_of_a_weight_is_another_model(folder: Path, kept: KeptHashes) -> None:
    before = model_content(own(folder), kept)
    shard = sorted(folder.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert changed(before, model_content(own(folder), kept)) == {"weights"}


def test_weights_that_moved_between_shards_are_another_model(
    folder: Path, kept: KeptHashes
) -> None:
    before = model_content(own(folder), kept)
    one, other, *_ = sorted(folder.glob("*.safetensors"))
    both = one.read_bytes(), other.read_bytes()
    one.write_bytes(both[1])
    other.write_bytes(both[0])
    index = folder / "model.safetensors.index.json"
    swapped = json.loads(index.read_text())
    turned = {one.name: other.name, other.name: one.name}
    swapped["weight_map"] = {t: turned.get(f, f) for t, f in swapped["weight_map"].items()}
    index.write_text(json.dumps(swapped))
    assert changed(before, model_content(own(folder), kept)) == {"weights"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}),
        ("rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        ("rms_norm_eps", 1e-5),
        ("hidden_act", "gelu"),
    ],
)
def test_a_field_of_the_config_is_another_model(
    field: str, value: Any, folder: Path, kept: KeptHashes
) -> None:
    before = model_content(own(folder), kept)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert (
        field in changed(before, model_content(own(folder), kept)) <= {field, "use_sliding_window"}
    )


def test_another_release_is_another_model(
    folder: Path, kept: KeptHashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = own(folder)
    before = model_content(loaded, kept)
    monkeypatch.setattr(model_content_module.transformers, "__version__", "5.99.0")
    assert changed(before, model_content(loaded, kept)) == {"transformers"}
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", f"{torch.__version__.split('+')[0]}+cu999")
    assert model_content(loaded, kept) == before, "a build of the same release"


def test_a_quantized_model_has_the_release_of_what_reads_its_codes(
    folder: Path, kept: KeptHashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_content_module, "version", lambda name: "0.99.0+cpu")
    loaded = own(folder)
    config = AutoConfig.from_pretrained(folder)
    planned = content_of_files(loaded.files, config, loaded.dtype, kept, quantizes=True)
    loaded.model.config.quantization_config = {"quant_method": "torchao"}
    content = model_content(loaded, kept)
    assert content.code == planned.code
    assert content.code["torchao"] == "0.99.0"


def test_a_file_that_changed_since_it_was_loaded_has_no_name(
    folder: Path, kept: KeptHashes
) -> None:
    loaded = own(folder)
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(CannotName, match="was changed while or after"):
        model_content(loaded, kept)


def test_torchs_own_files_are_read_where_there_are_no_others(
    tmp_path: Path, kept: KeptHashes
) -> None:
    model = tiny_model("qwen3")
    model.config.save_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    loaded = own(tmp_path / "model")
    assert [file.path.name for file in loaded.files] == ["pytorch_model.bin"]
    assert model_content(loaded, kept).weights.startswith("files ")


# -- by what it has in memory ------------------------------------------------------------------


def test_a_model_that_another_owner_has_is_named_by_its_parameters(
    folder: Path, kept: KeptHashes
) -> None:
    """It may have been changed since it was read."""
    loaded = load(folder)
    before = model_content(loaded, kept)
    assert before.weights.startswith("parameters ")
    assert model_content(load(folder), kept) == before
    with torch.no_grad():
        loaded.model.model.norm.weight[3] += 0.5
    assert changed(before, model_content(loaded, kept)) == {"weights"}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.model.layers[2].self_attn.k_proj.weight.data[0].neg_(),
        lambda m: m.model.rotary_emb.inv_freq.mul_(1.01),
        lambda m: setattr(m.model.layers[0].self_attn, "scaling", 9.0),
        lambda m: setattr(m.model.rotary_emb, "attention_scaling", 2.0),
        lambda m: setattr(m.model.layers[1].mlp, "act_fn", nn.ReLU()),
        lambda m: setattr(m.config, "rms_norm_eps", 0.5),
        lambda m: m.model.layers[1].register_buffer("more", torch.zeros(3)),
        lambda m: m.model.layers.insert(0, m.model.layers[3]),
        lambda m: m.model.layers[3].self_attn.train(),
    ],
    ids=range(9),
)
def test_what_a_module_keeps_is_named(change: Any, kept: KeptHashes) -> None:
    model = tiny_model("qwen3")
    before = model_content(adopt(model), kept)
    assert model_content(adopt(tiny_model("qwen3")), kept) == before
    change(model)
    assert changed(before, model_content(adopt(model), kept))


def test_weights_that_changed_places_are_another_model(kept: KeptHashes) -> None:
    model = tiny_model("qwen3")
    before = model_content(adopt(model), kept)
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    model.model.layers[0].mlp, model.model.layers[1].mlp = second, first
    assert changed(before, model_content(adopt(model), kept)) == {"weights"}


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.undo()


def test_what_an_owner_switches_is_another_model_or_has_no_name(
    owner: Owner, kept: KeptHashes
) -> None:
    """Adapters, their scales, functions and classes of other files; and back again."""
    contents: list[ModelContent] = []
    for name in ("", *SWITCHES):
        before = model_content(adopt(owner.model), kept)
        if not name:
            contents.append(before)
            continue
        owner.switch(name)
        if name in ("hook", "forward"):
            with pytest.raises(CannotName, match="hooks, or a forward function of its own"):
                model_content(adopt(owner.model), kept)
        else:
            contents.append(model_content(adopt(owner.model), kept))
            assert contents[-1] != before, name
        owner.switch(name)
        if name not in ("merged", "other"):  # which are rounded, or leave other layers trainable
            assert model_content(adopt(owner.model), kept) == before, name
    assert len({json.dumps(names(each)) for each in contents}) == len(SWITCHES) - 2 + 1


PRINTED = """
import sys
from pathlib import Path
from quire.models.file_hashes import KeptHashes
from quire.models.loader import adopt, load
from quire.models.model_content import model_content
print(model_content(load(sys.argv[1]), KeptHashes(Path(sys.argv[2]))).weights)
"""


def test_another_process_finds_the_same_name(
    folder: Path, kept: KeptHashes, tmp_path: Path
) -> None:
    done = run_fork(PRINTED, str(folder), str(tmp_path / "kept"))
    assert done.stdout == f"{model_content(load(folder), kept).weights}\n", done.stderr


class Opaque:
    """Keeps what has no text."""

    __slots__ = ("inside",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m.model, "odd", Opaque()), "model.odd is a .*Opaque, which has no text"),
        (lambda m: setattr(m.model, "odd", iter([])), "model.odd is a builtins.list_iterator"),
        (lambda m: m.model.norm.to("meta"), "model.norm.weight has no numbers here"),
        (
            lambda m: m.register_buffer("odd", torch.eye(3).to_sparse()),
            r"\.odd has no numbers here: it is torch.sparse_coo on cpu",
        ),
        (lambda m: m.model.norm.register_forward_hook(print), "hooks"),
        (lambda m: setattr(m.model, "odd", _circle()), "contains itself"),
    ],
)
def test_what_cannot_be_named_is_refused(change: Any, words: str, kept: KeptHashes) -> None:
    model = tiny_model("qwen3")
    change(model)
    with pytest.raises(CannotName, match=words):
        model_content(adopt(model), kept)


def _circle() -> list[Any]:
    circle: list[Any] = []
    circle.append(circle)
    return circle


def test_code_that_lies_in_no_file_has_no_name(kept: KeptHashes) -> None:
    model = tiny_model("qwen3")
    scope: dict[str, Any] = {"__name__": "typed_in"}
    exec("import torch.nn as nn\nclass Own(nn.ReLU):\n    pass", scope)
    model.model.layers[0].mlp.act_fn = scope["Own"]()
    with pytest.raises(CannotName, match="the code of typed_in lies in no file"):
        model_content(adopt(model), kept)


# -- adapters ----------------------------------------------------------------------------------


def test_an_adapter_that_was_replaced_under_its_name_is_another(
    owner: Owner, tmp_path: Path, kept: KeptHashes
) -> None:
    owner.adapters.save_pretrained(tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    before = adapter_content(first, kept)
    assert len(before) == 64
    assert adapter_content(first, kept) == before != adapter_content(second, kept)
    copy = Path(shutil.copytree(second, tmp_path / "copy"))
    assert adapter_content(copy, kept) == adapter_content(second, kept)
    options = copy / "adapter_config.json"
    options.write_text(json.dumps({**json.loads(options.read_text()), "lora_alpha": 99}))
    assert adapter_content(copy, kept) != adapter_content(second, kept), "another scale"
    weights = first / "adapter_model.safetensors"
    save_file({n: -each for n, each in load_file(weights).items()}, weights)
    assert adapter_content(first, kept) != before


def test_a_folder_without_an_adapter_is_refused(folder: Path, kept: KeptHashes) -> None:
    with pytest.raises(CannotName, match="has no adapter"):
        adapter_content(folder, kept)
