"""Images of a typical prompt: tokens, features, and what an encoder takes for one of them.

A model's processor says how many tokens an image of some size makes. It is a file beside the
weights; of a config.json alone a few models say it. Sizes of the encoder are those of its section.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from quire.errors import ConfigError
from quire.memory.budget import EncoderFootprint
from quire.planner.hardware import LAYER_S
from quire.planner.simulation.cost_model import RooflineCosts
from quire.planner.subject import Subject
from quire.spec.fields import Fields
from quire.units import ceil_div

# By default, where files leave it out: Gemma3Config of Transformers.
_TOKENS: Mapping[str, int] = MappingProxyType({"gemma3": 256})
_FLOAT32_BYTES = 4
_COLOURS = 3
_MOST_SIDE = 2**16
_MOST_IMAGES = 2**16

# Returns the tokens of an image (width, height), the values of its pixels, and what says so.
Ask: TypeAlias = Callable[[int, int], tuple[int, int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSizes:
    """The images of a prompt, all alike."""

    count: int
    width: int
    height: int

    @classmethod
    def parse(cls, text: str) -> "ImageSizes":
        """Read ``1024x768``, or ``4x1024x768`` for four. Raises: ConfigError."""
        numbers = re.fullmatch(r"(?:(\d{1,5})x)?(\d{1,5})x(\d{1,5})", text.replace("×", "x"))
        if numbers is None:
            raise ConfigError(
                f"--images {text[:40]!r} must be width x height in pixels, as in 1024x768, or a "
                f"number of them before it, as in 4x1024x768"
            )
        count, width, height = (int(number or 1) for number in numbers.groups())
        sides = range(1, _MOST_SIDE + 1)
        if not 1 <= count <= _MOST_IMAGES or width not in sides or height not in sides:
            raise ConfigError(
                f"--images {text}: a prompt has 1 to {_MOST_IMAGES:,} images, and a side 1 to "
                f"{_MOST_SIDE:,} pixels"
            )
        return cls(count=count, width=width, height=height)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedImages:
    """What the images of a prompt take."""

    sizes: ImageSizes
    each: EncoderFootprint  # of one
    num_patches: int  # of one; 0: not known
    flops: float  # to encode one; 0: not known
    num_layers: int  # of the encoder
    tower_bytes: int  # of weights, which are read for each
    said_by: str  # where the number of tokens comes from

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all images in a prompt."""
        return self.sizes.count * self.each.num_tokens

    def encoder_s(self, costs: RooflineCosts) -> float | None:
        """Return the seconds in which a device encodes one; None where the tower is not known."""
        if not self.flops:
            return None
        computed_s = self.flops / costs.flops_per_s
        return self.num_layers * LAYER_S + max(computed_s, self.tower_bytes / costs.bytes_per_s)


def planned_images(subject: Subject, sizes: ImageSizes, ask: Ask | None) -> PlannedImages:
    """Plan a model's images. ``ask`` asks its processor, where there are its files.

    Raises: ConfigError where the model reads text, or its tokens of an image are not known.
    """
    section = subject.config.get("vision_config")
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"--images: {subject.name} reads text: its config.json has no vision_config"
        )
    fields = Fields(section=section, source=f"vision_config of {subject.name}")
    if ask is not None:
        num_tokens, num_values, said_by = ask(sizes.width, sizes.height)
    else:
        num_tokens, num_values, said_by = _of_config(subject, fields)
    tower, item_bytes = _Tower.of(fields), subject.own.item_bytes
    patches = tower.patches(num_values)
    return PlannedImages(
        sizes=sizes,
        each=EncoderFootprint(
            num_values=num_values,
            num_tokens=num_tokens,
            peak_bytes=tower.peak_bytes(patches, item_bytes),
            row_bytes=subject.own.hidden_size * item_bytes,
        ),
        num_patches=patches,
        flops=tower.flops(patches, subject.parameters.towers),
        num_layers=tower.num_layers,
        tower_bytes=subject.weights.towers,
        said_by=said_by,
    )


def _of_config(subject: Subject, fields: Fields) -> tuple[int, int, str]:
    """Read a number of tokens that is the same for images of all sizes. Raises: ConfigError."""
    outer = Fields(section=subject.config, source=subject.source)
    tokens = outer.optional_integer("mm_tokens_per_image")
    tokens = tokens or _TOKENS.get(subject.spec.model_type.removesuffix("_text"))
    side = fields.optional_integer("image_size")
    if tokens is None or side is None:
        raise ConfigError(
            f"--images: the config.json of {subject.name} does not say how many tokens an image "
            f"makes; its processor does: name a folder that has its preprocessor_config.json"
        )
    return tokens, _COLOURS * side * side, "mm_tokens_per_image, for images of any size"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tower:
    """An encoder's sizes, as far as they are known; 0 where they are not."""

    patch: int
    frames: int  # of a patch: an image may be taken twice, as a video of two frames
    places: int  # patches of a tile; 0: an image is not cut
    width: int
    inner: int
    num_layers: int

    @classmethod
    def of(cls, fields: Fields) -> "_Tower":
        def one(*names: str) -> int:
            """Return the first of these fields that is set; of a list, its first."""
            given = (fields.section.get(name) for name in names)
            numbers = (each[0] if isinstance(each, list) and each else each for each in given)
            return next((n for n in numbers if isinstance(n, int) and 0 < n < 2**20), 0)

        width = one("embed_dim", "hidden_size", "width")
        ratio = fields.section.get("mlp_ratio")
        inner = one("intermediate_size")
        if not inner and isinstance(ratio, int | float) and 0 < ratio < 100:
            inner = int(width * ratio)
        patch, side = one("patch_size"), one("image_size")
        return cls(
            patch=patch,
            frames=one("temporal_patch_size") or 1,
            places=(side // patch) ** 2 if patch else 0,
            width=width,
            inner=inner,
            num_layers=one("num_hidden_layers", "depth", "num_layers"),
        )

    def patches(self, num_values: int) -> int:
        return ceil_div(num_values, _COLOURS * self.frames * self.patch**2) if self.patch else 0

    def peak_bytes(self, patches: int, item_bytes: int) -> int:
        """Estimate as for a step of text: what a layer makes of so many tokens."""
        return patches * (
            3 * self.inner * item_bytes + self.width * (3 * item_bytes + 3 * _FLOAT32_BYTES)
        )

    def flops(self, patches: int, num_weights: int) -> float:
        """Count products with the weights, and of patches with those of their tile."""
        if not num_weights:
            return 0.0
        seen = min(patches, self.places or patches)
        return 2.0 * num_weights * patches + 4.0 * patches * seen * self.width * self.num_layers
