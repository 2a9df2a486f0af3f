"""A cache for ``model.generate(past_key_values=…)``: one line in code that exists already.

Keys and values are kept by the strategy, and what recurrent layers remember lies beside them
(``row_states``). Reads are views wherever the strategy holds a range, so that any attention
kernel works unchanged.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from threading import Lock, Thread, current_thread
from typing import Any
from weakref import ReferenceType, proxy, ref

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
)

from quire.errors import ConfigError, MemoryUnavailable, UnsupportedModel
from quire.kv import Usage
from quire.memory import CountedMemory
from quire.models.drop_in.cache_layers import (
    DropInLayer,
    DropInStateLayer,
    LayerStates,
    recurrent_layer,
)
from quire.models.drop_in.rows import BatchRows, CacheFamily
from quire.spec import (
    AttentionSpec,
    ChunkedAttention,
    KeptWhole,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
)

# Whose attention calls ``view`` on keys, which works for tensors without gaps only.
_IN_ONE_PIECE = frozenset({"gpt_neox_japanese"})


class _Steps:
    """Whose step is under way: one thread at a time may run a model over a cache.

    A step begins in the model's first layer and ends in its last one. Between two steps the cache
    may go from one thread to another, as turns of a conversation do.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._thread: Thread | None = None  # that is in the midst of a step
        self._before: Thread | None = None  # that made the last whole step
        self._mixed: str | None = None  # why nothing here can be relied on

    @contextmanager
    def of_this_thread(self, *, ends: bool) -> Iterator[None]:
        """A layer's part of a step; ``ends``: the last one's. A failure ends the step too.

        Raises: ConfigError if another thread is in the midst of one.
        """
        me = current_thread()
        with self._lock:
            other = self._thread
            if other is not None and other is not me and other.is_alive():
                said = (
                    f"thread {me.name!r} uses this cache in the midst of a step of thread "
                    f"{other.name!r}: one cache is for one batch at a time; make another one with "
                    f"quire.cache, or copy.deepcopy this one before"
                )
                if self._before is me:  # the other one came in between two steps of this one
                    self._mixed = f"{said}. Tokens of both lie in it: reset() it"
                raise ConfigError(self._mixed or said)
            if self._mixed is not None:
                raise ConfigError(self._mixed)
            self._thread = me
        try:
            yield
        except BaseException:
            self._thread = None
            raise
        if ends:
            self._before, self._thread = me, None


