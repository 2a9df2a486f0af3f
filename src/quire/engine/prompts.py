"""From what a caller gives to requests: text or token ids, one prompt or several.

Everything about a prompt is checked here, but for its length, which the scheduler knows.
"""

import operator
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from quire.engine.params import SamplingParams
from quire.errors import RequestError
from quire.units import format_count

# Of an encoder-decoder also a mapping: see ``source_prompts``.
Prompt: TypeAlias = str | list[int] | Mapping[str, Any]


def split(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """Several prompts, though it may be one. Raises: RequestError for what is neither."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, list | tuple) and prompts and _token_id(prompts[0]) is not None:
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise _wrong_kind(prompts)
    return list(prompts)


def encode(prompt: object, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """A prompt's token ids. Raises: RequestError."""
    if isinstance(prompt, str):
        given = _tokenize(prompt, tokenizer)
    elif isinstance(prompt, list | tuple):
        given = list(prompt)
    else:
        raise _wrong_kind(prompt)
    if not given:
        raise RequestError("the prompt is empty: give at least one token")
    token_ids = [_token_id(item) for item in given]
    for item, token_id in zip(given, token_ids, strict=True):
        if token_id is None or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"token id {item!r} is not in the vocabulary: give whole numbers from 0 to "
                f"{format_count(vocab_size - 1)}"
            )
    return tuple(token_id for token_id in token_ids if token_id is not None)


def _tokenize(text: str, tokenizer: Any) -> list[int]:
    if tokenizer is None:
        raise RequestError("this model has no tokenizer: give the prompt as token ids")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is not valid text: {error}") from error
    token_ids: list[int] = tokenizer(text)["input_ids"]
    return token_ids


def _token_id(item: Any) -> int | None:
    """A whole number of any library as Python's own; None for anything else."""
    if isinstance(item, bool):
        return None
    try:
        return operator.index(item)
    except TypeError:
        return None


def _wrong_kind(prompt: object) -> RequestError:
    return RequestError(
        f"a prompt is text or a list of token ids, and several are a list of those; "
        f"this is {type(prompt).__name__}: {str(prompt)[:60]!r}"
    )


def params_for_each(
    params: SamplingParams | Iterable[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """What was given for all prompts, or for each. Raises: RequestError."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    several = list(params) if isinstance(params, Iterable) else [params]
    for own in several:
        if not isinstance(own, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(own).__name__}")
    if len(several) != num_prompts:
        raise RequestError(
            f"{len(several)} params for {num_prompts} prompts: give one, or one each"
        )
    return several
