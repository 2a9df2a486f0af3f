"""What a model sees: how its processor makes a prompt's images ready, as its files say it.

A processor writes so many placeholder tokens into a prompt as an image has features, and makes of
the image what the model's encoder reads. An image's name is a hash of that: the same picture has
the same name in every prompt, and another one of its size has not.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import RequestError, one_line
from quire.kv import Image
from quire.memory.budget import EncoderFootprint
from quire.models.executors.image_features import PromptImage, PromptImages
from quire.models.loader import LoadedModel
from quire.units import format_count

log = logging.getLogger(__name__)

# What processors call the kinds of tokens, by the name of the model's argument.
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Vision:
    """Of one model. ``why_not``: why no image can be shown to it; empty otherwise."""

    name: str
    why_not: str = ""
    most_images: int = 0  # in a prompt
    encoder: EncoderFootprint | None = None  # what the largest image takes
    image_token_id: int = -1
    placeholder: str = ""  # what a prompt says where an image goes
    chat_template: str | None = None  # if the processor has one, and the tokenizer none
    _processor: Any = None
    _input_names: tuple[str, ...] = ()  # of the encoder's arguments
    _type_names: tuple[str, ...] = ()  # of the model's arguments

    @classmethod
    def of(cls, loaded: LoadedModel, most_images: int) -> "Vision":
        """Read a model's, whose prompts may have so many images."""
        if why_not := _why_not(loaded) or ("" if most_images else "limit_mm_per_prompt has none"):
            return cls(name=loaded.name, why_not=why_not)
        model, processor = loaded.model, loaded.processor
        asked = signature(model.base_model.get_image_features).parameters
        taken = signature(model.forward).parameters
        return cls(
            name=loaded.name,
            most_images=most_images,
            image_token_id=model.config.image_token_id,
            placeholder=processor.image_token,
            chat_template=None
            if getattr(loaded.tokenizer, "chat_template", None)
            else getattr(processor, "chat_template", None),
            _processor=processor,
            _input_names=tuple(name for name in asked if name != "kwargs"),
            _type_names=tuple(name for name in _TOKEN_TYPES if name in taken),
        )

    def check(self) -> None:
        """Raise RequestError if no image can be shown."""
        if self.why_not:
            raise RequestError(f"{self.name} takes no images: {self.why_not}")

    def check_number(self, number: int) -> None:
        """Raise RequestError if a prompt cannot have so many images."""
        self.check()
        if number > self.most_images:
            raise RequestError(
                f"the prompt has {number} images, and may have {self.most_images} "
                f"(limit_mm_per_prompt)"
            )

    def read(
        self, text: str, given: Sequence[Any], *, add_special_tokens: bool = True
    ) -> PromptImages:
        """Return a prompt that has a placeholder for each image as tokens, with its images.

        An image is one of Pillow's, or u8[height, width, 3]. It takes as long as the processor.

        Raises: RequestError.
        """
        self.check_number(len(given))
        pictures = [_picture(each, number) for number, each in enumerate(given)]
        spelled = text.count(self.placeholder)
        if spelled != len(pictures):
            raise RequestError(
                f"the prompt has {spelled} × {self.placeholder!r}, and {len(pictures)} images came "
                f"with it: it needs one for each"
            )
        made = self._made(text, pictures, add_special_tokens=add_special_tokens)
        token_ids = made["input_ids"][0].tolist()
        places = np.flatnonzero(np.array(token_ids) == self.image_token_id)
        if len(pictures) == 1:
            images = [self._image(made)]
        else:  # each as it is by itself, so that its name does not depend on the others
            images = [self._image(self._made(self.placeholder, [each])) for each in pictures]
        for number, image in enumerate(images):
            self._check_size(image, number)
        if sum(image.num_tokens for image in images) != len(places):
            raise RequestError(
                f"{self.name} wrote {len(places)} placeholders for {len(images)} images, and "
                f"{sum(image.num_tokens for image in images)} for each by itself"
            )
        types = {
            name: made[name][0].numpy().astype(np.int64)
            for name in self._type_names
            if name in made
        }
        return PromptImages(
            images=tuple(images), token_ids=tuple(token_ids), places=places, token_types=types
        )

    def _made(
        self, text: str, pictures: list[Any], *, add_special_tokens: bool = True
    ) -> Mapping[str, Tensor]:
        try:
            made: Mapping[str, Tensor] = self._processor(
                text=[text],
                images=[pictures],
                add_special_tokens=add_special_tokens,
                return_mm_token_type_ids=True,
                return_tensors="pt",
            )
        except Exception as error:  # of Pillow, numpy and each processor's own: many kinds
            raise RequestError(f"the images cannot be read: {one_line(error)}") from error
        return made

    def _check_size(self, image: PromptImage, number: int) -> None:
        most = None if self.encoder is None else self.encoder.num_values
        if most is not None and image.num_values > most:
            raise RequestError(
                f"image number {number} is too large: {self.name} makes "
                f"{format_count(image.num_values)} values of it ({image.num_tokens} tokens), and "
                f"memory is planned for {format_count(most)}: send a smaller one"
            )

    def _image(self, made: Mapping[str, Tensor]) -> PromptImage:
        """Return the one image of a processor's output."""
        inputs = {name: made[name] for name in self._input_names if name in made}
        return PromptImage(
            content_id=_content_id(inputs),
            inputs=inputs,
            num_tokens=int((made["input_ids"] == self.image_token_id).sum()),
        )


