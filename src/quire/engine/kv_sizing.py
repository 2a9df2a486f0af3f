"""What a model and options need of memory, and the cache's numbers: arithmetic without a model.

The engine sizes itself with this, and a planner that has only a model's files. ``kv_budget`` has
the numbers of a loaded model.
"""

from collections.abc import Iterable, Sequence

from quire.config import KV_CACHE_DTYPES, EngineConfig
from quire.errors import ConfigError
from quire.kv import STRATEGIES, CacheConfig
from quire.kv.layout import (
    attention_groups,
    slot_bytes,
    stacked_block_size,
    stacking,
    suited_to,
)
from quire.memory.budget import EncoderFootprint, Footprint, Ledger, Needs, make_ledger
from quire.memory.machine import Machine
from quire.spec import ChunkedAttention, Group, KeptWhole, ModelSpec, RecurrentState, SlidingWindow
from quire.units import ceil_div, format_count, parse_bytes

_SHORT_TOKENS = 128  # a prompt and an answer: a smaller cache is of no use
# Libraries, compiled kernels and threads take addresses after sizing: 345 MiB with two threads,
# most of it stacks and arenas of malloc, and more with others. It matters only under ulimit -v.
_LATER_ADDRESS_BYTES = 640 * 2**20
_SWAP_PIECE_BYTES = 32 * 2**20  # copied at once, at least
_LEAST_STAGING_BYTES = 64 * 2**20
_LEAST_FILLED = 4  # blocks of all groups
_MOST_FILLED_BYTES = 2**30  # of a step, that staging memory is made for
_ENDLESS_TOKENS = 2**30  # longer than any window
_ALIGNMENT_BYTES = 64  # of a layer's parts, four at most


def ledger_for(config: EngineConfig, needs: Needs, machine: Machine | None) -> Ledger:
    """Make the ledger of the options."""
    return make_ledger(
        machine,
        needs,
        budget=config.budget,
        utilization=config.memory_utilization,
        mode=config.memory_mode,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
    )


def kv_needs(
    config: EngineConfig,
    name: str,
    spec: ModelSpec,
    own: Footprint,
    page_bytes: int,
    *,
    on_gpu: bool = False,
    measured_bytes: int | None = None,
) -> Needs:
    """Return what a model needs under these options.

    ``on_gpu``: decode steps are captured, whose memory stays taken, and swap goes through buffers.
    ``measured_bytes``: the peak of a step in bytes, if it is known; else it is estimated.

    Raises: ConfigError for longer sequences than the model's.
    """
    longest, spec = longest_tokens(config, name, spec), stored_spec(config, spec)
    strategy, encoder = STRATEGIES[config.cache], own.encoder
    whole = strategy.reserves and config.reserve == "max_model_len"
    least_tokens = longest if whole else min(longest, _SHORT_TOKENS)
    one_state = sum(
        slot_bytes(group, page_bytes) for group in spec.groups if isinstance(group.spec, KeptWhole)
    )
    state_bytes = config.max_num_seqs * one_state
    num_seqs, num_drafts = min(config.max_num_seqs, config.max_num_batched_tokens), 0
    if config.speculative_config is not None:
        num_drafts = config.speculative_config.num_speculative_tokens
    activation_bytes = own.activation_bytes(
        max(config.max_num_batched_tokens, spec.source_tokens),
        min(config.max_num_seqs * (1 + num_drafts), config.max_num_batched_tokens),
    )
    source = "estimate for max_num_batched_tokens"
    if measured_bytes is not None:
        activation_bytes = measured_bytes
        source = "measured, max_num_batched_tokens of max_num_seqs"
    return Needs(
        weights_bytes=own.weights_bytes,
        counted_weights_bytes=own.counted_bytes,
        activation_bytes=activation_bytes,
        activation_source=source,
        graph_bytes=0 if config.enforce_eager or not on_gpu else _graph_bytes(own, spec, num_seqs),
        swap_buffer_bytes=2 * swap_buffer_bytes(spec.groups, longest)
        if on_gpu and config.swap_space and config.swap_path is None
        else 0,
        bytes_per_token=spec.bytes_per_token,
        address_bytes=_LATER_ADDRESS_BYTES + _window_bytes(config, spec, longest),
        addresses_per_byte=(2 if strategy.maps_pages else 1) * len(spec.groups),
        context_tokens=longest,
        tier_bytes=0 if on_gpu else tier_bytes(config, spec.groups, page_bytes),
        image_bytes=0 if encoder is None else image_bytes(config, encoder),
        encoder_bytes=0 if encoder is None else encoder.peak_bytes,
        least_bytes=least_tokens * spec.bytes_per_token + one_state,
        most_bytes=_most_bytes(config, spec, longest, page_bytes) + state_bytes,
        state_bytes=state_bytes,
    )


