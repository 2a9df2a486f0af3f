"""What names of modules say of a model's parts, by the parts of a name between its dots."""

from collections.abc import Collection

_TOWERS = frozenset({"visual", "multi_modal_projector", "mm_projector"})
_OTHER_SENSES = ("vision_", "audio_")


def is_of_tower(modules: Collection[str]) -> bool:
    """Tell whether one of these modules is a part for images or sound, beside the text's."""
    return any(each in _TOWERS or each.startswith(_OTHER_SENSES) for each in modules)
