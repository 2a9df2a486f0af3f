"""Which parts of a model are not the text's, by the names of their modules."""

import pytest

from quire.spec.module_names import is_of_tower


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("model.visual.blocks.0.mlp.up_proj", True),
        ("model.vision_tower.encoder.layers.0.fc1", True),
        ("audio_tower.layers.0.fc1", True),
        ("model.multi_modal_projector.linear_1", True),
        ("model.language_model.layers.0.mlp.up_proj", False),
        ("model.layers.0.supervision_head", False),
    ],
)
def test_towers_are_told_by_a_modules_whole_name(name: str, is_one: bool) -> None:
    assert is_of_tower(name.split(".")) is is_one
