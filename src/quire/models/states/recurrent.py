"""Recurrent layers inside a step: each sequence meets its own state, and no other's.

A convolution or a scan runs along the whole row that a packed step is. So the forward of each
module that keeps a state (``mixers``) is wrapped for the time of one pass: the tokens of sequences
that decode go through it as rows of one batch, every longer chunk goes alone, each from the state
its sequence had before. The model's own code computes, on layers of Transformers' own cache, whose
tensors are those of the storage.

States are overwritten as the pass goes on: after one that fails, those of its sequences are of no
use.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from quire.devices.staging import Array, to_device
from quire.errors import UnsupportedModel
from quire.models.placed import device_of
from quire.models.states.mixers import Forward, Mixer, Output, Parts, find_mixers
from quire.models.states.settling import settle
from quire.spec import RecurrentState
from quire.strategies import Accounting, Storage
from quire.strategies.base import Slots
from quire.strategies.states import place_of

_Chunks = Sequence[tuple[int, int, int]]  # (sequence, start, stop) of each


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStates:
    """A layer's states of all sequences, and where those of a step's sequences are."""

    convolutions: tuple[Tensor, ...]  # [slots, channels, width], each
    scans: tuple[Tensor, ...]  # [slots, …], each
    slots: Slots  # i64[S]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Chunks of one length that are computed as rows of one batch."""

    members: list[int]  # which of the step's chunks
    places: Tensor  # i64[rows, tokens]: in the packed row
    goes_on: bool  # from states that are there


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowSlots:
    """Where one layer's states of some rows are."""

    first: int
    all: Tensor  # i64[rows]


class RecurrentLayers:
    """A model's recurrent layers. Between two passes it is its owner's, as it was.

    Raises: UnsupportedModel if they are not modules, at least one each, that ask Transformers'
    cache.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self._model, self._device = model, device_of(model)
        self._mixers = find_mixers(model)
        found = sorted({mixer.layer for mixer in self._mixers})
        if found != list(layers):
            raise UnsupportedModel(
                f"{type(model).__name__} ({model.config.model_type}): layers {list(layers)} keep a "
                f"recurrent state, and what asks Transformers' cache for one are layers {found}"
            )

    def settle(self, token_ids: Sequence[int], stops: Sequence[int], limit: float) -> float:
        """Find out how the modules go on from chunk to chunk; how far that is from one go."""
        self._mixers, deviation = settle(self._model, self._mixers, token_ids, stops, limit)
        return deviation

    @property
    def slow_to_go_on(self) -> list[str]:
        """Classes of modules that get the tokens of a chunk one by one, where they go on."""
        names = {type(m.module).__name__ for m in self._mixers if m.goes_on_by_tokens}
        return sorted(names)

    def of_step(self, accounting: Accounting, storage: Storage, chunks: _Chunks) -> "StepStates":
        """For the passes of one step."""
        kept = _kept_states(accounting, storage, chunks)
        return StepStates(self._mixers, chunks, kept, self._device)


class StepStates:
    """The states that a step goes on from, and leaves."""

    def __init__(
        self,
        mixers: Sequence[Mixer],
        chunks: _Chunks,
        kept: Mapping[int, KeptStates],
        device: torch.device,
    ) -> None:
        self._mixers, self._chunks, self._kept, self._device = mixers, chunks, kept, device

    @property
    def layers(self) -> frozenset[int]:
        """Those that keep a state."""
        return frozenset(mixer.layer for mixer in self._mixers)

    @contextmanager
    def in_place(self, number: int | None = None) -> Iterator[None]:
        """For one pass over all the step's chunks, or over one of them.

        Raises: RuntimeError for a layer that was left out, or whose states are of another shape.
        """
        chunks, kept = self._chunks, self._kept
        if number is not None:
            chunks = chunks[number : number + 1]
            one = {id(own.slots): own.slots[number : number + 1] for own in kept.values()}
            kept = {layer: replace(own, slots=one[id(own.slots)]) for layer, own in kept.items()}
        several, places = _batches(chunks, kept, self._device)
        computed: set[nn.Module] = set()
        modules = [mixer.module.__dict__ for mixer in self._mixers]
        own_forwards = [module.get("forward") for module in modules]
        try:
            for mixer in self._mixers:
                mixer.module.__dict__["forward"] = partial(
                    _forward,
                    mixer,
                    mixer.module.forward,
                    several,
                    places[mixer.layer],
                    kept[mixer.layer],
                    computed,
                )
            yield
        finally:
            for module, forward in zip(modules, own_forwards, strict=True):
                module.pop("forward", None)
                if forward is not None:
                    module["forward"] = forward
        if len(computed) < len(self._mixers):
            raise RuntimeError("a recurrent layer was not computed")


def _kept_states(
    accounting: Accounting, storage: Storage, chunks: _Chunks
) -> dict[int, KeptStates]:
    """Those of a step's chunks, by layer."""
    kept: dict[int, KeptStates] = {}
    for number, group in enumerate(accounting.groups):
        if not isinstance(group.spec, RecurrentState):
            continue
        rows, states = storage.states(number), group.spec.states
        slots = np.array([place_of(accounting, number, seq_id) for seq_id, _, _ in chunks])
        for layer in group.layers:
            held = list(zip(states, rows.layer(layer), strict=True))
            kept[layer] = KeptStates(
                convolutions=tuple(tensor for state, tensor in held if state.is_convolution),
                scans=tuple(tensor for state, tensor in held if not state.is_convolution),
                slots=slots,
            )
    return kept


