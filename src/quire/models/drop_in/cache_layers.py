"""The layers of a drop-in cache, as Transformers wants to see them: keys and values, states, both.

A layer that attends writes through the rows and reads views of them. A recurrent one is
Transformers' own, which makes its tensors once and then copies into them: it is enough to make them
views of what ``row_states`` holds, which is what ``LayerStates`` does. Which rows there are, and
when they change, is the cache's affair.

Nothing here keeps gradients. What a layer gives back carries those of the tokens it was just given;
those of earlier tokens are refused when a backward pass asks for them (``without_gradients``).
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from quire.errors import ConfigError, UnsupportedModel
from quire.models.drop_in.rows import BatchRows
from quire.spec import AttentionSpec, RecurrentState, SlidingWindow


class Owner(Protocol):
    """The cache whose layers these are."""

    model_name: str  # the class of the model it was made for

    @property
    def rows(self) -> BatchRows | None:
        """None before the first token."""
        ...

    @property
    def in_one_piece(self) -> bool:
        """Whether the model must be given keys and values without gaps: copies, not views."""
        ...

    @property
    def reads_in_place(self) -> bool:
        """Whether the model's attention may be given tensors that are not gathered yet."""
        ...

    def rows_for(self, k: Tensor) -> BatchRows:
        """Return the rows of these keys [rows, K, T, D], made for them if there are none."""
        ...

    def begin_states(self, state: Tensor) -> None:
        """Have rows, as many as this state has: [rows, …]."""
        ...

    def states_of(self, layer: int) -> tuple[Tensor, ...]:
        """Return all states of a layer, as its spec lists them: [rows, *shape], a view each."""
        ...

    def whole_or_empty(self) -> AbstractContextManager[None]:
        """Give everything back if the system refuses pages half-way."""
        ...


# -- gradients ------------------------------------------------------------------------------------


class _RefusedLayer(torch.autograd.Function):
    """Passes a tensor on, and refuses to carry a gradient back to it."""

    @staticmethod
    def forward(_: Any, kept: Tensor, anchor: Tensor) -> Tensor:
        """``anchor``: anything with gradients, for the sake of which the result has some too."""
        return kept.view_as(kept)

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Any:
        raise ConfigError(
            "this backward pass goes through tokens of an earlier forward, and a cache of Quire "
            "keeps keys, values and states without their gradients: give the model all tokens in "
            "one forward, call it with torch.no_grad() the first time, or train with Transformers' "
            "own DynamicCache"
        )


