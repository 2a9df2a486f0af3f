"""The layers of a drop-in cache, as Transformers wants to see them: keys and values, states, both.

A layer that attends writes through the rows and reads views of them. A recurrent one is run by
Transformers' own code, which makes its tensors once and then copies into them: it is enough to make
them views of what ``row_states`` holds. Which rows there are, and when they change, is the cache's
affair.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from quire.errors import UnsupportedModel
from quire.models.drop_in.rows import Rows
from quire.spec import AttentionSpec, RecurrentState, SlidingWindow


class Owner(Protocol):
    """The cache whose layers these are."""

    @property
    def in_one_piece(self) -> bool:
        """Whether the model must be given keys and values without gaps: copies, not views."""
        ...

    @property
    def reads_in_place(self) -> bool:
        """Whether the model's attention may be given tensors that are not gathered yet."""
        ...

    def rows_for(self, k: Tensor) -> Rows:
        """The rows of these keys ([rows, K, T, D]), made for them if there are none."""
        ...

    def begin_states(self, state: Tensor) -> None:
        """Have rows, as many as this state has: [rows, …]."""
        ...

    def states_of(self, layer: int) -> tuple[Tensor, ...]:
        """All states of a layer, as its spec lists them: [rows, *shape], a view each."""
        ...

    def whole_or_empty(self) -> AbstractContextManager[None]:
        """If the system refuses pages half-way, everything is given back."""
        ...


class DropInLayer(CacheLayerMixin):
    """One attention layer of a ``DropInCache``, as Transformers wants to see it."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: Owner, layer: int, spec: AttentionSpec) -> None:
        super().__init__()
        self.is_sliding = isinstance(spec, SlidingWindow)
        self.cumulative_length = 0
        self._owner = owner
        self._layer = layer
        self._attends = spec

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        got = tuple((x.shape[1], x.shape[3]) for x in (key_states, value_states))
        if got != self._attends.entry_shapes:
            raise UnsupportedModel(
                f"layer {self._layer} caches entries of {got} (heads, width), but config.json says "
                f"{self._attends.entry_shapes}: this model cannot be kept"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        # They lie elsewhere. Mllama asks each layer how many it has, to find those of images.
        self.keys = self.values = key_states.new_empty(0)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        rows = self._owner.rows_for(key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.cumulative_length
        stop = start + key_states.shape[-2]
        if rows.num_tokens < stop:  # the first layer of a step makes room in all of them
            with self._owner.whole_or_empty():
                rows.extend(stop)
        rows.write(self._layer, start, key_states, value_states)
        self.cumulative_length = stop
        first = self._attends.live_range(start).start
        if self._owner.reads_in_place and not key_states.requires_grad:
            unread = rows.read_in_place(self._layer, first, start, stop)
            if unread is not None:
                return unread
        k, v = rows.read(self._layer, first, stop)
        return (k.contiguous(), v.contiguous()) if self._owner.in_one_piece else (k, v)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys that ``update`` will return."""
        first = self._attends.live_range(self.cumulative_length).start
        return self.cumulative_length + query_length - first, first

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1  # anything else makes generate() treat the cache as static


class StateLayer(LinearAttentionLayer):
    """One recurrent layer, as Transformers wants to see it."""

    is_compileable = False

    def __init__(
        self, owner: Owner, layer: int, spec: RecurrentState, number_of_states: int
    ) -> None:
        super().__init__(number_of_states=number_of_states)
        self._owner = owner
        self._layer = layer
        self._spec = spec
        # Which of the spec's tensors are Transformers' convolutions 0, 1, …, and which its scans.
        states = list(enumerate(spec.states))
        self._convolutions = [at for at, state in states if state.is_convolution]
        self._scans = [at for at, state in states if not state.is_convolution]

    def lazy_initialization(
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        if conv_states is not None:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            shape = (*conv_states.shape[1:-1], width)
            self._check("convolution", self._convolutions, state_idx, shape, conv_states.dtype)
            self.dtype, self.device = conv_states.dtype, conv_states.device
            self.conv_kernel_size[state_idx] = width
            self._owner.begin_states(conv_states)
            kept = self._owner.states_of(self._layer)
            self.conv_states[state_idx] = kept[self._convolutions[state_idx]]
            self.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            shape = tuple(recurrent_states.shape[1:])
            self._check("scan", self._scans, state_idx, shape, recurrent_states.dtype)
            self._owner.begin_states(recurrent_states)
            kept = self._owner.states_of(self._layer)
            self.recurrent_states[state_idx] = kept[self._scans[state_idx]]
            self.is_recurrent_states_initialized[state_idx] = True

    def crop(self, tokens_to_remove: int) -> None:
        """Undo tokens whose convolutions were recorded."""
        super().crop(tokens_to_remove)
        self.put_back()

    def put_back(self) -> None:
        """Back to its place with what Transformers has recorded elsewhere, less what is too old."""
        for at, recorded in self.conv_states.items():
            if recorded is not None and self.record_past:
                own = self._owner.states_of(self._layer)[self._convolutions[at]]
                # After few tokens it is shorter; before the first one are zeros.
                last = recorded[..., -own.shape[-1] :]
                own.copy_(pad(last, (own.shape[-1] - last.shape[-1], 0)))
                self.conv_states[at] = own

    def rows_changed(self) -> None:
        """There are more rows than before, or fewer."""
        for places, several in (
            (self._convolutions, self.conv_states),
            (self._scans, self.recurrent_states),
        ):
            for at, state in several.items():
                if state is not None:
                    several[at] = self._owner.states_of(self._layer)[places[at]]

    def forget(self) -> None:
        """Begin anew. The memory is no longer ours."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)

    def _check(
        self, kind: str, places: list[int], at: int, shape: tuple[Any, ...], dtype: torch.dtype
    ) -> None:
        said = [self._spec.states[place] for place in places]
        found = f"{list(shape)} in {dtype}"
        expected = [f"{list(state.shape)} in torch.{state.dtype}" for state in said]
        if at >= len(said) or found != expected[at]:
            raise UnsupportedModel(
                f"layer {self._layer} keeps, as {kind} {at}, a state of {found}, but config.json "
                f"says {expected}: this model cannot be kept"
            )


class DropInStateLayer(StateLayer, DropInLayer):
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
        StateLayer.__init__(self, owner, layer, states, number_of_states)

    def lazy_initialization(self, *keys: Tensor, **states: Any) -> None:  # type: ignore[override]
        """Transformers gives keys and values by place, states by name."""
        if keys:
            DropInLayer.lazy_initialization(self, *keys)
        else:
            StateLayer.lazy_initialization(self, **states)
