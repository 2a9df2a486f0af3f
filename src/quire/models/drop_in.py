"""A cache for ``model.generate(past_key_values=…)``: one line in code that exists already.

Attention layers are kept by the strategy; what recurrent layers remember stays with Transformers'
own layer classes. Reads are views wherever the strategy holds a range, so that any attention kernel
works unchanged.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from quire.errors import ConfigError, MemoryUnavailable, UnsupportedModel
from quire.memory import CountedMemory, HostMemory, MemoryProvider
from quire.memory.budget import make_ledger
from quire.memory.budget.ledger import Needs
from quire.memory.machine import read_machine
from quire.memory.machine.probe import spare_mappings
from quire.models.footprint import footprint
from quire.models.rows import Rows
from quire.spec import AttentionSpec, ChunkedAttention, ModelSpec, RecurrentState, SlidingWindow
from quire.strategies import STRATEGIES, CacheConfig, Growth, Usage
from quire.units import format_count, parse_bytes


class DropInCache(Cache):
    """A Transformers cache whose attention layers are kept by one of Quire's strategies.

    Nothing is reserved before the first token; ``close()``, or the end of a ``with`` block, gives
    everything back. ``memory`` counts bytes reserved, committed, at peak and returned; ``usage()``
    says what of them holds tokens.
    """

    def __init__(
        self,
        model_config: Any,
        spec: ModelSpec,
        memory: CountedMemory,
        make_rows: Callable[[ModelSpec, int], Rows],
    ) -> None:
        self._memory = memory
        self._spec = _windows_for_chunks(spec)
        self._make_rows = make_rows
        self._rows: Rows | None = None
        self._dtype: torch.dtype | None = None  # of the rows
        # Transformers' own layers, where they are not simply attention: states, nothing at all.
        layers: list[Any] = DynamicCache(config=model_config.get_text_config(decoder=True)).layers
        for index in range(len(layers)):
            kept = _only_attention(self._spec, index)
            if kept is not None:
                layers[index] = DropInLayer(self, index, kept)
        super().__init__(layers=layers)

    def rows_for(self, k: Tensor) -> Rows:
        """The rows, made when the first keys arrive ([rows, K, T, D]) and tell how many there are.

        Raises: ConfigError for a device or dtype that cannot be kept.
        """
        if k.device.type != "cpu":
            raise ConfigError(f"the model runs on {k.device}; this cache keeps CPU tensors only")
        if self._rows is None:
            dtype = str(k.dtype).removeprefix("torch.")
            self._rows = self._make_rows(self._spec.with_kv_dtype(dtype), k.shape[0])
            self._dtype = k.dtype
        if k.dtype != self._dtype:
            raise ConfigError(
                f"this cache holds {self._dtype} and was given {k.dtype}: "
                f"make a new one, or call reset()"
            )
        if len(self._rows) != k.shape[0]:
            raise ConfigError(
                f"this cache holds {len(self._rows)} rows and was given {k.shape[0]}: "
                f"make a new one, or call reset()"
            )
        return self._rows

    @property
    def rows(self) -> Rows | None:
        """The rows; None before the first token."""
        return self._rows

    @property
    def memory(self) -> CountedMemory:
        """Bytes reserved, committed, at peak and returned, of all that this cache ever held."""
        return self._memory

    def usage(self) -> Usage:
        """Bytes reserved, committed, used and wasted, as accounting knows them."""
        if self._rows is None:
            return Usage(
                reserved_bytes=0, committed_bytes=0, used_bytes=0, num_sequences=0, num_tokens=0
            )
        return self._rows.usage()

    def close(self) -> None:
        """Give everything back. The cache can be used again, from the beginning."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None
        for layer in self._own_layers:
            layer.cumulative_length = 0
            layer.is_initialized = False

    def __enter__(self) -> "DropInCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset(self) -> None:
        for layer in self._other_layers:
            layer.reset()
        self.close()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for layer in self._other_layers:
            layer.reorder_cache(beam_idx)
        if self._rows is not None:
            self._rows.reorder(beam_idx.cpu())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens (Transformers' sign).

        A number above zero is what shall be left of them, as before Transformers 5.18.
        """
        if self._rows is not None and tokens_to_remove:
            held = self._rows.num_tokens
            left = tokens_to_remove if tokens_to_remove > 0 else held + tokens_to_remove
            self._rows.trim(min(held, max(0, left)))
            for layer in self._own_layers:
                layer.cumulative_length = self._rows.num_tokens
        for layer in self._other_layers:
            layer.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for layer in self._other_layers:
            layer.batch_repeat_interleave(repeats)
        if self._rows is not None:
            with self.whole_or_empty():
                self._rows.select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self._other_layers:
            layer.batch_select_indices(indices)
        if self._rows is not None:
            with self.whole_or_empty():
                self._rows.select(torch.arange(len(self._rows))[indices.cpu()].tolist())

    @contextmanager
    def whole_or_empty(self) -> Iterator[None]:
        """If the system refuses pages half-way, give everything back: the cache begins anew."""
        try:
            yield
        except MemoryUnavailable:
            self.close()
            raise

    @property
    def _own_layers(self) -> list["DropInLayer"]:
        return [layer for layer in self.layers if isinstance(layer, DropInLayer)]

    @property
    def _other_layers(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, DropInLayer)]


class DropInLayer(CacheLayerMixin):
    """One attention layer of a ``DropInCache``, as Transformers wants to see it."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: DropInCache, layer: int, spec: AttentionSpec) -> None:
        super().__init__()
        self.is_sliding = isinstance(spec, SlidingWindow)
        self.cumulative_length = 0
        self._owner = owner
        self._layer = layer
        self._spec = spec

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        got = tuple((x.shape[1], x.shape[3]) for x in (key_states, value_states))
        if got != self._spec.entry_shapes:
            raise UnsupportedModel(
                f"layer {self._layer} caches entries of {got} (heads, width), but config.json says "
                f"{self._spec.entry_shapes}: this model cannot be kept"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
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
        return rows.read(self._layer, self._spec.live_range(start).start, stop)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys that ``update`` will return."""
        first = self._spec.live_range(self.cumulative_length).start
        return self.cumulative_length + query_length - first, first

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1  # anything else makes generate() treat the cache as static


def cache(  # noqa: PLR0913 - each is an option of its own, and the defaults work
    model: PreTrainedModel,
    strategy: str = "paged",
    *,
    max_model_len: int | None = None,
    kv_cache_memory_bytes: int | str | None = None,
    max_num_seqs: int | None = None,
    block_size: int = 16,
    growth: Growth = "uniform",
    growth_tokens: int = 256,
    keep_old: bool = False,
    shares_pages: bool = False,
    provider: MemoryProvider | None = None,
) -> DropInCache:
    """A cache for one ``model.generate(…, past_key_values=quire.cache(model, strategy))``.

    ``strategy`` is ``contiguous``, ``growing``, ``paged`` or ``virtual``. ``max_model_len``
    (tokens, prompt and continuation) defaults to the model's own; ``kv_cache_memory_bytes``, the
    ceiling, to what the machine has available, less headroom; ``max_num_seqs`` to enough rows for
    this batch and its beams. ``block_size`` is for ``paged``; ``growth``, ``growth_tokens`` and
    ``keep_old`` are for ``growing``. With ``shares_pages``, ``virtual`` has one copy of what beams
    have in common, in a layout that is slower to read. ``provider`` is where the pages come from.

    Raises: ConfigError, UnsupportedModel.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"cache strategy {strategy!r} is unknown; known: {', '.join(STRATEGIES)}")
    spec = ModelSpec.from_config(model.config.to_dict(), type(model).__name__ + ".config")
    longest = spec.max_model_len if max_model_len is None else max_model_len
    _at_least_one(max_model_len=longest, block_size=block_size, growth_tokens=growth_tokens)
    if max_num_seqs is not None:
        _at_least_one(max_num_seqs=max_num_seqs)
    memory = CountedMemory(HostMemory() if provider is None else provider)
    if shares_pages and memory.cannot_share is not None:
        raise ConfigError(f"shares_pages cannot be had: {memory.cannot_share}; leave it out")
    asked = None if kv_cache_memory_bytes is None else parse_bytes(kv_cache_memory_bytes)
    ceiling = _ceiling(model, spec, longest, asked)

    def make_rows(spec: ModelSpec, num_rows: int) -> Rows:
        config = CacheConfig(
            max_model_len=longest,
            max_num_seqs=max_num_seqs or max(16, 2 * num_rows),
            capacity_bytes=ceiling,
            block_size=block_size,
            page_bytes=memory.page_bytes,
            growth=growth,
            growth_tokens=growth_tokens,
            keep_old=keep_old,
            shares_pages=shares_pages,
            max_mappings=spare_mappings() if shares_pages else None,
        )
        return Rows(strategy, spec, config, memory, num_rows)

    return DropInCache(model.config, spec, memory, make_rows)


def _ceiling(model: PreTrainedModel, spec: ModelSpec, longest: int, asked: int | None) -> int:
    """What may be committed: as asked, or by the budget rule ``auto``. Raises: ConfigError."""
    own = footprint(model)
    needs = Needs(
        weights_bytes=own.weights_bytes,
        counted_weights_bytes=own.counted_bytes,
        bytes_per_token=spec.bytes_per_token,
        context_tokens=longest,
        least_bytes=spec.bytes_per_token,
    )
    return make_ledger(read_machine(), needs, kv_cache_memory_bytes=asked).require()


def _only_attention(spec: ModelSpec, layer: int) -> AttentionSpec | None:
    """The layer's spec if attention is all that it remembers."""
    specs = spec.layers[layer].specs
    if len(specs) == 1 and not isinstance(specs[0], RecurrentState):
        return specs[0]
    return None


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


def _at_least_one(**options: int) -> None:
    for name, value in options.items():
        if value < 1:
            raise ConfigError(f"{name}={format_count(value)} must be at least 1")
