"""``MooncakeTier``: records in the memory that the clients of a Mooncake store lend to each other.

    mooncake://MASTER[:PORT]?host=…&lend=…&metadata=…&protocol=…&device=…

The master knows where each record lies, and evicts; bytes go from client to client, over TCP or
RDMA. A client's memory goes with its process, and the master's knowledge with the master: what is
left then is a miss, or bytes of something else, which a record's check finds.

Mooncake's client knows no deadline, so each call is made in a thread. Its ``setup`` lets no other
thread run meanwhile, and ends the process if the client is used after it has failed. So it is
called where a tier is made, before there are requests, and its failure is an error.
"""

import logging
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, final

from quire.errors import ConfigError
from quire.tiers.address import TierAddress
from quire.tiers.blocking_calls import BlockingCalls
from quire.tiers.tier import Deadline, Name, TierError, TierFull, TierTraits, TierUsage
from quire.units import align_up, parse_bytes

log = logging.getLogger(__name__)

_PORT = 50051
_METADATA_PORT = 8080
_CLOSE_S = 10.0  # that calls under way may take at the end
_CALLS = 4  # at once: more are not faster, and each needs a buffer
_BUFFERS_A_CALL = 2  # Mooncake copies through memory that its transfers know
_STEP_BYTES = 16 * 2**20  # of what is lent, and of buffers
_OPTIONS = ("host", "lend", "metadata", "protocol", "device")

# Mooncake's ErrorCode (mooncake-store/include/types.h).
_NO_ROOM = -200
_NOT_FOUND = -704
_UNREACHABLE = -900


def open_mooncake(address: TierAddress, record_bytes: int, namespace: str) -> "MooncakeTier":
    """Make the tier of an address, which takes seconds where the master does not answer.

    ``record_bytes`` is the largest record's size. Raises: ConfigError, also without Mooncake or its
    master.
    """
    where = f"kv_tier={address}"
    if find_spec("mooncake") is None:
        raise ConfigError(
            f"{where} needs Mooncake's client: pip install 'quire-kv[mooncake]', or beside CUDA "
            f"mooncake-transfer-engine"
        )
    address.require_known(*_OPTIONS)
    master, options = address.url.hostname, address.options
    if not master or "host" not in options:
        raise ConfigError(
            f"{where}: write mooncake://MASTER?host=HOST; HOST is where others reach this machine"
        )
    config = {
        "local_hostname": options["host"],
        "metadata_server": options.get("metadata", f"http://{master}:{_METADATA_PORT}/metadata"),
        "global_segment_size": align_up(address.option("lend", parse_bytes, 0), _STEP_BYTES),
        "local_buffer_size": align_up(_CALLS * _BUFFERS_A_CALL * record_bytes, _STEP_BYTES),
        "protocol": options.get("protocol", "tcp"),
        "rdma_devices": options.get("device", ""),
        "master_server_addr": f"{master}:{address.url.port or _PORT}",
    }
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    if code := client.setup(config):
        raise ConfigError(
            f"{where}: Mooncake's client cannot be set up (its error {code}): is the master at "
            f"{config['master_server_addr']}, and metadata at {config['metadata_server']}?"
        )
    return MooncakeTier(client, str(address), f"quire/{namespace}/")


@final
class MooncakeTier:
    """Records of one namespace in one store."""

    traits = TierTraits(is_shared=True, is_persistent=False)

    def __init__(self, client: Any, label: str, prefix: str) -> None:
        """``client``: a MooncakeDistributedStore that was set up, and is now the tier's own."""
        self._client, self._label, self._prefix = client, label, prefix
        self._calls = BlockingCalls(label, _CALLS, str)

    def find(self, names: Sequence[Name], deadline: Deadline) -> int:
        return self._calls.count(
            len(names),
            lambda i: partial(self._size, names[i]),
            lambda _, size: size is not None,
            deadline,
        )

    def load(self, names: Sequence[Name], into: Sequence[memoryview], deadline: Deadline) -> int:
        def copy(i: int, record: bytes | None) -> bool:
            if record is None or len(record) != len(into[i]):
                return False
            into[i][:] = record
            return True

        return self._calls.count(
            len(names), lambda i: partial(self._fetch, names[i], len(into[i])), copy, deadline
        )

    def store(
        self, names: Sequence[Name], records: Sequence[memoryview], deadline: Deadline
    ) -> int:
        return self._calls.count(
            len(names),
            lambda i: partial(self._keep, names[i], bytes(records[i])),
            lambda *_: True,
            deadline,
        )

    def drop(self, names: Sequence[Name], deadline: Deadline) -> None:
        self._calls.make_all(len(names), lambda i: partial(self._forget, names[i]), deadline)

    def usage(self) -> TierUsage:
        self._calls.require_open()
        return TierUsage()

    def close(self) -> None:
        # Mooncake's client must not be closed under a call, and knows no deadline.
        if not self._calls.close(wait_s=_CLOSE_S):
            log.warning(
                "%s: a call has not ended in %g s: its client stays open", self._label, _CLOSE_S
            )
            return
        if self._client is not None:
            self._client.close()
        self._client = None

    # -- calls, in threads -------------------------------------------------------------------------

    def _size(self, name: Name) -> int | None:
        """Ask for a record's bytes: None where it is not there."""
        num_bytes: int = self._client.get_size(self._key(name))
        if num_bytes == _NOT_FOUND:
            return None
        self._check(min(num_bytes, 0), "cannot be asked")
        return num_bytes

    def _fetch(self, name: Name, num_bytes: int) -> bytes | None:
        if self._size(name) != num_bytes:
            return None
        found = self._client.get_buffer(self._key(name))  # None: it is gone, or the master is
        # A copy: what Mooncake has lent is of a small memory, and the caller may come late.
        return None if found is None else bytes(found)

    def _keep(self, name: Name, record: bytes) -> None:
        found = self._size(name)
        if found == len(record):
            return
        if found is not None:  # a put would leave it as it is
            self._forget(name)
        self._check(self._client.put(self._key(name), record), "cannot store")

    def _forget(self, name: Name) -> None:
        code = self._client.remove(self._key(name), True)
        self._check(0 if code == _NOT_FOUND else code, "cannot remove")

    def _key(self, name: Name) -> str:
        return self._prefix + name.hex()

    def _check(self, code: int, what: str) -> None:
        if code == _NO_ROOM:
            raise TierFull(f"{self._label}: no client lends enough memory: raise lend=")
        if code:
            away = ": the master does not answer" if code == _UNREACHABLE else ""
            raise TierError(f"{self._label}: {what}: Mooncake's error {code}{away}")
