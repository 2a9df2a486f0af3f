"""Fields that requests for text have in common. Every number and every list has a bound.

Names, defaults and meanings are OpenAI's, and vLLM's where OpenAI has none. ``null`` means that a
field is left out. The bounds are against accidents and abuse; ordinary clients do not meet them.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from quire.sampling_params import LONGEST_RETENTION_S
from quire.server.wire.error_responses import Refused, invalid

MAX_CHOICES = 128

Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Text: TypeAlias = Annotated[str, Meta(max_length=1024)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Count: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]
NumLogprobs: TypeAlias = Annotated[int, Meta(ge=-1, lt=2**31)]
Salt: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None  # a last chunk without choices
    continuous_usage_stats: bool | None = None  # … and in every chunk


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's field: exactly one form."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


FormatType: TypeAlias = Literal["text", "json_object", "json_schema"]


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: FormatType
    json_schema: JsonSchema | None = None


class ModelRequest(msgspec.Struct, kw_only=True):
    """The body of a request to a model."""

    model: Text | None = None

    def validate(self, names: Sequence[str]) -> None:
        """Check what the fields' types cannot say. ``names``: of the model that is served. Raises:
        Refused.
        """
        refuse_unknown_model(self.model, names)


class Routed(ModelRequest, kw_only=True):
    """Which model is asked, for whom, and when."""

    user: str | None = None  # a fleet may keep its requests together
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Salt | None = None
    request_id: Text | None = None  # ignored


class Upload(Routed, kw_only=True):
    """A form with a file in it. Its other fields are texts, which are converted."""

    file: bytes


class Addressed(Routed, kw_only=True):
    """… how prompts are read …"""

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    add_special_tokens: bool | None = None


class KeptPrefix(msgspec.Struct, kw_only=True):
    """Ours: what of the prompt the cache is to keep for a while."""

    seconds: Annotated[float, Meta(gt=0, le=LONGEST_RETENTION_S)]
    num_tokens: Count | None = None  # of the prompt, from its first on; all of them


class Sampling(Addressed, kw_only=True):
    """… how tokens are chosen and when to end …"""

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=1e6)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=2**18)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    bad_words: Annotated[list[Text], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    # Ours: the conversation ends with this request, or this is to be kept of its prompt.
    cache_hint: Literal["ends"] | KeptPrefix | None = None
    prompt_logprobs: NumLogprobs | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # vLLM's older names for parts of structured_outputs.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(max_length=1024)] | None = None
    guided_grammar: str | None = None


class PromptCacheOptions(msgspec.Struct, kw_only=True):
    """OpenAI's field: how long the prompt is to be kept, unless only marks in it are meant."""

    ttl: Literal["30m"] | None = None
    mode: Literal["implicit", "explicit"] | None = None


class KVTransferParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Blocks of a prompt that another server is to load, or has left: vLLM's fields."""

    do_remote_decode: bool | None = None  # leave the prompt's blocks for another server
    do_remote_prefill: bool | None = None  # another server has them
    remote_engine_id: Text | None = None
    remote_request_id: Annotated[str, Meta(max_length=64)] | None = None  # of the lease
    remote_host: Annotated[str, Meta(max_length=256)] | None = None
    remote_port: Annotated[int, Meta(ge=0, le=65_535)] | None = None
    remote_num_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    remote_block_ids: list[Any] | None = None  # none: blocks are named by their tokens
    remote_blocks_expiry_time: float | None = None  # seconds since 1970


class GenerationRequest(Sampling, kw_only=True):
    """… and how the answer is to come."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in logprobs
    kv_transfer_params: KVTransferParams | None = None
    # A fleet may keep requests with the same one together; the API key decides about the cache.
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    safety_identifier: Text | None = None


class Searching(GenerationRequest, kw_only=True):
    """… or by a beam search, ``best_of`` wide, of which the ``n`` best are given."""

    use_beam_search: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None  # n
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None  # 1
    early_stopping: bool | Literal["never"] | None = None  # never


def refuse_unknown_model(name: str | None, names: Sequence[str]) -> None:
    """Refuse a model that is not served. Raises: Refused (404)."""
    if name is not None and name not in names:
        raise Refused(
            404,
            f"the model {name[:200]!r} is not served here: there is {', '.join(names)}",
            param="model",
            code="model_not_found",
        )


def refuse_several(asked: Sampling) -> None:
    """Refuse several choices, where an answer has one. Raises: Refused."""
    if asked.n is not None and asked.n != 1:
        raise invalid("n", f"n={asked.n}: this interface gives one answer")


class PromptLogprob(msgspec.Struct, kw_only=True):
    """One token's log-probability, in vLLM's form; ``rank`` 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


# None for the first token; for each other one, the likely tokens by id.
PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]


class TokenUsage(msgspec.Struct, kw_only=True):
    """Tokens of a request. Of the prompt's, ``prompt_tokens_details`` says how many were cached."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
