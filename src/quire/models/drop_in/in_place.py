"""Keys and values that attention reads where they lie.

A layer's ``update`` gives its model two ``Unread`` tensors. They have a shape and no elements. When
the model calls ``scaled_dot_product_attention`` with them, our kernel walks the blocks; any other
operation is given what was gathered, once. So a model that changes its keys before it attends, or
reads under a mask that our kernel does not know, computes what it always did.

This is PyTorch's own protocol for such tensors (``__torch_function__``): neither the model nor
Transformers is changed. Which rows there are, and when their tokens move, is the affair of
``rows``.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire.attention import AttentionBackend, AttentionBatch
from quire.kv import LayerView
from quire.spec import AttentionSpec

Gather: TypeAlias = Callable[[], tuple[Tensor, Tensor]]

# What asks for no element.
_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")
_OF_SHAPE = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.__len__,
        Tensor.is_floating_point,
    }
)
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class KVPlace:
    """Where one layer's keys and values lie in one step: a view, and each row's blocks.

    The chunk is the last tokens of ``batch``; what is read begins at token ``start``.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        view: LayerView,
        spec: AttentionSpec,
        batch: AttentionBatch,
        start: int,
        gather: Gather,
    ) -> None:
        self._backend, self._view, self._spec = backend, view, spec
        self._batch, self._start = batch, start
        self._gather: Gather | None = gather
        self._gathered: tuple[Tensor, Tensor] | None = None

    def tensors(self, dtype: torch.dtype) -> tuple["Unread", "Unread"]:
        """Return keys [rows, K, n, D] and values [rows, K, n, Dv]."""
        num_rows, num_tokens = self._batch.num_seqs, int(self._batch.context_lens[0]) - self._start
        key, value = (
            Unread.over(self, which, (num_rows, heads, num_tokens, width), dtype)
            for which, (heads, width) in enumerate(self._spec.entry_shapes)
        )
        return key, value

    def read(self) -> tuple[Tensor, Tensor]:
        """Gather k [rows, K, n, D], v [rows, K, n, Dv]: a view of rows equally spaced."""
        if self._gathered is None:
            assert self._gather is not None
            self._gathered, self._gather = self._gather(), None
        return self._gathered

    def attend(
        self, q: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float, repeats: bool
    ) -> Tensor | None:
        """Attend to them, q [rows, H, T, D] → [rows, H, T, Dv]; None: torch must compute it.

        ``repeats``: query heads may outnumber key-value heads.
        """
        num_rows, heads, num_queries, width = q.shape
        num_tokens = int(self._batch.query_starts[1])  # of the chunk
        stop, kv_heads = int(self._batch.context_lens[0]), self._spec.entry_shapes[0][0]
        if self._gathered is not None or (heads != kv_heads and not repeats):
            return None
        if num_tokens == 1:
            # Query heads that share a key-value head may come as queries that read alike.
            if is_causal or (num_queries > 1 and heads != kv_heads):
                return None
        elif num_queries != num_tokens or is_causal == (mask is not None):
            return None
        elif is_causal and (stop != num_tokens or self._spec.live_start(stop - 1)):
            return None  # torch's is_causal counts from the first key, and knows no window
        batch = self._masked(mask)
        if batch is None:
            return None
        if num_tokens == 1:
            packed = q.reshape(num_rows, heads * num_queries, width)
        else:
            packed = q.transpose(1, 2).reshape(num_rows * num_queries, heads, width)
        out = self._backend.attend(packed, self._view, batch, spec=self._spec, scale=scale)
        if num_tokens == 1:
            return out.view(num_rows, heads, num_queries, -1)
        return out.view(num_rows, num_queries, heads, -1).transpose(1, 2)

    def _masked(self, mask: Tensor | None) -> AttentionBatch | None:
        """The step as a mask shows it, found once for all layers of a kind.

        None if it is of another form.
        """
        if mask is None:
            return self._batch
        memo, key = self._batch.memo, ("mask", id(mask), self._start, self._spec)
        if key not in memo:
            padding = _padding(mask, self._spec, self._batch, self._start)
            found = self._batch
            if padding is not None and padding.any():
                found = replace(self._batch, padding=padding, memo={})
            # The mask is kept, so that its id stays its own.
            memo[key] = mask, None if padding is None else found
        batch: AttentionBatch | None = memo[key][1]
        return batch


class Unread(Tensor):
    """Keys or values that are not gathered before an operation asks for an element."""

    _place: KVPlace
    _which: int  # 0: keys, 1: values
    _outline: Tensor  # shape and dtype, with one element for all

    @classmethod
    def over(
        cls, place: KVPlace, which: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> "Unread":
        """Make what stands for keys or values that lie at ``place``."""
        # Code that reads past PyTorch's protocol finds NaN, not numbers that look right.
        outline = torch.full((1,), torch.nan, dtype=dtype).expand(shape)
        made = outline.as_subclass(cls)
        made._place, made._which, made._outline = place, which, outline
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or _NO_OPTIONS
        if func in _OF_SHAPE:
            return func(args[0]._outline, *args[1:], **kwargs)
        if func is scaled_dot_product_attention:
            found = _attend(*args, **kwargs)
            if found is not None:
                return found
        return func(*_gathered(args), **_gathered(dict(kwargs)))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """``scaled_dot_product_attention`` where the keys lie; None where that is not possible."""
    if not (type(key) is Unread and type(value) is Unread) or type(query) is Unread:
        return None
    place = key._place
    if place is not value._place or (key._which, value._which) != (0, 1):
        return None
    if query.dim() != 4 or query.dtype != key._outline.dtype or dropout_p:
        return None
    if query.requires_grad and torch.is_grad_enabled():
        return None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return place.attend(query, attn_mask, is_causal=is_causal, scale=scale, repeats=enable_gqa)


def _gathered(given: Any) -> Any:
    """The same arguments, with elements in every tensor."""
    if isinstance(given, Unread):
        return given._place.read()[given._which]
    if isinstance(given, list | tuple):
        several = [_gathered(each) for each in given]
        return type(given)(several) if type(given) in (list, tuple) else type(given)(*several)
    if isinstance(given, dict):
        return {name: _gathered(each) for name, each in given.items()}
    return given


def _padding(
    mask: Tensor, spec: AttentionSpec, batch: AttentionBatch, start: int
) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """How many tokens a mask hides at the front of each row (i64[rows]).

    None if that, and what the layer's kind lets a query read, is not all that it says, or if a
    query is left with nothing to read.
    """
    stop, num_queries = int(batch.context_lens[0]), int(batch.query_starts[1])
    num_rows, begin = batch.num_seqs, stop - num_queries
    if mask.dtype != torch.bool or mask.dim() != 4:
        return None
    if mask.shape[1:] != (1, num_queries, stop - start) or mask.shape[0] not in (1, num_rows):
        return None
    shown = mask[:, 0].numpy()  # [rows, T, n]
    firsts = start + shown[:, 0].argmax(1)
    tokens, queries = np.arange(start, stop), np.arange(begin, stop)
    lows = np.maximum(firsts[:, None], spec.live_start(queries))  # [rows, T]
    expected = (tokens >= lows[..., None]) & (tokens <= queries[:, None])
    if not np.array_equal(shown, expected):
        return None
    padding: np.ndarray[Any, np.dtype[np.int64]] = np.where(firsts > start, firsts, 0)
    return np.broadcast_to(padding, (num_rows,))
