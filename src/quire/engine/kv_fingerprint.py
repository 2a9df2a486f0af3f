"""What the entries of an engine's cache mean: the fingerprint of its model, options and groups."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from quire.config import KV_CACHE_DTYPES, EngineConfig, kernel_dir
from quire.engine.kv_sizing import stored_spec
from quire.models.file_hashes import CannotName, KeptHashes
from quire.models.loader import LoadedModel, looked_at, read_config
from quire.models.model_content import ModelContent, content_of_files, model_content
from quire.models.rank_spec import part_spec
from quire.spec import Group
from quire.spec.model_files import find_folder
from quire.tiers.fingerprint import Fingerprint
from quire.tiers.record import VERSION

# Raised by hand where Quire's own arithmetic no longer gives what it gave, but for rounding: where
# an error was repaired whose results may lie in tiers, or positions are counted otherwise.
ARITHMETIC = 1

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
        "kv_cache_dtype": "named",
        "cache": "rounding",  # each part of a record says how it is laid out
        "attention_backend": "rounding",
        "enforce_eager": "rounding",
        "max_model_len": "nothing",  # a length that would turn positions is refused
        "max_num_seqs": "nothing",
        "max_num_batched_tokens": "rounding",
        "block_size": "named",
        "enable_prefix_caching": "nothing",
        "prefix_caching_policy": "nothing",
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
        "seed": "nothing",
    }
)


def kv_fingerprint(
    loaded: LoadedModel, config: EngineConfig, groups: Sequence[Group], *, rank: int = 0
) -> Fingerprint:
    """Return the fingerprint of an engine's records, as long as its model is what it is now.

    ``groups``: as they are stored, of this rank.

    Raises: CannotName with the reason why there is none, and why tiers are off then.
    """
    content = model_content(loaded, KeptHashes(kernel_dir()))
    return fingerprint_of(content, config, groups, rank=rank)


def planned_fingerprint(name: str | Path | None, config: EngineConfig) -> Fingerprint:
    """Return the fingerprint of rank 0's records in an engine for a folder or a hub name.

    Its weights are hashed, if they have not been, and not loaded.

    Raises: CannotName for weights that are not here; ModelNotLoadable, ConfigError.
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
        quantizes=config.quantization is not None,
    )
    spec = spec.computed_in(dtype)
    if config.tensor_parallel_size > 1:
        spec = part_spec(source, hf_config, spec, config.tensor_parallel_size)
    return fingerprint_of(content, config, stored_spec(config, spec).groups)


def fingerprint_of(
    content: ModelContent, config: EngineConfig, groups: Sequence[Group], *, rank: int = 0
) -> Fingerprint:
    """Return the fingerprint of what a model's content and options store. Raises: CannotName."""
    of_config = dict(content.config)
    if config.quantization is not None:
        of_config.pop("quantization_config", None)  # Transformers', of the option
    named: dict[str, Any] = {
        "weights": content.weights,
        "config": of_config,
        "dtype": content.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": KV_CACHE_DTYPES[config.kv_cache_dtype] or content.dtype,
        "block_size": config.block_size,
        "groups": [_group(group) for group in groups],
        "rank": rank,
        "tensor_parallel_size": config.tensor_parallel_size,
        "record_version": VERSION,
        "code": {**content.code, "quire_arithmetic": ARITHMETIC},
    }
    try:
        return Fingerprint.of(named)
    except TypeError as error:
        raise CannotName(str(error)) from None


def _group(group: Group) -> dict[str, Any]:
    return {"kind": type(group.spec).__name__, "layers": group.layers, **asdict(group.spec)}
