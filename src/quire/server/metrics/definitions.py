"""Every metric that is exported."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from quire.engine.llm import LLM
from quire.engine.scheduling.block_carrier import TierReport
from quire.engine.scheduling.offload_policy import OffloadReport
from quire.server.metrics.family import (
    Counts,
    Figures,
    MetricFamily,
    MetricReading,
    counter,
    counters,
    gauge,
    gauges,
    histogram,
    histograms,
    read,
)

T = TypeVar("T")

# -- figures of tiers ------------------------------------------------------------------------------

_TIER_STATES = ("ok", "suspect", "broken")


def _by_tier(figure: Callable[[TierReport], T | None]) -> Callable[[MetricReading], dict[str, T]]:
    """Return a figure of each tier; None: the tier does not say."""

    def read(reading: MetricReading) -> dict[str, T]:
        tiers = () if reading.tiers is None else reading.tiers.tiers
        found = {tier.name: figure(tier) for tier in tiers}
        return {name: value for name, value in found.items() if value is not None}

    return read


def _by_tier_and(
    figures: Callable[[TierReport], Mapping[str, float]],
) -> Callable[[MetricReading], Figures]:
    """Return figures of each tier, by one label more."""

    def read(reading: MetricReading) -> Figures:
        tiers = () if reading.tiers is None else reading.tiers.tiers
        return {
            (tier.name, label): value for tier in tiers for label, value in figures(tier).items()
        }

    return read


def _of_all_tiers(
    figure: Callable[[OffloadReport], float],
) -> Callable[[MetricReading], Figures]:
    """Return a figure of all tiers together, and none without tiers."""

    def read(reading: MetricReading) -> Figures:
        return {} if reading.tiers is None else {(): figure(reading.tiers)}

    return read


# -- counters --------------------------------------------------------------------------------------


def _sources(reading: MetricReading) -> dict[str, float]:
    all_of_them = reading.statistics.num_prompt_tokens
    cached = reading.statistics.num_cached_prompt_tokens
    return {"local_compute": all_of_them - cached, "local_cache_hit": cached}


def _event_batches(reading: MetricReading) -> dict[str, float]:
    events = reading.kv_events
    if events is None:  # there are none
        return {}
    return {"published": events.num_published, "dropped": events.num_dropped}


def _outgoing_blocks(reading: MetricReading) -> dict[str, float]:
    if reading.tiers is None:
        return {}
    counts = reading.tiers.counts
    return {"copied": counts.stored_blocks, "dropped": counts.dropped_blocks}


def _wasted_tokens(reading: MetricReading) -> dict[str, float]:
    if reading.tiers is None:
        return {}
    counts = reading.tiers.counts
    return {"late": counts.late_tokens, "evicted": counts.evicted_tokens}


# Of the server, wherever its engine is.
SERVER_FAMILIES = (
    MetricFamily(
        name="vllm:admission_rejections_total",
        kind="counter",
        unit="requests",
        meaning="Requests refused before they reached the engine, by the limit that they met.",
        labels=("reason",),
        of=("model_name",),
        read=lambda r: {(reason,): count for reason, count in r.counts.rejections.items()},
    ),
    MetricFamily(
        name="http_requests_total",
        kind="counter",
        unit="requests",
        meaning="HTTP requests answered, by the template of the path and the status code.",
        labels=("handler", "method", "status"),
        of=(),
        read=lambda r: r.counts.answers,
    ),
)

COUNTERS = (
    counter(
        "vllm:prefix_cache_queries_total",
        "tokens",
        "Prompt tokens that were looked up, once for each prompt.",
        lambda r: r.statistics.prefix_query_tokens,
    ),
    counter(
        "vllm:prefix_cache_hits_total",
        "tokens",
        "Prompt tokens that were looked up and found computed.",
        lambda r: r.statistics.prefix_hit_tokens,
    ),
    counters(
        "quire:prefix_cache_misses_total",
        "tokens",
        "reason",
        "Prompt tokens that were looked up and not found, but for the last one, which is always "
        "computed. unknown: they were not computed, or long ago; salt: nothing is cached under "
        "this salt; evicted, window, state: what a layer needs there is gone; strategy: this cache "
        "shares nothing; room: computed again to take less room.",
        lambda r: r.statistics.prefix_missed_tokens,
    ),
    counter(
        "vllm:num_preemptions_total",
        "preemptions",
        "Times that a running request's memory was taken away.",
        lambda r: r.statistics.num_preemptions,
    ),
    counter(
        "quire:swaps_total",
        "preemptions",
        "Preemptions that saved what was computed, instead of computing it again.",
        lambda r: r.statistics.num_swaps,
    ),
    counter(
        "quire:recomputed_tokens_total",
        "tokens",
        "Tokens that were computed, lost by a preemption and computed again.",
        lambda r: r.statistics.num_recomputed_tokens,
    ),
    counters(
        "quire:swap_bytes_total",
        "bytes",
        "direction",
        "Bytes that were saved to swap space (out) and brought back (in).",
        lambda r: {"out": r.statistics.saved_bytes, "in": r.statistics.loaded_bytes},
    ),
    counter(
        "vllm:prompt_tokens_total",
        "tokens",
        "Tokens of prompts whose first token has come, once for all of n continuations.",
        lambda r: r.statistics.num_prompt_tokens,
    ),
    counters(
        "vllm:prompt_tokens_by_source_total",
        "tokens",
        "source",
        "Prompt tokens by source: computed, or found in the prefix cache.",
        _sources,
    ),
    counter(
        "vllm:prompt_tokens_cached_total",
        "tokens",
        "Prompt tokens that were found in the prefix cache.",
        lambda r: r.statistics.num_cached_prompt_tokens,
    ),
    counter(
        "vllm:generation_tokens_total",
        "tokens",
        "Tokens generated.",
        lambda r: r.statistics.num_generation_tokens,
    ),
    counters(
        "vllm:request_success_total",
        "requests",
        "finished_reason",
        "Requests that have ended, by reason: stop, length, abort, error; capacity: for "
        "lack of KV memory. Each of n continuations is one.",
        lambda r: r.statistics.num_finished,
    ),
    counter(
        "vllm:corrupted_requests_total",
        "requests",
        "Requests that ended with an error since the model's logits were NaN or infinite.",
        lambda r: r.statistics.num_corrupted,
    ),
    counter(
        "vllm:spec_decode_num_drafts_total",
        "drafts",
        "Times that draft tokens were verified.",
        lambda r: r.statistics.num_drafts,
    ),
    counter(
        "vllm:spec_decode_num_draft_tokens_total",
        "tokens",
        "Draft tokens that were computed.",
        lambda r: r.statistics.num_draft_tokens,
    ),
    counter(
        "vllm:spec_decode_num_accepted_tokens_total",
        "tokens",
        "Draft tokens that were accepted.",
        lambda r: r.statistics.num_accepted_tokens,
    ),
    counter(
        "quire:kv_returned_bytes_total",
        "bytes",
        "KV memory that was given back to the machine.",
        lambda r: r.elastic.returned_bytes,
    ),
    counter(
        "vllm:external_prefix_cache_queries_total",
        "tokens",
        "Prompt tokens that tiers were asked for, once for each prompt: whole blocks behind the "
        "prefix hit.",
        lambda r: 0 if r.tiers is None else r.tiers.counts.queried_tokens,
    ),
    counter(
        "vllm:external_prefix_cache_hits_total",
        "tokens",
        "Prompt tokens that tiers had in time, and that were brought into the prefix cache.",
        lambda r: 0 if r.tiers is None else r.tiers.counts.hit_tokens,
    ),
    counters(
        "quire:tier_hit_tokens_total",
        "tokens",
        "tier",
        "The same by the tier that had them.",
        _by_tier(lambda tier: tier.hit_tokens),
    ),
    counters(
        "vllm:kv_offload_tiering_read_bytes_total",
        "bytes",
        "tier",
        "Bytes of records that were loaded and are right.",
        _by_tier(lambda tier: tier.loaded_bytes),
    ),
    counters(
        "vllm:kv_offload_tiering_read_time_total",
        "seconds",
        "tier",
        "Time that loading records took, beside steps.",
        _by_tier(lambda tier: tier.load_s),
    ),
    counters(
        "vllm:kv_offload_tiering_write_bytes_total",
        "bytes",
        "tier",
        "Bytes of records that the tier has taken.",
        _by_tier(lambda tier: tier.stored_bytes),
    ),
    counters(
        "vllm:kv_offload_tiering_write_time_total",
        "seconds",
        "tier",
        "Time that storing records took, beside steps.",
        _by_tier(lambda tier: tier.store_s),
    ),
    counters(
        "vllm:kv_offload_tiering_backpressure_stores_dropped_total",
        "records",
        "tier",
        "Records that a full, slow or broken tier did not take.",
        _by_tier(lambda tier: tier.num_dropped),
    ),
    MetricFamily(
        name="quire:tier_bad_records_total",
        kind="counter",
        unit="records",
        meaning="Records that were not what was stored, by what was wrong with them. None of their "
        "bytes was used.",
        labels=("tier", "reason"),
        read=_by_tier_and(lambda tier: tier.num_bad),
    ),
    MetricFamily(
        name="quire:tier_errors_total",
        kind="counter",
        unit="calls",
        meaning="Calls that a tier did not answer in time, or at all.",
        labels=("tier", "call"),
        read=_by_tier_and(lambda tier: tier.num_errors),
    ),
    counters(
        "quire:tier_blocks_total",
        "blocks",
        "outcome",
        "Blocks that were to be stored: copied out, or dropped since they were evicted first.",
        _outgoing_blocks,
    ),
    counters(
        "quire:tier_wasted_tokens_total",
        "tokens",
        "reason",
        "Tokens that were loaded for nothing: late, the request waited no longer; evicted, they "
        "left the cache again before any request had them.",
        _wasted_tokens,
    ),
    MetricFamily(
        name="quire:tier_late_loads_total",
        kind="counter",
        unit="loads",
        meaning="Loads that a request did not wait for: computing was quicker, or it ended.",
        read=_of_all_tiers(lambda tiers: tiers.counts.num_late),
    ),
    counters(
        "quire:kv_event_batches_total",
        "batches",
        "outcome",
        "Batches of the prefix cache's events: published, or dropped since too many waited "
        "(max_queue_size).",
        _event_batches,
    ),
    *SERVER_FAMILIES,
)


# -- gauges ----------------------------------------------------------------------------------------


_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # vLLM's words, by level


def _waiting(reading: MetricReading) -> dict[str, float]:
    """vLLM's two reasons: for capacity; or for something else than room."""
    deferred = sum(reading.waiting[why] for why in ("prefix", "sibling", "choice"))
    return {"capacity": sum(reading.waiting.values()) - deferred, "deferred": deferred}


