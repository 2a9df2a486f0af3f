"""What Transformers' own cache holds of each layer, and what a spec says that it should.

Keys, values and states by name, shape and dtype, without the batch.
"""

from collections.abc import Iterator
from typing import Any

import torch

from quire.models.cache_argument import cache_argument
from quire.spec import ChunkedAttention, Layer, RecurrentState

Held = dict[str, tuple[tuple[int, ...], str]]


def cache_after(model: Any, tokens: torch.Tensor) -> Any:
    """What a model holds once ``tokens`` (i64[1, T]) are computed: a prompt, and one token more."""
    with torch.no_grad():
        name = cache_argument(model.forward)
        before = getattr(model(tokens[:, :-1], use_cache=True), name)
        cache = getattr(model(tokens[:, -1:], use_cache=True, **{name: before}), name)
    return getattr(cache, "self_attention_cache", cache)  # of a decoder that may read an encoder


def held_by(cache_layer: Any) -> Held:
    """What one layer of a cache holds."""

    def tensors() -> Iterator[tuple[str, Any]]:
        for name in ("keys", "values"):
            yield name, getattr(cache_layer, name, None)
        for name in ("conv_states", "recurrent_states"):
            states = getattr(cache_layer, name, None) or {}
            for at, state in states.items():
                yield f"{name}{at or ''}", state

    return {
        name: (tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors()
        if tensor is not None
    }


def expected_of(layer: Layer, num_tokens: int) -> Held:
    """The same, as the spec says it."""
    held: Held = {}
    for spec in layer.specs:
        if isinstance(spec, RecurrentState):
            for state in spec.states:
                held[_held_name(state.name)] = (state.shape, state.dtype)
            continue
        live = len(spec.live_range(num_tokens))
        if isinstance(spec, ChunkedAttention):
            # Transformers keeps a window of the chunk's size.
            live = min(num_tokens, spec.chunk - 1)
        (key_heads, key_dim), (value_heads, value_dim) = spec.entry_shapes
        held["keys"] = ((key_heads, live, key_dim), spec.dtype)
        held["values"] = ((value_heads, live, value_dim), spec.dtype)
    return held


def _held_name(state: str) -> str:
    """A state's name as ``held_by`` has it: conv, conv0, conv1, …; what else there is, scans."""
    if not state.startswith("conv"):
        return "recurrent_states"
    return "conv_states" + state.removeprefix("conv").removeprefix("0")
