"""``PeerTransfer``: what an engine leaves for other servers, and takes from them.

It has the leased records and the server that gives them away, and a tier for each peer that
requests may name. ``ThreadedCarrier`` moves bytes, ``scheduling.offers`` decides what is offered.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, final
from uuid import uuid4

from quire.config import KVTransferConfig
from quire.engine.scheduling.offers import Lease
from quire.engine.sequence import RemoteBlocks
from quire.errors import ConfigError, RequestError
from quire.kv.prefix_index import BlockIdentity
from quire.tiers import Deadline, TierError
from quire.tiers.guard import GuardedTier
from quire.tiers.record import KeyedSeal, RecordFormat
from quire.tiers.transfer.leased_records import LeasedRecords
from quire.tiers.transfer.peer_address import MOST_PORT, PeerAddress
from quire.tiers.transfer.peer_frames import LONGEST_LEASE_BYTES, MOST_GROUPS, NONCE_BYTES, Hello
from quire.tiers.transfer.peer_server import LONGEST_AWAIT_S, PeerServer
from quire.tiers.transfer.peer_tier import PeerTier

log = logging.getLogger(__name__)

_RELEASE_S = 1.0  # that telling a peer may take
_AWAIT_SHARE = 0.5  # of a job's time, that a peer may take to copy records out
_LONGEST_HOST = 256  # characters
_MOST_NAMED = 64  # unknown peers that the log has
_ANY_ADDRESS = ("0.0.0.0", "::")
_TYPES: Mapping[str, type] = MappingProxyType(
    {
        "do_remote_decode": bool,
        "do_remote_prefill": bool,
        "remote_host": str,
        "remote_port": int,
        "remote_request_id": str,
    }
)


@final
class PeerTransfer:
    """The transfer of one engine. Threads share it."""

    def __init__(
        self,
        config: KVTransferConfig,
        plain: Sequence[RecordFormat],  # of each group
        sealed: Sequence[RecordFormat],
        seal: KeyedSeal | None,  # of the sealed ones; None: there is no key
        fingerprint: bytes,  # 32 bytes
    ) -> None:
        """Bind the address to listen at. Raises: ConfigError."""
        if len(plain) > MOST_GROUPS:
            raise ConfigError(
                f"kv_transfer_config: the model has {len(plain)} groups of layers: at most "
                f"{MOST_GROUPS}"
            )
        self._config = config
        self._formats = (tuple(plain), tuple(plain if seal is None else sealed))
        self._seal, self._fingerprint = seal, fingerprint
        self._engine_id = config.engine_id or str(uuid4())
        self._lock = threading.Lock()
        self._unknown: set[str] = set()  # addresses that were named and are no peers
        self._has_pushed = False  # a peer has left records here
        self._server: PeerServer | None = None
        self._links: dict[PeerAddress, PeerTier] = {}
        self.peers: dict[PeerAddress, GuardedTier] = {}
        for address in sorted(config.peers, key=str):
            is_sealed = self._is_sealed(address)
            self._links[address] = link = PeerTier(
                address, self._hello(address), self._key(address)
            )
            self.peers[address] = GuardedTier(
                f"peer {address}", link, self._formats[is_sealed], is_sealed=is_sealed
            )
        self.records = LeasedRecords(max(1, config.size_bytes), config.extras.lease_s)
        self._leased: GuardedTier | None = None
        self._own_formats = self._formats[0]
        self._own_sealed = False
        if config.listen is not None:
            self._own_sealed = self._is_sealed(config.listen)
            self._own_formats = self._formats[self._own_sealed]
            self._leased = GuardedTier(
                "leased records", self.records, self._own_formats, is_sealed=self._own_sealed
            )
            self._server = PeerServer(
                config.listen,
                self.records,
                self._hello(config.listen),
                self._key(config.listen),
                note_stored=self._note_stored,
            )

    def start(self) -> None:
        """Let peers in."""
        if self._server is not None:
            self._server.start()
            log.info("records for peers are given away at %s", self._server.address)

    def close(self) -> None:
        """End all leases and connections."""
        if self._server is not None:
            self._server.close()
        self.records.close()
        for tier in self.peers.values():
            tier.close()

    @property
    def formats(self) -> tuple[tuple[RecordFormat, ...], ...]:
        """Return the formats of all records that come or go, of each group."""
        return self._formats

    @property
    def tiers(self) -> tuple[GuardedTier, ...]:
        """Return where records of others are found: peers, and what they have left here."""
        return (*self.peers.values(), *(() if self._leased is None else (self._leased,)))

    @property
    def drain_to(self) -> GuardedTier | None:
        """Return the peer that gets the hottest blocks at the end."""
        address = self._config.extras.drain_to
        return None if address is None else self.peers[PeerAddress.parse(address)]

    # -- what is left for others -------------------------------------------------------------------

    def lease(self, groups: Sequence[Sequence[int]]) -> Lease | None:
        """Reserve memory for blocks, of each in these groups. Return None where there is none."""
        if self._server is None or not self._config.gives:
            return None
        sizes = [[self._own_formats[group].num_bytes for group in own] for own in groups]
        name, count = self.records.lease(sizes)
        if not count:
            return None
        address = self._server.address
        is_any = address.host in _ANY_ADDRESS
        return Lease(
            name=name,
            num_blocks=count,
            params={
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self._engine_id,
                "remote_request_id": name,
                "remote_host": self._config.kv_ip if is_any else address.remote_host,
                "remote_port": address.port,
                "remote_block_ids": [],  # blocks are named by their tokens
                "remote_blocks_expiry_time": time.time() + self.records.lease_s,
            },
        )

    def keep(self, lease: str, group: int, identity: BlockIdentity, buffer: memoryview) -> None:
        """Keep a block whose payload lies at the end of a buffer u8[n]. It may be encrypted."""
        form = self._own_formats[group]
        header, view = form.header(identity), buffer[-form.num_bytes :]
        form.finish(view, header)
        self.records.keep(lease, form.name(header), view)

    def drop(self, blocks: Sequence[BlockIdentity]) -> None:
        """Forget what is leased of these blocks: they are wrong."""
        names = [form.name(form.header(block)) for block in blocks for form in self._own_formats]
        self.records.drop(names, Deadline.after(_RELEASE_S))

    def skip(self, group: int, lease: str) -> None:
        """Note that a block does not come that memory was leased for."""
        self.records.skip(lease, self._own_formats[group].num_bytes)

    # -- what others have left ---------------------------------------------------------------------

    def tiers_for(self, remote: RemoteBlocks | None) -> tuple[GuardedTier, ...]:
        """Return what is asked before an engine's own tiers: a peer, and what peers left here."""
        peer = None if remote is None else self._peer(remote)
        left = self._leased if self._has_pushed and not self.records.is_empty else None
        return tuple(tier for tier in (peer, left) if tier is not None)

    def least_wait_s(self, remote: RemoteBlocks | None) -> float:
        """Return the seconds that a sequence waits for what peers have left, at the least."""
        wait_s = self._config.extras.wait_s
        return wait_s if wait_s and any(tier.may_load for tier in self.tiers_for(remote)) else 0.0

    def wait_for(
        self, remote: RemoteBlocks, deadline: Deadline, is_wanted: Callable[[], bool]
    ) -> None:
        """Give a peer a while to copy out what it has leased, as long as that ``is_wanted``."""
        peer = self._peer(remote)
        if peer is None or not peer.may_load:
            return
        link, begun_s = self._links[_address(remote)], time.monotonic()
        most_s = max(LONGEST_AWAIT_S, self._config.extras.wait_s)
        until = Deadline.after(min(most_s, _AWAIT_SHARE * deadline.left_s))
        try:
            while is_wanted() and (wait_s := min(LONGEST_AWAIT_S, until.left_s)):
                asked = Deadline.after(wait_s)
                # What is not there, and was not waited for, will not come: the lease has ended.
                if link.wait(remote.lease, wait_s, deadline) or asked.left_s:
                    break
        except TierError as error:
            peer.note_failed("find", error, begun_s, deadline)

    def release(self, remote: RemoteBlocks) -> None:
        """Tell a peer that its blocks are not needed any more."""
        peer = self._peer(remote)
        if peer is None or not peer.may_load:
            return
        begun_s, deadline = time.monotonic(), Deadline.after(_RELEASE_S)
        try:
            self._links[_address(remote)].release(remote.lease, deadline)
        except TierError as error:  # the lease ends by time
            peer.note_failed("drop", error, begun_s, deadline)

    def _peer(self, remote: RemoteBlocks) -> GuardedTier | None:
        try:
            address = _address(remote)
        except ConfigError:
            address = None
        if not self._config.takes:
            return None
        found = None if address is None else self.peers.get(address)
        if found is None:
            self._note_unknown(f"{remote.host}:{remote.port}")
        return found

    def _note_unknown(self, named: str) -> None:
        with self._lock:
            if named in self._unknown or len(self._unknown) >= _MOST_NAMED:
                return
            self._unknown.add(named)
        log.warning(
            "a request names the peer %r, which is none of peers in kv_transfer_config: its prompt "
            "is computed here",
            named[:_LONGEST_HOST],
        )

    def _note_stored(self) -> None:
        self._has_pushed = True

    # -- records -----------------------------------------------------------------------------------

    def _is_sealed(self, address: PeerAddress) -> bool:
        """Return whether records to and from an address are sealed: other machines may listen."""
        return not address.is_unix and self._seal is not None

    def _key(self, address: PeerAddress) -> bytes | None:
        return None if address.is_unix or self._seal is None else self._seal.peers_key

    def _hello(self, address: PeerAddress) -> Hello:
        is_sealed = self._is_sealed(address)
        return Hello(
            fingerprint=self._fingerprint,
            sizes=tuple(form.num_bytes for form in self._formats[is_sealed]),
            is_sealed=is_sealed,
            nonce=bytes(NONCE_BYTES),
        )