def has_gradients(*new: Tensor) -> bool:
    """Tell whether a backward pass may reach these."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in new)


def without_gradients(kept: Tensor) -> Tensor:
    """Return a tensor [*shape] without its gradients: usable, but not in a backward pass."""
    anchor = torch.empty(0, requires_grad=True)
    refused: Tensor = _RefusedLayer.apply(kept, anchor)  # type: ignore[no-untyped-call]
    return refused


# -- keys and values ------------------------------------------------------------------------------


class DropInLayer(CacheLayerMixin):
    """One attention layer of a ``DropInCache``, as Transformers wants to see it."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: Owner, layer: int, spec: AttentionSpec) -> None:
        """Transformers' own would set ``keys`` and ``values``, which are read from the rows."""
        self.is_initialized = False
        self.is_sliding = isinstance(spec, SlidingWindow)
        self.cumulative_length = 0
        self._owner = owner
        self._layer = layer
        self._attends = spec
        self._had_gradients = False  # the tokens that are kept

    @property
    def keys(self) -> Tensor | None:
        """[rows, K, tokens that the next one can read, D]: a copy, which stays as it is.

        None before the first token.
        """
        return self._kept(0)

    @property
    def values(self) -> Tensor | None:
        return self._kept(1)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Check the shape of the first keys [rows, K, T, D]. Raises: UnsupportedModel."""
        got = tuple((x.shape[1], x.shape[3]) for x in (key_states, value_states))
        if got != self._attends.entry_shapes:
            raise UnsupportedModel(
                f"layer {self._layer} was given keys and values of {got} (heads, width), and "
                f"{self._owner.model_name}, for which this cache was made, has "
                f"{self._attends.entry_shapes} there by its config: make a cache of the model that "
                f"runs, quire.cache(model, …); if it is that one, it cannot be kept"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep keys and values [rows, K, T, D], and return all of the layer's.

        Raises: OutOfKVMemory, MemoryUnavailable, UnsupportedModel.
        """
        rows = self._owner.rows_for(key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.cumulative_length
        stop = start + key_states.shape[-2]
        if rows.num_tokens < stop:  # the first layer of a step makes room in all of them
            with self._owner.whole_or_empty():
                rows.extend(stop)
        first = self._attends.live_range(start).start
        with torch.no_grad():
            rows.write(self._layer, start, key_states, value_states)
            self.cumulative_length = stop
        if torch.is_grad_enabled():
            return self._with_gradients(
                *rows.read(self._layer, first, stop), key_states, value_states
            )
        if self._owner.reads_in_place:
            unread = rows.read_in_place(self._layer, first, start, stop)
            if unread is not None:
                return unread
        k, v = rows.read(self._layer, first, stop)
        return (k.contiguous(), v.contiguous()) if self._owner.in_one_piece else (k, v)

    def _with_gradients(
        self, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Copies, which the next step does not overwrite, whose last tokens are the new ones."""
        pairs = []
        for kept, new in ((k, new_k), (v, new_v)):
            earlier = kept[:, :, : kept.shape[2] - new.shape[2]]
            if self._had_gradients and earlier.shape[2]:
                earlier = without_gradients(earlier)
            pairs.append(torch.cat([earlier, new], 2))
        self._had_gradients |= has_gradients(new_k, new_v)
        return pairs[0], pairs[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (length, offset) of the keys that ``update`` will return."""
        first = self._attends.live_range(self.cumulative_length).start
        return self.cumulative_length + query_length - first, first

    def get_seq_length(self) -> int:
        """Return how many tokens it holds."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """Return how many tokens it may hold; -1 for no bound."""
        return -1  # anything else makes generate() treat the cache as static

    def begin_anew(self) -> None:
        """Forget all tokens. Their memory is the cache's affair."""
        self.cumulative_length = 0
        self.is_initialized = self._had_gradients = False

    def take_over(self, other: "DropInLayer") -> None:
        """Stand where another cache's layer stands."""
        self.cumulative_length, self.is_initialized = other.cumulative_length, other.is_initialized
        self._had_gradients = other._had_gradients
        if other.is_initialized:
            self.dtype, self.device = other.dtype, other.device

    def _kept(self, which: int) -> Tensor | None:
        rows = self._owner.rows
        if rows is None or not self.cumulative_length:
            return None
        first = self._attends.live_range(self.cumulative_length).start
        return rows.read(self._layer, first, self.cumulative_length)[which].clone()


# -- states ---------------------------------------------------------------------------------------


class LayerStates:
    """What one recurrent layer of Transformers' keeps, as views of the rows' states.

    A layer asks for its tensors once, by ``lazy_initialization``; ``tensors_for`` takes that place.
    """

    def __init__(
        self, owner: Owner, layer: int, spec: RecurrentState, own: LinearAttentionCacheLayerMixin
    ) -> None:
        self.own = own
        self.had_gradients = False  # what the states were computed from
        self._copied: set[tuple[bool, int]] = set()  # states that ``shown`` gave copies of
        self._owner = owner
        self._layer = layer
        self._spec = spec
        # Which of the spec's tensors are Transformers' convolutions 0, 1, …, and which its scans.
        states = list(enumerate(spec.states))
        self._convolutions = [at for at, state in states if state.is_convolution]
        self._scans = [at for at, state in states if not state.is_convolution]

    def tensors_for(
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Make the layer's tensors, [rows, *state] each. Raises: UnsupportedModel."""
        own = self.own
        if conv_states is not None:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            shape = (*conv_states.shape[1:-1], width)
            self._check("convolution", self._convolutions, state_idx, shape, conv_states.dtype)
            own.dtype, own.device = conv_states.dtype, conv_states.device
            own.conv_kernel_size[state_idx] = width
            self._owner.begin_states(conv_states)
            kept = self._owner.states_of(self._layer)
            own.conv_states[state_idx] = kept[self._convolutions[state_idx]]
            own.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            shape = tuple(recurrent_states.shape[1:])
            self._check("scan", self._scans, state_idx, shape, recurrent_states.dtype)
            self._owner.begin_states(recurrent_states)
            kept = self._owner.states_of(self._layer)
            own.recurrent_states[state_idx] = kept[self._scans[state_idx]]
            own.is_recurrent_states_initialized[state_idx] = True

    def crop(self, tokens_to_remove: int) -> None:
        """Undo tokens whose convolutions were recorded."""
        LinearAttentionLayer.crop(self.own, tokens_to_remove)
        self.put_back()

    def put_back(self) -> None:
        """Back to its place with what Transformers has recorded elsewhere, less what is too old."""
        self.settle()
        for at, recorded in self.own.conv_states.items():
            if recorded is not None and self.own.record_past:
                kept = self._owner.states_of(self._layer)[self._convolutions[at]]
                # After few tokens it is shorter; before the first one are zeros.
                last = recorded[..., -kept.shape[-1] :]
                kept.copy_(pad(last, (kept.shape[-1] - last.shape[-1], 0)))
                self.own.conv_states[at] = kept

    def rows_changed(self) -> None:
        """Note that there are more rows than before, or fewer."""
        for places, several in (
            (self._convolutions, self.own.conv_states),
            (self._scans, self.own.recurrent_states),
        ):
            for at, state in several.items():
                if state is not None:
                    several[at] = self._owner.states_of(self._layer)[places[at]]

    def begin_anew(self) -> None:
        """Forget the memory, which is no longer ours."""
        LinearAttentionLayer.__init__(self.own, number_of_states=self.own.number_of_states)
        self.had_gradients = False
        self._copied.clear()

    def take_over(self, other: "LayerStates") -> None:
        """Stand where another cache's layer stands, whose rows were copied."""
        for name, value in vars(other.own).items():
            if isinstance(value, dict):
                setattr(self.own, name, dict(value))
        self.own.dtype, self.own.device = other.own.dtype, other.own.device
        self.own.record_past, self.had_gradients = other.own.record_past, other.had_gradients
        recorded = {at: state for at, state in self.own.conv_states.items() if state is not None}
        self.rows_changed()
        if self.own.record_past:
            self.own.conv_states.update({at: state.clone() for at, state in recorded.items()})

    # Transformers copies into its tensors and gives them back; both without gradients here.

    def convolved(self, new: Tensor, full: Tensor) -> Tensor:
        """Return inputs [rows, channels, n] with the gradients of the last ones, ``new``."""
        if not torch.is_grad_enabled():
            return full
        earlier = full[..., : full.shape[-1] - new.shape[-1]]
        if self.had_gradients and earlier.shape[-1]:
            earlier = without_gradients(earlier)
        self.had_gradients |= has_gradients(new)
        return torch.cat([earlier, new], -1)

    def scanned(self, new: Tensor, kept: Tensor) -> Tensor:
        """Return a scan's state [rows, *state] with the gradients of what it was computed from."""
        if not torch.is_grad_enabled():
            return kept
        self.had_gradients |= has_gradients(new)
        return new

    def shown(self, state: Tensor | None, at: int, *, is_scan: bool) -> Tensor | None:
        """Return a state [rows, *state] that a layer may overwrite: a copy if it has gradients.

        A backward pass needs what was there before. The copy stands for the state until it is put
        back (``settle``).
        """
        if state is None or not torch.is_grad_enabled():
            return state
        copied = (without_gradients(state) if self.had_gradients else state).clone()
        if is_scan or not self.own.record_past:
            (self.own.recurrent_states if is_scan else self.own.conv_states)[at] = copied
            self._copied.add((is_scan, at))
        return copied

    def settle(self, which: tuple[bool, int] | None = None) -> None:
        """Put a copy that a layer has overwritten, or all, back to where states lie.

        ``which``: whether it is a scan's, and its number.
        """
        for is_scan, at in self._copied & {which} if which else set(self._copied):
            several = self.own.recurrent_states if is_scan else self.own.conv_states
            place, copied = (self._scans if is_scan else self._convolutions)[at], several[at]
            kept = self._owner.states_of(self._layer)[place]
            self.had_gradients |= copied.requires_grad
            with torch.no_grad():
                several[at] = kept.copy_(copied)
            self._copied.discard((is_scan, at))

    def _check(
        self, kind: str, places: list[int], at: int, shape: tuple[Any, ...], dtype: torch.dtype
    ) -> None:
        said = [self._spec.states[place] for place in places]
        found = f"{list(shape)} in {dtype}"
        expected = [f"{list(state.shape)} in torch.{state.dtype}" for state in said]
        if at >= len(said) or found != expected[at]:
            raise UnsupportedModel(
                f"layer {self._layer} was given, as {kind} {at}, a state of {found}, and "
                f"{self._owner.model_name}, for which this cache was made, has {expected} there by "
                f"its config: make a cache of the model that runs, quire.cache(model, …); if it is "
                f"that one, it cannot be kept"
            )


def recurrent_layer(
    owner: Owner, layer: int, spec: RecurrentState, number_of_states: int
) -> LayerStates:
    """Make a layer that keeps a state: of Transformers' own class, which is looked for by type."""
    own = LinearAttentionLayer(number_of_states=number_of_states)
    states = LayerStates(owner, layer, spec, own)
    if not isinstance(getattr(LinearAttentionLayer, "is_compileable", None), property):
        own.is_compileable = False  # from Transformers 5.24 on the class says it, for all
    own.lazy_initialization = states.tensors_for
    return states


class DropInStateLayer(LinearAttentionLayer, DropInLayer):
    """A layer that attends and keeps a state besides."""

    is_compileable = False

    def __init__(
        self,
        owner: Owner,
        layer: int,
        attention: AttentionSpec,
        states: RecurrentState,
        number_of_states: int,
    ) -> None:
        DropInLayer.__init__(self, owner, layer, attention)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.states = LayerStates(owner, layer, states, self)

    def lazy_initialization(self, *keys: Tensor, **states: Any) -> None:
        """Prepare for keys and values, which Transformers gives by place, or states, by name."""
        if keys:
            DropInLayer.lazy_initialization(self, *keys)
        else:
            self.states.tensors_for(**states)
