"""The budget's ledger for a loaded model, and the numbers of its cache. See ``kv_sizing``."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.engine.kv_sizing import cache_sizes, kv_needs, ledger_for, stored_spec
from quire.engine.speculation.drafters import needs_with_draft
from quire.kv import STRATEGIES, CacheConfig
from quire.memory import PROVIDERS, MemoryProvider, MemoryRequest
from quire.memory.budget import BY_OWN_MEMORY, EncoderFootprint
from quire.memory.budget.ledger import Ledger
from quire.memory.by_device import known_machine
from quire.memory.machine.probe import spare_mappings
from quire.models.footprint import footprint
from quire.models.loader import LoadedModel

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def kv_ledger(
    config: EngineConfig,
    loaded: LoadedModel,
    page_bytes: int,
    draft: LoadedModel | None = None,
    *,
    measured_bytes: int | None = None,
    encoder: EncoderFootprint | None = None,
) -> Ledger:
    """Return the ledger of a loaded model's device by the chosen rule.

    With a ``draft`` model it is for the KV memory of both. ``measured_bytes`` are those of a step,
    ``encoder`` has those of images.

    Raises: ConfigError for longer sequences than the model's; MemoryUnavailable.
    """
    device, own = loaded.device, replace(footprint(loaded.model), encoder=encoder)
    needs = kv_needs(
        config,
        loaded.name,
        loaded.spec,
        own,
        page_bytes,
        on_gpu=device.type == "cuda",
        measured_bytes=measured_bytes,
    )
    if draft is not None:
        needs = needs_with_draft(needs, stored_spec(config, loaded.spec), draft)
    stated_bytes = config.kv_cache_memory_bytes
    limits_only = stated_bytes is not None or config.budget not in BY_OWN_MEMORY
    machine = known_machine(device, stated_bytes, limits_only=limits_only)
    if loaded.ranks is not None and machine is not None:
        machine = loaded.ranks.share_of(machine)
    return ledger_for(config, needs, machine)


def named_memory(config: EngineConfig, device: "torch.device") -> MemoryProvider:
    """Make the memory that the options name, in this process.

    Raises: ConfigError where the device cannot have it. MemoryUnavailable.
    """
    make = PROVIDERS.find(config.memory_provider, "memory_provider")
    with PROVIDERS.blamed(config.memory_provider, "memory_provider"):
        return make(MemoryRequest(device=device, residency=config.residency))


def cache_config(
    config: EngineConfig, loaded: LoadedModel, provider: MemoryProvider, capacity_bytes: int
) -> CacheConfig:
    """Return the cache's numbers for a capacity in bytes, and log options that do not apply."""
    would_share = STRATEGIES[config.cache].maps_pages and config.enable_prefix_caching
    if would_share and (reason := provider.cannot_share) is not None:
        said = "%s shares no pages: %s; prompts that begin alike are computed"
        log.warning(said, config.cache, reason)
    if config.enable_prefix_caching and loaded.spec.source_tokens:
        log.info("no prefix caching: what %s writes depends on its source too", loaded.name)
    limited = would_share and loaded.device.type == "cpu"  # a GPU's driver has no such limit
    sizes = cache_sizes(
        config,
        loaded.spec,
        page_bytes=provider.page_bytes,
        capacity_bytes=capacity_bytes,
        can_share=provider.cannot_share is None,
        max_mappings=spare_mappings() if limited else None,
    )
    events = config.kv_events_config
    return replace(sizes, keep_events=events is not None and events.publishes)