def read_params(given: Mapping[str, Any] | None) -> tuple[bool, RemoteBlocks | None]:
    """Read vLLM's ``kv_transfer_params``: whether blocks are to be left, and those that are there.

    Unknown fields are ignored. Raises: RequestError for a value of another type.
    """
    if given is None:
        return False, None
    if not isinstance(given, Mapping):
        raise RequestError(f"kv_transfer_params must be an object, not {type(given).__name__}")
    for name, kind in _TYPES.items():
        value = given.get(name)
        is_bool = isinstance(value, bool)
        if value is not None and (not isinstance(value, kind) or is_bool != (kind is bool)):
            raise RequestError(
                f"kv_transfer_params: {name} must be of the type {kind.__name__}, and is of "
                f"{type(value).__name__}"
            )
    leaves = bool(given.get("do_remote_decode"))
    host, port = given.get("remote_host"), given.get("remote_port") or 0
    if not given.get("do_remote_prefill") or host is None:
        return leaves, None
    lease = given.get("remote_request_id") or ""
    if not 0 <= port <= MOST_PORT:
        raise RequestError(f"kv_transfer_params: remote_port must be from 0 to {MOST_PORT:,}")
    if len(host) > _LONGEST_HOST or len(lease) > LONGEST_LEASE_BYTES or not lease.isascii():
        raise RequestError(
            f"kv_transfer_params: remote_host has at most {_LONGEST_HOST} characters, and "
            f"remote_request_id {LONGEST_LEASE_BYTES} of ASCII"
        )
    return leaves, RemoteBlocks(host=host, port=port, lease=lease)


def _address(remote: RemoteBlocks) -> PeerAddress:
    return PeerAddress.told(remote.host, remote.port)
