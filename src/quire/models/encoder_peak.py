"""What a model's encoder takes at its peak: found with small images, before there is a cache.

An encoder has all of an image at once, and all frames of a video. Its bytes are counted operation
by operation, for two small images, and from these for the largest image that a prompt can have:
they grow with the values of its input, or with their square where attention keeps its scores.
"""

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from quire.errors import one_line
from quire.memory.budget import EncoderFootprint
from quire.models.executors.image_features import (
    Features,
    Modality,
    PromptImage,
    encoded_by,
)
from quire.models.footprint import outlined
from quire.models.loader import LoadedModel, processor_of
from quire.models.vision import Vision
from quire.spec.model_files import called, find_folder
from quire.units import format_bytes, format_count

log = logging.getLogger(__name__)

# Of what is read; the first one is encoded. A processor that cuts images into tiles makes the most
# of some ratio of sides.
_SHAPES = (
    (32, 32),
    (64, 64),
    (128, 128),
    (256, 256),
    (512, 384),
    (576, 384),
    (640, 320),
    (800, 320),
)
_LARGE_SIDES = (896, 1792, 3584)
_VIDEOS = ((4, 32, 32), (8, 32, 32), (4, 64, 64), (8, 128, 128))  # frames, width, height
_FEWER_TOKENS = 1.5  # images of the same pixels may have: tokens of padding are left out


def encoder_footprints(
    vision: Vision, model: PreTrainedModel, max_tokens: int, *, video_tokens: int
) -> dict[Modality, EncoderFootprint]:
    """Return what the encoder takes for the largest image of a prompt, and for the largest video.

    A prompt has ``max_tokens``; a video has ``video_tokens`` of them at most, or as many as the
    largest image: no processor bounds its length. Nothing is returned of what cannot be shown.
    """
    found: dict[Modality, EncoderFootprint] = {}
    images = encoder_footprint(vision, model, max_tokens)
    if images is not None:
        found["image"] = images
        most = min(max_tokens, max(video_tokens, images.num_tokens))
        videos = encoder_footprint(vision, model, most, "video")
        if videos is not None:
            found["video"] = videos
    return found


def encoder_footprint(
    vision: Vision, model: PreTrainedModel, max_tokens: int, modality: Modality = "image"
) -> EncoderFootprint | None:
    """Return what the encoder takes for the largest image, or video, of ``max_tokens``.

    Some blank images go through the processor, one or two small ones through the encoder. Where
    that fails, a token's features are taken to be as wide as the model. None without an encoder.
    """
    if vision.of_kind(modality).why_not:
        return None
    measure = _of_images if modality == "image" else _of_videos
    try:
        found = measure(vision, model, max_tokens)
    except Exception as error:  # of processors and encoders, which raise many kinds
        said = "no memory is planned for %ss in the encoder of %s, which was not measured: %s"
        log.warning(said, modality, vision.name, one_line(error))
        width: int = model.config.get_text_config().hidden_size
        row_bytes = width * model.dtype.itemsize
        return EncoderFootprint(num_values=None, num_tokens=0, peak_bytes=0, row_bytes=row_bytes)
    log.info(
        "the encoder of %s takes %s for the largest %s, of %s tokens",
        vision.name,
        format_bytes(found.peak_bytes),
        modality,
        format_count(found.num_tokens),
    )
    return found


def image_of_files(
    name: str | Path, width: int, height: int, *, dtype: str = "auto"
) -> tuple[PromptImage, str]:
    """Return a blank image of a model whose weights stay where they are, and its processor's name.

    Raises: ModelNotLoadable, UnsupportedModel; RequestError where it takes no images.
    """
    folder = find_folder(name)
    source = str(folder or name)
    model, spec = outlined(name, dtype=dtype)
    processor, why_no_processor = processor_of(source, model)
    loaded = LoadedModel(
        name=called(name),
        model=model,
        tokenizer=None,
        processor=processor,
        why_no_processor=why_no_processor,
        spec=spec,
    )
    vision = Vision.of(loaded, {"image": 1})
    vision.check()
    return _read(vision, width, height), type(processor).__name__