def _kv_bytes(reading: MetricReading) -> dict[str, float]:
    usage = reading.usage
    return {
        "reserved": usage.reserved_bytes,
        "committed": usage.committed_bytes,
        "used": usage.used_bytes,
        "cached": usage.cached_bytes,
        "wasted": usage.wasted_bytes,
    }


def _memory_bytes(reading: MetricReading) -> dict[str, float]:
    memory = reading.elastic.memory
    if memory is None:  # it has not been read yet, or the system does not say
        return {}
    return {"total": memory.total_bytes, "available": memory.available_bytes}


GAUGES = (
    gauge(
        "vllm:num_requests_running",
        "requests",
        "Requests that hold KV memory and are computed.",
        lambda r: r.num_running,
    ),
    gauge(
        "vllm:num_requests_waiting",
        "requests",
        "Requests in the engine that wait, new or preempted.",
        lambda r: sum(r.waiting.values()),
    ),
    gauges(
        "vllm:num_requests_waiting_by_reason",
        "requests",
        "reason",
        "Waiting requests: for capacity, or deferred until another one has computed their prompt, "
        "or what it begins with.",
        _waiting,
    ),
    gauges(
        "quire:num_requests_waiting_by_reason",
        "requests",
        "reason",
        "Waiting requests, by what the first of them lacked in the last plan: kv_memory, "
        "max_num_seqs, token_budget; preempted: it has just made room; next_step: it came after "
        "that; prefix: another one computes what it begins with; prefix, sibling, choice: as "
        "deferred.",
        lambda r: r.waiting,
    ),
    gauge(
        "vllm:kv_cache_usage_perc",
        "share",
        "KV memory that sequences hold, of the ceiling; 1 is full. What is only cached is free.",
        lambda r: r.usage_share,
    ),
    MetricFamily(
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
    gauges(
        "quire:kv_bytes",
        "bytes",
        "state",
        "KV memory: reserved are addresses, committed is backed with pages; of that, used can "
        "still be read, cached is kept for prompts that begin alike, wasted is neither.",
        _kv_bytes,
    ),
    gauge(
        "quire:kv_capacity_bytes",
        "bytes",
        "The most that may be committed, as configured.",
        lambda r: r.elastic.capacity_bytes,
    ),
    gauge(
        "quire:kv_ceiling_bytes",
        "bytes",
        "The most that may be committed now: lower while the machine is short of memory.",
        lambda r: r.elastic.ceiling_bytes,
    ),
    gauges(
        "quire:memory_bytes",
        "bytes",
        "state",
        "Memory of the GPU where KV memory lies, or of the machine within its tightest limit: all "
        "of it, and what is available.",
        _memory_bytes,
    ),
    gauge(
        "quire:swap_used_bytes",
        "bytes",
        "Entries of preempted requests that are kept in swap space.",
        lambda r: r.swap_used_bytes,
    ),
    MetricFamily(
        name="quire:tier_state",
        kind="gauge",
        unit="1",
        meaning="1 for the state: ok; broken, its last call failed, and it is asked again later; "
        "suspect, nothing is loaded from it until it is trusted again (POST /tiers/trust).",
        labels=("tier", "state"),
        read=_by_tier_and(
            lambda tier: {state: float(tier.state == state) for state in _TIER_STATES}
        ),
    ),
    gauges(
        "quire:tier_records",
        "records",
        "tier",
        "Records that a tier holds. One that does not say has no sample, here and below.",
        _by_tier(lambda tier: tier.num_records),
    ),
    gauges(
        "quire:tier_used_bytes",
        "bytes",
        "tier",
        "Bytes that a tier holds, after this engine's last store.",
        _by_tier(lambda tier: tier.used_bytes),
    ),
    gauges(
        "quire:tier_capacity_bytes",
        "bytes",
        "tier",
        "Bytes that a tier may hold.",
        _by_tier(lambda tier: tier.capacity_bytes),
    ),
    MetricFamily(
        name="quire:tier_saved_seconds",
        kind="gauge",
        unit="seconds",
        meaning="Computing that blocks from tiers have spared, less the time that steps lost to "
        "them; below 0, tiers cost more than they spare.",
        read=_of_all_tiers(lambda tiers: tiers.counts.saved_s),
    ),
    gauges(
        "vllm:engine_sleep_state",
        "1",
        "sleep_state",
        "1 for the state: awake; weights_offloaded, asleep without KV memory; discard_all, and "
        "without the model.",
        lambda r: {name: r.sleep_level == level for level, name in enumerate(_SLEEP_STATES)},
    ),
    gauge(
        "quire:engine_up",
        "1",
        "1 while the engine can compute; 0 after it was closed or has failed.",
        lambda r: r.is_up,
    ),
)


# -- histograms ------------------------------------------------------------------------------------


HISTOGRAMS = (
    histogram(
        "vllm:time_to_first_token_seconds",
        "seconds",
        "From arrival to the first token.",
        lambda r: r.statistics.first_token_s,
    ),
    histogram(
        "vllm:inter_token_latency_seconds",
        "seconds",
        "From one step that gave a request tokens to the next.",
        lambda r: r.statistics.inter_token_s,
    ),
    histogram(
        "vllm:request_time_per_output_token_seconds",
        "seconds",
        "Mean over a request's tokens after the first; of requests with one token, none.",
        lambda r: r.statistics.token_s,
    ),
    histogram(
        "vllm:e2e_request_latency_seconds",
        "seconds",
        "From arrival to the end.",
        lambda r: r.statistics.e2e_s,
    ),
    histogram(
        "vllm:request_queue_time_seconds",
        "seconds",
        "From arrival to the first step, or to the end of a request that never ran.",
        lambda r: r.statistics.queue_s,
    ),
    histogram(
        "vllm:request_inference_time_seconds",
        "seconds",
        "From the first step to the last token, preemptions included.",
        lambda r: r.statistics.inference_s,
    ),
    histogram(
        "vllm:request_prefill_time_seconds",
        "seconds",
        "From the first step to the first token.",
        lambda r: r.statistics.prefill_s,
    ),
    histogram(
        "vllm:request_decode_time_seconds",
        "seconds",
        "From the first token to the last.",
        lambda r: r.statistics.decode_s,
    ),
    histogram(
        "vllm:request_prompt_tokens",
        "tokens",
        "Prompt tokens of requests that have ended.",
        lambda r: r.statistics.prompt_tokens,
    ),
    histogram(
        "vllm:request_prefill_kv_computed_tokens",
        "tokens",
        "Prompt tokens of requests that have ended, but for those found in the prefix cache.",
        lambda r: r.statistics.prefill_tokens,
    ),
    histogram(
        "vllm:request_generation_tokens",
        "tokens",
        "Tokens generated by requests that have ended.",
        lambda r: r.statistics.generation_tokens,
    ),
    histogram(
        "vllm:request_max_num_generation_tokens",
        "tokens",
        "Tokens generated by the longest of n continuations.",
        lambda r: r.statistics.longest_generation_tokens,
    ),
    histogram(
        "vllm:request_params_n",
        "requests",
        "n, as asked for.",
        lambda r: r.statistics.num_choices,
    ),
    histogram(
        "vllm:request_params_max_tokens",
        "tokens",
        "max_tokens, as asked for.",
        lambda r: r.statistics.max_tokens,
    ),
    histogram(
        "vllm:request_num_preemptions",
        "preemptions",
        "Preemptions of requests that have ended.",
        lambda r: r.statistics.request_preemptions,
    ),
    histograms(
        "vllm:kv_offload_tiering_promotion_latency_seconds",
        "seconds",
        "tier",
        "From the question for a prompt's blocks to the last of them checked in memory, for each "
        "tier that had some.",
        _by_tier(lambda tier: tier.promotion_s),
    ),
    histogram(
        "vllm:iteration_tokens_total",
        "tokens",
        "Tokens that a step computed.",
        lambda r: r.statistics.step_tokens,
    ),
)


# -- all of them -----------------------------------------------------------------------------------


FAMILIES = (*GAUGES, *COUNTERS, *HISTOGRAMS)
ENGINE_FAMILIES = tuple(family for family in FAMILIES if family not in SERVER_FAMILIES)


def engine_figures(llm: LLM) -> dict[str, Figures]:
    """Read an engine's figures without waiting for it, by metric. They can be pickled."""
    reading = read(llm, Counts())
    return {family.name: family.read(reading) for family in ENGINE_FAMILIES}
