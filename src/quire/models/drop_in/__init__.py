"""Caches for ``model.generate(past_key_values=…)``, kept by any strategy."""

from quire.models.drop_in.cache import DropInCache
from quire.models.drop_in.make import cache

__all__ = ["DropInCache", "cache"]
