"""Tiers on paper: what each holds of a model's blocks, how fast it is, and which record goes first.

An address is the engine's own option; nothing is opened. A tier's size is in its address, or is
given beside it for a kind whose address has none. Its speed is given, or one of ``TIER_SPEEDS``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from quire.config import EngineConfig
from quire.config.kv_transfer import TransferExtras
from quire.engine.kv_sizing import require_blocks
from quire.errors import ConfigError
from quire.kv import Accounting
from quire.kv.interface import ExternalBlocks
from quire.planner.kept_records import ByUses, KeptRecords, LastUsed
from quire.spec import Group, KeptWhole
from quire.tiers import TierAddress
from quire.tiers.address import tier_names
from quire.tiers.files import DEFAULT_SIZE_BYTES
from quire.tiers.host_memory import piece_bytes
from quire.tiers.record import Checksums, Part, RecordFormat
from quire.tiers.record_folder import DISK_BLOCK_BYTES
from quire.units import ceil_div, format_bytes, parse_bytes

# -- speeds ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpeed:
    """How fast one server reads and writes a tier."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    call_s: float  # of each call: to find records, or to load or store a batch of them
    source: str  # where the figures are from

    def __str__(self) -> str:
        read, write = self.read_bytes_per_s / 1e9, self.write_bytes_per_s / 1e9
        return f"{read:.3g} GB/s read, {write:.3g} written, {self.call_s * 1e3:.3g} ms a call"


def _speed(read: float, write: float, call_ms: float, source: str) -> TierSpeed:
    return TierSpeed(
        read_bytes_per_s=read * 1e9,
        write_bytes_per_s=write * 1e9,
        call_s=call_ms * 1e-3,
        source=source,
    )


PEER = "peer"  # a prefill replica, of which other replicas load blocks
# Gigabytes (10⁹) a second, and milliseconds a call. docs/concepts/simulator.md has the commands.
TIER_SPEEDS: Mapping[str, TierSpeed] = MappingProxyType(
    {
        "memory": _speed(10.3, 10.3, 0.0, "a copy, measured on two cores of an EPYC"),
        "file": _speed(0.87, 0.56, 0.1, "a cold file on a virtual disk, measured"),
        "redis": _speed(2.4, 2.2, 0.5, "Redis 7 over TCP on the same machine, measured"),
        "rediss": _speed(0.9, 0.9, 0.5, "assumed: TLS on one core"),
        PEER: _speed(0.96, 10.3, 0.1, "from a peer over a Unix socket, on a busy host, measured"),
        "mooncake": _speed(5.2, 0.84, 0.1, "one host without RDMA, measured"),
        "s3": _speed(1.0, 1.0, 20.0, "assumed: a network of 10 Gbit/s"),
        "gs": _speed(1.0, 1.0, 20.0, "assumed: a network of 10 Gbit/s"),
        "az": _speed(1.0, 1.0, 20.0, "assumed: a network of 10 Gbit/s"),
    }
)
RECORDS_A_CALL = 16  # that an engine loads or stores at once
_FASTEST_GB = 1e6  # a second
_SLOWEST_CALL_MS = 60e3
_DIGEST_BYTES = 32  # of a fingerprint, which is not known here


def parse_tier_speed(text: str) -> tuple[str, TierSpeed]:
    """Read ``KIND=READ,WRITE[,LATENCY]``: gigabytes (10⁹ bytes) a second, milliseconds a call.

    Without LATENCY a kind keeps its own, or has none. Raises: ConfigError.
    """
    kind, _, numbers = text.partition("=")
    known = TIER_SPEEDS.get(kind)
    own_ms = 0.0 if known is None else known.call_s * 1e3
    try:
        read, write, call_ms = map(float, [*numbers.split(","), str(own_ms)][:3])
        is_readable = kind != "" and numbers.count(",") <= 2
    except ValueError:
        is_readable = False
    if not is_readable:
        raise ConfigError(
            f"--tier-speed {text!r} is not KIND=READ,WRITE[,LATENCY], gigabytes a second and "
            f"milliseconds a call: write e.g. file=6,3 or redis=1,1,0.5"
        )
    for what, value in (("READ", read), ("WRITE", write)):
        if not 0 < value <= _FASTEST_GB:
            raise ConfigError(
                f"--tier-speed {text!r}: {what} {value:g} must be above 0 GB/s and at most "
                f"{_FASTEST_GB:,.0f}"
            )
    if not 0 <= call_ms <= _SLOWEST_CALL_MS:
        raise ConfigError(
            f"--tier-speed {text!r}: LATENCY {call_ms:g} must be from 0 to "
            f"{_SLOWEST_CALL_MS:,.0f} ms"
        )
    return kind, _speed(read, write, call_ms, "--tier-speed")


