"""Images of prompts: what an encoder made of each, and what of it the tokens of a step take.

A prompt holds placeholder tokens where an image's features go. An image is encoded once, when the
first of its tokens is computed. Its features are kept for the chunks that follow, for another
prompt of its caller with the same image and for a sequence that begins anew, up to a bound in
bytes. How they get under the tokens is the model's own code, which is given them as
``mm_encoder_outputs``. A video is an image of another modality: several frames, with an encoder and
placeholders of its own.

Some models count an image's tokens along several axes. Behind the last image the axes agree, and
what is left is a shift.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Literal, TypeAlias, final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from quire.models.weight_placement import device_of

# -- a prompt's images -----------------------------------------------------------------------------


# What Transformers calls the kinds: a model has an encoder and a placeholder for each it takes.
Modality: TypeAlias = Literal["image", "video"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptImage:
    """One image or video, as the model's processor has made it."""

    content_id: str  # a hash of the inputs
    inputs: Mapping[str, Tensor]  # what encoder and positions are made of: pixels, sizes, grids
    num_tokens: int  # placeholders
    modality: Modality = "image"

    @property
    def num_values(self) -> int:
        """Return how many values its pixels are."""
        return sum(each.numel() for each in self.inputs.values() if each.is_floating_point())

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its inputs."""
        return sum(each.nbytes for each in self.inputs.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class PromptImages:
    """The images and videos of one prompt, in their order."""

    images: tuple[PromptImage, ...]
    token_ids: tuple[int, ...]  # of the whole prompt
    places: NDArray[np.int64]  # of all placeholders, ascending
    token_types: Mapping[str, NDArray[np.int64]]  # what the processor calls each token: [P]
    # What else the model takes of each token, as the kind of expert that it goes to: [P]
    marks: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    made: Mapping[str, Tensor] = field(default_factory=dict)  # by the processor, for a trial alone
    # Keys of the prompt's caller: features of others are not taken, or the time of a first token
    # would tell what they have shown.
    owner: tuple[tuple[str, str], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the inputs of all."""
        return sum(each.num_bytes for each in self.images)

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
            marks={name: np.pad(each, around) for name, each in self.marks.items()},
            made=self.made,
            owner=self.owner,
        )

    def inputs(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return these inputs of all images that have them, [n, …] one behind the other."""
        return {
            name: torch.cat(parts)
            for name in names
            if (parts := [each.inputs[name] for each in self.images if name in each.inputs])
        }


def as_model_takes(inputs: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Return inputs [n, …] where a model computes, those of floats in its dtype."""
    device = device_of(model)
    return {
        name: each.to(device, model.dtype if each.is_floating_point() else each.dtype)
        for name, each in inputs.items()
    }


def encoded_by(model: PreTrainedModel, image: PromptImage) -> Any:
    """Return what a model's encoder makes of an image or video. Raises: what it raises."""
    encode = getattr(model.base_model, f"get_{image.modality}_features")
    names = signature(encode).parameters
    own = {name: each for name, each in image.inputs.items() if name in names}
    return encode(**as_model_takes(own, model), return_dict=True)


# -- features --------------------------------------------------------------------------------------

# How a model wants to be given rows: one tensor of them, of images of them, or a list; or as its
# encoder's hidden state, which it projects itself.
_Form: TypeAlias = Literal["rows", "images", "list", "hidden"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """How a model's encoder gives what it made, and how the model wants it back."""

    rows: _Form  # of the first level
    kind: type[Any]  # a model may read further fields of its own, which are left empty

    def filled(self, levels: Sequence[Tensor]) -> Any:
        """Return rows [n, hidden] as the encoder would have returned them."""
        first, *deeper = levels
        if self.rows == "hidden":
            return self.kind(last_hidden_state=first)
        forms = {"rows": first, "images": first[None], "list": [first]}
        given: dict[str, Any] = {"pooler_output": forms[self.rows]}
        if deeper:
            given["deepstack_features"] = [[rows] for rows in deeper]
        return self.kind(**given)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """What an encoder made of one image: a row for each placeholder, at one level or several."""

    levels: tuple[Tensor, ...]  # [n, hidden] each: the first is embedded, later ones go deeper
    form: OutputForm

    @classmethod
    def of(cls, encoded: Any, num_tokens: int) -> "Features":
        """Read an encoder's output. Raises: ValueError for another number of rows."""
        first = encoded.pooler_output
        form: _Form = "list"
        if first is None:
            first, form = encoded.last_hidden_state, "hidden"
            if first is None:
                raise ValueError("the encoder's output has neither pooled nor hidden states")
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
        return cls(levels=levels, form=OutputForm(rows=form, kind=type(encoded)))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all levels."""
        return sum(rows.nbytes for rows in self.levels)


def _rows(made: Any) -> Tensor:
    """Return one level as rows [n, hidden]."""
    parts = [made] if isinstance(made, Tensor) else [*made]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


# -- a step's images -------------------------------------------------------------------------------

Levels: TypeAlias = tuple[Tensor, ...]  # [placeholders, hidden] each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkImages:
    """One chunk's part of them."""

    levels: Mapping[Modality, Levels]  # of the placeholders in the chunk, where it has any
    positions: Tensor  # i64[axes, n]
    token_types: Mapping[str, Tensor]  # i64[end of the chunk]: masks are found by positions
    embedded: Tensor | None  # [n, hidden], where ids would not say which tokens are placeholders
    marks: Mapping[str, Tensor]  # i64[n]


@final
class StepImages:
    """What a model is called with besides ids, for a step or for one of its chunks."""

    def __init__(
        self, chunks: Sequence[ChunkImages], forms: Mapping[Modality, OutputForm], *, has_axes: bool
    ) -> None:
        self._chunks, self._forms, self._has_axes = chunks, forms, has_axes

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
        embedded = [own.embedded for own in chunks if own.embedded is not None]
        if embedded:
            given |= {"input_ids": None, "inputs_embeds": torch.cat(embedded)[None]}
        given |= {
            name: torch.cat([own.marks[name] for own in chunks])[None] for name in chunks[0].marks
        }
        outputs: dict[str, Any] = {}
        for modality, form in self._forms.items():
            several = [own.levels[modality] for own in chunks if modality in own.levels]
            if several:
                levels = [torch.cat(each) for each in zip(*several, strict=True)]
                outputs[modality] = form.filled(levels)
        if outputs:
            given["mm_encoder_outputs"] = outputs
        return given


@final
class ImageEncoder:
    """Makes a step's features with a model's own encoder, and keeps up to ``most_bytes`` of them.

    For the thread that steps.
    """

    def __init__(
        self, model: PreTrainedModel, token_ids: Mapping[Modality, int], most_bytes: int
    ) -> None:
        self._model, self._token_ids, self._most_bytes = model, token_ids, most_bytes
        # By owner and content, the latest use last.
        self._kept: OrderedDict[tuple[object, str], Features] = OrderedDict()
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
            {} if own is None else self._taken(own, start, stop, used)
            for (start, stop), own in pairs
        ]
        if not used and not self.has_axes:
            return None
        kinds = {
            image.modality: used[image.content_id]
            for _, own in pairs
            for image in (own.images if own else ())
            if image.content_id in used
        }
        by_hidden = any(kind.form.rows == "hidden" for kind in kinds.values())
        marked = {
            name for (start, _), own in pairs if own and start < own.end for name in own.marks
        }
        parts: list[ChunkImages] = []
        begin = 0
        for ((start, stop), own), rows in zip(pairs, taken, strict=True):
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
            levels = {
                modality: self._joined(rows.get(modality, []), token_ids[here], modality, kind)
                for modality, kind in kinds.items()
            }
            parts.append(
                ChunkImages(
                    levels={modality: own for modality, own in levels.items() if own},
                    positions=own_positions,
                    token_types=types,
                    embedded=self._embedded(token_ids[here], rows) if by_hidden else None,
                    marks={
                        name: torch.from_numpy(
                            _up_to(own.marks[name], stop)[start:]
                            if own and name in own.marks
                            else np.zeros(stop - start, np.int64)
                        ).to(token_ids.device)
                        for name in sorted(marked)
                    },
                )
            )
        forms = {modality: kind.form for modality, kind in kinds.items()}
        return StepImages(parts, forms, has_axes=self.has_axes)

    def _joined(
        self, taken: Sequence[Levels], token_ids: Tensor, modality: Modality, kind: Features
    ) -> Levels:
        """Return rows for all placeholders of a chunk, whose images gave those in ``taken``.

        A placeholder behind which no image stands is a token like any other: a prompt without
        images may spell it, and a model may say it. It comes after the images of its prompt.
        """
        levels = [[rows[level] for rows in taken] for level in range(len(kind.levels))]
        strays = self._strays(token_ids, modality, taken)
        if len(strays) and kind.form.rows != "hidden":
            row = self._model.get_input_embeddings()(token_ids[strays[:1]])
            levels[0].append(row.expand(len(strays), -1))
            for deeper in levels[1:]:
                deeper.append(row.new_zeros(len(strays), row.shape[-1]))
        return tuple(torch.cat(each) for each in levels if each)

    def _strays(self, token_ids: Tensor, modality: Modality, taken: Sequence[Levels]) -> Tensor:
        """Return which tokens of a chunk are placeholders behind which no image stands."""
        places = (token_ids == self._token_ids[modality]).nonzero()[:, 0]
        return places[sum(len(rows[0]) for rows in taken) :]

    def _embedded(self, token_ids: Tensor, taken: Mapping[Modality, Sequence[Levels]]) -> Tensor:
        """Return a chunk's embeddings [n, hidden], in which no stray placeholder is one.

        A model that projects rows itself would project a stray's own embedding too. Without ids it
        knows a placeholder by its embedding; a stray's is another one, by the last bit of one
        number.
        """
        found: Tensor = self._model.get_input_embeddings()(token_ids).clone()
        bits = found.view(torch.int32 if found.itemsize == 4 else torch.int16)
        for modality in self._token_ids:
            bits[self._strays(token_ids, modality, taken.get(modality, ())), 0] ^= 1
        return found

    def _taken(
        self, own: PromptImages, start: int, stop: int, used: dict[str, Features]
    ) -> dict[Modality, list[Levels]]:
        """Return the rows of each image that the tokens [start, stop) of its prompt take.

        ``used`` is given what was taken last of each.
        """
        first, last = np.searchsorted(own.places, (start, stop)).tolist()
        taken: dict[Modality, list[Levels]] = {}
        begin = 0
        for image in own.images:
            end = begin + image.num_tokens
            if begin < last and first < end:
                features = self._features(image, own.owner)
                rows = slice(max(first, begin) - begin, min(last, end) - begin)
                levels = tuple(level[rows] for level in features.levels)
                # A copy, or the rest would stay too: of many prompts that are found in the prefix
                # cache up to their images' last tokens, a step takes few rows of many images.
                if len(levels[0]) < image.num_tokens:
                    levels = tuple(level.clone() for level in levels)
                used[image.content_id] = replace(features, levels=levels)
                taken.setdefault(image.modality, []).append(levels)
            begin = end
        return taken

    def _features(self, image: PromptImage, owner: object) -> Features:
        """Return an image's features, which are computed unless they are kept for this owner."""
        key = (owner, image.content_id)
        features = self._kept.get(key)
        if features is not None:
            self._kept.move_to_end(key)
            return features
        features = Features.of(encoded_by(self._model, image), image.num_tokens)
        self.num_encoded += 1
        self._kept[key] = features
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
