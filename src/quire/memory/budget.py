"""How many bytes the KV cache may commit: what was asked for, or a share of what there is."""

from quire.errors import ConfigError
from quire.memory.probe import available_bytes
from quire.units import format_bytes


def kv_ceiling(asked_bytes: int | None, *, default_fraction: float) -> int:
    """The ceiling on committed bytes; ``default_fraction`` of what is available if none is asked.

    Raises: ConfigError for more than the machine has available.
    """
    available = available_bytes()
    if asked_bytes is None:
        return int(available * default_fraction)
    if asked_bytes > available:
        raise ConfigError(
            f"kv_cache_memory_bytes={format_bytes(asked_bytes)} is more than the machine has "
            f"available, {format_bytes(available)}: lower it"
        )
    return asked_bytes
