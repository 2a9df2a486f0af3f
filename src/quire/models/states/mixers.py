"""Modules that keep a recurrent state: found by their code, called on a part of a packed row.

What they compute is their own; it starts from, and leaves, a layer of Transformers' own cache, or
what stands for one where they keep states themselves (``attributes``). Whose state that is, and
where it lies, ``recurrent_layers`` knows.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
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
from quire.models.cache_argument import named_cache
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
        cache_name = named_cache(names)
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


# -- how they go on from one chunk to the next, tried out ------------------------------------------

# They all should give, chunk by chunk, what they give at once. Some begin their scan anew with each
# chunk of several tokens (Jamba's, in Transformers itself), and get those one by one then.


def settle(
    model: PreTrainedModel,
    mixers: Sequence[Mixer],
    token_ids: Sequence[int],
    stops: Sequence[int],
    limit: float,
) -> tuple[list[Mixer], float]:
    """Return the modules as they must be called, and how far outputs are from those in one go.

    Tried on what a pass over the tokens gives them, in chunks that end at ``stops``, for one module
    of each class. In float32, where rounding does not hide it: of the largest output. Those that
    are off by more than ``limit`` get the tokens of later chunks one by one.
    """
    given = _calls(model, mixers, token_ids)
    found: dict[type[nn.Module], tuple[Mixer, float]] = {}
    for mixer in mixers:
        kind, bound = type(mixer.module), given[mixer.module]
        if kind in found:
            continue
        tried = replace(mixer, along=_along(bound, len(token_ids)))
        deviation = _deviation(tried, bound, stops)
        if not deviation <= limit:
            tried = replace(tried, goes_on_by_tokens=True)
            deviation = _deviation(tried, bound, stops)
        found[kind] = tried, deviation
    settled: list[Mixer] = []
    for mixer in mixers:
        like, _ = found[type(mixer.module)]
        settled.append(replace(mixer, along=like.along, goes_on_by_tokens=like.goes_on_by_tokens))
    return settled, max(deviation for _, deviation in found.values())


def _calls(
    model: PreTrainedModel, mixers: Sequence[Mixer], token_ids: Sequence[int]
) -> dict[nn.Module, inspect.BoundArguments]:
    """What each module is given in a pass over the tokens."""
    found: dict[nn.Module, inspect.BoundArguments] = {}

    def note(mixer: Mixer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[mixer.module] = mixer.bind(args, kwargs)

    handles = [
        mixer.module.register_forward_pre_hook(partial(note, mixer), with_kwargs=True)
        for mixer in mixers
    ]
    try:
        with torch.inference_mode():
            model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _along(bound: inspect.BoundArguments, num_tokens: int) -> tuple[str, ...]:
    """Names of arguments that have a row for each token."""
    return tuple(
        name
        for name, value in bound.arguments.items()
        if isinstance(value, Tensor) and value.shape[:2] == (1, num_tokens)
    )


def _deviation(mixer: Mixer, bound: inspect.BoundArguments, stops: Sequence[int]) -> float:
    """How far outputs in chunks are from those in one, of the largest of them."""
    mixer = replace(mixer, module=deepcopy(mixer.module).float())
    forward = mixer.module.forward
    exact = inspect.BoundArguments(mixer.signature, _in_float32(bound.arguments))
    with torch.inference_mode():
        whole, parts = (_in_chunks(mixer, forward, exact, s) for s in (stops[-1:], stops))
    return max(
        float((part - each).abs().max() / each.abs().max())
        for part, each in zip(parts, whole, strict=True)
        if part is not None and each is not None
    )


def _in_float32(arguments: Mapping[str, Any]) -> "OrderedDict[str, Any]":
    return OrderedDict(
        (name, value.float() if isinstance(value, Tensor) and value.is_floating_point() else value)
        for name, value in arguments.items()
    )


def _in_chunks(
    mixer: Mixer, forward: Any, bound: inspect.BoundArguments, stops: Sequence[int]
) -> Parts:
    """A module's outputs for one sequence, from the beginning."""
    device = bound.arguments[mixer.hidden_name].device
    state, places = mixer.no_state(), torch.arange(stops[-1], device=device)[None]
    return side_by_side(
        [
            mixer.compute(forward, bound, places[:, start:stop], state, goes_on=start > 0)
            for start, stop in pairwise([0, *stops])
        ]
    )
