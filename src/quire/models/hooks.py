"""Two seams of Transformers carry a paged, packed batch through its unmodified models.

* *Write*: an ``EngineCache`` stands in for ``past_key_values``; each layer hands it the new keys
  and values (or the latent) and it puts them into their slots.
* *Read*: an attention function registered under a name that is not registered as a mask, so that no
  tokens x tokens mask is ever built; the step travels to it as a keyword argument of
  ``model(...)``.

Both hold for one ``forward`` only: between two steps the model is its owner's, as it was.
``Step.silent`` names the layers whose reads or writes did not come by.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from quire.attention import AttentionBackend, AttentionBatch
from quire.attention.gather import read_sequence, readable
from quire.attention.sdpa import attend_sequence
from quire.errors import UnsupportedModel
from quire.spec import AttentionSpec, LatentAttention
from quire.strategies import Accounting, Storage
from quire.strategies.layout import attention_spec

ATTENTION_NAME = "quire"


@dataclass(slots=True)
class Step:
    """One forward pass: for each layer its spec and its batch, and who has reported."""

    storage: Storage
    backend: AttentionBackend
    specs: Mapping[int, AttentionSpec]
    batches: Mapping[int, AttentionBatch]  # a layer's group's
    written: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)

    @property
    def silent(self) -> list[int]:
        """Layers that should remember and were not written, or not read."""
        return sorted(self.specs.keys() - (self.written & self.read))


class EngineCache:
    """What a model sees as its ``past_key_values`` during one step (the write seam)."""

    is_compileable = False

    def __init__(self, step: Step, positions: Tensor) -> None:
        self._step = step
        self._positions = positions  # i64[T]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's entries ([1, K, T, D] and [1, K, T, Dv]).

        Returns them, unless the model expands them further (a latent): then those of every token
        that the step's sequences hold, one sequence after the other.
        """
        step = self._step
        batch = step.batches[layer_idx]
        k, v = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        step.storage.write(layer_idx, batch.slots, k, v)
        step.written.add(layer_idx)
        if not isinstance(step.specs[layer_idx], LatentAttention):
            return key_states, value_states
        view = step.storage.view(layer_idx)
        held = [read_sequence(view, batch, index, 0) for index in range(batch.num_seqs)]
        # In the model's own dtype, whatever they are kept in.
        return (
            torch.cat([k for k, _ in held], 1)[None].to(key_states.dtype),
            torch.cat([v for _, v in held], 1)[None].to(value_states.dtype),
        )

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:
        """What a token's place in the batch lacks to its position.

        The model as a whole is given positions and builds no mask, so it needs none. A layer that
        asks (Llama 4's do) adds the answer to ``arange(T)``, and gets each token its own.
        """
        if layer_idx is None:
            return 0
        return self._positions - torch.arange(len(self._positions))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1


@contextmanager
def reading_through_attend(model: PreTrainedModel) -> Iterator[None]:
    """While it lasts the model reads through ``attend``; then it has its own attention back.

    Raises: UnsupportedModel for one whose attention does not go through Transformers' interface.
    """
    AttentionInterface.register(ATTENTION_NAME, attend)
    config = model.config
    own = {"": config._attn_implementation}
    for name in config.sub_configs:
        if getattr(config, name) is not None:
            own[name] = getattr(config, name)._attn_implementation
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        if config._attn_implementation != ATTENTION_NAME:
            raise UnsupportedModel(
                f"{type(model).__name__} ({config.model_type}): no layer can be reached, for its "
                f"attention does not go through Transformers' interface; "
                f"model.generate(past_key_values=quire.cache(model)) runs it"
            )
        yield
    finally:
        model.set_attn_implementation(own)


def make_step(
    accounting: Accounting,
    storage: Storage,
    backend: AttentionBackend,
    batches: list[AttentionBatch],
) -> Step:
    """``batches``: one for each group of the accounting."""
    specs: dict[int, AttentionSpec] = {}
    by_layer: dict[int, AttentionBatch] = {}
    for group, batch in zip(accounting.groups, batches, strict=True):
        for layer in group.layers:
            specs[layer] = attention_spec(group)
            by_layer[layer] = batch
    return Step(storage=storage, backend=backend, specs=specs, batches=by_layer)


def attend(  # noqa: PLR0913 - the signature is Transformers'
    module: torch.nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    quire_step: Step | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function (the read seam): [1, T, H, Dv]."""
    if quire_step is None:
        raise RuntimeError("the step's keyword arguments did not reach the attention layers")
    layer: int = module.layer_idx  # type: ignore[assignment]
    if layer not in quire_step.specs:
        raise RuntimeError(f"layer {layer} keeps nothing of its own and reads another layer's")
    spec, batch = quire_step.specs[layer], quire_step.batches[layer]
    quire_step.read.add(layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q = query[0].transpose(0, 1)
    if isinstance(spec, LatentAttention):
        out = _attend_expanded(q, key[0], value[0], batch, spec, scale)
    else:
        view = quire_step.storage.view(layer)
        out = quire_step.backend.attend(
            q, view, batch, spec=spec, scale=scale, softcap=softcap, sinks=s_aux
        )
    return out[None], None


def _attend_expanded(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [H, all tokens of all sequences, D]
    v: Tensor,
    batch: AttentionBatch,
    spec: AttentionSpec,
    scale: float,
) -> Tensor:
    """Latents that the model has expanded itself, one sequence after the other."""
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    first = 0
    for begin, end, context_len in batch.chunks():
        own = slice(first, first + context_len)
        mask = readable(spec, end - begin, context_len, 0, q.device)
        out[begin:end] = attend_sequence(
            q[begin:end], k[:, own], v[:, own], mask, scale=scale, softcap=None, sinks=None
        )
        first += context_len
    return out
