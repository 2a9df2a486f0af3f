"""Models whose attention is their own: one forward for each sequence's chunk, over Quire's memory.

What does not attend through Transformers' interface, or reads masks itself (ALiBi, biases kept as
buffers), cannot have the tokens of several sequences in one row. Each chunk then goes through the
model by itself, with the model's own attention and masks. It sees a cache of Transformers' kind
that holds this one sequence: where that lies, which sequences share it and which have room stays
with the storage and the accounting. Encoder-decoders go the same way: each text reads its own
``source``.
"""

import inspect
from bisect import bisect_left
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from quire.attention.gather import read_sequence
from quire.models.cache_argument import cache_argument
from quire.models.dummy_layer import UnkeptLayer
from quire.models.executors.encoder_source import EncoderSourceLayer, forward
from quire.models.executors.hooks import PackedStep, hearing_hidden
from quire.models.fused_modules import FusedModules
from quire.models.model_watch import ModelWatch
from quire.spec import ChunkedAttention, SlidingWindow


class PerSequenceModel:
    """A model that computes a step chunk by chunk. Between two it is its owner's, as it was."""

    def __init__(
        self,
        model: PreTrainedModel,
        stand_ins: FusedModules | None = None,
        watch: ModelWatch | None = None,  # of a caller that has it look before each pass
    ) -> None:
        self._model = model
        self._stand_ins = stand_ins
        self._watch = watch or ModelWatch(model)
        self._cache_name = cache_argument(model.forward)
        self._takes = inspect.signature(model.forward).parameters.keys()

    def forward(
        self,
        step: PackedStep,
        token_ids: Tensor,  # i64[T]
        positions: Tensor,  # i64[T]
        logits_at: Tensor,  # i64[S]: the packed tokens whose logits are wanted
    ) -> Tensor:
        """Run a forward pass for each sequence: logits [S, vocabulary]."""
        logits: Tensor | None = None
        exchanged = nullcontext() if self._stand_ins is None else self._stand_ins.in_place()
        places = logits_at.tolist()  # in order
        with torch.inference_mode(), self._watch.passing(), exchanged:
            for number, (begin, end, _) in enumerate(_chunks(step)):
                asked = slice(bisect_left(places, begin), bisect_left(places, end))
                wanted = logits_at[asked] - begin
                rows = self._chunk(step, number, token_ids[begin:end], positions[begin:end], wanted)
                if logits is None:
                    logits = rows.new_empty(len(logits_at), rows.shape[-1])
                logits[asked] = rows
        assert logits is not None, "a step without chunks"
        return logits

    def close(self) -> None:
        """Do nothing: nothing was made of the model."""

    def _chunk(
        self, step: PackedStep, number: int, token_ids: Tensor, positions: Tensor, wanted: Tensor
    ) -> Tensor:
        """Logits at the ``wanted`` tokens of one sequence's chunk."""
        cache = Cache(layers=_layers(step, number))
        if step.sources:
            kept = step.sources[number]
            source = Cache(
                layers=[EncoderSourceLayer(kept, layer) for layer in sorted(kept.places)]
            )
            both = EncoderDecoderCache(cache, source)
            return forward(self._model, kept, token_ids, **{self._cache_name: both})[wanted]
        given: dict[str, Any] = {"input_ids": token_ids[None], self._cache_name: cache}
        if "position_ids" in self._takes:
            given["position_ids"] = positions[None]
        if step.images is not None:
            given |= step.images.of_chunk(number)
        keeps = "logits_to_keep" in self._takes
        if keeps:
            given["logits_to_keep"] = wanted
        with step.in_states(number), hearing_hidden(self._model, step):
            logits: Tensor = self._model(use_cache=True, **given).logits[0]
        return logits if keeps else logits[wanted]


def _chunks(step: PackedStep) -> list[tuple[int, int, int]]:
    """They are the same in every layer's batch."""
    return next(iter(step.batches.values())).chunks()


def _layers(step: PackedStep, number: int) -> list[Any]:
    """Sequence ``number``'s cache, layer by layer; what keeps nothing has a place only."""
    keep_states = step.states.layers if step.states else ()
    layers: list[Any] = [UnkeptLayer() for _ in range(max([*step.specs, *keep_states]) + 1)]
    for layer in step.specs:
        layers[layer] = PerSequenceLayer(step, layer, number)
    return layers


class PerSequenceLayer(CacheLayerMixin):
    """One layer of one sequence, as Transformers wants to see it."""

    def __init__(self, step: PackedStep, layer: int, number: int) -> None:
        super().__init__()
        self._step = step
        self._layer = layer
        self._number = number
        self._spec = step.specs[layer]
        begin, end, self._stop = step.batches[layer].chunks()[number]
        self._own = slice(begin, end)
        self.cumulative_length = self._stop - (end - begin)
        self.is_sliding = isinstance(self._spec, SlidingWindow | ChunkedAttention)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: k and v [1, K, T, D] go elsewhere."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the chunk's entries ([1, K, n, D], [1, K, n, Dv]); those of the whole sequence.

        What a window has passed may be gone, and is zero: the model's own mask has it unread.
        """
        step, layer = self._step, self._layer
        batch, storage = step.batches[layer], step.storage
        k, v = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        storage.write(layer, batch.slots_on(k.device)[self._own], k, v)
        step.written.add(layer)
        step.read.add(layer)  # by the model itself, out of what it is given here
        first = self._spec.live_range(self.cumulative_length).start
        self.cumulative_length = self._stop
        k, v = read_sequence(storage.view(layer), batch, self._number, first)
        k, v = k.to(key_states.dtype), v.to(value_states.dtype)
        return pad(k, (0, 0, first, 0))[None], pad(v, (0, 0, first, 0))[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (length, offset) of the keys that ``update`` gives."""
        return self._stop, 0

    def get_seq_length(self) -> int:
        """Return how many tokens it holds."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """Return -1: it has no bound of its own."""
        return -1  # it grows as it must
