"""A request's fields as ``SamplingParams``, with defaults and the server's own bounds."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from quire.chat.tools.tool_choice import closed
from quire.errors import ConfigError
from quire.sampling_params import (
    SAMPLING_DEFAULTS,
    BeamSearchParams,
    CacheRetention,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.server.schemas.request_fields import (
    GenerationRequest,
    KeptPrefix,
    ResponseFormat,
    Sampling,
    Searching,
    StructuredOutputs,
)
from quire.server.wire.error_responses import invalid

MAX_BIASES = 1024

# Fields that mean the same in both: a value that is not null is passed on.
_SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop_token_ids", "bad_words", "include_stop_str_in_output"),
    *("skip_special_tokens", "ignore_eos", "min_tokens", "allowed_token_ids"),
)
# Fields that a beam search has too, or that do not change it.
_OF_A_SEARCH = ("n", "max_tokens", "temperature", "seed", "ignore_eos", "cache_hint")


def sampling_defaults(generation_config: str, *, own: Mapping[str, float]) -> dict[str, float]:
    """Return defaults for fields that requests leave open.

    They are ``own`` (auto), none (vllm), or those of ``generation_config.json`` in a folder.
    Raises: ConfigError.
    """
    if generation_config in ("auto", "vllm"):
        return dict(own) if generation_config == "auto" else {}
    path = Path(generation_config) / "generation_config.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        found = {name: said[name] for name in SAMPLING_DEFAULTS if said.get(name) is not None}
        SamplingParams(**found)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"generation_config={generation_config!r}: {path}: {error}") from error
    return found


def sampling_params(
    asked: Sampling,
    *,
    defaults: Mapping[str, float],
    max_tokens: int,
    logprobs: int | None,
    max_logprobs: int,
    form: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """Return the engine's parameters.

    ``defaults`` are for fields that the request leaves open; ``form`` is what ``tool_choice``
    prescribes.

    Raises: Refused; RequestError.
    """
    for name, count in (("logprobs", logprobs), ("prompt_logprobs", asked.prompt_logprobs)):
        _refuse_too_many(name, count, max_logprobs)
    given = {name: value for name in _SAME if (value := getattr(asked, name)) is not None}
    return SamplingParams(
        **{**defaults, **given},
        max_tokens=max_tokens,
        stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
        logit_bias=_biases(asked.logit_bias),
        logprobs=logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        structured_outputs=_form(asked, form),
        cache_hint=_cache_hint(asked),
    )


def _cache_hint(asked: Sampling) -> Literal["ends"] | CacheRetention | None:
    """Return what a request says of its prompt in the cache: our own field goes before OpenAI's."""
    hint = asked.cache_hint
    if isinstance(hint, KeptPrefix):
        return CacheRetention(seconds=hint.seconds, num_tokens=hint.num_tokens)
    if hint is not None or not isinstance(asked, GenerationRequest):
        return hint
    if asked.prompt_cache_retention == "24h":
        return CacheRetention(seconds=24 * 3600)
    options = asked.prompt_cache_options
    if options is not None and options.ttl is not None and options.mode != "explicit":
        return CacheRetention(seconds=30 * 60)
    return None


def searched(asked: Searching, params: SamplingParams) -> SamplingParams | BeamSearchParams:
    """Return the parameters, or those of a beam search if the request asks for one. Raises: Refused
    for what only a search can do, or what it cannot; RequestError.
    """
    width = asked.best_of or asked.n or 1
    if not asked.use_beam_search:
        if width != (asked.n or 1):
            raise invalid(
                "best_of",
                f"best_of={width}: only n choices are made: give n, or use_beam_search",
            )
        for name, harmless in (("length_penalty", 1), ("early_stopping", False)):
            if getattr(asked, name) not in (None, harmless):
                raise invalid(name, f"{name} needs use_beam_search")
        return params
    if asked.stream:
        raise invalid(
            "stream",
            "stream: what a beam search finds is known at its end: leave out stream, or "
            "use_beam_search",
        )
    if asked.temperature:
        raise invalid(
            "temperature",
            f"temperature={asked.temperature}: a beam search does not sample, give 0",
        )
    if width < params.n:
        raise invalid("best_of", f"best_of={width} must be at least n={params.n}")
    plain = SamplingParams()
    for each in fields(params):
        name = each.name
        if name not in _OF_A_SEARCH and getattr(params, name) != getattr(plain, name):
            raise invalid(name, f"{name} does not work with use_beam_search: leave it out")
    return BeamSearchParams(
        beam_width=width,
        n=params.n,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        length_penalty=1 if asked.length_penalty is None else asked.length_penalty,
        early_stopping="never" if asked.early_stopping is None else asked.early_stopping,
    )


def _refuse_too_many(name: str, count: int | None, most: int) -> None:
    if count is None or most < 0 or 0 <= count <= most:
        return
    raise invalid(name, f"{name}={count} must be from 0 to {most} (max_logprobs)")


def _biases(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    if len(given) > MAX_BIASES:
        raise invalid(
            "logit_bias", f"logit_bias has {len(given):,} entries and may have {MAX_BIASES:,}"
        )
    wrong = [name for name in given if not (name.isascii() and name.isdigit() and len(name) < 10)]
    if wrong:
        raise invalid("logit_bias", f"logit_bias: {wrong[0][:40]!r} is not a token id")
    return {int(name): bias for name, bias in given.items()}


def _form(asked: Sampling, other: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
    """Return the one form that the text must have. Raises: Refused if there are several."""
    several = (
        _of_format(asked.response_format),
        _of_vllm(asked.structured_outputs),
        _of_older(asked),
        other,
    )
    forms = [form for form in several if form is not None]
    if len(forms) > 1:
        raise invalid(
            "response_format",
            "response_format, structured_outputs, guided_… and a tool_choice that prescribes a "
            "call cannot be combined: give one of them",
        )
    return forms[0] if forms else None


def _of_format(given: ResponseFormat | None) -> StructuredOutputsParams | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if given.json_schema is None or given.json_schema.schema is None:
        raise invalid(
            "response_format", "response_format: type json_schema needs json_schema.schema"
        )
    schema = given.json_schema.schema
    return StructuredOutputsParams(json=closed(schema) if given.json_schema.strict else schema)


def _of_older(asked: Sampling) -> StructuredOutputsParams | None:
    """Read vLLM's names from before structured_outputs."""
    fields: dict[str, Any] = {
        "json": asked.guided_json,
        "regex": asked.guided_regex,
        "choice": None if asked.guided_choice is None else tuple(asked.guided_choice),
        "grammar": asked.guided_grammar,
    }
    is_given = any(value is not None for value in fields.values())
    return StructuredOutputsParams(**fields) if is_given else None


def _of_vllm(given: StructuredOutputs | None) -> StructuredOutputsParams | None:
    if given is None:
        return None
    fields: dict[str, Any] = {
        "json": given.json,
        "regex": given.regex,
        "choice": None if given.choice is None else tuple(given.choice),
        "grammar": given.grammar,
        "json_object": bool(given.json_object),
        "disable_any_whitespace": bool(given.disable_any_whitespace),
    }
    return StructuredOutputsParams(**fields)
