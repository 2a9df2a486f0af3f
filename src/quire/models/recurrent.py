"""Recurrent layers inside a packed step: each sequence meets its own state, and no other's.

A convolution or a scan runs along the whole row that a packed step is. So the forward of each
module that keeps a state is wrapped for the time of one pass: the tokens of sequences that decode
go through it as rows of one batch, every longer chunk goes alone, each from the state its sequence
had before. The model's own code computes, on layers of Transformers' own cache.

States are never changed in place: a pass that fails has changed nothing, and one that is computed
again gives the same.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from quire.errors import UnsupportedModel

KEPT_STATES = 2  # of each sequence: after its latest chunk, and before it

LayerStates: TypeAlias = dict[int, LinearAttentionLayer]  # by layer, each of one row

_CALLS = frozenset(
    ("get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state")
)
_STATES = ("conv_states", "recurrent_states")
_CACHE_NAMES = ("cache_params", "past_key_values")


class States:
    """What each sequence's layers remember after so many of its tokens."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, LayerStates]] = {}  # by sequence, then by tokens

    def at(self, sequence: int, num_tokens: int) -> LayerStates:
        """The states to go on from. Whatever came before or after them is dropped.

        Raises: RuntimeError if they are not there.
        """
        held = self._held.pop(sequence, {})
        if not num_tokens:
            return {}
        if num_tokens not in held:
            raise RuntimeError(
                f"sequence {sequence} goes on after {num_tokens} tokens, and its states are those "
                f"after {sorted(held)}"
            )
        self._held[sequence] = {num_tokens: held[num_tokens]}
        return held[num_tokens]

    def put(self, sequence: int, num_tokens: int, states: LayerStates) -> None:
        """Keep these beside those that ``at`` gave."""
        self._held.setdefault(sequence, {})[num_tokens] = states

    def forget(self, sequence: int) -> None:
        self._held.pop(sequence, None)

    @property
    def num_bytes(self) -> int:
        return sum(
            tensor.nbytes
            for versions in self._held.values()
            for states in versions.values()
            for layer in states.values()
            for name in _STATES
            for tensor in getattr(layer, name).values()
            if tensor is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mixer:
    """A module that keeps a state, and how it is called."""

    module: nn.Module
    layer: int
    others: list[DummyLayer]  # the layers before it, as a cache has them
    num_states: int  # of each kind
    signature: inspect.Signature  # of its forward
    hidden_name: str
    cache_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A sequence's states before a chunk, and those after it as they are computed."""

    sequence: int
    stop: int
    before: LayerStates
    after: LayerStates


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Chunks of one length that are computed as rows of one batch."""

    chunks: list[_Chunk]
    places: Tensor  # i64[rows, tokens]: in the packed row


class RecurrentLayers:
    """A model's recurrent layers. Between two passes it is its owner's, as it was.

    Raises: UnsupportedModel if they are not, each, one module that asks Transformers' cache.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self.states = States()
        self._mixers = _find(model)
        found = sorted(mixer.layer for mixer in self._mixers)
        if found != list(layers):
            raise UnsupportedModel(
                f"{type(model).__name__} ({model.config.model_type}): layers {list(layers)} keep a "
                f"recurrent state, and what asks Transformers' cache for one are layers {found}; "
                f"model.generate(past_key_values=quire.cache(model)) runs it"
            )

    @contextmanager
    def in_place(self, chunks: Sequence[tuple[int, int, int]]) -> Iterator[None]:
        """For one pass over these chunks (sequence, start, stop); then their states are kept.

        Raises: RuntimeError for a chunk that does not go on where its sequence is, or a layer that
        was left out.
        """
        several = self._rows(chunks)
        modules = [mixer.module.__dict__ for mixer in self._mixers]
        own = [module.get("forward") for module in modules]
        try:
            for mixer in self._mixers:
                mixer.module.__dict__["forward"] = partial(
                    self._forward, mixer, mixer.module.forward, several
                )
            yield
        finally:
            for module, forward in zip(modules, own, strict=True):
                module.pop("forward", None)
                if forward is not None:
                    module["forward"] = forward
        for chunk in (chunk for rows in several for chunk in rows.chunks):
            if len(chunk.after) < len(self._mixers):
                raise RuntimeError("a recurrent layer was not computed")
            self.states.put(chunk.sequence, chunk.stop, chunk.after)

    def deviation(self, stops: Sequence[int], hidden_size: int) -> float:
        """How far outputs in chunks that end there are from those in one, of the largest of them.

        In float32, where rounding does not hide it, for one module of each class.
        """
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(1, stops[-1], hidden_size, generator=generator)
        worst = 0.0
        for mixer in {type(mixer.module): mixer for mixer in self._mixers}.values():
            forward = deepcopy(mixer.module).float().forward
            with torch.inference_mode():
                whole, parts = (_in_chunks(mixer, forward, inputs, s) for s in (stops[-1:], stops))
            worst = max(worst, float((parts - whole).abs().max() / whole.abs().max()))
        return worst

    def _rows(self, chunks: Sequence[tuple[int, int, int]]) -> list[_Rows]:
        """Tokens that go on from a state are rows of one batch; every other chunk is by itself."""
        alone: list[_Rows] = []
        together: list[_Chunk] = []
        places: list[int] = []
        first = 0
        for sequence, start, stop in chunks:
            chunk = _Chunk(
                sequence=sequence, stop=stop, before=self.states.at(sequence, start), after={}
            )
            own = torch.arange(first, first + stop - start)
            first += stop - start
            if chunk.before and stop - start == 1:
                together.append(chunk)
                places.append(first - 1)
            else:
                alone.append(_Rows(chunks=[chunk], places=own[None]))
        if together:
            alone.append(_Rows(chunks=together, places=torch.tensor(places)[:, None]))
        return alone

    @staticmethod
    def _forward(
        mixer: _Mixer,
        forward: Callable[..., Tensor],
        several: list[_Rows],
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Stands in for a mixer's own forward."""
        bound = mixer.signature.bind(*args, **kwargs)
        packed: Tensor = bound.arguments[mixer.hidden_name]  # [1, T, hidden]
        out: Tensor | None = None
        for rows in several:
            state = _state(mixer, rows)
            bound.arguments[mixer.hidden_name] = packed[0, rows.places]
            bound.arguments[mixer.cache_name] = Cache(layers=[*mixer.others, state])
            part = forward(*bound.args, **bound.kwargs)
            if out is None:
                out = part.new_empty(1, packed.shape[1], part.shape[-1])
            out[0, rows.places] = part
            for row, chunk in enumerate(rows.chunks):
                chunk.after[mixer.layer] = state if len(rows.chunks) == 1 else _row(state, row)
        assert out is not None, "a pass without tokens"
        return out


def _in_chunks(
    mixer: _Mixer, forward: Callable[..., Tensor], inputs: Tensor, stops: Sequence[int]
) -> Tensor:
    """A mixer's outputs for one sequence, from the beginning."""
    cache = Cache(layers=[*mixer.others, LinearAttentionLayer(number_of_states=mixer.num_states)])
    parts = [
        forward(**{mixer.hidden_name: inputs[:, start:stop], mixer.cache_name: cache})
        for start, stop in pairwise([0, *stops])
    ]
    return torch.cat(parts, 1)


def _state(mixer: _Mixer, rows: _Rows) -> LinearAttentionLayer:
    """A layer's states of all the rows, in one batch. They are copies."""
    if not rows.chunks[0].before:
        return LinearAttentionLayer(number_of_states=mixer.num_states)
    layers = [chunk.before[mixer.layer] for chunk in rows.chunks]
    return _with(layers[0], lambda name, at: torch.cat([getattr(x, name)[at] for x in layers]))


def _row(layer: LinearAttentionLayer, row: int) -> LinearAttentionLayer:
    """One sequence's states of a batch. A view would keep all the others' from being freed."""
    return _with(layer, lambda name, at: getattr(layer, name)[at][row : row + 1].clone())


def _with(like: LinearAttentionLayer, make: Callable[[str, int], Tensor]) -> LinearAttentionLayer:
    """A layer in the same condition, with its states made anew."""
    made = copy(like)
    for name, value in vars(like).items():
        if isinstance(value, dict):
            setattr(made, name, dict(value))
    for name in _STATES:
        own = getattr(made, name)
        own.update({at: make(name, at) for at, state in own.items() if state is not None})
    return made


def _find(model: PreTrainedModel) -> list[_Mixer]:
    """The modules that ask for a layer's state, each known by its class's own code."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    asks: dict[type[nn.Module], bool] = {}
    mixers: list[_Mixer] = []
    for module in model.modules():
        kind = type(module)
        if kind not in asks:
            asks[kind] = _asks_for_states(kind)
        layer = getattr(module, "layer_idx", None)
        if not asks[kind] or not isinstance(layer, int) or layer >= len(layers):
            continue
        signature = inspect.signature(module.forward)
        names = list(signature.parameters)
        cache_name = next((name for name in _CACHE_NAMES if name in names), None)
        keeps = layers[layer]
        if cache_name is not None and isinstance(keeps, LinearAttentionCacheLayerMixin):
            mixers.append(
                _Mixer(
                    module=module,
                    layer=layer,
                    others=[DummyLayer()] * layer,
                    num_states=keeps.number_of_states,
                    signature=signature,
                    hidden_name=names[0],
                    cache_name=cache_name,
                )
            )
    return mixers


def _asks_for_states(kind: type[nn.Module]) -> bool:
    functions = [inspect.unwrap(f) for f in vars(kind).values() if inspect.isfunction(f)]
    return any(not _CALLS.isdisjoint(f.__code__.co_names) for f in functions)
