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

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from quire.errors import UnsupportedModel
from quire.models.states.mixers import Forward, Mixer, Output, Parts, find_mixers
from quire.models.states.settling import settle
from quire.spec import RecurrentState
from quire.strategies import Accounting, Storage
from quire.strategies.states import place_of

_Chunks = Sequence[tuple[int, int, int]]  # (sequence, start, stop) of each


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStates:
    """A layer's states of all sequences, and where those of a step's sequences are."""

    convolutions: tuple[Tensor, ...]  # [slots, channels, width], each
    scans: tuple[Tensor, ...]  # [slots, …], each
    slots: Tensor  # i64[S]


class RecurrentLayers:
    """A model's recurrent layers. Between two passes it is its owner's, as it was.

    Raises: UnsupportedModel if they are not modules, at least one each, that ask Transformers'
    cache.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self._model = model
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
        return StepStates(self._mixers, chunks, _kept_states(accounting, storage, chunks))


class StepStates:
    """The states that a step goes on from, and leaves."""

    def __init__(
        self, mixers: Sequence[Mixer], chunks: _Chunks, kept: Mapping[int, KeptStates]
    ) -> None:
        self._mixers, self._chunks, self._kept = mixers, chunks, kept

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
            kept = {
                layer: replace(own, slots=own.slots[number : number + 1])
                for layer, own in kept.items()
            }
        several, computed = _batches(chunks), set[nn.Module]()
        modules = [mixer.module.__dict__ for mixer in self._mixers]
        own_forwards = [module.get("forward") for module in modules]
        try:
            for mixer in self._mixers:
                mixer.module.__dict__["forward"] = partial(
                    _forward, mixer, mixer.module.forward, several, kept[mixer.layer], computed
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
        slots = torch.tensor([place_of(accounting, number, seq_id) for seq_id, _, _ in chunks])
        for layer in group.layers:
            held = list(zip(states, rows.layer(layer), strict=True))
            kept[layer] = KeptStates(
                convolutions=tuple(tensor for state, tensor in held if state.is_convolution),
                scans=tuple(tensor for state, tensor in held if not state.is_convolution),
                slots=slots,
            )
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Chunks of one length that are computed as rows of one batch."""

    members: Tensor  # i64[rows]: which of the step's chunks
    places: Tensor  # i64[rows, tokens]: in the packed row
    goes_on: bool  # from states that are there


def _batches(chunks: _Chunks) -> list[_Rows]:
    """Tokens that go on from a state are rows of one batch; every other chunk is by itself."""
    several: list[_Rows] = []
    members: list[int] = []
    places: list[int] = []
    first = 0
    for number, (_, start, stop) in enumerate(chunks):
        own = torch.arange(first, first + stop - start)
        first += stop - start
        if start and stop - start == 1:
            members.append(number)
            places.append(first - 1)
        else:
            alone = torch.tensor([number])
            several.append(_Rows(members=alone, places=own[None], goes_on=start > 0))
    if members:
        together = torch.tensor(places)[:, None]
        several.append(_Rows(members=torch.tensor(members), places=together, goes_on=True))
    return several


def _forward(
    mixer: Mixer,
    forward: Forward,
    several: list[_Rows],
    kept: KeptStates,
    computed: set[nn.Module],
    *args: Any,
    **kwargs: Any,
) -> Output:
    """Stands in for a mixer's own forward."""
    bound = mixer.bind(args, kwargs)
    packed: Tensor = bound.arguments[mixer.hidden_name]  # [1, T, hidden]
    out: Parts = ()
    for rows in several:
        slots = kept.slots[rows.members]
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


def _load(mixer: Mixer, kept: KeptStates, slots: Tensor) -> LinearAttentionLayer:
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


def _of(held: Tensor, slots: Tensor) -> Tensor:
    if len(slots) > 1:
        return held[slots]
    slot = int(slots[0])
    return held[slot : slot + 1]


def _store(mixer: Mixer, kept: KeptStates, slots: Tensor, state: LinearAttentionLayer) -> None:
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
            if tensor.data_ptr() != said[int(slots[0])].data_ptr():
                said[slots] = tensor
