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
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from quire.errors import UnsupportedModel
from quire.kv import Accounting, Storage
from quire.layers.watch import Place
from quire.models.states.mixers import Forward, Mixer, Output, Parts, find_mixers, settle
from quire.models.states.state_batch import PlacedRows, PlacedStates, RowSlots, state_groups
from quire.models.weight_placement import device_of
from quire.spec import RecurrentState

# -- rows of a tensor of states --------------------------------------------------------------------

# A layer's states are a tensor with a row for each slot. In an eager step torch moves a step's
# rows into one batch and back. A captured step has rows of padding too, which only a kernel can
# leave out: a tensor on the device tells it where to read and write.


class RowMover(Protocol):
    """Moves rows by their slots, which lie on the device."""

    def take(self, held: Tensor, slots: Tensor) -> Tensor:
        """Copy some rows: held [slots, …], slots i64[S] → [S, …], in order."""
        ...

    def put(self, held: Tensor, slots: Tensor, new: Tensor) -> None:
        """Overwrite some rows: held [slots, …], slots i64[S], new [S, …]."""
        ...


@final
class TorchRows:
    """A ``RowMover`` by torch: every slot is a sequence's."""

    def take(self, held: Tensor, slots: Tensor) -> Tensor:
        """Copy some rows: held [slots, …], slots i64[S] → [S, …], in order."""
        return held[slots]

    def put(self, held: Tensor, slots: Tensor, new: Tensor) -> None:
        """Overwrite some rows: held [slots, …], slots i64[S], new [S, …]."""
        held[slots] = new


def find_padded_rows(device: torch.device) -> RowMover | str:
    """Find what moves rows and leaves out padding, or return why the device has nothing that does.

    The slot of padding is -1: it is taken as zeros and written nowhere.
    """
    try:
        from quire.attention.triton import TritonRows, find_gpu
    except (ImportError, OSError) as error:  # torch for CUDA brings it, one for the CPU not
        return f"Triton cannot be imported ({error})"
    gpu = find_gpu(device)
    return gpu if isinstance(gpu, str) else TritonRows()


# -- recurrent layers ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStates:
    """A layer's states of all sequences, and what brings a step's into a batch and back."""

    convolutions: tuple[Tensor, ...]  # [slots, channels, width], each
    scans: tuple[Tensor, ...]  # [slots, …], each
    group: int  # whose slots these are, of the groups that keep states
    rows: RowMover


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

    @property
    def lent(self) -> frozenset[Place]:
        """Attributes that hold a step's states during its passes, and their owner's otherwise."""
        several = ((m.module, m.attributes) for m in self._mixers)
        return frozenset(p for module, at in several if at for p in at.places(module))

    def settle(self, token_ids: Sequence[int], stops: Sequence[int], limit: float) -> float:
        """Find out how the modules go on from chunk to chunk; how far that is from one go."""
        self._mixers, deviation = settle(self._model, self._mixers, token_ids, stops, limit)
        return deviation

    @property
    def slow_to_go_on(self) -> list[str]:
        """Classes of modules that get the tokens of a chunk one by one, where they go on."""
        names = {type(m.module).__name__ for m in self._mixers if m.goes_on_by_tokens}
        return sorted(names)

    @property
    def why_not_padded(self) -> str | None:
        """Why no step of theirs may have rows without a sequence."""
        return self._padded_rows if isinstance(self._padded_rows, str) else None

    @cached_property
    def _padded_rows(self) -> RowMover | str:
        return find_padded_rows(device_of(self._model))

    def of_step(
        self, accounting: Accounting, storage: Storage, placed: PlacedStates
    ) -> "StepStates":
        """Return the states for the passes of one step."""
        rows = self._padded_rows if placed.batch.is_padded else TorchRows()
        assert not isinstance(rows, str), rows
        return StepStates(self._mixers, placed, _kept_states(accounting, storage, rows))


class StepStates:
    """The states that a step goes on from, and leaves."""

    def __init__(
        self, mixers: Sequence[Mixer], placed: PlacedStates, kept: Mapping[int, KeptStates]
    ) -> None:
        self._mixers, self._placed, self._kept = mixers, placed, kept

    @property
    def layers(self) -> frozenset[int]:
        """Those that keep a state."""
        return frozenset(mixer.layer for mixer in self._mixers)

    @contextmanager
    def in_place(self, number: int | None = None) -> Iterator[None]:
        """Have layers go on from them for one pass over all the step's chunks, or over one of them.

        Raises: RuntimeError for a layer that was left out, or whose states are of another shape.
        """
        placed = self._placed if number is None else self._placed.chunk(number)
        several = placed.batches()
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
                    self._kept[mixer.layer],
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


def _kept_states(accounting: Accounting, storage: Storage, rows: RowMover) -> dict[int, KeptStates]:
    """By layer."""
    kept: dict[int, KeptStates] = {}
    for at, number in enumerate(state_groups(accounting)):
        group, states = accounting.groups[number], storage.states(number)
        assert isinstance(group.spec, RecurrentState), "state_groups has no others"
        for layer in group.layers:
            held = list(zip(group.spec.states, states.layer(layer), strict=True))
            kept[layer] = KeptStates(
                convolutions=tuple(tensor for state, tensor in held if state.is_convolution),
                scans=tuple(tensor for state, tensor in held if not state.is_convolution),
                group=at,
                rows=rows,
            )
    return kept


def _forward(
    mixer: Mixer,
    forward: Forward,
    several: Sequence[PlacedRows],
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
        slots = rows.slots[kept.group]
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


def _load(mixer: Mixer, kept: KeptStates, slots: RowSlots) -> LinearAttentionLayer:
    """A layer's states of these slots, in one batch: of a known one themselves, else copies."""
    state = mixer.no_state()
    for at, held in enumerate(kept.convolutions):
        state.conv_states[at] = _of(kept, held, slots)
        state.conv_kernel_size[at] = held.shape[-1]
        state.is_conv_states_initialized[at] = True
    for at, held in enumerate(kept.scans):
        state.recurrent_states[at] = _of(kept, held, slots)
        state.is_recurrent_states_initialized[at] = True
    first = next(iter((*kept.convolutions, *kept.scans)))
    state.device, state.dtype = first.device, first.dtype
    state.has_previous_state = dict.fromkeys(range(mixer.num_states), True)
    return state


def _of(kept: KeptStates, held: Tensor, slots: RowSlots) -> Tensor:
    if slots.only is None:
        return kept.rows.take(held, slots.all)
    return held[slots.only : slots.only + 1]


def _store(mixer: Mixer, kept: KeptStates, slots: RowSlots, state: LinearAttentionLayer) -> None:
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
            if slots.only is None or tensor.data_ptr() != said[slots.only].data_ptr():
                kept.rows.put(said, slots.all, tensor)