def named(images: PromptImages) -> tuple[Image, ...]:
    """Return the images as the prefix cache tells them apart, with their places in the prompt."""
    found: list[Image] = []
    begin = 0
    for image in images.images:
        own = images.places[begin : begin + image.num_tokens]
        begin += image.num_tokens
        start, stop = int(own[0]), int(own[-1]) + 1
        found.append(Image(content_id=image.content_id, start=start, num_tokens=stop - start))
    return tuple(found)


def _content_id(inputs: Mapping[str, Tensor]) -> str:
    """Hash what an encoder is called with: names, kinds, shapes and bytes."""
    found = hashlib.sha256()
    for name, each in sorted(inputs.items()):
        found.update(f"{name} {each.dtype} {list(each.shape)}\n".encode())
        found.update(each.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _picture(given: Any, number: int) -> Any:
    """Return an image of Pillow's the right way up, or an array, in colours.

    Raises: RequestError.
    """
    if isinstance(given, Tensor):
        given = given.cpu().numpy()
    if isinstance(given, np.ndarray):
        if given.ndim != 3 or given.shape[2] != 3 or given.dtype != np.uint8 or not given.size:
            raise RequestError(
                f"an image is u8[height, width, 3]; this is {given.dtype}{list(given.shape)}"
            )
        return given
    if not (hasattr(given, "convert") and hasattr(given, "mode")):
        raise RequestError(
            f"an image is one of Pillow's or an array u8[height, width, 3], not "
            f"{type(given).__name__}"
        )
    try:
        from PIL import ImageOps

        # It reads the file, if it has not been read. A camera's picture may say how it was held.
        turned: Any = ImageOps.exif_transpose(given)
        return turned.convert("RGB")
    except Exception as error:  # of a file that is cut short, or too large: many kinds
        why = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise RequestError(f"image number {number} cannot be read: {why}") from error


def _why_not(loaded: LoadedModel) -> str:
    model, processor = loaded.model, loaded.processor
    token_id = getattr(model.config, "image_token_id", None)
    if not hasattr(model.base_model, "get_image_features") or token_id is None:
        return "it reads text"
    if "mm_encoder_outputs" not in signature(model.forward).parameters:
        return "this release of Transformers has no way to give it what its encoder made of them"
    if loaded.ranks is not None:
        return "with tensor_parallel_size above 1 its encoder is divided among processes"
    if processor is None:
        return loaded.why_no_processor or (
            "it came without a processor (preprocessor_config.json), or Pillow is not installed"
        )
    if getattr(processor, "image_token", None) is None:
        return f"its {type(processor).__name__} has no placeholder for an image"
    if not 0 <= token_id < loaded.vocab_size:
        return f"its placeholder, token {token_id}, is not in the vocabulary"
    return ""
