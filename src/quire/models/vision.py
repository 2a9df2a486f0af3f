"""What a model sees: how its processor makes a prompt's images and videos ready.

A processor writes so many placeholder tokens into a prompt as an image has features, and makes of
the image what the model's encoder reads. An image's name is a hash of that: the same picture has
the same name in every prompt, and another one of its size has not. A video is its frames.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import RequestError, one_line
from quire.kv import Image
from quire.memory.budget import EncoderFootprint
from quire.models.executors.image_features import Modality, PromptImage, PromptImages
from quire.models.loader import LoadedModel
from quire.units import format_count

log = logging.getLogger(__name__)

# What processors call the kinds of tokens, by the name of the model's argument.
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
_OF_POSITIONS = ("input_ids", "attention_mask", *_TOKEN_TYPES)  # not of one image
_METADATA = frozenset({"fps", "total_num_frames", "frames_indices", "duration"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaKind:
    """Images or videos of one model. ``why_not``: why none can be shown to it; empty otherwise."""

    why_not: str = ""
    most: int = 0  # in a prompt
    limited_by: str = "limit_mm_per_prompt"
    token_id: int = -1
    placeholder: str = ""  # what a prompt says where one goes
    input_names: tuple[str, ...] = ()  # of what its encoder and positions are made of

    @property
    def has_encoder(self) -> bool:
        """Whether the model has one for it. Else the processor makes images of it."""
        return not self.why_not and self.token_id >= 0


_NO_KIND = MediaKind(why_not="it reads text")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Vision:
    """Of one model. Where it is shown no image, it is shown no video."""

    name: str
    kinds: Mapping[Modality, MediaKind] = field(default_factory=lambda: MappingProxyType({}))
    # What the largest image takes, and the largest video.
    encoders: Mapping[Modality, EncoderFootprint] = field(
        default_factory=lambda: MappingProxyType({})
    )
    chat_template: str | None = None  # if the processor has one, and the tokenizer none
    _processor: Any = None
    _taken: frozenset[str] = frozenset()  # the model's arguments

    @classmethod
    def of(cls, loaded: LoadedModel, most: Mapping[Modality, int]) -> "Vision":
        """Read a model's, whose prompts may have so many images and videos."""
        none: dict[Modality, MediaKind] = {}
        for modality, number in most.items():
            why_not = _why_not(loaded, modality)
            none[modality] = MediaKind(why_not=why_not or ("" if number else _LIMITED))
        if none["image"].why_not:
            return cls(name=loaded.name, kinds=none)
        model, processor = loaded.model, loaded.processor
        taken = signature(model.forward).parameters
        kinds = {
            modality: kind
            if kind.why_not
            else MediaKind(
                most=most[modality],
                token_id=_token_id(model, modality),
                placeholder=getattr(processor, f"{modality}_token"),
                input_names=_input_names(model, modality),
            )
            for modality, kind in none.items()
        }
        return cls(
            name=loaded.name,
            kinds=kinds,
            chat_template=None
            if getattr(loaded.tokenizer, "chat_template", None)
            else getattr(processor, "chat_template", None),
            _processor=processor,
            _taken=frozenset(taken),
        )

    @property
    def why_not(self) -> str:
        """Why no image can be shown; empty if one can."""
        return self.of_kind("image").why_not

    @property
    def placeholder(self) -> str:
        """What a prompt says where an image goes."""
        return self.of_kind("image").placeholder

    @property
    def placeholders(self) -> dict[str, str]:
        """Return what a prompt says where one goes, by the kinds that can be shown."""
        if self.why_not:
            return {}
        return {modality: kind.placeholder for modality, kind in self.kinds.items()}

    @property
    def encoder(self) -> EncoderFootprint | None:
        """Return what either takes at most, one at a time; None where neither can be shown."""
        return EncoderFootprint.larger(*self.encoders.values()) if self.encoders else None

    def of_kind(self, modality: Modality) -> MediaKind:
        """Return what is known of images, or of videos."""
        return self.kinds.get(modality, _NO_KIND)

    def without(self, modality: Modality, why_not: str) -> "Vision":
        """Return one that shows none of a kind, for a reason."""
        return replace(self, kinds={**self.kinds, modality: MediaKind(why_not=why_not)})

    def with_one_image(self, why: str) -> "Vision":
        """Return one that shows one image a prompt, for a reason."""
        alone = replace(self.of_kind("image"), most=1, limited_by=why)
        return replace(self, kinds={**self.kinds, "image": alone})

    def check(self, modality: Modality = "image") -> None:
        """Raise RequestError if no image can be shown, or no video."""
        for needed in dict.fromkeys(("image", modality)):
            if why_not := self.of_kind(needed).why_not:
                raise RequestError(f"{self.name} takes no {needed}s: {why_not}")

    def check_number(self, number: int, modality: Modality = "image") -> None:
        """Raise RequestError if a prompt cannot have so many of a kind."""
        self.check(modality)
        kind = self.of_kind(modality)
        if number > kind.most:
            raise RequestError(
                f"the prompt has {number} {modality}s, and may have {kind.most} ({kind.limited_by})"
            )

    def check_numbers(self, images: int, videos: int) -> None:
        """Raise RequestError if a prompt cannot have so many of each."""
        if images:
            self.check_number(images)
        if videos:
            self.check_number(videos, "video")

    def read(
        self,
        text: str,
        given: Sequence[Any],
        videos: Sequence[Any] = (),
        *,
        add_special_tokens: bool = True,
        for_trial: bool = False,
    ) -> PromptImages:
        """Return a prompt that has a placeholder for each image and video as tokens, with them.

        An image is one of Pillow's, or u8[height, width, 3]. A video is a list of such images, or
        u8[frames, height, width, 3]; or a pair of that and its metadata ("fps",
        "frames_indices"), without which a processor guesses when the frames were. All frames that
        are given are shown. It takes as long as the processor. ``for_trial``: what the processor
        made of all together is returned too.

        Raises: RequestError.
        """
        shown: dict[Modality, list[Any]] = {"image": [], "video": []}
        self.check_numbers(len(given), len(videos))
        shown["image"] = [_picture(each, number) for number, each in enumerate(given)]
        shown["video"] = [_video(each, number) for number, each in enumerate(videos)]
        for modality, own in shown.items():
            placeholder = self.of_kind(modality).placeholder
            spelled = text.count(placeholder) if placeholder else 0
            if spelled != len(own) and (own or modality == "image"):
                raise RequestError(
                    f"the prompt has {spelled} × {placeholder!r}, and {len(own)} {modality}s came "
                    f"with it: it needs one for each"
                )
        made = self._made(text, shown, add_special_tokens=add_special_tokens)
        token_ids = made["input_ids"][0].tolist()
        if len(given) + len(videos) == 1:
            images = [self._image(made, "image" if given else "video", 0)]
        else:  # each as it is by itself, so that its name does not depend on the others
            images = self._in_order(text, shown)
        found = self._in_prompt(token_ids, images, made)
        return replace(found, made=made) if for_trial else found

    def _in_order(self, text: str, shown: Mapping[Modality, Sequence[Any]]) -> list[PromptImage]:
        """Return what is shown, each as it is by itself, in the order of their placeholders."""
        found: list[tuple[int, PromptImage]] = []
        for modality, several in shown.items():
            placeholder = self.of_kind(modality).placeholder
            place = -1
            for number, each in enumerate(several):
                place = text.index(placeholder, place + 1)
                made = self._made(placeholder, {modality: [each]})
                found.append((place, self._image(made, modality, number)))
        return [image for _, image in sorted(found, key=lambda pair: pair[0])]

    def _in_prompt(
        self, token_ids: list[int], images: list[PromptImage], made: Mapping[str, Tensor]
    ) -> PromptImages:
        """Find the placeholders of images. Raises: RequestError if there are others."""
        ids = np.array(token_ids)
        left = {
            modality: np.flatnonzero(ids == self.of_kind(modality).token_id)
            for modality in {image.modality for image in images}
        }
        written = sum(map(len, left.values()))
        places: list[NDArray[np.int64]] = []
        for image in images:
            own, left[image.modality] = np.split(left[image.modality], [image.num_tokens])
            places.append(own)
        together = np.concatenate(places)
        if (
            written != sum(image.num_tokens for image in images)
            or any(map(len, left.values()))
            or np.any(np.diff(together) <= 0)
        ):
            raise RequestError(
                f"{self.name} wrote {written} placeholders for {len(images)} images, and "
                f"{sum(image.num_tokens for image in images)} for each by itself"
            )
        of_tokens = {
            name: torch.as_tensor(each)[0].numpy().astype(np.int64)
            for name, each in made.items()
            if name in self._taken and name.endswith("token_type_ids")
        }
        types = {name: each for name, each in of_tokens.items() if name in _TOKEN_TYPES}
        marks = {name: each for name, each in of_tokens.items() if name not in types}
        return PromptImages(
            images=tuple(images),
            token_ids=tuple(token_ids),
            places=together,
            token_types=types,
            marks=marks,
        )

    def _made(
        self,
        text: str,
        shown: Mapping[Modality, Sequence[Any]],
        *,
        add_special_tokens: bool = True,
    ) -> Mapping[str, Tensor]:
        given: dict[str, Any] = {}
        if pictures := shown.get("image"):
            given["images"] = [[*pictures]]
        if videos := shown.get("video"):
            given |= {
                "videos": [frames for frames, _ in videos],
                "video_metadata": [dict(metadata) for _, metadata in videos],
                "do_sample_frames": False,
            }
        try:
            made: Mapping[str, Tensor] = self._processor(
                text=[text],
                add_special_tokens=add_special_tokens,
                return_mm_token_type_ids=True,
                return_tensors="pt",
                **given,
            )
        except Exception as error:  # of Pillow, numpy and each processor's own: many kinds
            what = "videos" if videos else "images"
            raise RequestError(f"the {what} cannot be read: {one_line(error)}") from error
        return made

    def _check_size(self, image: PromptImage, modality: Modality, number: int) -> None:
        planned = self.encoders.get(modality)
        most = None if planned is None else planned.num_values
        if most is not None and image.num_values > most:
            instead = (
                "send a smaller one"
                if modality == "image"
                else "send fewer frames or smaller ones, or have the operator raise "
                "max_num_batched_tokens"
            )
            raise RequestError(
                f"{modality} number {number} is too large: {self.name} makes "
                f"{format_count(image.num_values)} values of it ({image.num_tokens} tokens), and "
                f"memory is planned for {format_count(most)}: {instead}"
            )

    def _image(self, made: Mapping[str, Tensor], modality: Modality, number: int) -> PromptImage:
        """Return the one image or video of a processor's output.

        A processor may make images of a video's frames. Then they are read as one image.

        Raises: RequestError where nothing is made that an encoder takes.
        """
        for found in dict.fromkeys((modality, "image")):
            kind = self.of_kind(found)
            num_tokens = int((made["input_ids"] == kind.token_id).sum())
            if num_tokens and kind.input_names[0] in made:
                names = [name for name in kind.input_names if name in made]
                inputs = {name: torch.as_tensor(made[name]) for name in names}
                image = PromptImage(
                    content_id=_content_id(inputs),
                    inputs=inputs,
                    num_tokens=num_tokens,
                    modality=found,
                )
                self._check_size(image, modality, number)
                return image
        raise RequestError(
            f"{type(self._processor).__name__} makes of a {modality} what no encoder of "
            f"{self.name} takes, or writes no {self.of_kind(modality).placeholder!r} for it"
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


def _video(given: Any, number: int) -> tuple[NDArray[np.uint8], Mapping[str, Any]]:
    """Return a video's frames u8[frames, height, width, 3], and what is known of their times.

    Raises: RequestError.
    """
    metadata: Any = {}
    if isinstance(given, tuple) and len(given) == 2:
        given, metadata = given
    if isinstance(given, Tensor):
        given = given.cpu().numpy()
    if not isinstance(given, np.ndarray):
        if not isinstance(given, list | tuple) or not given:
            raise RequestError(
                f"a video is a list of images or an array u8[frames, height, width, 3], not "
                f"{type(given).__name__}"
            )
        frames = [np.asarray(_picture(each, number)) for each in given]
        if len({frame.shape for frame in frames}) > 1:
            raise RequestError(f"video number {number} has frames of several sizes")
        given = np.stack(frames)
    if given.ndim != 4 or given.shape[3] != 3 or given.dtype != np.uint8 or not given.size:
        raise RequestError(
            f"a video is u8[frames, height, width, 3]; this is {given.dtype}{list(given.shape)}"
        )
    if not isinstance(metadata, Mapping) or metadata.keys() - _METADATA:
        raise RequestError(
            f"video number {number}: metadata has {', '.join(sorted(_METADATA))}, not "
            f"{sorted(map(str, metadata)) if isinstance(metadata, Mapping) else metadata!r}"
        )
    whole = {"total_num_frames": len(given), "frames_indices": [*range(len(given))]}
    return given, {**whole, **metadata}


_LIMITED = "limit_mm_per_prompt has none"


def _input_names(model: Any, modality: Modality) -> tuple[str, ...]:
    """Return the names of what an encoder is called with, its pixels first, and of positions."""
    encode = getattr(model.base_model, f"get_{modality}_features", None)
    asked = [] if encode is None else [*signature(encode).parameters]
    place = getattr(model.base_model, "get_rope_index", None)
    if place is not None:
        asked += [name for name in signature(place).parameters if name not in _OF_POSITIONS]
    return tuple(dict.fromkeys(name for name in asked if name != "kwargs"))


def _token_id(model: Any, modality: Modality) -> int:
    """Return the placeholder of a kind that has an encoder of its own; -1 otherwise.

    Of a model that has none for videos the processor may make images of the frames.
    """
    token_id = getattr(model.config, f"{modality}_token_id", None)
    has_own = hasattr(model.base_model, f"get_{modality}_features")
    return token_id if has_own and token_id is not None else -1


def _why_not(loaded: LoadedModel, modality: Modality) -> str:
    model, processor = loaded.model, loaded.processor
    token_id = _token_id(model, modality)
    if modality == "image" and token_id < 0:
        return "it reads text"
    if "mm_encoder_outputs" not in signature(model.forward).parameters:
        return "this release of Transformers has no way to give it what its encoder made of them"
    if loaded.ranks is not None:
        return "with tensor_parallel_size above 1 its encoder is divided among processes"
    if processor is None:
        return loaded.why_no_processor or (
            "it came without a processor (preprocessor_config.json), or Pillow is not installed"
        )
    if getattr(processor, f"{modality}_token", None) is None:
        return f"its {type(processor).__name__} has no placeholder for {modality}s"
    if modality == "video" and getattr(processor, "video_processor", None) is None:
        return f"its {type(processor).__name__} reads none"
    if token_id >= loaded.vocab_size:
        return f"its placeholder, token {token_id}, is not in the vocabulary"
    return ""
