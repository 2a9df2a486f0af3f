"""Sizes of published models, against arithmetic done by hand."""

import json
from pathlib import Path

import pytest

from quire.spec import LatentAttention, ModelSpec
from spec.published import FULL, LATENT, Published
from spec.published_recurrent import RECURRENT
from spec.published_windowed import WINDOWED

MODELS = [*FULL, *LATENT, *WINDOWED, *RECURRENT]


def _name(model: Published) -> str:
    return model.name


@pytest.mark.parametrize("model", MODELS, ids=_name)
def test_bytes_are_those_worked_out_by_hand(model: Published) -> None:
    spec = ModelSpec.from_config(model.config, model.name)
    assert spec.bytes_per_token == model.bytes_per_token
    assert spec.bytes_for(4096) == model.at_4096
    assert spec.bytes_for(40960) == model.at_40960


@pytest.mark.parametrize("model", MODELS, ids=_name)
def test_groups_partition_the_layers_that_remember(model: Published) -> None:
    spec = ModelSpec.from_config(model.config)
    pairs = [(layer, group.spec) for group in spec.groups for layer in group.layers]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {(i, own) for i, layer in enumerate(spec.layers) for own in layer.specs}
    assert len({group.spec for group in spec.groups}) == len(spec.groups)


@pytest.mark.parametrize("model", MODELS, ids=_name)
def test_a_file_reads_as_its_mapping_does(model: Published, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model.config), encoding="utf-8")
    spec = ModelSpec.from_config(model.config)
    assert ModelSpec.from_file(tmp_path) == spec
    assert ModelSpec.from_file(tmp_path / "config.json") == spec


def test_parallel_layers_are_in_two_groups() -> None:
    falcon_h1 = next(model for model in MODELS if "Falcon-H1" in model.name)
    attention, mamba = ModelSpec.from_config(falcon_h1.config).groups
    assert attention.layers == mamba.layers == tuple(range(44))


def test_layers_that_share_are_in_no_group_and_name_their_source() -> None:
    gemma3n = next(model for model in MODELS if "gemma-3n" in model.name)
    spec = ModelSpec.from_config(gemma3n.config)
    assert sorted(layer for group in spec.groups for layer in group.layers) == list(range(20))
    assert [layer.shares_with for layer in spec.layers[20:]] == [18, 18, 18, 18, 19] * 2
    assert all(layer.specs == () for layer in spec.layers[20:])


def test_mla_stores_576_elements_where_expanded_heads_would_store_40960() -> None:
    deepseek = next(model for model in MODELS if model.name.endswith("DeepSeek-V3"))
    (group,) = ModelSpec.from_config(deepseek.config).groups
    assert isinstance(group.spec, LatentAttention)
    assert group.spec.bytes_per_token == 576 * 2
    assert 128 * (128 + 64) + 128 * 128 == 40960


def test_all_five_kinds_and_two_dozen_models_are_covered() -> None:
    assert len(MODELS) >= 24
    kinds = {
        type(group.spec).__name__
        for model in MODELS
        for group in ModelSpec.from_config(model.config).groups
    }
    assert kinds == {
        "FullAttention",
        "SlidingWindow",
        "ChunkedAttention",
        "LatentAttention",
        "RecurrentState",
    }