def parse_tier_size(text: str) -> tuple[str, int]:
    """Read ``KIND=SIZE``, bytes or e.g. ``redis=100GiB``. Raises: ConfigError."""
    kind, _, size = text.partition("=")
    if not kind or not size:
        raise ConfigError(f"--tier-size {text!r} is not KIND=SIZE: write e.g. redis=100GiB")
    num_bytes = parse_bytes(size)
    if not 0 < num_bytes < 2**63:
        raise ConfigError(f"--tier-size {text!r}: {size} must be above 0 and below 8 EiB")
    return kind, num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTable:
    """Speeds and sizes by a tier's kind, for all that an address does not say."""

    speeds: Mapping[str, TierSpeed] = field(default_factory=lambda: TIER_SPEEDS)
    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))  # in bytes
    given: tuple[tuple[str, str], ...] = ()  # options and texts that they are from

    @classmethod
    def of(cls, speeds: Iterable[str], sizes: Iterable[str]) -> "TierTable":
        """Read texts such as ``file=6,3`` and ``redis=100GiB``. Raises: ConfigError."""
        texts = {"--tier-speed": tuple(speeds), "--tier-size": tuple(sizes)}
        speeds, sizes = texts["--tier-speed"], texts["--tier-size"]
        return cls(
            speeds=MappingProxyType({**TIER_SPEEDS, **dict(map(parse_tier_speed, speeds))}),
            sizes=MappingProxyType(dict(map(parse_tier_size, sizes))),
            given=tuple((option, text) for option, several in texts.items() for text in several),
        )

    def require_used(self, addresses: Iterable[TierAddress], *, has_peers: bool = False) -> None:
        """Refuse what was given for a kind that no address has. Raises: ConfigError.

        ``has_peers``: prefill replicas leave blocks for others.
        """
        kinds = dict.fromkeys(address.kind for address in addresses)
        if has_peers:
            kinds[PEER] = None
        for option, text in self.given:
            kind = text.partition("=")[0]
            if kind == PEER and kind not in kinds:
                raise ConfigError(
                    f"{option} {text}: it is of prefill replicas, and there are none: give "
                    f"--prefill-replicas, or leave it out"
                )
            if kind not in kinds:
                known = f"they are of {', '.join(kinds)}" if kinds else "there is none"
                raise ConfigError(f"{option} {text}: no kv_tier is of the kind {kind!r}: {known}")


# -- which tiers -----------------------------------------------------------------------------------

_OWN = ("memory", "file")  # which no other server sees


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTier:
    """A tier that is not there."""

    name: str  # its address, without a password and options
    kind: str
    capacity_bytes: int | None  # None: it has no limit of its own
    unit_bytes: int  # a record takes whole ones
    block_size: int  # of its blocks, in tokens
    record_bytes: tuple[int, ...]  # of each group's blocks, as they lie there
    speed: TierSpeed

    @property
    def is_shared(self) -> bool:
        """Return whether all servers see one tier, and not each its own."""
        return self.kind not in _OWN

    @property
    def keeps_by_uses(self) -> bool:
        """Return whether it keeps records as ``use_order`` does, and not by their last use.

        A folder, which looks at a sample of its files, keeps about what the last use would.
        """
        return self.kind == "memory"

    @property
    def block_bytes(self) -> int:
        """Return the bytes that the records of one block take, of all groups."""
        units = sum(ceil_div(size, self.unit_bytes) for size in self.record_bytes)
        return units * self.unit_bytes

    @property
    def num_blocks(self) -> int | None:
        """Return how many blocks of all groups it holds; None: it has no limit of its own."""
        return None if self.capacity_bytes is None else self.capacity_bytes // self.block_bytes

    @property
    def num_tokens(self) -> int | None:
        """Return the tokens of all groups that it holds; None: it has no limit of its own."""
        return None if self.num_blocks is None else self.num_blocks * self.block_size

    def load_s(self, num_blocks: int) -> float:
        """Return the seconds to find and load blocks that follow one another, of all groups."""
        return self.load_records_s(
            num_blocks * len(self.record_bytes), num_blocks * sum(self.record_bytes)
        )

    def load_records_s(self, num_records: int, num_bytes: int) -> float:
        """Return the seconds to find and load so many records, which have so many bytes."""
        num_calls = 1 + ceil_div(num_records, RECORDS_A_CALL)
        return num_calls * self.speed.call_s + num_bytes / self.speed.read_bytes_per_s

    def make_records(self) -> KeptRecords:
        """Make what it would keep, empty at first."""
        if self.capacity_bytes is None or not self.keeps_by_uses:
            return LastUsed(self.capacity_bytes)
        return ByUses(
            self.capacity_bytes // self.unit_bytes,
            unit_bytes=self.unit_bytes,
            largest_bytes=max(self.record_bytes),
        )


