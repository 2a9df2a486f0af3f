"""What a model calls the argument that takes its cache.

Transformers 5.24 renamed it to ``cache`` everywhere; the names before that go with 5.40. Earlier
releases have ``past_key_values``, and ``cache_params`` in Mamba's classes and in mixers.
"""

import inspect
from collections.abc import Callable, Collection

_NAMES = ("cache_params", "past_key_values", "cache")


def cache_argument(forward: Callable[..., object]) -> str:
    """Return the name by which ``forward`` takes a cache; ``past_key_values`` if it names none."""
    return named_cache(inspect.signature(forward).parameters) or "past_key_values"


def named_cache(names: Collection[str]) -> str | None:
    """Return which of a signature's names is that of a cache, or None."""
    return next((name for name in _NAMES if name in names), None)
