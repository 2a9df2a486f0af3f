"""Caches for ``model.generate(past_key_values=…)``, kept by any strategy."""

from quire.models.drop_in.cache import DropInCache, cache

__all__ = ["DropInCache", "cache"]
