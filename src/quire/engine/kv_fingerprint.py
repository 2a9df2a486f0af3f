"""What the entries of an engine's cache mean: the fingerprint of its model, options and blocks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from quire.config import KV_CACHE_DTYPES, EngineConfig, kernel_dir
from quire.devices import choose_device
from quire.engine.kv_budget import named_memory
from quire.engine.kv_sizing import cache_sizes, require_blocks, stored_spec
from quire.kv import Accounting, Storage, build_accounting, build_storage
from quire.kv.interface import BlockBytes, ExternalBlocks
from quire.models.file_hashes import CannotName, KeptHashes
from quire.models.loader import LoadedModel, looked_at, read_config
from quire.models.model_content import ModelContent, content_of_files, model_content
from quire.spec import Group, KeptWhole, ModelSpec
from quire.spec.model_files import find_folder
from quire.spec.weight_forms import weight_form
from quire.tiers.fingerprint import Fingerprint
from quire.tiers.record import VERSION

# Raised by hand where Quire's own arithmetic no longer gives what it gave, but for rounding: where
# an error was repaired whose results may lie in tiers, or positions are counted otherwise.
ARITHMETIC = 1
_PLANNED_BYTES = 2**28  # of addresses, for a cache that is only looked at

# What an option does to bytes in a record.
#   named     other options are other fingerprints
#   rounding  other kernels or other steps compute the same function: the bytes may differ as those
#             of two batches differ, and any of them is right
#   nothing   it says how much is kept, where and when, or for whom
Effect: TypeAlias = Literal["named", "rounding", "nothing"]
EFFECTS: Mapping[str, Effect] = MappingProxyType(
    {
        "device": "rounding",
        "dtype": "named",
        "quantization": "named",
        "dynamic_quantization": "named",  # where it is turned off
        "tokenizer": "nothing",  # blocks are named by their tokens' ids
        "kv_cache_dtype": "named",
        "cache": "named",  # by how it lays blocks out, which several may do alike
        "attention_backend": "rounding",
        "enforce_eager": "rounding",
        "batch_invariant": "named",  # with the kernels and the CPU, where it is set
        "max_model_len": "nothing",  # a length that would turn positions is refused
        "max_num_seqs": "nothing",
        "max_num_batched_tokens": "rounding",
        "block_size": "named",
        "enable_prefix_caching": "nothing",
        "prefix_caching_policy": "nothing",
        "prefix_caching_retention": "nothing",
        "watermark": "nothing",
        "scheduling_policy": "nothing",
        "swap_space": "nothing",
        "swap_path": "nothing",
        "kv_cache_memory_bytes": "nothing",
        "budget": "nothing",
        "memory_utilization": "nothing",
        "memory_mode": "nothing",
        "residency": "nothing",
        "memory_provider": "nothing",
        "growth": "nothing",
        "growth_tokens": "nothing",
        "reserve": "nothing",
        "speculative_config": "nothing",  # drafts that are rejected are trimmed
        "tensor_parallel_size": "named",
        "kv_events_config": "nothing",
        "kv_tier": "nothing",
        "kv_tier_key": "nothing",  # names under another key are other names
        "kv_tier_trusted": "nothing",
        "kv_tier_write": "nothing",
        "kv_offloading_size": "nothing",
        "kv_transfer_config": "nothing",
        "limit_mm_per_prompt": "nothing",
        "seed": "nothing",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """What blocks are in a cache, and how their bytes lie."""

    groups: tuple[Group, ...]  # as they are stored, of one rank
    block_size: int  # tokens: more than the option's where a page holds more
    order: str  # of a block's bytes
    rows: tuple[tuple[int, ...], ...]  # of each group: bytes of a token, or state, in each tensor

    @classmethod
    def of(cls, accounting: Accounting, storage: Storage) -> "BlockLayout":
        """Describe the blocks of a cache. One without blocks has its groups alone."""
        groups = accounting.groups
        if not isinstance(accounting, ExternalBlocks) or not isinstance(storage, BlockBytes):
            return cls(groups=groups, block_size=0, order="ranges", rows=((),) * len(groups))
        block_size = accounting.index.block_size
        tokens = [1 if isinstance(group.spec, KeptWhole) else block_size for group in groups]
        return cls(
            groups=groups,
            block_size=block_size,
            order=storage.block_order,
            rows=tuple(
                tuple(rows.shape[1] // tokens[number] for rows in storage.block_rows(number))
                for number in range(len(groups))
            ),
        )


def has_blocks(accounting: Accounting, storage: Storage) -> bool:
    """Tell whether a cache has blocks that may lie in tiers, too."""
    return isinstance(accounting, ExternalBlocks) and isinstance(storage, BlockBytes)


def kv_fingerprint(
    loaded: LoadedModel, config: EngineConfig, layout: BlockLayout, *, rank: int = 0
) -> Fingerprint:
    """Return the fingerprint of an engine's records, as long as its model is what it is now.

    Raises: CannotName with the reason why there is none, and why tiers are off then.
    """
    content = model_content(loaded, KeptHashes(kernel_dir()))
    return fingerprint_of(content, config, layout, rank=rank)


def planned_fingerprint(name: str | Path | None, config: EngineConfig) -> Fingerprint:
    """Return the fingerprint of the records of an engine for a folder or a hub name.

    Its weights are hashed, if they have not been, and not loaded.

    Raises: CannotName for weights that are not here; ConfigError for a cache that tiers cannot
    serve; ModelNotLoadable, MemoryUnavailable.
    """
    folder = find_folder(name)
    source = str(folder or name)
    hf_config, spec = read_config(source, folder)
    files = looked_at(source, folder, getattr(hf_config, "_commit_hash", None))
    if not files:
        raise CannotName(f"the weights of {source} are not on this machine")
    dtype = spec.dtype if config.dtype == "auto" else config.dtype
    content = content_of_files(
        files,
        hf_config,
        dtype,
        KeptHashes(kernel_dir()),
        quantizes=config.quantization is not None and choose_device(config.device).type != "cpu",
    )
    spec = spec.computed_in(dtype)
    return fingerprint_of(content, config, planned_layout(config, source, spec))


def planned_layout(config: EngineConfig, name: str, spec: ModelSpec) -> BlockLayout:
    """Return the layout of the blocks in an engine's cache: that of a small cache of its kind.

    Addresses are reserved for it, and no page is committed.

    Raises: ConfigError for a cache without blocks; MemoryUnavailable.
    """
    provider = named_memory(config, choose_device(config.device))
    sizes = cache_sizes(
        config,
        spec,
        page_bytes=provider.page_bytes,
        capacity_bytes=_PLANNED_BYTES,
        can_share=provider.cannot_share is None,
        max_mappings=None,
    )
    accounting = build_accounting(
        config.cache, stored_spec(config, spec), replace(sizes, max_num_seqs=1)
    )
    storage = build_storage(config.cache, accounting, provider)
    try:
        require_blocks(
            config,
            name,
            source_tokens=spec.source_tokens,
            has_blocks=has_blocks(accounting, storage),
        )
        return BlockLayout.of(accounting, storage)
    finally:
        storage.close()


def fingerprint_of(
    content: ModelContent, config: EngineConfig, layout: BlockLayout, *, rank: int = 0
) -> Fingerprint:
    """Return the fingerprint of what a model's content and options store. Raises: CannotName."""
    of_config = dict(content.config)
    form = None if config.quantization is None else weight_form(config.quantization)
    if form is not None:
        of_config.pop("quantization_config", None)  # Transformers', of the option
    named: dict[str, Any] = {
        "weights": content.weights,
        "config": of_config,
        "dtype": content.dtype,
        "quantization": None if form is None else form.name,  # what is usual may change
        "kv_cache_dtype": KV_CACHE_DTYPES[config.kv_cache_dtype] or content.dtype,
        "block_size": layout.block_size,
        "order": layout.order,
        "groups": [
            {**_group(group), "rows": rows}
            for group, rows in zip(layout.groups, layout.rows, strict=True)
        ],
        "rank": rank,
        "tensor_parallel_size": config.tensor_parallel_size,
        "record_version": VERSION,
        "code": {**content.code, "quire_arithmetic": ARITHMETIC},
    }
    if not config.dynamic_quantization:  # with it inputs may be rounded, and need not be
        named["dynamic_quantization"] = False
    if config.batch_invariant:  # not even rounding may differ
        from quire.models.order_of_sums import order_of_sums

        named["batch_invariant"] = order_of_sums()
    try:
        return Fingerprint.of(named)
    except TypeError as error:
        raise CannotName(str(error)) from None


def _group(group: Group) -> dict[str, Any]:
    return {"kind": type(group.spec).__name__, "layers": group.layers, **asdict(group.spec)}
