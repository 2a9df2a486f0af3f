"""Define the options under which servers hand blocks to each other, with vLLM's names.

Where vLLM lets a request name any address, a request here names one of the operator's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args
from urllib.parse import quote

from quire.config.option import in_range, nearest, object_of, one_of, switch
from quire.errors import ConfigError
from quire.tiers.transfer.peer_address import PeerAddress
from quire.units import parse_bytes

Role: TypeAlias = Literal["kv_producer", "kv_consumer", "kv_both"]

_OPTION = "kv_transfer_config"
_OWN, _OFFLOADING = "QuireConnector", "OffloadingConnector"
_LEASE_S = 120.0
_LONGEST_LEASE_S = 86_400.0
_LONGEST_WAIT_S = 3600.0
_SIZE_BYTES = 2**30
_MOST_PEERS = 1024
_SHOWN_CHARACTERS = 80  # of a value
_LOOPBACK, _ANY_ADDRESS = "127.0.0.1", ("0.0.0.0", "::")
_PATH_SAFE = "/"

# vLLM's other connectors, and what to use in their place.
_TIERS = "use kv_tier (redis:, s3:, file:, mooncake:), which needs no connector"
_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "NixlConnector": "records go over a Unix socket or TCP, not by NIXL: use QuireConnector, "
        "whose requests and answers have the same fields",
        "P2pNcclConnector": "records go over a Unix socket or TCP, not by NCCL: use QuireConnector",
        "LMCacheConnectorV1": f"LMCache keeps no records of Quire's: {_TIERS}",
        "LMCacheMPConnector": f"LMCache keeps no records of Quire's: {_TIERS}",
        "MooncakeConnector": "records go over a Unix socket or TCP: use QuireConnector; or "
        "kv_tier=mooncake:… for Mooncake's store",
        "MooncakeStoreConnector": "Mooncake's store is a tier: use kv_tier=mooncake:…",
        "MultiConnector": f"one connector is enough: use QuireConnector, and besides {_TIERS}",
        "SimpleCPUOffloadConnector": "use kv_offloading_size, which is a tier in host memory",
        "SharedStorageConnector": "use kv_tier=file:PATH",
        "ExampleConnector": "use kv_tier=file:PATH",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferExtras:
    """Fields of ``kv_connector_extra_config`` for ``QuireConnector``."""

    listen: str | None = None  # None: tcp://kv_ip:kv_port where the role has blocks to give
    peers: tuple[str, ...] = ()  # addresses that requests may name
    lease_s: float = _LEASE_S  # that records wait for a peer
    wait_s: float = 0.0  # that a request waits for a peer's blocks, if computing is quicker, too
    size: int = _SIZE_BYTES  # of them, in bytes
    drain_to: str | None = None  # of peers: it gets the hottest blocks when this server stops

    def __post_init__(self) -> None:
        name = f"{_OPTION}: "
        if isinstance(self.size, str):
            try:
                object.__setattr__(self, "size", parse_bytes(self.size))
            except ValueError as error:
                raise ConfigError(f"{name}size: {error}") from None
        in_range(f"{name}size", self.size, 1, 2**63)
        if not (_is_number(self.lease_s) and 0 < self.lease_s <= _LONGEST_LEASE_S):
            raise ConfigError(
                f"{name}lease_s={_shown(self.lease_s)} must be above 0 and at most "
                f"{_LONGEST_LEASE_S:g}"
            )
        if not (_is_number(self.wait_s) and 0 <= self.wait_s <= _LONGEST_WAIT_S):
            raise ConfigError(
                f"{name}wait_s={_shown(self.wait_s)} must be from 0 to {_LONGEST_WAIT_S:g} seconds"
            )
        if not isinstance(self.peers, list | tuple) or len(self.peers) > _MOST_PEERS:
            raise ConfigError(
                f"{name}peers={_shown(self.peers)} must be a list of up to {_MOST_PEERS:,} "
                f"addresses"
            )
        addresses = tuple(str(_address("peers", each)) for each in self.peers)
        object.__setattr__(self, "peers", addresses)
        if self.listen is not None:
            _address("listen", self.listen)
        if self.drain_to is not None:
            address = str(_address("drain_to", self.drain_to))
            if address not in addresses:
                raise ConfigError(f"{name}drain_to={address!r} must be one of peers")
            object.__setattr__(self, "drain_to", address)


@dataclass(frozen=True, kw_only=True)
class KVTransferConfig:
    """How blocks leave this engine and come to it. Names and meanings are those of vLLM 0.33.

    Raises: ConfigError with the field, its value and its limit.
    """

    kv_connector: str | None = None
    engine_id: str | None = None  # None: one is drawn
    kv_role: str | None = None  # kv_producer, kv_consumer, kv_both
    kv_ip: str = _LOOPBACK  # at which peers reach this server
    kv_port: int = 14579
    kv_load_failure_policy: str = "recompute"
    kv_connector_extra_config: Any = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    # Accepted, and of no effect.
    kv_buffer_device: str | None = None
    kv_buffer_size: float | None = None
    kv_rank: int | None = None
    kv_parallel_size: int = 1

    def __post_init__(self) -> None:
        name = f"{_OPTION}: "
        for needed, known in (("kv_connector", (_OWN, _OFFLOADING)), ("kv_role", get_args(Role))):
            if getattr(self, needed) is None:
                raise ConfigError(f"{name}{needed} is missing; known: {', '.join(known)}")
        connector = str(self.kv_connector)
        if connector in _OTHERS:
            raise ConfigError(f"{name}kv_connector={connector!r} is refused: {_OTHERS[connector]}")
        one_of(f"{name}kv_connector", connector, (_OWN, _OFFLOADING))
        one_of(f"{name}kv_role", str(self.kv_role), get_args(Role))
        if self.kv_load_failure_policy == "fail":
            raise ConfigError(
                f"{name}kv_load_failure_policy='fail' is refused: blocks that cannot be loaded are "
                f"computed, and the answer is the same: use 'recompute'"
            )
        one_of(f"{name}kv_load_failure_policy", str(self.kv_load_failure_policy), ("recompute",))
        if self.kv_connector_module_path is not None:
            raise ConfigError(
                f"{name}kv_connector_module_path={self.kv_connector_module_path!r} is refused: no "
                f"code from outside the package runs here"
            )
        switch(f"{name}enable_permute_local_kv", self.enable_permute_local_kv)
        if self.enable_permute_local_kv:
            raise ConfigError(f"{name}enable_permute_local_kv: records have one order of bytes")
        in_range(f"{name}kv_port", self.kv_port, 0, 65_535)
        if not isinstance(self.kv_ip, str):
            raise ConfigError(f"{name}kv_ip={self.kv_ip!r} must be a text")
        if not isinstance(self.kv_connector_extra_config, Mapping):
            raise ConfigError(f"{name}kv_connector_extra_config must be a JSON object")
        _ = self.offloaded, self.extras
        if self.is_own and self.kv_role == "kv_consumer" and not self.extras.peers:
            raise ConfigError(
                f"{name}kv_role='kv_consumer' needs peers in kv_connector_extra_config: the "
                f"addresses that requests may name"
            )
        is_any = self.listen is not None and self.listen.host in _ANY_ADDRESS
        if is_any and self.kv_ip in (*_ANY_ADDRESS, _LOOPBACK):
            raise ConfigError(
                f"{name}listen={str(self.listen)!r} is every address of this machine: set kv_ip "
                f"to the one at which peers reach it"
            )

    @classmethod
    def parse(cls, given: Any) -> "KVTransferConfig | None":
        """Parse a JSON object, as text or as a mapping. Raises: ConfigError."""
        return object_of(_OPTION, cls, given)

    @property
    def is_own(self) -> bool:
        """Return whether blocks are handed from server to server."""
        return self.kv_connector == _OWN

    @property
    def gives(self) -> bool:
        """Return whether requests may leave blocks here for a peer."""
        return self.is_own and self.kv_role != "kv_consumer"

    @property
    def takes(self) -> bool:
        """Return whether requests may bring blocks from a peer."""
        return self.is_own and self.kv_role != "kv_producer"

    @cached_property
    def listen(self) -> PeerAddress | None:
        """Return where peers are let in; None: nowhere."""
        if not self.is_own:
            return None
        if self.extras.listen is not None:
            return PeerAddress.parse(self.extras.listen)
        if not self.gives:
            return None
        return _address("kv_ip, kv_port", str(PeerAddress("", self.kv_ip, self.kv_port)))

    @cached_property
    def peers(self) -> frozenset[PeerAddress]:
        """Return the addresses that requests may name."""
        return frozenset(PeerAddress.parse(each) for each in self.extras.peers)

    @property
    def addresses(self) -> tuple[PeerAddress, ...]:
        """Return where records come from and go to."""
        own = () if self.listen is None else (self.listen,)
        return (*own, *sorted(self.peers, key=str))

    @property
    def size_bytes(self) -> int:
        """Return the host memory for records that wait for peers, in bytes."""
        return self.extras.size if self.listen is not None else 0

    @cached_property
    def extras(self) -> TransferExtras:
        """Return the extra fields of ``QuireConnector``. Raises: ConfigError."""
        if not self.is_own:
            return TransferExtras()
        given = dict(self.kv_connector_extra_config)
        known = {each.name for each in fields(TransferExtras)}
        for own in given:
            if own not in known:
                raise ConfigError(
                    f"{_OPTION}: kv_connector_extra_config: unknown {own!r}{nearest(own, known)}"
                )
        return TransferExtras(**given)

    @cached_property
    def offloaded(self) -> tuple[str, ...]:
        """Return what vLLM's ``OffloadingConnector`` says, as addresses of tiers.

        Raises: ConfigError.
        """
        if self.kv_connector != _OFFLOADING:
            return ()
        where = f"{_OPTION}: {_OFFLOADING}: "
        given = dict(self.kv_connector_extra_config)
        one_of(
            f"{where}spec_name",
            str(given.pop("spec_name", "CPUOffloadingSpec")),
            ("CPUOffloadingSpec", "TieringOffloadingSpec"),
        )
        size = given.pop("cpu_bytes_to_use", None)
        seconds = given.pop("secondary_tiers", [])
        for name in given:
            raise ConfigError(
                f"{where}{name}={given[name]!r} has no counterpart here: known are spec_name, "
                f"cpu_bytes_to_use and secondary_tiers"
            )
        if size is None:
            raise ConfigError(f"{where}cpu_bytes_to_use is missing: the bytes of host memory")
        in_range(f"{where}cpu_bytes_to_use", size, 1, 2**63)
        return (f"memory:?size={size}", *(_of_second(where, each) for each in _listed(seconds)))


def _of_second(where: str, given: Any) -> str:
    """Return the address of one of ``secondary_tiers``. Raises: ConfigError."""
    own = dict(given) if isinstance(given, Mapping) else {}
    kind, root = own.pop("type", None), own.pop("root_dir", None)
    is_path = isinstance(root, str) and Path(root).is_absolute() and root.isprintable()
    if kind != "fs" or not is_path or own:
        raise ConfigError(
            f"{where}secondary_tiers: {str(given)[:200]} is refused: it must be "
            f'{{"type": "fs", "root_dir": PATH}} with a whole path; other places are kv_tier\'s'
        )
    return f"file:{quote(root, safe=_PATH_SAFE)}"


def _listed(given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise ConfigError(f"{_OPTION}: secondary_tiers must be a list")
    return given


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN_CHARACTERS]


def _is_number(value: object) -> bool:
    """Tell whether a value of JSON is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or isfinite(value)  # a whole number may be too long for a float


def _address(name: str, given: Any) -> PeerAddress:
    try:
        return PeerAddress.parse(given)
    except ConfigError as error:
        raise ConfigError(f"{_OPTION}: {name}: {error}") from None
