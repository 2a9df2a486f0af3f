"""An accounting and its storage, as a pair that is replaced where storage could not follow."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, final

from quire.kv import Accounting, Storage, StorageOp
from quire.memory import CountedMemory

MakePair: TypeAlias = Callable[[], tuple[Accounting, Storage]]


class OtherStorages(Protocol):
    """The storages of other ranks, which have other heads of the same cache."""

    @property
    def least_committed_bytes(self) -> int:
        """Of the rank that has committed the fewest."""
        ...

    def apply(self, changes: Sequence[StorageOp], own: Storage) -> None:
        """Carry out changes in every rank, with this rank's ``own``. Raises: MemoryUnavailable."""
        ...

    def close_storage(self) -> None:
        """Give back every page of the other ranks."""
        ...


@final
class KVCache:
    """Has storage carry out what accounting decides.

    ``refusal`` is why storage could not, or None; after a refusal only ``restart`` helps.

    Raises: MemoryUnavailable if no addresses can be reserved.
    """

    def __init__(self, make: MakePair, others: OtherStorages | None = None) -> None:
        self._make, self._others = make, others
        self.accounting, self.storage = make()
        self._memory = self.storage.memory
        self._is_closed = False
        self.refusal: Exception | None = None

    @property
    def memory(self) -> CountedMemory:
        """Bytes reserved, committed, at peak and given back, since the last restart."""
        return self._memory

    @property
    def committed_bytes(self) -> int:
        """This rank's, or those of the rank that has committed the fewest."""
        others = self._others
        return self._memory.committed_bytes if others is None else others.least_committed_bytes

    def carry_out(self) -> None:
        """End the accounting's step: storage carries out its changes, or there is a ``refusal``."""
        if self.refusal is None:
            try:
                changes = self.accounting.drain()
                if self._is_closed:
                    return
                if self._others is None:
                    self.storage.apply(changes)
                elif several := list(changes):
                    self._others.apply(several, self.storage)
            except Exception as error:  # the changes are lost
                self.refusal = error

    def require(self) -> None:
        """Check that storage has followed. Raises: the refusal, as a rule MemoryUnavailable."""
        if self.refusal is not None:
            raise self.refusal

    def restart(self) -> None:
        """Give every page back and begin again with an empty pair, under the same ceiling.

        Raises: MemoryUnavailable, and then there is no storage.
        """
        ceiling = self.accounting.ceiling
        self._close_storage()
        self.accounting, self.storage = self._make()
        self._memory, self.refusal = self.storage.memory, None
        self.accounting.resize(ceiling.capacity_bytes)
        self.accounting.resize(ceiling.now_bytes, for_now=True)

    def close(self) -> None:
        """Give every page back, and the addresses once no tensor lies over them.

        A second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.accounting.drain()
        self._close_storage()
        del self.storage, self._make  # both hold tensors over the addresses

    def _close_storage(self) -> None:
        self.storage.close()
        if self._others is not None:
            self._others.close_storage()
