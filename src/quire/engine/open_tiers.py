"""``make_offloading``: opens the tiers that an engine's options name, and has blocks go there."""

import logging
from contextlib import ExitStack
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.kv_cache import KVCache
from quire.engine.kv_fingerprint import BlockLayout, has_blocks, kv_fingerprint
from quire.engine.kv_sizing import require_blocks, staging_bytes
from quire.engine.offloading.block_copies import BlockCopies, record_formats
from quire.engine.offloading.carrier import ThreadedCarrier
from quire.engine.offloading.staging import Staging
from quire.engine.scheduling.offers import Offers
from quire.engine.scheduling.offload_policy import OffloadPolicy
from quire.engine.scheduling.step_costs import Clock, Costs
from quire.engine.transfer import PeerTransfer
from quire.errors import ConfigError
from quire.kv.interface import ExternalBlocks
from quire.models.file_hashes import CannotName
from quire.models.loader import LoadedModel
from quire.tiers import TIERS, Tier, TierAddress, TierError
from quire.tiers.address import tier_names
from quire.tiers.fingerprint import Fingerprint
from quire.tiers.guard import GuardedTier
from quire.tiers.record import Checksums, KeyedSeal
from quire.tiers.tier import DescribedTier

log = logging.getLogger(__name__)

_LONGEST_KEY = 4096  # bytes of a key's file


def make_offloading(
    config: EngineConfig, loaded: LoadedModel, kv: KVCache, costs: Costs, clock: Clock
) -> OffloadPolicy | None:
    """Open the tiers that the options name, for an engine's cache; None if they name none.

    Raises: ConfigError where the cache has no blocks that tiers could keep, for a shared tier
    without a key, for a tier that cannot be opened, and where the system has no thread left.
    """
    transferring = config.kv_transfer_config
    if transferring is not None and not transferring.is_own:
        transferring = None  # vLLM's words for tiers
    if not config.tiers and transferring is None:
        return None
    require_blocks(
        config,
        loaded.name,
        source_tokens=loaded.spec.source_tokens,
        has_blocks=has_blocks(kv.accounting, kv.storage),
    )
    assert isinstance(kv.accounting, ExternalBlocks)
    groups, layout = kv.accounting.groups, BlockLayout.of(kv.accounting, kv.storage)
    block_size = layout.block_size
    seal = None if config.kv_tier_key is None else KeyedSeal(_read_key(config.kv_tier_key))
    try:
        fingerprint = kv_fingerprint(loaded, config, layout)
    except CannotName as error:
        raise ConfigError(
            f"kv_tier: records of {loaded.name} would have no name: {error}"
        ) from None
    plain = record_formats(kv, fingerprint.digest, block_size, Checksums())
    sealed = plain if seal is None else record_formats(kv, fingerprint.digest, block_size, seal)

    def is_same_model() -> bool:
        try:
            return kv_fingerprint(loaded, config, layout) == fingerprint
        except CannotName:
            return False

    largest_bytes = max(form.num_bytes for form in (*plain, *sealed))
    with ExitStack() as undo:
        tiers = list[GuardedTier]()
        for address, name in zip(config.tiers, tier_names(config.tiers), strict=True):
            make = TIERS.find(address.kind, "kv_tier")
            with TIERS.blamed(address.kind, "kv_tier"):
                tier = make(address, largest_bytes, fingerprint.namespace)
            undo.callback(tier.close)
            _describe(tier, address, fingerprint)
            is_shared = tier.traits.is_shared
            if is_shared and seal is None and not config.kv_tier_trusted:
                raise ConfigError(
                    f"kv_tier={address} is shared: a program that can write to it would choose "
                    f"this engine's answers: set kv_tier_key to a file with a secret key, or "
                    f"kv_tier_trusted if only trusted engines can reach it"
                )
            is_sealed = is_shared and seal is not None
            formats = sealed if is_sealed else plain
            tiers.append(GuardedTier(name, tier, formats, is_sealed=is_sealed))
        transfer = None
        if transferring is not None:
            transfer = PeerTransfer(transferring, plain, sealed, seal, fingerprint.digest)
            undo.callback(transfer.close)
            transfer.start()
        # A buffer holds the longest header that a record has, and the payload at its end.
        used = [*(tier.formats for tier in tiers), *(transfer.formats if transfer else ())]
        sizes = [max(form.num_bytes for form in own) for own in zip(*used, strict=True)]
        events = config.kv_events_config
        carrier = ThreadedCarrier(
            groups,
            block_size,
            BlockCopies(kv),
            tiers,
            Staging(staging_bytes(groups, block_size, config.max_num_batched_tokens), sizes),
            transfer=transfer,
            only_reads=config.kv_tier_write == "never",
            keeps_events=events is not None and events.publishes,
        )
        carrier.start()
        undo.pop_all()
    return OffloadPolicy(
        carrier,
        kv.accounting,
        costs,
        clock,
        write=config.kv_tier_write if config.tiers else "never",
        offers=None if transfer is None else Offers(carrier, clock),
        # Weights that only the engine has are never changed under it.
        is_same_model=(lambda: True) if loaded.is_private else is_same_model,
    )


def _describe(tier: Tier, address: TierAddress, fingerprint: Fingerprint) -> None:
    if isinstance(tier, DescribedTier):
        try:
            tier.describe(fingerprint.description.encode())
        except TierError as error:
            log.warning("tier %s: %s", address, error)
        except Exception:  # of a tier of another package
            log.exception("tier %s keeps no description", address)


def _read_key(path: str) -> bytes:
    """Read a key's file. Raises: ConfigError, which never shows the key."""
    try:
        with Path(path).expanduser().open("rb") as file:
            key = file.read(_LONGEST_KEY + 1)
    except OSError as error:
        raise ConfigError(f"kv_tier_key={path!r} cannot be read: {error.strerror}") from None
    if len(key) > _LONGEST_KEY:
        raise ConfigError(f"kv_tier_key={path!r} has more than {_LONGEST_KEY:,} bytes")
    return key
