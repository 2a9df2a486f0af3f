"""Sources: what an encoder reads for a text, and the keys and values that come of it.

An encoder is run once for a sequence, by itself and with the source's own length, before the
sequence's first tokens; each of the decoder's layers leaves what it made of the result in the
sequence's place, where every later chunk finds it (``alone``). Where that is, accounting knows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from quire.kv import Accounting, Storage
from quire.kv.interface import place_of
from quire.spec import CrossAttention


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """Token ids, or the features that a speech model hears ([mels, frames])."""

    num_tokens: int  # of the encoder's output
    token_ids: tuple[int, ...] = ()
    features: Tensor | None = None


@dataclass
class Encoded(BaseModelOutput):
    """An encoder's output as the whole model takes it; a mixture's asks for its routers' too."""

    router_logits: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSource:
    """A sequence's source, and its place in each layer: [K, longest source, D] and […, Dv]."""

    source: Source
    places: Mapping[int, tuple[Tensor, Tensor]]
    is_written: bool  # in an earlier step


def kept_sources(
    accounting: Accounting,
    storage: Storage,
    chunks: Sequence[tuple[int, int, int]],
    sources: Sequence[Source],
) -> list[KeptSource]:
    """Return the sources of a step's chunks (sequence, start, stop)."""
    several = []
    for (seq_id, start, _), source in zip(chunks, sources, strict=True):
        places = {}
        for number, group in enumerate(accounting.groups):
            if isinstance(group.spec, CrossAttention):
                slot = place_of(accounting, number, seq_id)
                for layer in group.layers:
                    keys, values = storage.states(number).layer(layer)
                    places[layer] = keys[slot], values[slot]
        several.append(KeptSource(source=source, places=places, is_written=start > 0))
    return several


def forward(
    model: PreTrainedModel, kept: KeptSource, token_ids: Tensor, **cache: "EncoderDecoderCache"
) -> Tensor:
    """Compute logits [n, vocabulary] of a chunk's token ids i64[n] with what its source gave.

    ``cache``: the text's, by the name that the model has for it.
    """
    logits: Tensor = model(
        encoder_outputs=Encoded(last_hidden_state=_encoded(model, kept)),
        decoder_input_ids=token_ids[None],
        use_cache=True,
        **cache,
    ).logits[0]
    return logits


def encode(model: PreTrainedModel, source: Source) -> Tensor:
    """Run the encoder: [1, S, hidden]. Raises: ValueError for another length than expected."""
    encoder = model.get_encoder()
    if source.features is not None:
        features = source.features[None].to(model.device, model.dtype)
        hidden: Tensor = encoder(features).last_hidden_state
    else:
        ids = torch.tensor([source.token_ids], device=model.device)
        hidden = encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    if hidden.shape[1] != source.num_tokens:
        raise ValueError(
            f"the encoder made {hidden.shape[1]} tokens of a source of {source.num_tokens}"
        )
    return hidden


def _encoded(model: PreTrainedModel, kept: KeptSource) -> Tensor:
    """The encoder's output, or something of its shape, which tells the decoder's layers that there
    is a source: they find it in their cache."""
    if not kept.is_written:
        return encode(model, kept.source)
    hidden_size: int = model.config.get_text_config(decoder=True).hidden_size
    nothing = torch.zeros((), dtype=model.dtype, device=model.device)
    return nothing.expand(1, kept.source.num_tokens, hidden_size)


class EncoderSourceLayer(CacheLayerMixin):
    """One layer's part of one sequence's source, as Transformers wants to see it."""

    def __init__(self, kept: KeptSource, layer: int) -> None:
        super().__init__()
        self._places = [place[None, :, : kept.source.num_tokens] for place in kept.places[layer]]
        self.is_initialized = kept.is_written
        if kept.is_written:
            self.keys, self.values = self._places

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: k and v [1, K, T, D] go elsewhere."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write [1, K, S, D] and […, Dv], once.

        Raises: ValueError for other shapes than the spec's.
        """
        for place, new in zip(self._places, (key_states, value_states), strict=True):
            if place.shape != new.shape:
                raise ValueError(
                    f"it caches sources as {list(new.shape[1:])}, and config.json says "
                    f"{list(place.shape[1:])}"
                )
            place.copy_(new)
        self.keys, self.values = self._places
        self.is_initialized = True
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        """Return how many tokens it holds."""
        return self._places[0].shape[2] if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Return -1: it has no bound of its own."""
        return -1
