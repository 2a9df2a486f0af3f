"""Windows have no more mappings after a step than its answers allowed for.

This is asked of every step, since few come near the system's limit.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from quire.kv import Accounting
from quire.kv.virtual_shared import SharedVirtualAccounting


@contextmanager
def counted_mappings(accounting: Accounting) -> Iterator[None]:
    """A step is ended, and its changes are carried out."""
    if not isinstance(accounting, SharedVirtualAccounting):
        yield
        return
    windows = accounting._windows
    allowed = windows.num_mappings + windows.num_promised
    yield
    assert windows.num_mappings <= allowed, "mappings that are not counted"
