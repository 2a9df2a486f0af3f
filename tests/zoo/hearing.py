"""Which decoders of Transformers take recordings, and whether they see besides."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

_ARGUMENTS = ("input_features", "input_values", "audio_input_features", "audio_input_ids")


def hearing_classes() -> tuple[list[str], list[str]]:
    """Model types of those that hear alone, and of those that Transformers lists as seeing too.

    Raises: AssertionError for one that takes what an encoder made, as none did.
    """
    names: Mapping[str, Any] = {
        **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        **MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    alone, besides = list[str](), list[str]()
    for model_type, named in sorted(names.items()):
        own = getattr(transformers, named if isinstance(named, str) else named[0])
        taken = signature(own.forward).parameters
        if not any(name in taken for name in _ARGUMENTS):
            continue
        if getattr(CONFIG_MAPPING[model_type](), "is_encoder_decoder", False):
            continue
        if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            besides.append(model_type)
        else:
            assert "mm_encoder_outputs" not in taken, model_type
            alone.append(model_type)
    return alone, besides
