"""A layer of Transformers' cache that keeps nothing.

It is Transformers' own; for a release that has none yet (5.17 has not) it is ours.
"""

from typing import TYPE_CHECKING, Any

from transformers.cache_utils import CacheLayerMixin

__all__ = ["UnkeptLayer"]


class _UnkeptLayer(CacheLayerMixin):
    """It has a place among a cache's layers, and that is all."""

    supports_early_init = False
    is_compileable = True

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Nothing is left to be done."""

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("this layer was to keep nothing")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


if TYPE_CHECKING:
    UnkeptLayer = _UnkeptLayer
else:
    try:
        from transformers.cache_utils import DummyLayer as UnkeptLayer
    except ImportError:
        UnkeptLayer = _UnkeptLayer
