"""Two seams of Transformers carry a paged, packed batch through its unmodified models.

* *Write*: an ``EngineCache`` stands in for ``past_key_values``; each layer hands it the new keys
  and values (or the latent) and it puts them into their slots.
* *Read*: an attention function registered under a name that is not registered as a mask, so that no
  tokens x tokens mask is ever built; the step travels to it as a keyword argument of
  ``model(...)``.

Both hold for one ``forward`` only: between two steps the model is its owner's, as it was.
``PackedStep.silent`` names the layers whose reads or writes did not come by.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from quire.attention import AttentionBackend, AttentionBatch, SdpaAttention
from quire.attention.gather import read_sequence
from quire.attention.sdpa import attend_sequence
from quire.errors import UnsupportedModel
from quire.kv import Accounting, LayerView, Storage
from quire.kv.layout import attention_groups, attention_spec
from quire.models.executors.encoder_source import KeptSource
from quire.models.executors.image_features import StepImages
from quire.models.executors.latent import AbsorbedLatent, attend_latents
from quire.models.states.recurrent_layers import StepStates
from quire.spec import AttentionSpec

# -- gathered --------------------------------------------------------------------------------------

# Layers that change keys and values after they were kept: each reads all that its sequences hold.
#
# Some models repeat, split or expand what the cache returns before they attend. What lies in
# blocks is then not what attention reads, so the cache returns everything, one sequence after the
# other, and each sequence attends by itself to its part of what the model has made of it. Of a
# window only what a query of the step can still read is brought along. Slower than reading blocks
# where they lie.


def gather(
    view: LayerView, batch: AttentionBatch, spec: AttentionSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Copy what the step's queries may read: k [1, K, all sequences' tokens, D], v [1, K, …, Dv].

    Both have the model's own ``dtype``, whatever they are kept in.
    """
    held = [read_sequence(view, batch, n, start) for n, (_, _, start, _) in _parts(batch, spec)]
    return (
        torch.cat([k for k, _ in held], 1)[None].to(dtype),
        torch.cat([v for _, v in held], 1)[None].to(dtype),
    )


