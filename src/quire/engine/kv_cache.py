"""One accounting and its storage: the pair that decides and that carries out.

What needs both holds this, so that the pair can be replaced where storage could not follow.
"""

from collections.abc import Callable
from typing import TypeAlias, final

from quire.kv import Accounting, Storage
from quire.memory import CountedMemory

MakePair: TypeAlias = Callable[[], tuple[Accounting, Storage]]


@final
class KVCache:
    """``refusal`` is why storage could not follow, if so: all that is left to do is ``restart``.

    ``least_committed_bytes`` tells how much every one of several ranks has committed.

    Raises: MemoryUnavailable if no addresses can be reserved.
    """

    def __init__(
        self, make: MakePair, least_committed_bytes: Callable[[], int] | None = None
    ) -> None:
        self._make = make
        self._least_committed_bytes = least_committed_bytes
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
        here = self._memory.committed_bytes
        return here if self._least_committed_bytes is None else self._least_committed_bytes()

    def carry_out(self) -> None:
        """End the accounting's step: storage does what was decided, or else there is a refusal.

        After ``close`` there is nothing to be done.
        """
        if self.refusal is None:
            try:
                changes = self.accounting.drain()
                if not self._is_closed:
                    self.storage.apply(changes)
            except Exception as error:  # what it was, is lost
                self.refusal = error

    def require(self) -> None:
        """Raises: what kept storage from following, MemoryUnavailable most of all."""
        if self.refusal is not None:
            raise self.refusal

    def restart(self) -> None:
        """Give every page back and begin again with an empty pair.

        The ceiling is where it was. Raises: MemoryUnavailable; then there is no storage any more.
        """
        ceiling = self.accounting.ceiling
        self.storage.close()
        self.accounting, self.storage = self._make()
        self._memory, self.refusal = self.storage.memory, None
        self.accounting.resize(ceiling.capacity_bytes)
        self.accounting.resize(ceiling.now_bytes, for_now=True)

    def close(self) -> None:
        """Give every page back, whatever is still to be done; and the addresses, as soon as no
        tensor of another owner is over them. A second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.accounting.drain()
        self.storage.close()
        del self.storage, self._make  # tensors over the addresses, and what makes more of them