def record_bytes(groups: Iterable[Group], block_size: int) -> tuple[int, ...]:
    """Return the bytes of a record of each group, with its header.

    The header is that of layers which lie apart; where storage keeps some together it is shorter
    by up to 72 bytes a layer.
    """
    return tuple(
        RecordFormat(
            bytes(_DIGEST_BYTES), number, block_size, _parts(group, block_size), Checksums()
        ).num_bytes
        for number, group in enumerate(groups)
    )


def _parts(group: Group, block_size: int) -> list[Part]:
    whole = isinstance(group.spec, KeptWhole)
    size = group.block_bytes(block_size) // len(group.layers)
    return [
        Part(
            layer=layer,
            dtype="uint8",
            order="states" if whole else "tokens",
            shape=(size,),
            num_bytes=size,
        )
        for layer in group.layers
    ]


def planned_tiers(
    config: EngineConfig,
    groups: Sequence[Group],
    *,
    block_size: int,
    table: TierTable | None = None,
) -> tuple[PlannedTier, ...]:
    """Return the tiers that the options name, the nearest first.

    Raises: ConfigError for a kind of unknown speed, and for a tier that holds no record.
    """
    several = record_bytes(groups, block_size)
    table = table or TierTable()
    return tuple(
        _planned(address, name, several, block_size, table)
        for address, name in zip(config.tiers, tier_names(config.tiers), strict=True)
    )


def planned_peer(
    groups: Sequence[Group], *, block_size: int, table: TierTable | None = None
) -> PlannedTier:
    """Return what a prefill replica has for the blocks that it leaves, and the link to it."""
    table = table or TierTable()
    return PlannedTier(
        name="prefill replicas",
        kind=PEER,
        capacity_bytes=table.sizes.get(PEER, TransferExtras().size),
        unit_bytes=1,
        block_size=block_size,
        record_bytes=record_bytes(groups, block_size),
        speed=table.speeds[PEER],
    )


def _planned(
    address: TierAddress,
    name: str,
    several: tuple[int, ...],
    block_size: int,
    table: TierTable,
) -> PlannedTier:
    kind = address.kind
    if kind not in table.speeds:
        raise ConfigError(
            f"kv_tier={address}: the speed of {kind!r} is unknown: give it by --tier-speed "
            f"{kind}=READ,WRITE in gigabytes a second"
        )
    unit_bytes, size_bytes = 1, table.sizes.get(kind)
    if kind == "memory":
        unit_bytes = piece_bytes(max(several))
        size_bytes = address.option("size", parse_bytes, size_bytes)
        if size_bytes is None:
            raise ConfigError("kv_tier=memory: needs a size: memory:?size=2GiB")
    elif kind == "file":
        unit_bytes = DISK_BLOCK_BYTES
        size_bytes = address.option("size", parse_bytes, size_bytes or DEFAULT_SIZE_BYTES)
    planned = PlannedTier(
        name=name,
        kind=kind,
        capacity_bytes=size_bytes,
        unit_bytes=unit_bytes,
        block_size=block_size,
        record_bytes=several,
        speed=table.speeds[kind],
    )
    largest = ceil_div(max(several), unit_bytes) * unit_bytes
    if size_bytes is not None and size_bytes < largest:
        raise ConfigError(
            f"kv_tier={address}: size={format_bytes(size_bytes)} holds no record: one takes "
            f"{format_bytes(largest)}"
        )
    return planned


def pays_from(tier: PlannedTier, token_s: float, *, most_tokens: int) -> int | None:
    """Return the fewest tokens that are loaded quicker than computed; None: not even the most.

    ``token_s``: seconds to compute a token. Tokens are those of whole blocks.
    """
    num_blocks, block_size = 1, tier.block_size
    while num_blocks * block_size <= most_tokens:
        if tier.load_s(num_blocks) < num_blocks * block_size * token_s:
            return num_blocks * block_size
        num_blocks += max(1, num_blocks // RECORDS_A_CALL)
    return None


def require_tier_blocks(
    config: EngineConfig,
    name: str,
    accounting: Accounting,
    *,
    num_ranks: int,
    source_tokens: int,
    has_peers: bool = False,
) -> None:
    """Refuse, as the engine does, tiers and peers for a cache whose blocks cannot be stored.

    ``has_peers``: prefill replicas leave blocks for others. Raises: ConfigError.
    """
    if not (config.tiers or has_peers):
        return
    try:
        require_blocks(
            replace(config, tensor_parallel_size=num_ranks),
            name,
            source_tokens=source_tokens,
            has_blocks=isinstance(accounting, ExternalBlocks),
        )
    except ConfigError as error:
        if config.tiers:
            raise
        raise ConfigError(f"prefill_replicas needs what kv_tier does: {error}") from error
