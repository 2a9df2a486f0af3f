"""What is so at the moment of a scrape."""

from quire.server.metrics.family import Family, each, one
from quire.server.metrics.reading import Reading

_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # vLLM's words, by level


def _waiting(reading: Reading) -> dict[str, float]:
    """vLLM's two reasons: for capacity; or for something else than room."""
    deferred = sum(reading.waiting[why] for why in ("prefix", "sibling", "choice"))
    return {"capacity": sum(reading.waiting.values()) - deferred, "deferred": deferred}


def _kv_bytes(reading: Reading) -> dict[str, float]:
    usage = reading.usage
    return {
        "reserved": usage.reserved_bytes,
        "committed": usage.committed_bytes,
        "used": usage.used_bytes,
        "cached": usage.cached_bytes,
        "wasted": usage.wasted_bytes,
    }


def _memory_bytes(reading: Reading) -> dict[str, float]:
    memory = reading.elastic.memory
    if memory is None:  # it has not been read yet, or the system does not say
        return {}
    return {"total": memory.total_bytes, "available": memory.available_bytes}


GAUGES = (
    one(
        "gauge",
        "vllm:num_requests_running",
        "requests",
        "Requests that hold KV memory and are computed.",
        lambda r: r.num_running,
    ),
    one(
        "gauge",
        "vllm:num_requests_waiting",
        "requests",
        "Requests in the engine that wait, new or preempted.",
        lambda r: sum(r.waiting.values()),
    ),
    each(
        "gauge",
        "vllm:num_requests_waiting_by_reason",
        "requests",
        "reason",
        "Waiting requests: for capacity, or deferred until another one has computed their prompt, "
        "or what it begins with.",
        _waiting,
    ),
    each(
        "gauge",
        "quire:num_requests_waiting_by_reason",
        "requests",
        "reason",
        "Waiting requests, by what the first of them lacked in the last plan: kv_memory, "
        "max_num_seqs, token_budget; preempted: it has just made room; next_step: it came after "
        "that; prefix: another one computes what it begins with; prefix, sibling, choice: as "
        "deferred.",
        lambda r: r.waiting,
    ),
    one(
        "gauge",
        "vllm:kv_cache_usage_perc",
        "share",
        "KV memory that sequences hold, of the ceiling; 1 is full. What is only cached is free.",
        lambda r: r.usage_share,
    ),
    Family(
        name="vllm:cache_config_info",
        kind="gauge",
        unit="1",
        meaning="The cache as configured, in the labels.",
        labels=(
            *("block_size", "cache_dtype", "enable_prefix_caching", "kv_cache_memory_bytes"),
            *("kv_strategy", "num_gpu_blocks"),
        ),
        of=("engine",),
        read=lambda r: {tuple(r.cache_config.values()): 1},
    ),
    each(
        "gauge",
        "quire:kv_bytes",
        "bytes",
        "state",
        "KV memory: reserved are addresses, committed is backed with pages; of that, used can "
        "still be read, cached is kept for who begins alike, wasted is neither.",
        _kv_bytes,
    ),
    one(
        "gauge",
        "quire:kv_capacity_bytes",
        "bytes",
        "The most that may be committed, as configured.",
        lambda r: r.elastic.capacity_bytes,
    ),
    one(
        "gauge",
        "quire:kv_ceiling_bytes",
        "bytes",
        "The most that may be committed now: lower while the machine is short of memory.",
        lambda r: r.elastic.ceiling_bytes,
    ),
    each(
        "gauge",
        "quire:memory_bytes",
        "bytes",
        "state",
        "Memory of the GPU where KV memory lies, or of the machine within its tightest limit: all "
        "of it, and what is available to anybody.",
        _memory_bytes,
    ),
    one(
        "gauge",
        "quire:swap_used_bytes",
        "bytes",
        "Entries of preempted requests that are kept in swap space.",
        lambda r: r.swap_used_bytes,
    ),
    each(
        "gauge",
        "vllm:engine_sleep_state",
        "1",
        "sleep_state",
        "1 for what is so: awake; weights_offloaded, asleep without KV memory; discard_all, and "
        "without the model.",
        lambda r: {name: r.sleep_level == level for level, name in enumerate(_SLEEP_STATES)},
    ),
    one(
        "gauge",
        "quire:engine_up",
        "1",
        "1 while the engine can compute; 0 after it was closed or has failed.",
        lambda r: r.is_up,
    ),
)
