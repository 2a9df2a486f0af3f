"""Modules that keep their state in attributes of their own, instead of in a cache (RecurrentGemma).

Which attributes those are is found out by having the module make room for a state: what has changed
then is where it keeps one. For one call they are given the state that it goes on from, and have
their own back afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import LinearAttentionLayer

from quire.layers.watch import Place

_MAKE_ROOM = "_setup_cache"  # (rows, device, dtype), as Transformers' code calls it


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeStates:
    """Where one module keeps its state: submodules, "" for itself, and their attributes."""

    convolutions: tuple[tuple[str, str], ...]  # [rows, channels, width], each
    scans: tuple[tuple[str, str], ...]  # [rows, …], each

    def places(self, module: nn.Module) -> set[Place]:
        """What is lent, as a watch names it."""
        several = (*self.convolutions, *self.scans)
        return {(id(vars(module.get_submodule(path))), name) for path, name in several}

    @contextmanager
    def lent(self, module: nn.Module, state: LinearAttentionLayer) -> Iterator[None]:
        """For one call the module goes on from a state, which is then the one after it."""
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
    """None for a module that keeps no state so."""
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
