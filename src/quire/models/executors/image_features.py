"""Images of prompts: what an encoder made of each, and what of it the tokens of a step take.

A prompt holds placeholder tokens where an image's features go. An image is encoded once, when the
first of its tokens is computed. Its features are kept for the chunks that follow, for another
prompt with the same image and for a sequence that begins anew, up to a bound in bytes. How they get
under the tokens is the model's own code, which is given them as ``mm_encoder_outputs``.

Some models count an image's tokens along several axes. Behind the last image the axes agree, and
what is left is a shift.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, TypeAlias, final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from quire.models.weight_placement import device_of

# -- a prompt's images -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptImage:
    """One image, as the model's processor has made it."""

    content_id: str  # a hash of the inputs
    inputs: Mapping[str, Tensor]  # what the encoder is called with: pixels, sizes, grids
    num_tokens: int  # placeholders

    @property
    def num_values(self) -> int:
        """Return how many values its pixels are."""
        return sum(each.numel() for each in self.inputs.values() if each.is_floating_point())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class PromptImages:
    """The images of one prompt, in their order."""

    images: tuple[PromptImage, ...]
    token_ids: tuple[int, ...]  # of the whole prompt
    places: NDArray[np.int64]  # of all placeholders, ascending
    token_types: Mapping[str, NDArray[np.int64]]  # what the processor calls each token: [P]

    @property
    def end(self) -> int:
        """One past the last placeholder."""
        return int(self.places[-1]) + 1

    def amid(self, before: Sequence[int], after: Sequence[int]) -> "PromptImages":
        """Return them in a longer prompt, with text before it and after it."""
        around = (len(before), len(after))
        return PromptImages(
            images=self.images,
            token_ids=(*before, *self.token_ids, *after),
            places=self.places + len(before),
            token_types={name: np.pad(each, around) for name, each in self.token_types.items()},
        )

    def inputs(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return these inputs of all images, [n, …] one behind the other, if all have them."""
        return {
            name: torch.cat([image.inputs[name] for image in self.images])
            for name in names
            if all(name in image.inputs for image in self.images)
        }


def as_model_takes(inputs: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Return inputs [n, …] where a model computes, those of floats in its dtype."""
    device = device_of(model)
    return {
        name: each.to(device, model.dtype if each.is_floating_point() else each.dtype)
        for name, each in inputs.items()
    }


# -- features --------------------------------------------------------------------------------------

# How a model wants to be given rows: one tensor of them, of images of them, or a list; or as its
# encoder's hidden state, which it projects itself.
_Form: TypeAlias = Literal["rows", "images", "list", "hidden"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """What an encoder made of one image: a row for each placeholder, at one level or several."""

    levels: tuple[Tensor, ...]  # [n, hidden] each: the first is embedded, later ones go deeper
    form: _Form  # of the first

    @classmethod
    def of(cls, encoded: Any, num_tokens: int) -> "Features":
        """Read an encoder's output. Raises: ValueError for another number of rows."""
        first = encoded.pooler_output
        form: _Form = "list"
        if first is None:
            first, form = encoded.last_hidden_state, "hidden"
        elif isinstance(first, Tensor):
            form = "rows" if first.ndim == 2 else "images"
        deeper = getattr(encoded, "deepstack_features", None) or ()
        levels = tuple(map(_rows, [first, *deeper]))
        for rows in levels:
            if len(rows) != num_tokens:
                raise ValueError(
                    f"the encoder made {len(rows)} features of an image that has {num_tokens} "
                    f"tokens in the prompt"
                )
        return cls(levels=levels, form=form)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all levels."""
        return sum(rows.nbytes for rows in self.levels)


def _rows(made: Any) -> Tensor:
    """Return one level as rows [n, hidden]."""
    parts = [made] if isinstance(made, Tensor) else [*made]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


@dataclass
class EncodedImages(BaseModelOutputWithPooling):
    """An encoder's output as a model takes it, with what its deeper layers are given."""

    deepstack_features: list[list[Tensor]] | None = None


# -- a step's images -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkImages:
    """One chunk's part of them."""

    levels: tuple[Tensor, ...]  # [placeholders in the chunk, hidden] each; () without any
    positions: Tensor  # i64[axes, n]
    token_types: Mapping[str, Tensor]  # i64[end of the chunk]: masks are found by positions


@final
class StepImages:
    """What a model is called with besides ids, for a step or for one of its chunks."""

    def __init__(self, chunks: Sequence[ChunkImages], form: _Form | None, *, has_axes: bool):
        self._chunks, self._form, self._has_axes = chunks, form, has_axes

    def of_step(self) -> dict[str, Any]:
        """Return the arguments for all chunks in one row."""
        return self._arguments(self._chunks)

    def of_chunk(self, number: int) -> dict[str, Any]:
        """Return the arguments for one chunk by itself, with the kinds of its tokens."""
        own = self._chunks[number]
        types = {name: each[None] for name, each in own.token_types.items()}
        return {**self._arguments([own]), **types}

    def _arguments(self, chunks: Sequence[ChunkImages]) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if self._has_axes:
            given["position_ids"] = torch.cat([own.positions for own in chunks], -1)[:, None]
        several = [own.levels for own in chunks if own.levels]
        levels = [torch.cat(each) for each in zip(*several, strict=True)]
        if levels:
            first, *deeper = levels
            if self._form == "hidden":
                encoded = EncodedImages(last_hidden_state=first)
            else:
                forms = {"rows": first, "images": first[None], "list": [first]}
                encoded = EncodedImages(pooler_output=forms[self._form or "list"])
            if deeper:
                encoded.deepstack_features = [[rows] for rows in deeper]
            given["mm_encoder_outputs"] = {"image": encoded}
        return given


@final
class ImageEncoder:
    """Makes a step's features with a model's own encoder, and keeps up to ``most_bytes`` of them.

    For the thread that steps.
    """

    def __init__(self, model: PreTrainedModel, image_token_id: int, most_bytes: int) -> None:
        self._model, self._token_id, self._most_bytes = model, image_token_id, most_bytes
        self._kept: OrderedDict[str, Features] = OrderedDict()  # the latest use last
        self.kept_bytes = 0
        self.num_encoded = 0  # images
        self._positions: WeakKeyDictionary[PromptImages, Tensor] = WeakKeyDictionary()
        # Whether positions have several axes where there are images.
        self.has_axes = hasattr(model.base_model, "get_rope_index")

    def shift(self, images: PromptImages, start: int) -> int:
        """Return what positions from ``start`` on, behind all images, lack to the model's own."""
        if not self.has_axes or start < images.end:
            return 0
        positions = self._positions_of(images)
        last = positions.shape[1] - 1
        return int(positions[0, last]) - last

    def of_step(
        self,
        chunks: Sequence[tuple[int, int]],  # (start, stop) in its sequence
        images: Sequence[PromptImages | None],  # of each chunk's prompt
        token_ids: Tensor,  # i64[T], packed
        positions: Tensor,  # i64[T], right for the chunks that are behind their images
    ) -> StepImages | None:
        """Encode what is not kept, and return the step's part; None where it needs nothing.

        Raises: ValueError for an image whose features are not as many as its tokens.
        """
        with torch.inference_mode():
            return self._of_step([*zip(chunks, images, strict=True)], token_ids, positions)

    def close(self) -> None:
        """Drop the features, and the model."""
        self._kept.clear()
        self.kept_bytes = 0
        del self._model

    def _of_step(
        self,
        pairs: Sequence[tuple[tuple[int, int], PromptImages | None]],
        token_ids: Tensor,
        positions: Tensor,
    ) -> StepImages | None:
        used: dict[str, Features] = {}
        taken = [
            [] if own is None else self._taken(own, start, stop, used)
            for (start, stop), own in pairs
        ]
        if not used and not self.has_axes:
            return None
        kind = next(iter(used.values()), None)
        parts: list[ChunkImages] = []
        begin = 0
        for ((start, stop), own), levels in zip(pairs, taken, strict=True):
            here = slice(begin, begin + stop - start)
            begin = here.stop
            own_positions = positions[here].expand(3, -1)
            types: dict[str, Tensor] = {}
            if own is not None and start < own.end:
                if self.has_axes:
                    own_positions = self._positions_in(own, start, stop).to(positions.device)
                types = {
                    name: torch.from_numpy(_up_to(each, stop)).to(token_ids.device)
                    for name, each in own.token_types.items()
                }
            parts.append(
                ChunkImages(
                    levels=() if kind is None else self._joined(levels, token_ids[here], kind),
                    positions=own_positions,
                    token_types=types,
                )
            )
        return StepImages(parts, kind.form if kind else None, has_axes=self.has_axes)

    def _joined(
        self, taken: list[tuple[Tensor, ...]], token_ids: Tensor, kind: Features
    ) -> tuple[Tensor, ...]:
        """Return rows for all placeholders of a chunk, whose images gave those in ``taken``.

        A placeholder behind which no image stands is a token like any other: a prompt without
        images may spell it, and a model may say it. It comes after the images of its prompt.
        """
        levels = [[rows[level] for rows in taken] for level in range(len(kind.levels))]
        num_taken = sum(len(rows[0]) for rows in taken)
        strays = int((token_ids == self._token_id).sum()) - num_taken
        if strays:
            placeholder = torch.tensor([self._token_id], device=token_ids.device)
            row = self._model.get_input_embeddings()(placeholder)
            levels[0].append(row.expand(strays, -1))
            for deeper in levels[1:]:
                deeper.append(row.new_zeros(strays, row.shape[-1]))
        return tuple(torch.cat(each) for each in levels if each)

    def _taken(
        self, own: PromptImages, start: int, stop: int, used: dict[str, Features]
    ) -> list[tuple[Tensor, ...]]:
        """Return the rows of each image that the tokens [start, stop) of its prompt take."""
        first, last = np.searchsorted(own.places, (start, stop)).tolist()
        taken: list[tuple[Tensor, ...]] = []
        begin = 0
        for image in own.images:
            end = begin + image.num_tokens
            if begin < last and first < end:
                if image.content_id not in used:
                    used[image.content_id] = self._features(image)
                rows = slice(max(first, begin) - begin, min(last, end) - begin)
                taken.append(tuple(level[rows] for level in used[image.content_id].levels))
            begin = end
        return taken

    def _features(self, image: PromptImage) -> Features:
        """Return an image's features, which are computed unless they are kept."""
        features = self._kept.get(image.content_id)
        if features is not None:
            self._kept.move_to_end(image.content_id)
            return features
        given = as_model_takes(image.inputs, self._model)
        encoded = self._model.base_model.get_image_features(**given, return_dict=True)
        features = Features.of(encoded, image.num_tokens)
        self.num_encoded += 1
        self._kept[image.content_id] = features
        self.kept_bytes += features.num_bytes
        # The latest one stays, however large: the next chunk goes on with it.
        while self.kept_bytes > self._most_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self.kept_bytes -= oldest.num_bytes
        return features

    def _positions_in(self, own: PromptImages, start: int, stop: int) -> Tensor:
        """Return i64[3, stop - start]; text behind the prompt goes on from its last token."""
        known = self._positions_of(own)
        behind = torch.arange(1, max(0, stop - known.shape[1]) + 1) + known[0, -1]
        return torch.cat([known[:, start:stop], behind.expand(3, -1)], -1)

    def _positions_of(self, own: PromptImages) -> Tensor:
        """Return the positions of a whole prompt, i64[3, P], on the host."""
        found = self._positions.get(own)
        if found is None:
            ask = self._model.base_model.get_rope_index
            names = [*signature(ask).parameters]
            ids = torch.tensor([own.token_ids])
            types = {name: torch.from_numpy(each)[None] for name, each in own.token_types.items()}
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types}
            given = {name: each for name, each in given.items() if name in names}
            found = ask(**given, **own.inputs(names))[0][:, 0].cpu().long()
            self._positions[own] = found
        return found


def _up_to(types: NDArray[np.int64], stop: int) -> NDArray[np.int64]:
    """Return what the first ``stop`` tokens are called: those behind the prompt are text."""
    return np.pad(types[:stop], (0, max(0, stop - len(types))))
