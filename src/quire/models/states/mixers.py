"""Modules that keep a recurrent state: found by their code, called on a part of a packed row.

What they compute is their own; it starts from, and leaves, a layer of Transformers' own cache, or
what stands for one where they keep states themselves (``attributes``). Whose state that is, and
where it lies, ``recurrent`` knows.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from quire.layers.watch import Place
from quire.models.dummy_layer import UnkeptLayer

# -- attributes ------------------------------------------------------------------------------------

# Modules that keep their state in attributes of their own, instead of in a cache (RecurrentGemma).
#
# Which attributes those are is found out by having the module make room for a state: what has
# changed then is where it keeps one. For one call they are given the state that it goes on from,
# and have their own back afterwards.


_MAKE_ROOM = "_setup_cache"  # (rows, device, dtype), as Transformers' code calls it


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeStates:
    """Where one module keeps its state: submodules, "" for itself, and their attributes."""

    convolutions: tuple[tuple[str, str], ...]  # [rows, channels, width], each
    scans: tuple[tuple[str, str], ...]  # [rows, …], each

    def places(self, module: nn.Module) -> set[Place]:
        """Return what is lent, as a watch names it."""
        several = (*self.convolutions, *self.scans)
        return {(id(vars(module.get_submodule(path))), name) for path, name in several}

    @contextmanager
    def lent(self, module: nn.Module, state: LinearAttentionLayer) -> Iterator[None]:
        """Have the module go on from a state for one call, which leaves there the one after it."""
        held = [
            (module.get_submodule(path).__dict__, name, states, number)
            for places, states in (
                (self.convolutions, state.conv_states),
                (self.scans, state.recurrent_states),
            )
            for number, (path, name) in enumerate(places)
        ]
        own = [attributes.get(name) for attributes, name, *_ in held]
        try:
            for attributes, name, states, number in held:
                attributes[name] = states[number]
            yield
            for attributes, name, states, number in held:
                states[number] = attributes[name]
        finally:
            for (attributes, name, *_), before in zip(held, own, strict=True):
                attributes[name] = before


def find_attributes(module: nn.Module) -> AttributeStates | None:
    """Find the attributes in which a module keeps its state; None for one that keeps none so."""
    make_room = getattr(module, _MAKE_ROOM, None)
    if make_room is None:
        return None
    before = _tensors(module)
    parameter = next(module.parameters())
    make_room(1, parameter.device, parameter.dtype)
    after = _tensors(module)
    new = {place: value for place, value in after.items() if value is not before.get(place)}
    if not new:
        return None
    for path, name in new:
        module.get_submodule(path).__dict__[name] = before.get((path, name))
    return AttributeStates(
        convolutions=tuple(place for place, value in new.items() if value.ndim == 3),
        scans=tuple(place for place, value in new.items() if value.ndim != 3),
    )


def _tensors(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Tensors that are plain attributes: neither weights nor buffers."""
    return {
        (path, name): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    }


# -- mixers ----------------------------------------------------------------------------------------


Parts: TypeAlias = tuple[Tensor | None, ...]
Output: TypeAlias = Tensor | Parts
Forward: TypeAlias = Callable[..., Output]

_CALLS = frozenset(
    ("get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state")
)
_CACHE_NAMES = ("cache_params", "past_key_values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """A module that keeps a state, and how it is called."""

    module: nn.Module
    layer: int
    others: list[UnkeptLayer]  # the layers before it, as a cache has them
    num_states: int  # of each kind
    signature: inspect.Signature  # of its forward
    hidden_name: str
    cache_name: str | None  # of the argument that holds states …
    attributes: AttributeStates | None = None  # … or else where the module holds them itself
    along: tuple[str, ...]  # arguments that have a row for each token, [1, T, …]
    goes_on_by_tokens: bool = False  # from a state, several tokens must come one by one

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """Bind what the module is called with to the arguments of its forward."""
        return self.signature.bind(*args, **kwargs)

    def no_state(self) -> LinearAttentionLayer:
        """Return what a sequence begins from."""
        return LinearAttentionLayer(number_of_states=self.num_states)

    def compute(
        self,
        forward: Forward,
        bound: inspect.BoundArguments,
        places: Tensor,  # i64[rows, tokens]: in the packed row
        state: LinearAttentionLayer,
        *,
        goes_on: bool,
    ) -> Parts:
        """Compute what the module gives for tokens [rows, tokens, …], from the state of their rows.

        The state is then that after them.
        """
        by_tokens = self.goes_on_by_tokens and goes_on
        several: Sequence[Tensor] = torch.split(places, 1, 1) if by_tokens else (places,)
        parts: list[Parts] = []
        for cut in several:
            given = OrderedDict(
                (name, value[0, cut] if name in self.along and value is not None else value)
                for name, value in bound.arguments.items()
            )
            if self.cache_name is not None:
                given[self.cache_name] = Cache(layers=[*self.others, state])
            elif "use_cache" in given:  # what keeps its state itself forgets it without
                given["use_cache"] = True
            call = inspect.BoundArguments(self.signature, given)
            with self._lent(state):
                part = forward(*call.args, **call.kwargs)
            parts.append((part,) if isinstance(part, Tensor) else part)
        return parts[0] if len(parts) == 1 else side_by_side(parts)

    def _lent(self, state: LinearAttentionLayer) -> AbstractContextManager[None]:
        if self.attributes is None:
            return nullcontext()
        return self.attributes.lent(self.module, state)


def side_by_side(parts: Sequence[Parts]) -> Parts:
    """Join what a module gave for tokens after one another."""
    return tuple(
        None if tensors[0] is None else torch.cat(cast("tuple[Tensor, ...]", tensors), 1)
        for tensors in zip(*parts, strict=True)
    )


def find_mixers(model: PreTrainedModel) -> list[Mixer]:
    """Find the modules that ask a cache for a layer's state, or keep one themselves."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    asks: dict[type[nn.Module], bool] = {}
    mixers: list[Mixer] = []
    for path, module in model.named_modules():
        kind = type(module)
        if kind not in asks:
            asks[kind] = _asks_for_states(kind)
        layer = _layer_of(path, module)
        if layer is None or layer >= len(layers):
            continue
        keeps = layers[layer]
        if not isinstance(keeps, LinearAttentionCacheLayerMixin):
            continue
        attributes = None if asks[kind] else find_attributes(module)
        if not (asks[kind] or attributes):
            continue
        signature = inspect.signature(module.forward)
        names = list(signature.parameters)
        cache_name = next((name for name in _CACHE_NAMES if name in names), None)
        if attributes or cache_name is not None:
            mixers.append(
                Mixer(
                    module=module,
                    layer=layer,
                    others=[UnkeptLayer()] * layer,
                    num_states=keeps.number_of_states,
                    signature=signature,
                    hidden_name=names[0],
                    cache_name=cache_name,
                    attributes=attributes,
                    along=(names[0],),
                )
            )
    return mixers


def _layer_of(path: str, module: nn.Module) -> int | None:
    """As the module says, else by its place among the model's layers."""
    layer = getattr(module, "layer_idx", None)
    if isinstance(layer, int):
        return layer
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def _asks_for_states(kind: type[nn.Module]) -> bool:
    functions = [inspect.unwrap(f) for f in vars(kind).values() if inspect.isfunction(f)]
    return any(not _CALLS.isdisjoint(f.__code__.co_names) for f in functions)
