"""Three ways to run a model, the fastest first. Which of them is right for it, a trial says.

* ``table``: keys and values go to their slots, and attention reads through block tables.
* ``gathered``: they go to their slots; what a step reads is copied out of them for the model, which
  changes it before it attends. Still one pass for all sequences.
* ``alone``: a pass for each sequence's chunk, with the model's own attention and masks.
"""

import inspect
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Protocol, final

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

from quire.errors import UnsupportedModel
from quire.kv.storage.entries import dequantize, quantize
from quire.models.cache_argument import cache_argument
from quire.models.executors.encoder_source import Encoded, Source, encode
from quire.models.executors.hooks import PackedStep
from quire.models.executors.image_features import PromptImages, as_model_takes
from quire.models.executors.packed import PackedModel
from quire.models.executors.per_sequence import PerSequenceModel
from quire.models.fused_modules import FusedModules
from quire.models.loader import LoadedModel, features_shape
from quire.models.model_watch import ModelWatch
from quire.spec import AttentionSpec, ChunkedAttention, LatentAttention, SlidingWindow

# -- choice ----------------------------------------------------------------------------------------


WAYS = ("table", "gathered", "alone")


class Way(Protocol):
    """Computes a step over what a storage holds."""

    def forward(
        self, step: PackedStep, token_ids: Tensor, positions: Tensor, logits_at: Tensor
    ) -> Tensor:
        """Compute logits [S, vocabulary] at some of the packed tokens, i64[S] of T."""
        ...

    def close(self) -> None:
        """Drop what was made of the model, which runs no more."""
        ...


def make_way(
    name: str,
    loaded: LoadedModel,
    stand_ins: FusedModules | None = None,
    watch: ModelWatch | None = None,
    *,
    records: bool = True,
) -> Way:
    """Make one of ``WAYS``. Raises: UnsupportedModel for a model that cannot be run so."""
    if loaded.spec.source_tokens and name != "alone":
        raise UnsupportedModel("each of its texts reads a source of its own, of another length")
    if stand_ins is not None and stand_ins.cpu.batch_invariant and name != "table":
        raise UnsupportedModel(f"batch_invariant: by way of {name!r} torch attends")
    if name == "table":
        latents = {
            number: spec
            for number, layer in enumerate(loaded.spec.layers)
            for spec in layer.specs
            if isinstance(spec, LatentAttention)
        }
        records &= not loaded.spec.recurrent_layers
        return PackedModel(loaded.model, stand_ins, watch, latents=latents, records=records)
    if name == "gathered":
        return PackedModel(loaded.model, stand_ins, watch, gathers=True, records=False)
    return PerSequenceModel(loaded.model, stand_ins, watch)


# -- the quantized reference -----------------------------------------------------------------------

# A model's own run with its keys and values rounded as a cache in another dtype rounds them.
#
# What a run through such a cache is held against: the rounding itself may turn a router to another
# expert, so nothing can be said of a difference that includes it.


@final
class RoundedCache(DynamicCache):
    """Transformers' own cache, given entries that have been in ``dtype``."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        super().__init__(config=config)
        self._dtype = dtype

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add entries [1, K, T, D] to the layer's, rounded, and return all of these."""
        k, v = (
            dequantize(*quantize(x, self._dtype)).to(x.dtype) for x in (key_states, value_states)
        )
        entries: tuple[Tensor, Tensor] = super().update(k, v, layer_idx, *args, **kwargs)
        return entries


# -- the trial -------------------------------------------------------------------------------------

# A few tokens that a model computes chunk by chunk, and what it says of them by itself.
#
# How it is run, and over which cache, its caller knows.


_LEAST_TOKENS = 12
_LEAST_FOR_KERNELS = 640  # from which on a GPU's kernels divide a sequence, and its queries
# What a window leaves out, and what is gone when it has passed, is seen in a trial whose first
# chunk is longer. A long window is not waited for, because that takes a large model half a minute:
# in a small copy of the model every window is short.
_PAST_WINDOW = 4
_MOST_WINDOW = 256
_NO_WINDOW = 2**62
_FOR_THE_REST = 3
_EXACT, _EXACT_WITH_SCANS = 1e-4, 1e-3  # of a small copy; a scan adds up in quite another order