def cache_sizes(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    page_bytes: int,
    capacity_bytes: int,
    can_share: bool,
    max_mappings: int | None,
) -> CacheConfig:
    """Return the cache's numbers for a capacity in bytes.

    ``can_share``: the memory can map a page at several addresses, with ``max_mappings`` in all.
    """
    # A decoder's entries depend on its source too, so that other prompts may not share them.
    caching = config.enable_prefix_caching and not spec.source_tokens
    may_share = STRATEGIES[config.cache].maps_pages and can_share
    shares_pages = may_share and config.enable_prefix_caching
    return CacheConfig(
        max_model_len=config.max_model_len or spec.max_model_len,
        max_num_seqs=config.max_num_seqs,
        capacity_bytes=capacity_bytes,
        block_size=config.block_size,
        page_bytes=page_bytes,
        layers_per_page=suited_to(page_bytes),
        reserve=config.reserve,
        shares_pages=shares_pages,
        max_mappings=max_mappings if shares_pages else None,
        enable_prefix_caching=caching,
        eviction_policy=config.prefix_caching_policy,
        retention_share=config.prefix_caching_retention,
        growth=config.growth,
        growth_tokens=config.growth_tokens,
    )


def image_bytes(config: EngineConfig, encoder: EncoderFootprint) -> int:
    """Return the bytes of image features that are kept: a step's rows, or the largest image's."""
    return max(config.max_num_batched_tokens, encoder.num_tokens) * encoder.row_bytes


def swap_buffer_bytes(groups: Iterable[Group], longest: int) -> int:
    """Return the bytes of one swap buffer on a GPU.

    Whole layers are copied at once, so that it holds the largest: that of a sequence of ``longest``
    tokens, or all states of a group.
    """
    layers = (
        slot_bytes(group, 1)
        if isinstance(group.spec, KeptWhole)
        else group.spec.peak_tokens(longest) * group.spec.bytes_per_token
        for group in groups
    )
    return max(_SWAP_PIECE_BYTES, max(layers) + _ALIGNMENT_BYTES)


def tier_bytes(config: EngineConfig, groups: Sequence[Group], page_bytes: int) -> int:
    """Return the bytes of host memory that tiers take: their own, and those of blocks on the way.

    Raises: ConfigError.
    """
    transfer = config.kv_transfer_config
    hands_over = transfer is not None and transfer.is_own
    if not (config.tiers or hands_over):
        return 0
    in_memory = (
        address.option("size", parse_bytes, 0)
        for address in config.tiers
        if address.kind == "memory"
    )
    leased_bytes = 0 if transfer is None else transfer.size_bytes
    block_size, step_tokens = config.block_size, config.max_num_batched_tokens
    if STRATEGIES[config.cache].maps_pages:  # a block fills whole pages
        seen = attention_groups(groups)
        block_size = stacked_block_size(seen, block_size, page_bytes, suited_to(page_bytes))
    return sum(in_memory) + leased_bytes + staging_bytes(groups, block_size, step_tokens)


