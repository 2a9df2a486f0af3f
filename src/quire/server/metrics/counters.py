"""What has been counted since the engine was made."""

from quire.server.metrics.family import Family, each, one
from quire.server.metrics.reading import Reading


def _sources(reading: Reading) -> dict[str, float]:
    all_of_them = reading.statistics.num_prompt_tokens
    cached = reading.statistics.num_cached_prompt_tokens
    return {"local_compute": all_of_them - cached, "local_cache_hit": cached}


COUNTERS = (
    one(
        "counter",
        "vllm:prefix_cache_queries_total",
        "tokens",
        "Prompt tokens that were looked up, once for each prompt.",
        lambda r: r.statistics.prefix_query_tokens,
    ),
    one(
        "counter",
        "vllm:prefix_cache_hits_total",
        "tokens",
        "Prompt tokens that were looked up and found computed.",
        lambda r: r.statistics.prefix_hit_tokens,
    ),
    each(
        "counter",
        "quire:prefix_cache_misses_total",
        "tokens",
        "reason",
        "Prompt tokens that were looked up and not found, but for the last one, which is always "
        "computed. unknown: they were not computed, or long ago; salt: nothing is cached under "
        "this salt; evicted, window, state: what a layer needs there is gone; strategy: this cache "
        "shares nothing; room: computed again to take less room.",
        lambda r: r.statistics.prefix_missed_tokens,
    ),
    one(
        "counter",
        "vllm:num_preemptions_total",
        "preemptions",
        "Times that a running request's memory was taken away.",
        lambda r: r.statistics.num_preemptions,
    ),
    one(
        "counter",
        "quire:swaps_total",
        "preemptions",
        "Preemptions that saved what was computed, instead of computing it again.",
        lambda r: r.statistics.num_swaps,
    ),
    one(
        "counter",
        "quire:recomputed_tokens_total",
        "tokens",
        "Tokens that were computed, lost by a preemption and computed again.",
        lambda r: r.statistics.num_recomputed_tokens,
    ),
    each(
        "counter",
        "quire:swap_bytes_total",
        "bytes",
        "direction",
        "Bytes that were saved to swap space (out) and brought back (in).",
        lambda r: {"out": r.statistics.saved_bytes, "in": r.statistics.loaded_bytes},
    ),
    one(
        "counter",
        "vllm:prompt_tokens_total",
        "tokens",
        "Tokens of prompts whose first token has come, once for all of n continuations.",
        lambda r: r.statistics.num_prompt_tokens,
    ),
    each(
        "counter",
        "vllm:prompt_tokens_by_source_total",
        "tokens",
        "source",
        "Prompt tokens by source: computed, or found in the prefix cache.",
        _sources,
    ),
    one(
        "counter",
        "vllm:prompt_tokens_cached_total",
        "tokens",
        "Prompt tokens that were found in the prefix cache.",
        lambda r: r.statistics.num_cached_prompt_tokens,
    ),
    one(
        "counter",
        "vllm:generation_tokens_total",
        "tokens",
        "Tokens generated.",
        lambda r: r.statistics.num_generation_tokens,
    ),
    each(
        "counter",
        "vllm:request_success_total",
        "requests",
        "finished_reason",
        "Requests that have ended, however that was: stop, length, abort, error; capacity: for "
        "lack of KV memory. Each of n continuations is one.",
        lambda r: r.statistics.num_finished,
    ),
    one(
        "counter",
        "vllm:corrupted_requests_total",
        "requests",
        "Requests that ended with an error since the model's logits were NaN or infinite.",
        lambda r: r.statistics.num_corrupted,
    ),
    one(
        "counter",
        "vllm:spec_decode_num_drafts_total",
        "drafts",
        "Times that guesses at next tokens were looked at.",
        lambda r: r.statistics.num_drafts,
    ),
    one(
        "counter",
        "vllm:spec_decode_num_draft_tokens_total",
        "tokens",
        "Guessed tokens that were computed.",
        lambda r: r.statistics.num_draft_tokens,
    ),
    one(
        "counter",
        "vllm:spec_decode_num_accepted_tokens_total",
        "tokens",
        "Guessed tokens that came true.",
        lambda r: r.statistics.num_accepted_tokens,
    ),
    one(
        "counter",
        "quire:kv_returned_bytes_total",
        "bytes",
        "KV memory that was given back to the machine.",
        lambda r: r.elastic.returned_bytes,
    ),
    Family(
        name="vllm:admission_rejections_total",
        kind="counter",
        unit="requests",
        meaning="Requests refused before they reached the engine, by the limit that they met.",
        labels=("reason",),
        of=("model_name",),
        read=lambda r: {(reason,): count for reason, count in r.counts.rejections.items()},
    ),
    Family(
        name="http_requests_total",
        kind="counter",
        unit="requests",
        meaning="HTTP requests answered, by the template of the path and the status code.",
        labels=("handler", "method", "status"),
        of=(),
        read=lambda r: r.counts.answers,
    ),
)
