"""How a cache's blocks lie in storage: copies of them, and the formats of their records."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, final

from quire.engine.kv_cache import KVCache
from quire.engine.offloading.staging import Bytes
from quire.kv.interface import BlockBytes
from quire.kv.layout import attention_spec
from quire.spec import Group, KeptWhole
from quire.tiers.record import Part, RecordFormat, Seal

if TYPE_CHECKING:
    from torch import Tensor


def record_formats(
    kv: KVCache, fingerprint: bytes, block_size: int, seal: Seal
) -> list[RecordFormat]:
    """Make the format of each group's records, after how its blocks lie in storage."""
    assert isinstance(kv.storage, BlockBytes)
    order = kv.storage.block_order
    return [
        RecordFormat(
            fingerprint,
            number,
            block_size,
            list(_parts(group, kv.storage.block_rows(number), order)),
            seal,
        )
        for number, group in enumerate(kv.accounting.groups)
    ]


def _parts(group: Group, rows: "list[Tensor]", order: str) -> Iterable[Part]:
    layers = group.layers[:: max(1, -(-len(group.layers) // len(rows)))]
    if isinstance(group.spec, KeptWhole):
        for layer, row in zip(layers, rows, strict=True):
            size = row.shape[1]
            yield Part(layer=layer, dtype="uint8", order="states", shape=(size,), num_bytes=size)
        return
    spec = attention_spec(group)
    (heads, key_dim), (_, value_dim) = spec.entry_shapes
    together = len(group.layers) // len(rows)
    for layer, row in zip(layers, rows, strict=True):
        yield Part(
            layer=layer,
            dtype=spec.dtype,
            order=order,
            shape=(together, heads, key_dim, value_dim),
            num_bytes=row.shape[1],
        )


@final
class BlockCopies:
    """Copies whole blocks between a cache and staging memory, where they are a buffer's end."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        # Of each group, u8[blocks, bytes]; on a CPU arrays of NumPy, which copies little quicker.
        self._rows: list[list[Any]] = []
        self._is_on_host = True

    def out(self, group: int, block: int, buffer: Bytes) -> None:
        """Copy a block to the end of a buffer u8[n]."""
        for rows, piece in self._pieces(group, buffer):
            piece[:] = rows[block]

    def into(self, group: int, block: int, buffer: Bytes) -> None:
        """Copy the end of a buffer u8[n] into a block."""
        for rows, piece in self._pieces(group, buffer):
            rows[block] = piece

    def forget(self) -> None:
        """Let go of the cache's memory, until the next copy."""
        self._rows = []

    def _pieces(self, group: int, buffer: Bytes) -> Iterator[tuple[Any, Any]]:
        """Yield where blocks lie, and the piece of a buffer that goes there."""
        if not self._rows:
            self._look()
        whole: Any = buffer
        if not self._is_on_host:
            import torch

            whole = torch.from_numpy(buffer)
        stop = len(buffer)
        for rows in reversed(self._rows[group]):
            start = stop - rows.shape[1]
            yield rows, whole[start:stop]
            stop = start

    def _look(self) -> None:
        storage, groups = self._kv.storage, self._kv.accounting.groups
        assert isinstance(storage, BlockBytes)
        rows = [storage.block_rows(number) for number in range(len(groups))]
        self._is_on_host = all(each.device.type == "cpu" for several in rows for each in several)
        self._rows = [
            [each.numpy() if self._is_on_host else each for each in several] for several in rows
        ]
