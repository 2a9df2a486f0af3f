"""A cache for ``generate`` of an encoder-decoder: the text's keys and values, and the source's.

The text has a cache like any decoder's (``drop_in``). Beside it, in the same rows and under the
same ceiling, each row keeps what the encoder made of its source. Whether a layer has written it is
asked of the rows themselves, so that a cache that was emptied begins anew.
"""

from collections.abc import Callable, Iterator, MutableMapping
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from quire.errors import RequestTooLong, UnsupportedModel
from quire.kv import Usage
from quire.memory import CountedMemory
from quire.models.drop_in.cache import DropInCache
from quire.models.drop_in.cache_layers import has_gradients, without_gradients
from quire.models.drop_in.rows import BatchRows
from quire.spec import CrossAttention, KeptWhole, ModelSpec
from quire.units import format_count

MakeRows: TypeAlias = Callable[[ModelSpec, int], BatchRows]


class SourceCache(EncoderDecoderCache):
    """A Transformers cache of an encoder-decoder, kept by one of Quire's strategies.

    Nothing is reserved before the first token; ``close()``, or the end of a ``with`` block, gives
    everything back. ``memory`` counts bytes reserved, committed, at peak and returned; ``usage()``
    says what of them holds tokens and sources.
    """

    def __init__(
        self,
        model_config: Any,
        spec: ModelSpec,
        make_rows: MakeRows,
        make_text: Callable[[Any, ModelSpec, MakeRows], DropInCache],
    ) -> None:
        """``make_text`` makes the text's cache of a config, a spec and what makes its rows."""
        config = deepcopy(model_config)
        config.num_hidden_layers = spec.num_layers  # of the decoder; files mean the encoder's

        def make_both(text: ModelSpec, num_rows: int) -> BatchRows:
            dtypes = [
                kept.dtype for kept in text.layers[0].specs if not isinstance(kept, KeptWhole)
            ]
            return make_rows(spec.computed_in(dtypes[0]), num_rows)

        self._lie_in(make_text(config, spec.text_alone, make_both), spec)

    def _lie_in(self, text: DropInCache, spec: ModelSpec) -> None:
        """``text``: the cache that has the rows."""
        self.text, self._spec = text, spec
        self.sources = [
            SourceLayer(self.text, number, kept)
            for number, layer in enumerate(spec.layers)
            for kept in layer.specs
            if isinstance(kept, CrossAttention)
        ]
        EncoderDecoderCache.__init__(self, self.text, Cache(layers=self.sources))
        self.is_updated = _Written(self.sources)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SourceCache":
        """As of a ``DropInCache``: the sources go along with the text."""
        twin = SourceCache.__new__(SourceCache)
        memo[id(self)] = twin
        twin._lie_in(deepcopy(self.text, memo), self._spec)
        for copied, own in zip(twin.sources, self.sources, strict=True):
            copied.take_over(own)
        return twin

    def __copy__(self) -> "SourceCache":
        return deepcopy(self)

    @property
    def rows(self) -> BatchRows | None:
        """The rows; None before the first token."""
        return self.text.rows

    @property
    def memory(self) -> CountedMemory:
        """Bytes reserved, committed, at peak and returned, of all that this cache ever held."""
        return self.text.memory

    def usage(self) -> Usage:
        """Count the bytes reserved, committed, used and wasted, as accounting knows them."""
        return self.text.usage()

    def close(self) -> None:
        """Give everything back. The cache can be used again, from the beginning."""
        self.text.close()

    def __enter__(self) -> "SourceCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset(self) -> None:
        """Drop all that is kept: the next token is the first one."""
        self.text.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i a copy of row ``beam_idx[i]``, i64[rows]."""
        self.text.reorder_cache(beam_idx)  # its rows take their sources along

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; with the first one its source goes too."""
        self.text.crop(tokens_to_remove)
        if self.rows is not None and not self.rows.num_tokens:
            for source in self.sources:
                source.reset()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row as often as ``repeats`` says."""
        self.text.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, i64[rows], in that order."""
        self.text.batch_select_indices(indices)


class SourceLayer(CacheLayerMixin):
    """The source as one layer reads it. Transformers asks for ``keys`` and ``values`` by name."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, text: DropInCache, layer: int, spec: CrossAttention) -> None:
        self._text, self._layer, self._spec = text, layer, spec
        self._written: BatchRows | None = None  # in which it lies
        self._length = 0  # tokens
        self._had_gradients = False  # when it was written

    @property
    def is_written(self) -> bool:
        return self._written is not None and self._written is self._text.rows

    @property
    def is_initialized(self) -> bool:
        return self.is_written

    @property
    def keys(self) -> Tensor | None:
        """[rows, K, source, D]."""
        return self._read(0)

    @property
    def values(self) -> Tensor | None:
        return self._read(1)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for keys [rows, K, source, D]. Raises: UnsupportedModel, RequestTooLong."""
        spec = self._spec
        got = tuple((x.shape[1], x.shape[3]) for x in (key_states, value_states))
        said = tuple((state.shape[0], state.shape[2]) for state in spec.states)
        if got != said:
            raise UnsupportedModel(
                f"layer {self._layer} caches sources of {got} (heads, width), but config.json says "
                f"{said}: this model cannot be kept"
            )
        if (length := key_states.shape[2]) > spec.source_tokens:
            raise RequestTooLong(
                f"a source of {format_count(length)} tokens is longer than the "
                f"{format_count(spec.source_tokens)} that each row has room for: raise "
                f"max_source_tokens"
            )

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the rows' sources ([rows, K, S, D], […, Dv]), once."""
        self.lazy_initialization(key_states, value_states)
        rows = self._text.rows_for(key_states)
        with torch.no_grad():
            rows.write_source(self._layer, key_states, value_states)
        self._had_gradients = has_gradients(key_states, value_states)
        self._written, self._length = rows, key_states.shape[2]
        return key_states, value_states

    def reset(self) -> None:
        """Drop all that is kept: the next token is the first one."""
        self._written, self._length = None, 0

    def take_over(self, other: "SourceLayer") -> None:
        """Read what another cache's layer has written, whose rows were copied."""
        self._written = self._text.rows if other.is_written else None
        self._length, self._had_gradients = other._length, other._had_gradients

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        """Return how many tokens it holds."""
        return self._length if self.is_written else 0

    def get_max_length(self) -> int:
        """Return how many tokens it may hold; -1 for no bound."""
        return -1

    def _read(self, which: int) -> Tensor | None:
        if self._written is None or not self.is_written:
            return None
        kept = self._written.read_source(self._layer)[which]
        refuses = self._had_gradients and torch.is_grad_enabled()
        return without_gradients(kept) if refuses else kept


class _Written(MutableMapping[int, bool]):
    """Which layers have written their source. Transformers sets it too, sometimes too early."""

    def __init__(self, sources: list[SourceLayer]) -> None:
        self._sources = sources

    def __getitem__(self, layer: int) -> bool:
        if layer >= len(self._sources):
            raise KeyError(layer)
        return self._sources[layer].is_written

    def __setitem__(self, layer: int, _: bool) -> None:
        """Nothing to note: it is asked of the layer."""

    def __delitem__(self, layer: int) -> None:
        raise KeyError(layer)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._sources)))

    def __len__(self) -> int:
        return len(self._sources)