class DropInCache(Cache):
    """A Transformers cache whose layers are kept by one of Quire's strategies.

    Nothing is reserved before the first token; ``close()``, or the end of a ``with`` block, gives
    everything back. ``memory`` counts bytes reserved, committed, at peak and returned; ``usage()``
    says what of them holds tokens and states. ``copy.deepcopy`` makes one that goes on from the
    same tokens, and shares their blocks where the strategy does. A refused step loses no token;
    where layers keep states, those before the layer that was refused have gone on, and ``reset()``
    is what is left.
    """

    def __init__(
        self,
        model_name: str,
        model_config: Any,
        spec: ModelSpec,
        memory: CountedMemory,
        make_rows: Callable[[ModelSpec, int], BatchRows],
        dtype: torch.dtype,
    ) -> None:
        """``dtype``: of the model, and of its keys where states come before them."""
        self.model_name = model_name  # the class of the model it is for
        self._model_config = model_config
        self._memory = memory
        self._make_rows = make_rows
        self._model_dtype = dtype
        self._rows: BatchRows | None = None
        # Where copies of this cache lie, and lies this one: it comes back there after ``close``.
        self._family: ReferenceType[CacheFamily] | None = None
        self._dtype: torch.dtype | None = None  # of the keys in the rows
        self._steps = _Steps()
        self._text_config = model_config.get_text_config(decoder=True)
        layers: list[Any] = DynamicCache(config=self._text_config).layers
        self._spec = _windows_for_chunks(spec)
        self._states: dict[int, LayerStates] = {}  # by layer
        # Transformers' own layers stay where there is nothing to keep.
        for index, own in enumerate(layers):
            layers[index] = self._layer(index, own)
        super().__init__(layers=layers)
        # It ends a step. What lies behind it, if anything, keeps nothing here.
        self._last_layer = max(
            (n for n in range(len(layers)) if _kinds(self._spec, n) != (None, None)), default=-1
        )

    def _layer(self, index: int, own: Any) -> Any:
        """What stands for Transformers' ``own`` layer."""
        states, attention = _kinds(self._spec, index)
        owner = proxy(self)  # a cache that is dropped goes at once, with what it holds
        if states is not None and attention is not None:
            layer = DropInStateLayer(owner, index, attention, states, own.number_of_states)
            self._states[index] = layer.states
            return layer
        if states is not None:
            self._states[index] = recurrent_layer(owner, index, states, own.number_of_states)
            return self._states[index].own
        return own if attention is None else DropInLayer(owner, index, attention)

    # -- what a forward does ----------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of new tokens ([rows, K, T, D], […, Dv]); those it now reads.

        Raises: UnsupportedModel for a layer that the model of this cache has not; ConfigError for
        another thread's step; RequestTooLong, OutOfKVMemory.
        """
        self._expect(layer_idx, CacheLayerMixin, "keys and values")
        with self._steps.of_this_thread(ends=layer_idx == self._last_layer):
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Keep a convolution's inputs [rows, channels, n], as ``update`` keeps keys."""
        states = self._states_in(layer_idx, state_idx, is_scan=False)
        with self._steps.of_this_thread(ends=layer_idx == self._last_layer), torch.no_grad():
            full = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return full if states is None else states.convolved(conv_states, full)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Keep what a scan leaves, [rows, *state], as ``update`` keeps keys."""
        states = self._states_in(layer_idx, state_idx, is_scan=True)
        with self._steps.of_this_thread(ends=layer_idx == self._last_layer), torch.no_grad():
            kept = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        return kept if states is None else states.scanned(recurrent_states, kept)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return what a convolution reads: [rows, channels, n]."""
        states = self._states_in(layer_idx, state_idx, is_scan=False)
        state = super().get_conv_state(layer_idx, state_idx)
        return state if states is None else states.shown(state, state_idx, is_scan=False)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return what a scan left: [rows, *state]."""
        states = self._states_in(layer_idx, state_idx, is_scan=True)
        state = super().get_recurrent_state(layer_idx, state_idx)
        return state if states is None else states.shown(state, state_idx, is_scan=True)

    def _states_in(self, layer: int, at: int, *, is_scan: bool) -> LayerStates | None:
        """A layer's states, where they lie; None if Transformers keeps them.

        Raises: as ``_expect``.
        """
        what = "a recurrent state" if is_scan else "a convolution's state"
        self._expect(layer, LinearAttentionCacheLayerMixin, what)
        states = self._states.get(layer)
        if states is not None:
            states.settle((is_scan, at))
        return states

    def _expect(self, layer: int, kind: type, what: str) -> None:
        """Raises: UnsupportedModel if this cache's model keeps nothing of the kind in a layer."""
        if layer < len(self.layers) and isinstance(self.layers[layer], kind):
            return
        has = f"has {len(self.layers)} layers"
        if layer < len(self.layers):
            has += f", and keeps something else in that one ({type(self.layers[layer]).__name__})"
        raise UnsupportedModel(
            f"a model has {what} in its layer {layer}, and {self.model_name}, for which this cache "
            f"was made, {has}: it is another model; make a cache of the one that runs, "
            f"quire.cache(model, …)"
        )

    # -- copies -----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> "DropInCache":
        """A cache that goes on by itself from here, in the same memory and under the same ceiling.

        Strategies that share blocks copy one when it is written; the others copy all at once.
        ``memory`` and ``usage`` speak of all copies together.
        Raises: OutOfKVMemory; ConfigError in the midst of another thread's step.
        """
        with self._steps.of_this_thread(ends=True):
            twin = DropInCache(
                self.model_name,
                self._model_config,
                self._spec,
                self._memory,
                self._make_rows,
                self._model_dtype,
            )
            memo[id(self)] = twin
            for states in self._states.values():
                states.settle()
            with self.whole_or_empty():
                twin._rows = None if self._rows is None else self._rows.copy()
            twin._family, twin._dtype = self._family, self._dtype
            for index, (own, copied) in enumerate(zip(self.layers, twin.layers, strict=True)):
                if isinstance(own, DropInLayer):
                    copied.take_over(own)
                elif index not in self._states:
                    twin.layers[index] = deepcopy(own, memo)
            for index, states in self._states.items():
                if twin._rows is not None:
                    twin._states[index].take_over(states)
            return twin

    def __copy__(self) -> "DropInCache":
        return deepcopy(self)

    def __reduce_ex__(self, _: Any) -> Any:
        raise ConfigError(
            f"a {type(self).__name__} cannot be pickled: its memory belongs to this process. To "
            f"keep what it holds, save keys and values of its layers; to go on from it twice in "
            f"this process, use copy.deepcopy"
        )

    def rows_for(self, k: Tensor) -> BatchRows:
        """Return the rows, made when the first keys [rows, K, T, D] tell how many there are.

        Raises: ConfigError for a device or dtype that cannot be kept.
        """
        rows = self._rows_like(k, k.dtype)
        if k.dtype != self._dtype:
            raise ConfigError(
                f"this cache holds {self._dtype} and was given {k.dtype}: "
                f"make a new one, or call reset()"
            )
        return rows

    def begin_states(self, state: Tensor) -> None:
        """Have rows, as many as the first state of a layer ([rows, …]).

        Raises: ConfigError for a device that cannot be kept.
        """
        self._rows_like(state, self._model_dtype)

    def states_of(self, layer: int) -> tuple[Tensor, ...]:
        """Return a recurrent layer's states as its spec lists them: [rows, *shape], a view each."""
        assert self._rows is not None, "states before the first of them"
        with self.whole_or_empty():
            return self._rows.states(layer)

    def _rows_like(self, new: Tensor, dtype: torch.dtype) -> BatchRows:
        """As many rows as ``new`` has; if there are none yet, with keys of this dtype."""
        if new.device.type != "cpu":
            raise ConfigError(f"the model runs on {new.device}; this cache keeps CPU tensors only")
        if self._rows is None:
            self._rows = self._new_rows(dtype, new.shape[0])
            self._dtype, self._family = dtype, ref(self._rows.family)
        if len(self._rows) != new.shape[0]:
            raise ConfigError(
                f"this cache holds {len(self._rows)} rows and was given {new.shape[0]}: "
                f"make a new one, or call reset()"
            )
        return self._rows

    def _new_rows(self, dtype: torch.dtype, num_rows: int) -> BatchRows:
        """Beside the copies of this cache, if there are some: they have one ceiling."""
        family = self._family_of_copies
        with torch.inference_mode(False):  # it may end before the cache does
            if family is not None:
                if dtype != self._dtype:
                    raise ConfigError(
                        f"this cache was given {dtype}, and its copies hold {self._dtype}: make "
                        f"a new one, or close() them"
                    )
                return BatchRows(family, num_rows)
            return self._make_rows(
                self._spec.with_kv_dtype(str(dtype).removeprefix("torch.")), num_rows
            )

    @property
    def in_one_piece(self) -> bool:
        """Whether this model must be given keys and values without gaps."""
        return self._spec.model_type in _IN_ONE_PIECE

    @property
    def reads_in_place(self) -> bool:
        """Whether this model asks torch for its attention: other code looks at elements at once."""
        return (
            self._text_config._attn_implementation == "sdpa"
            and not self.in_one_piece
            and not torch.compiler.is_compiling()
        )

    @property
    def rows(self) -> BatchRows | None:
        """The rows; None before the first token."""
        return self._rows

    @property
    def memory(self) -> CountedMemory:
        """Bytes reserved, committed, at peak and returned, of all that this cache ever held."""
        return self._memory

    @property
    def _family_of_copies(self) -> CacheFamily | None:
        family = None if self._family is None else self._family()
        return family if family is not None and family.can_be_joined else None

    def usage(self) -> Usage:
        """Count the bytes reserved, committed, used and wasted, as accounting knows them."""
        family = self._family_of_copies
        return Usage.nothing() if family is None else family.usage()

    def close(self) -> None:
        """Give back what no copy holds. The cache can be used again, from the beginning."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None
        for layer in self._own_layers:
            layer.begin_anew()
        for states in self._states.values():
            states.begin_anew()
        self._steps = _Steps()

    def __enter__(self) -> "DropInCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset(self) -> None:
        """Drop all that is kept: the next token is the first one."""
        for layer in self._other_layers:
            layer.reset()
        self.close()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i a copy of row ``beam_idx[i]``, i64[rows]."""
        with self._steps.of_this_thread(ends=True):
            for layer in self._other_layers:
                layer.reorder_cache(beam_idx)
            if self._rows is not None:
                self._put_back_states()
                self._rows.reorder(beam_idx.cpu())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens (Transformers' sign).

        A number above zero is what shall be left of them, as before Transformers 5.18; a recurrent
        layer knows no such number, and goes back only over what it was told to record.
        """
        tokens_to_remove = int(tokens_to_remove)  # Transformers 5.17 gives a tensor of one number
        with self._steps.of_this_thread(ends=True):
            for layer in [*self._states.values(), *self._other_layers]:
                layer.crop(tokens_to_remove)
            if self._rows is not None and tokens_to_remove:
                held = self._rows.num_tokens
                left = tokens_to_remove if tokens_to_remove > 0 else held + tokens_to_remove
                self._rows.trim(min(held, max(0, left)))
                for layer in self._own_layers:
                    layer.cumulative_length = self._rows.num_tokens

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row as often as ``repeats`` says."""
        with self._steps.of_this_thread(ends=True):
            for layer in self._other_layers:
                layer.batch_repeat_interleave(repeats)
            if self._rows is not None:
                self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, i64[rows], in that order."""
        with self._steps.of_this_thread(ends=True):
            for layer in self._other_layers:
                layer.batch_select_indices(indices)
            if self._rows is not None:
                self._select(torch.arange(len(self._rows))[indices.cpu()].tolist())

    def _select(self, source_rows: list[int]) -> None:
        assert self._rows is not None, "no rows to choose from"
        self._put_back_states()
        with self.whole_or_empty():
            self._rows.select(source_rows)
        for states in self._states.values():
            states.rows_changed()

    def _put_back_states(self) -> None:
        """What moves with the rows are states that lie in them."""
        for states in self._states.values():
            states.put_back()

    @contextmanager
    def whole_or_empty(self) -> Iterator[None]:
        """Give everything back if the system refuses pages half-way: the cache begins anew."""
        try:
            yield
        except MemoryUnavailable:
            self.close()
            raise

    @property
    def is_linear(self) -> list[bool]:
        """Whether layers are recurrent only: Transformers looks for the others' masks."""
        return [
            isinstance(layer, LinearAttentionCacheLayerMixin)
            and not isinstance(layer, CacheLayerMixin)
            for layer in self.layers
        ]

    @property
    def _own_layers(self) -> list["DropInLayer"]:
        return [layer for layer in self.layers if isinstance(layer, DropInLayer)]

    @property
    def _other_layers(self) -> list[Any]:
        """Transformers' own, which keep what they are given themselves."""
        layers = ((n, layer) for n, layer in enumerate(self.layers) if n not in self._states)
        return [layer for _, layer in layers if not isinstance(layer, DropInLayer)]


def _kinds(spec: ModelSpec, layer: int) -> tuple[RecurrentState | None, AttentionSpec | None]:
    """What a layer keeps: a state, keys and values, both or neither."""
    specs = spec.layers[layer].specs
    states = [kept for kept in specs if isinstance(kept, RecurrentState)]
    attention = [kept for kept in specs if not isinstance(kept, KeptWhole)]
    return next(iter(states), None), next(iter(attention), None)


def _windows_for_chunks(spec: ModelSpec) -> ModelSpec:
    """Chunks become windows of that length: a padded row begins its chunks later than others."""

    def window(kept: Any) -> Any:
        if not isinstance(kept, ChunkedAttention):
            return kept
        return SlidingWindow(
            num_kv_heads=kept.num_kv_heads,
            head_dim=kept.head_dim,
            value_head_dim=kept.value_head_dim,
            dtype=kept.dtype,
            window=kept.chunk,
        )

    layers = tuple(
        replace(layer, specs=tuple(window(kept) for kept in layer.specs)) for layer in spec.layers
    )
    return replace(spec, layers=layers)