def attend_gathered(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [K, all sequences' tokens, D]
    v: Tensor,  # [K, all sequences' tokens, Dv]
    batch: AttentionBatch,
    spec: AttentionSpec,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend sequence by sequence: [T, H, Dv]. Raises: RuntimeError where tokens were lost."""
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    first = 0
    for _, (begin, end, start, context_len) in _parts(batch, spec):
        own = slice(first, first + context_len - start)
        out[begin:end] = attend_sequence(
            q[begin:end],
            k[:, own],
            v[:, own],
            spec,
            start,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        first = own.stop
    if not k.shape[1] == v.shape[1] == first:
        raise RuntimeError(
            f"{first} tokens were gathered, attention was given {k.shape[1]} keys and "
            f"{v.shape[1]} values"
        )
    return out


def _parts(
    batch: AttentionBatch, spec: AttentionSpec
) -> list[tuple[int, tuple[int, int, int, int]]]:
    """(number, (first query, one past the last, first token read, context length)) of each."""
    return [
        (n, (begin, end, spec.live_range(context_len - (end - begin)).start, context_len))
        for n, (begin, end, context_len) in enumerate(batch.chunks())
    ]


# -- hooks -----------------------------------------------------------------------------------------


ATTENTION_NAME = "quire"


@dataclass(slots=True)
class PackedStep:
    """One forward pass: for each layer its spec and its batch, and who has reported."""

    storage: Storage
    backend: AttentionBackend
    specs: Mapping[int, AttentionSpec]
    batches: Mapping[int, AttentionBatch]  # a layer's group's
    # Layers that read through block tables what their model would expand first …
    absorbed: Mapping[int, AbsorbedLatent] = field(default_factory=dict)
    # … and those that are given all that they can read, for their model to change it as it likes.
    gathered: Collection[int] = ()
    states: StepStates | None = None  # where layers are recurrent
    # A layer that keeps nothing of its own → whose keys and values it reads.
    lenders: Mapping[int, int] = field(default_factory=dict)
    sources: Sequence[KeptSource] = ()  # of each chunk, where the model reads any
    images: StepImages | None = None  # where a chunk has any
    written: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    latest: int = -1  # the layer that was written last
    # Gets what the model's layers end with, [1, T, hidden] of each pass, if it is there.
    hidden: list[Tensor] | None = None

    def in_states(self, number: int | None = None) -> AbstractContextManager[None]:
        """Have recurrent layers go on from their states, for a pass over the step or one chunk."""
        return nullcontext() if self.states is None else self.states.in_place(number)

    @property
    def silent(self) -> list[int]:
        """Layers that should remember and were not written, or not read."""
        return sorted(self.specs.keys() - (self.written & self.read))


class EngineCache:
    """What a model sees as its ``past_key_values`` during one step (the write seam)."""

    layers: tuple[Any, ...] = ()  # a model that looks in finds no entries from outside
    is_compileable = False
    is_initialized = True  # no chunk is anything but a continuation

    def __init__(self, step: PackedStep, positions: Tensor) -> None:
        self._step = step
        self._positions = positions  # i64[T]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's entries ([1, K, T, D] and [1, K, T, Dv]).

        Returns them; of a layer that is gathered those of every token that its queries may read,
        one sequence after the other.
        """
        step = self._step
        batch = step.batches[layer_idx]
        k, v = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        step.storage.write(layer_idx, batch.slots_on(k.device), k, v)
        step.written.add(layer_idx)
        step.latest = layer_idx
        if layer_idx not in step.gathered:
            return key_states, value_states
        view = step.storage.view(layer_idx)
        return gather(view, batch, step.specs[layer_idx], key_states.dtype)

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:
        """Return what a token's place in the batch lacks to its position: i64[T].

        The model as a whole is given positions and builds no mask, so it needs none. A layer that
        asks (Llama 4's do) adds the answer to ``arange(T)``, and gets each token its own.
        """
        if layer_idx is None:
            return 0
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: it has no bound of its own."""
        return -1


@contextmanager
def reading_through_attend(model: PreTrainedModel) -> Iterator[None]:
    """Have a model read through ``attend``; afterwards it has its own attention back.

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
                "no layer can be reached, for its attention does not go through Transformers' "
                "interface"
            )
        yield
    finally:
        model.set_attn_implementation({name: what for name, what in own.items() if what})
        for name in (name for name, what in own.items() if name and not what):
            getattr(config, name)._attn_implementation_internal = None  # it never had one


@contextmanager
def hearing_hidden(model: PreTrainedModel, step: PackedStep) -> Iterator[None]:
    """Give a step the last hidden states of a pass, if it asks for them.

    Raises: RuntimeError where the model's layers were not called as one module.
    """
    heard = step.hidden
    if heard is None:
        yield
        return

    def hear(_: torch.nn.Module, __: Any, out: Any) -> None:
        heard.append(out[0])

    hook = model.base_model.register_forward_hook(hear)
    try:
        yield
    finally:
        hook.remove()
    if not heard:
        raise RuntimeError("the model's layers were not called as one module: no hidden states")


def make_step(
    accounting: Accounting,
    storage: Storage,
    backend: AttentionBackend,
    batches: list[AttentionBatch],
    lenders: Mapping[int, int],
) -> PackedStep:
    """Make a step of batches, one for each of the accounting's groups that have tokens."""
    specs: dict[int, AttentionSpec] = {}
    by_layer: dict[int, AttentionBatch] = {}
    for group, batch in zip(attention_groups(accounting.groups), batches, strict=True):
        for layer in group.layers:
            specs[layer] = attention_spec(group)
            by_layer[layer] = batch
    return PackedStep(
        storage=storage, backend=backend, specs=specs, batches=by_layer, lenders=lenders
    )


def attend(  # noqa: PLR0913 - the signature is Transformers'
    module: torch.nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    quire_step: PackedStep | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend, as Transformers' attention function (the read seam): [1, T, H, Dv].

    Raises: RuntimeError where the step did not arrive, or the layer keeps nothing.
    """
    if quire_step is None:
        raise RuntimeError("the step's keyword arguments did not reach the attention layers")
    layer = _layer_of(module, quire_step)
    if layer not in quire_step.specs:
        raise RuntimeError(f"layer {layer} attends, and keeps nothing that it could read")
    spec, batch = quire_step.specs[layer], quire_step.batches[layer]
    quire_step.read.add(layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q = query[0].transpose(0, 1)
    if layer in quire_step.gathered:
        out = attend_gathered(
            q, key[0], value[0], batch, spec, scale=scale, softcap=softcap, sinks=s_aux
        )
        return out[None], None
    view = quire_step.storage.view(layer)
    read = partial(quire_step.backend.attend, scale=scale, softcap=softcap, sinks=s_aux)
    absorbed = quire_step.absorbed.get(layer)
    if absorbed is None:
        out = read(q, view, batch, spec=spec)
    else:
        alone = partial(_attend_expanded, quire_step.backend, scale=scale, softcap=softcap)
        out = attend_latents(
            q, key, value, absorbed, view, batch, read, partial(alone, sinks=s_aux), spec=spec
        )
    return out[None], None


def _attend_expanded(
    backend: AttentionBackend,
    q: Tensor,
    row: LayerView,
    batch: AttentionBatch,
    *,
    spec: AttentionSpec,
    **options: Any,
) -> Tensor:
    """Over keys and values that no cache keeps; their kind need not be one that is kept."""
    key = ("expanded", spec.entry_shapes)
    if key not in batch.memo:
        serves = backend.unsupported(spec, q.device) is None
        batch.memo[key] = backend if serves else SdpaAttention()
    found: Tensor = batch.memo[key].attend(q, row, batch, spec=spec, **options)
    return found


def _layer_of(module: torch.nn.Module, step: PackedStep) -> int:
    """Whose memory it reads: what was written last, for one module may serve several layers.

    Unless it is of a layer that keeps nothing of its own, and reads another one's.
    """
    own = getattr(module, "layer_idx", None)
    if not isinstance(own, int) or own < 0 or own in step.specs:
        return step.latest
    return step.lenders.get(own, own)