def _batches(
    chunks: _Chunks, kept: Mapping[int, KeptStates], device: torch.device
) -> tuple[list[_Rows], dict[int, list[_RowSlots]]]:
    """Tokens that go on from a state are rows of one batch; every other chunk is by itself.

    Returns: the batches, and where each layer has their states.
    """
    batches: list[tuple[list[int], Array, bool]] = []  # members, places, whether it goes on
    alike: list[tuple[int, int]] = []
    first = 0
    for number, (_, start, stop) in enumerate(chunks):
        if start and stop - start == 1:
            alike.append((number, first))
        else:
            batches.append(([number], np.arange(first, first + stop - start)[None], start > 0))
        first += stop - start
    if alike:
        numbers, places = zip(*alike, strict=True)
        batches.append(([*numbers], np.array(places)[:, None], True))
    groups = {id(own.slots): own.slots for own in kept.values()}
    arrays: list[Array] = [places for _, places, _ in batches]
    arrays += [slots[members] for slots in groups.values() for members, _, _ in batches]
    found = iter(_placed(arrays, device))
    rows = [
        _Rows(members=members, places=next(found), goes_on=goes_on)
        for members, _, goes_on in batches
    ]
    of_group = {
        group: [_RowSlots(first=int(slots[each.members[0]]), all=next(found)) for each in rows]
        for group, slots in groups.items()
    }
    return rows, {layer: of_group[id(own.slots)] for layer, own in kept.items()}


def _placed(arrays: list[Array], device: torch.device) -> list[Tensor]:
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return to_device(arrays, device)


def _forward(
    mixer: Mixer,
    forward: Forward,
    several: list[_Rows],
    places: list[_RowSlots],
    kept: KeptStates,
    computed: set[nn.Module],
    *args: Any,
    **kwargs: Any,
) -> Output:
    """Stands in for a mixer's own forward."""
    bound = mixer.bind(args, kwargs)
    packed: Tensor = bound.arguments[mixer.hidden_name]  # [1, T, hidden]
    out: Parts = ()
    for rows, slots in zip(several, places, strict=True):
        state = _load(mixer, kept, slots) if rows.goes_on else mixer.no_state()
        parts = mixer.compute(forward, bound, rows.places, state, goes_on=rows.goes_on)
        if not out:
            out = tuple(
                None if part is None else part.new_empty(1, packed.shape[1], *part.shape[2:])
                for part in parts
            )
        for whole, part in zip(out, parts, strict=True):
            if whole is not None and part is not None:
                whole[0, rows.places] = part
        _store(mixer, kept, slots, state)
    assert out, "a pass without tokens"
    computed.add(mixer.module)
    return out[0] if len(out) == 1 and out[0] is not None else out


def _load(mixer: Mixer, kept: KeptStates, slots: _RowSlots) -> LinearAttentionLayer:
    """A layer's states of these slots, in one batch: of a single one themselves, else copies."""
    state = mixer.no_state()
    for at, held in enumerate(kept.convolutions):
        state.conv_states[at] = _of(held, slots)
        state.conv_kernel_size[at] = held.shape[-1]
        state.is_conv_states_initialized[at] = True
    for at, held in enumerate(kept.scans):
        state.recurrent_states[at] = _of(held, slots)
        state.is_recurrent_states_initialized[at] = True
    first = next(iter((*kept.convolutions, *kept.scans)))
    state.device, state.dtype = first.device, first.dtype
    state.has_previous_state = dict.fromkeys(range(mixer.num_states), True)
    return state


def _of(held: Tensor, slots: _RowSlots) -> Tensor:
    return held[slots.all] if len(slots.all) > 1 else held[slots.first : slots.first + 1]


def _store(mixer: Mixer, kept: KeptStates, slots: _RowSlots, state: LinearAttentionLayer) -> None:
    """Raises: RuntimeError for states that are not as the spec says."""
    for name, several, new in (
        ("convolution", kept.convolutions, state.conv_states),
        ("scan", kept.scans, state.recurrent_states),
    ):
        for at, tensor in new.items():
            if tensor is None:  # another module's of this layer, or none
                continue
            said = several[at] if at < len(several) else None
            if said is None or (tensor.shape[1:], tensor.dtype) != (said.shape[1:], said.dtype):
                raise RuntimeError(
                    f"layer {mixer.layer} keeps a {name} state of {list(tensor.shape[1:])} in "
                    f"{tensor.dtype}, and the spec says otherwise"
                )
            if tensor.data_ptr() != said[slots.first].data_ptr():
                said[slots.all] = tensor