def _of_images(vision: Vision, model: PreTrainedModel, max_tokens: int) -> EncoderFootprint:
    read = [_read(vision, *shape) for shape in _SHAPES]
    num_values, last_values = 0, max(image.num_values for image in read)
    for side in _LARGE_SIDES:
        image = _read(vision, side, side)
        read.append(image)
        if image.num_values <= last_values:
            break  # the processor makes no larger ones
        if 4 * image.num_tokens > max_tokens:
            # The next one has more tokens than a prompt.
            num_values = image.num_values * max_tokens // image.num_tokens
            break
        last_values = image.num_values
    num_values = max(num_values, *(_most_values(image, max_tokens) for image in read))
    num_tokens = min(max_tokens, max(image.num_tokens for image in read))
    return _grown(model, read, num_values, num_tokens)


def _of_videos(vision: Vision, model: PreTrainedModel, max_tokens: int) -> EncoderFootprint:
    """Of as many tokens as there may be, and of those that are read here: a longer one has more."""
    read = [_read_video(vision, *shape) for shape in _VIDEOS]
    num_tokens = max(max_tokens, *(video.num_tokens for video in read))
    of_token = max(video.num_values / video.num_tokens for video in read)
    num_values = max(int(of_token * num_tokens), *(video.num_values for video in read))
    return _grown(model, read, num_values, num_tokens)


def _grown(
    model: PreTrainedModel, read: Sequence[PromptImage], num_values: int, num_tokens: int
) -> EncoderFootprint:
    """Encode the first one that was read, and the next larger one, and foretell the largest."""
    first = EncoderRun.of(model, read[0])
    larger = [image for image in read if image.num_values > first.num_values]
    peak_bytes = max(first.live_bytes)
    if larger:
        second = EncoderRun.of(model, min(larger, key=lambda image: image.num_values))
        peak_bytes = first.peak_bytes(second, num_values)
    return EncoderFootprint(
        num_values=num_values,
        num_tokens=num_tokens,
        peak_bytes=peak_bytes,
        row_bytes=first.row_bytes,
    )


def _most_values(image: PromptImage, max_tokens: int) -> int:
    """Return the values of an image, or of one like it that has so many tokens at most."""
    return int(image.num_values * min(1.0, max_tokens * _FEWER_TOKENS / image.num_tokens))


def _read(vision: Vision, width: int, height: int) -> PromptImage:
    from PIL import Image

    [image] = vision.read(vision.placeholder, [Image.new("RGB", (width, height))]).images
    return image


def _read_video(vision: Vision, frames: int, width: int, height: int) -> PromptImage:
    placeholder = vision.of_kind("video").placeholder
    blank = np.zeros((frames, height, width, 3), np.uint8)
    [video] = vision.read(placeholder, [], [blank]).images
    return video


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderRun:
    """The bytes of one image's way through an encoder."""

    num_values: int
    live_bytes: Sequence[int]  # of what it has made and needs still, after each operation
    row_bytes: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel, image: PromptImage) -> "EncoderRun":
        """Encode an image, and count. Raises: what encoders raise."""
        count = _LiveBytes()
        with torch.inference_mode(), count:
            encoded = encoded_by(model, image)
        features = Features.of(encoded, image.num_tokens)
        return cls(
            num_values=image.num_values,
            live_bytes=count.after,
            row_bytes=features.num_bytes // image.num_tokens,
        )

    def peak_bytes(self, larger: "EncoderRun", num_values: int) -> int:
        """Return the bytes at the peak of an image of ``num_values``, the largest of the three.

        Each operation's bytes are followed: another one may have the most of them then. Where the
        larger image took more operations, only the peaks are.
        """
        pairs = [*zip(self.live_bytes, larger.live_bytes, strict=False)]
        if len(self.live_bytes) != len(larger.live_bytes):
            pairs = [(max(self.live_bytes), max(larger.live_bytes))]
        small, large = self.num_values, larger.num_values
        peak = 0.0
        for first, second in pairs:
            # a n + b n² through both; c + a n where that would bend down.
            bend = (second / large - first / small) / (large - small)
            slope = (second - first) / (large - small)
            grown = num_values * (first / small + bend * (num_values - small))
            if bend < 0:
                grown = second + max(0.0, slope) * (num_values - large)
            peak = max(peak, grown)
        return int(peak)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.after = [0]
        self._now = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = operation(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        for each in _tensors(made):
            storage = each.untyped_storage()
            if storage._cdata not in given | self._alive:
                self._alive.add(storage._cdata)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.after.append(self._now)
        return made

    def _forget(self, address: int, num_bytes: int) -> None:
        self._alive.discard(address)
        self._now -= num_bytes


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]