def require_blocks(
    config: EngineConfig, name: str, *, source_tokens: int, has_blocks: bool
) -> None:
    """Refuse tiers for a cache of which no block can be named, or is whole in one process.

    ``has_blocks``: the cache's strategy keeps blocks that may come from outside.

    Raises: ConfigError.
    """
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"kv_tier needs tensor_parallel_size=1, and it is {config.tensor_parallel_size}: each "
            f"rank has a part of every block, and only whole blocks are stored"
        )
    if source_tokens:
        raise ConfigError(
            f"kv_tier cannot be used with {name}: what an encoder-decoder writes depends "
            f"on its source, which names no block"
        )
    if not config.enable_prefix_caching:
        raise ConfigError("kv_tier needs enable_prefix_caching: blocks from tiers are found by it")
    if not has_blocks:
        raise ConfigError(
            f"kv_tier needs blocks, and cache={config.cache} has none here: use cache=paged"
        )


def staging_bytes(groups: Iterable[Group], block_size: int, step_tokens: int) -> int:
    """Return the bytes through which blocks go to tiers and come back.

    They hold what four steps of ``step_tokens`` fill, and twice what a sequence reads of windows.
    Half of it is for stores: what one step has filled is on its way while the next one goes out.
    """
    several = tuple(groups)
    blocks = sum(group.block_bytes(block_size) for group in several)
    windows = sum(
        group.peak_bytes(_ENDLESS_TOKENS, block_size)
        for group in several
        if isinstance(group.spec, SlidingWindow | ChunkedAttention)
    )
    filled = min(ceil_div(step_tokens, block_size) * blocks, _MOST_FILLED_BYTES)
    return max(_LEAST_STAGING_BYTES, 4 * max(filled, _LEAST_FILLED * blocks) + 2 * windows)


def longest_tokens(config: EngineConfig, name: str, spec: ModelSpec) -> int:
    """Return the most tokens of a sequence. Raises: ConfigError for more than the model's."""
    most = stored_spec(config, spec).max_model_len
    longest = config.max_model_len or most
    if longest > most:
        raise ConfigError(
            f"max_model_len={format_count(longest)} is more than {name} was made for, "
            f"{format_count(most)}: lower it"
        )
    return longest


def stored_spec(config: EngineConfig, spec: ModelSpec) -> ModelSpec:
    """Return the model's spec with the dtypes in which keys and values are stored."""
    if config.max_model_len and spec.source_tokens == spec.max_model_len:  # one limit for both
        spec = spec.with_source_tokens(min(config.max_model_len, spec.source_tokens))
    kept_as = KV_CACHE_DTYPES[config.kv_cache_dtype]
    return spec if kept_as is None else spec.with_kv_dtype(kept_as)


def _graph_bytes(own: Footprint, spec: ModelSpec, num_seqs: int) -> int:
    """Return the bytes of captured steps, with three copies of one layer's states."""
    each = (g.spec.state_bytes for g in spec.groups if isinstance(g.spec, RecurrentState))
    return own.graph_bytes(num_seqs) + 3 * num_seqs * max(each, default=0)


def _window_bytes(config: EngineConfig, spec: ModelSpec, longest: int) -> int:
    """Return the bytes of addresses that a strategy reserves beyond its capacity."""
    if STRATEGIES[config.cache].has_own_ranges:
        return config.max_num_seqs * longest * spec.bytes_per_token
    return 0


def _most_bytes(config: EngineConfig, spec: ModelSpec, longest: int, page_bytes: int) -> int:
    """Return the bytes of all sequences at their longest: a larger cache only keeps prefixes.

    A sequence's last block, or the last page of each head or stack, is not full. While a buffer
    grows, the old one is there too.
    """
    copies = 2 if STRATEGIES[config.cache].grows_by_copying else 1
    slack = config.block_size * spec.bytes_per_token + page_bytes * sum(
        2 * heads
        for layer in spec.layers
        for kept in layer.specs
        if not isinstance(kept, KeptWhole)
        for heads, _ in kept.entry_shapes[:1]
    )
    sequence = copies * spec.bytes_per_token * longest + slack
    if suited_to(page_bytes) is not None:
        stacked = [stacking(group, page_bytes, "auto") for group in attention_groups(spec.groups)]
        in_stacks = (s.slot_bytes * (longest + s.page_tokens(page_bytes)) for s in stacked)
        sequence = max(sequence, copies * sum(in_stacks))
    return int(config.max_num_seqs * sequence / (1 - config.watermark))
