"""From a request's fields to ``SamplingParams``: defaults, the server's own bounds, forms."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.params import SAMPLING_DEFAULTS, SamplingParams, StructuredOutputsParams
from quire.errors import ConfigError
from quire.server.chat.json_schemas import closed
from quire.server.schemas.fields import ResponseFormat, Sampling, StructuredOutputs
from quire.server.wire.errors import Refused

MAX_BIASES = 1024

# Fields that mean the same in both, so that what is not null is taken as it is.
_SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop_token_ids", "bad_words", "include_stop_str_in_output"),
    *("skip_special_tokens", "ignore_eos", "min_tokens"),
)


def sampling_defaults(generation_config: str, *, own: Mapping[str, float]) -> dict[str, float]:
    """For what requests leave open: ``own`` (auto), nothing (vllm), or what a folder's file says.

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
    """``defaults`` are for what the request leaves open; ``form`` is another source of one.

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
    )


def _refuse_too_many(name: str, count: int | None, most: int) -> None:
    if count is None or most < 0 or 0 <= count <= most:
        return
    raise Refused(400, f"{name}={count} must be from 0 to {most} (max_logprobs)", param=name)


def _biases(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    if len(given) > MAX_BIASES:
        raise Refused(
            400,
            f"logit_bias has {len(given):,} entries and may have {MAX_BIASES:,}",
            param="logit_bias",
        )
    wrong = [name for name in given if not (name.isascii() and name.isdigit() and len(name) < 10)]
    if wrong:
        raise Refused(400, f"logit_bias: {wrong[0][:40]!r} is no token id", param="logit_bias")
    return {int(name): bias for name, bias in given.items()}


def _form(asked: Sampling, other: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
    """The one form that the text must have. Raises: Refused if there are several."""
    several = (
        _of_format(asked.response_format),
        _of_vllm(asked.structured_outputs),
        _of_older(asked),
        other,
    )
    forms = [form for form in several if form is not None]
    if len(forms) > 1:
        raise Refused(
            400,
            "response_format, structured_outputs, guided_… and a tool_choice that prescribes a "
            "call exclude each other: give one of them",
            param="response_format",
        )
    return forms[0] if forms else None


def _of_format(given: ResponseFormat | None) -> StructuredOutputsParams | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if given.json_schema is None or given.json_schema.schema is None:
        raise Refused(
            400,
            "response_format: type json_schema needs json_schema.schema",
            param="response_format",
        )
    schema = given.json_schema.schema
    return StructuredOutputsParams(json=closed(schema) if given.json_schema.strict else schema)


def _of_older(asked: Sampling) -> StructuredOutputsParams | None:
    """vLLM's names from before there was structured_outputs."""
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