class Trial:
    """What one model is tried with, in two chunks or more.

    ``kept_as``: the dtype of keys and values; ``most``: the tokens that a sequence can have.
    ``exact``: the model is a small copy, in float32: no two ways of it are further apart than their
    order of adding up, and all of its windows are passed. ``for_kernels``: a GPU's are tried too.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        specs: Iterable[AttentionSpec],
        kept_as: torch.dtype,
        most: int,
        *,
        exact: bool = False,
        for_kernels: bool = False,
    ) -> None:
        windows = [*map(_window, specs)]
        if exact:
            window = max((w for w in windows if w < _NO_WINDOW), default=_NO_WINDOW)
        else:
            window = min(windows, default=_NO_WINDOW)
        past = window + _PAST_WINDOW if window <= _MOST_WINDOW else 0
        least = _LEAST_FOR_KERNELS if for_kernels else _LEAST_TOKENS
        num_tokens = min(most, max(least, past + _PAST_WINDOW))
        self.token_ids = [(3 + 7 * i) % loaded.vocab_size for i in range(num_tokens)]
        self.source = _source(loaded, most)
        self._past = past
        self._loaded, self._kept_as, self._exact = loaded, kept_as, exact

    def first_stop(self, num_tokens: int) -> int:
        """Return where the first chunk ends if there is room for so many tokens."""
        half = (num_tokens + 1) // 2
        return self._past if half < self._past < num_tokens else half

    def judge(self, logits: Tensor, first: int) -> None:
        """Judge logits [n, vocabulary] of the first n tokens, ``first`` of them in the first chunk.

        Raises: UnsupportedModel, with both figures.
        """
        expected = self._expected[: len(logits)]
        # A model may say of some tokens that it never gives them: nothing is small beside that.
        least = torch.finfo(expected.dtype).min / 2
        never = expected <= least
        apart = torch.where(never, 0.0, (logits - expected).abs())  # what is no number stays
        apart = torch.where(never == (logits <= least), apart, torch.inf)
        deviations = apart.amax(-1) / expected[~never].abs().max()
        limit = max(limit_for(self._loaded.model.dtype), limit_for(self._kept_as))
        if self._exact:
            limit = _EXACT_WITH_SCANS if self._loaded.spec.recurrent_layers else _EXACT
            _require(deviations.max(), limit)
            return
        if limit == limit_for(torch.float32):
            _require(deviations.max(), limit)
            return
        # In fewer bits a mixture may send a single token to another expert: the median decides. The
        # rest, where windows have passed, is judged apart; but that one token may be among the few
        # that all of the rest read, and move them a little.
        _require(deviations.median(), limit)
        if len(logits) > first:
            _require(deviations[first:].median(), _FOR_THE_REST * limit)

    @property
    def has_expectation(self) -> bool:
        """Tell whether it is known what the model says by itself."""
        return "_expected" in self.__dict__

    def expect(self) -> None:
        """Find that out now, rather than when it is asked for."""
        _ = self._expected

    @cached_property
    def _expected(self) -> Tensor:
        """What the model says by itself, keys and values rounded as they are kept."""
        model = self._loaded.model
        rounded = self._kept_as != model.dtype
        if self.source is not None:
            return self._expected_of_source(self.source)
        cache = RoundedCache(model.config, self._kept_as) if rounded else None
        device = self._loaded.device
        # As in generate().
        given: dict[str, Any] = {cache_argument(model.forward): cache}
        if "position_ids" in inspect.signature(model.forward).parameters:
            given["position_ids"] = torch.arange(len(self.token_ids), device=device)[None]
        with torch.inference_mode():
            logits: Tensor = model(
                input_ids=torch.tensor([self.token_ids], device=device),
                use_cache=rounded,
                **given,
            ).logits[0]
        return logits

    def _expected_of_source(self, source: Source) -> Tensor:
        """The same of an encoder-decoder, whose keys are not rounded: few bits are given way."""
        model = self._loaded.model
        with torch.inference_mode():
            logits: Tensor = model(
                encoder_outputs=Encoded(last_hidden_state=encode(model, source)),
                decoder_input_ids=torch.tensor([self.token_ids], device=self._loaded.device),
                use_cache=False,
            ).logits[0]
        return logits


@final
class ImageTrial(Trial):
    """The same with images amid text: a chunk ends before the first one, and one in the last one.

    With ``whole`` one ends before the last one. So what stands around an image is computed apart
    from it, and one image apart from another.
    """

    def __init__(
        self, loaded: LoadedModel, images: PromptImages, kept_as: torch.dtype, *, whole: bool
    ) -> None:
        placeholder = images.token_ids[int(images.places[0])]
        text = [
            t for i in range(_LEAST_TOKENS) if (t := (3 + 7 * i) % loaded.vocab_size) != placeholder
        ]
        half = len(text) // 2
        self.images = images.amid(text[:half], text[half:])
        self.token_ids, self.source = [*self.images.token_ids], None
        last = self.images.places[-self.images.images[-1].num_tokens :]
        cut = int(last[0 if whole else len(last) // 2])
        behind = len(self.token_ids) - len(text[half:]) // 2
        self.stops = sorted({int(self.images.places[0]), cut, behind, len(self.token_ids)})
        self._past = 0
        self._loaded, self._kept_as, self._exact = loaded, kept_as, False

    @cached_property
    def _expected(self) -> Tensor:
        """What the model says by itself, of pixels, with its own positions and masks."""
        model, images = self._loaded.model, self.images
        rounded = self._kept_as != model.dtype
        taken = [*inspect.signature(model.forward).parameters]
        ids = torch.tensor([images.token_ids])
        of_tokens = {**images.token_types, **images.marks}
        given = {
            **{name: each for name, each in images.made.items() if name != "input_ids"},
            "attention_mask": torch.ones_like(ids),
            **{name: torch.from_numpy(each)[None] for name, each in of_tokens.items()},
        }
        given = as_model_takes(given, model)
        # What it would keep of these positions for a text that goes on.
        shift = getattr(model.base_model, "rope_deltas", None)
        cache = RoundedCache(model.config, self._kept_as) if rounded else None
        with torch.inference_mode():
            logits: Tensor = model(
                input_ids=ids.to(self._loaded.device),
                **{cache_argument(model.forward): cache},
                use_cache=rounded,
                **{name: each for name, each in given.items() if name in taken},
            ).logits[0]
        if hasattr(model.base_model, "rope_deltas"):
            model.base_model.rope_deltas = shift
        return logits


def _source(loaded: LoadedModel, most_tokens: int) -> Source | None:
    """A short one, of the kind that the model reads; None if it reads none."""
    most = loaded.spec.source_tokens
    if not most:
        return None
    shape = features_shape(loaded)
    if shape is not None:
        generator = torch.Generator().manual_seed(0)
        return Source(num_tokens=most, features=torch.randn(shape, generator=generator))
    token_ids = tuple(
        (5 + 3 * i) % loaded.vocab_size for i in range(min(most, most_tokens, _LEAST_TOKENS))
    )
    return Source(num_tokens=len(token_ids), token_ids=token_ids)


def _require(deviation: Tensor, limit: float) -> None:
    if not deviation <= limit:  # nor if it is no number
        raise UnsupportedModel(
            f"it gives other logits than by itself: {deviation:.1e} of the largest, "
            f"{limit:.0e} allowed"
        )


def hides_errors(dtype: torch.dtype, specs: Iterable[AttentionSpec]) -> bool:
    """Tell whether a model in ``dtype`` may compute something else in a trial, and pass it."""
    return dtype != torch.float32 or any(_MOST_WINDOW < _window(s) < _NO_WINDOW for s in specs)


def limit_for(dtype: torch.dtype) -> float:
    """Return how far logits may be apart that were computed in another order, or kept in ``dtype``.

    In eight bits a product at the edge between two codes may fall to either side.
    """
    if dtype == torch.float32:
        return 1e-3
    return 5e-2 if dtype.itemsize > 1 else 0.25


def _window(spec: AttentionSpec) -> int:
    """Tokens that it reaches back."""
    if isinstance(spec, SlidingWindow):
        return spec.window
    return spec.chunk if isinstance(spec, ChunkedAttention) else _NO_WINDOW
