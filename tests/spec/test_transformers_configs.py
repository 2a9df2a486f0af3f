"""The table of families against the config classes of the installed Transformers.

Files leave out what equals a class default; the table must then supply the same. So: take a class's
defaults whole, read them; take away all that the table claims to know, read again.
"""

from typing import Any

import pytest

from quire.spec import ModelSpec
from quire.spec.families import FAMILIES
from quire.spec.fields import SPELLINGS
from quire.spec.patterns import listed

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

CLASSES = transformers.models.auto.configuration_auto.CONFIG_MAPPING
READ = sorted(name for name, row in FAMILIES.items() if not row.refused and name in CLASSES)
NESTED = [name for name in READ if FAMILIES[name].nested_defaults]

RULED = [name for name in READ if FAMILIES[name].pattern != listed and name != "nemotron_h"]

# The class default is no model that runs: 42.67 channels a head.
ODD = {"glm4_moe"}


def class_defaults(model_type: str) -> dict[str, Any]:
    return {**CLASSES[model_type]().to_dict(), "dtype": "bfloat16"}


def without(fields: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The fields less these, under any spelling, and less all that tells layers apart."""
    names = names | {"layer_types", "per_layer_config"}
    gone = {spelling for name in names for spelling in (name, *SPELLINGS.get(name, ()))}
    gone |= {name for name, others in SPELLINGS.items() if names & set(others)}
    return {name: value for name, value in fields.items() if name not in gone}


@pytest.mark.parametrize("model_type", RULED)
def test_defaults_and_rules_are_those_of_the_class(model_type: str) -> None:
    fields = class_defaults(model_type)
    left = without(fields, set(FAMILIES[model_type].defaults)) | {
        # The class has these sizes as defaults, the table leaves them to the file.
        name: fields[name]
        for name in ("num_hidden_layers", "num_attention_heads")
        if name in fields
    }
    assert ModelSpec.from_config(left).layers == ModelSpec.from_config(fields).layers


@pytest.mark.parametrize("model_type", NESTED)
def test_an_empty_section_has_the_sizes_of_the_class(model_type: str) -> None:
    section = {"model_type": model_type, "dtype": "bfloat16"}
    spec = ModelSpec.from_config({"text_config": section})
    assert spec == ModelSpec.from_config(class_defaults(model_type))


def test_rows_that_no_class_has_are_few() -> None:
    """A mistyped model_type would otherwise go unnoticed."""
    unknown = {name for name, row in FAMILIES.items() if not row.refused and name not in CLASSES}
    assert unknown == {"nemotron-nas"}  # its modelling code comes with its weights


def test_every_decoder_is_read_or_refused_by_name() -> None:
    """All causal models that Transformers knows: read like the class, or refused with a reason."""
    from transformers.cache_utils import get_layer_types_and_kwargs
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    num_read = 0
    for model_type in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - ODD):
        try:
            fields = class_defaults(model_type)
            kinds, _ = get_layer_types_and_kwargs(CLASSES[model_type]())
        except Exception:  # multimodal wholes have no layers of their own
            continue
        if fields.get("is_encoder_decoder"):  # Transformers counts the encoder's: ``test_sources``
            continue
        try:
            spec = ModelSpec.from_config(fields)
        except ValueError as error:
            assert type(error).__module__ == "quire.errors", model_type  # noqa: PT017
            continue
        num_read += 1
        remembering = [bool(layer.specs) for layer in spec.layers]
        assert remembering == [kind != "dummy" for kind in kinds], model_type
    assert num_read > 100
