"""From what a caller gives to requests: text or token ids, one prompt or several.

Everything about a prompt is checked here, but for its length, which the scheduler knows.
"""

import operator
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.units import format_count

# -- prompts ---------------------------------------------------------------------------------------


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


# -- vocabulary ------------------------------------------------------------------------------------

# What a request's parameters name, in tokens: words that it bars, ids that it favours.


def bad_word_ids(
    words: tuple[str, ...], tokenizer: Any, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Each word as the tokenizer writes it at the beginning of a text and, as vLLM does, after a
    space, where that makes another first token and no more of them.

    Raises: RequestError for a word without tokens.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = _encoded(word.lstrip(), tokenizer)
        spaced = _encoded(" " + word.lstrip(), tokenizer)
        if not bare:
            raise RequestError(f"bad_words: {word!r} has no tokens of its own")
        found.append(bare)
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            found.append(spaced)
    for own in found:
        refuse_unknown_ids(own, vocab_size, "bad_words")
    return tuple(found)


def refuse_unknown_ids(token_ids: Iterable[int], vocab_size: int, name: str) -> None:
    """Raises: RequestError for a token id that the model does not have."""
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise RequestError(
                f"{name}: token id {token_id} is not in the vocabulary: it ends at "
                f"{format_count(vocab_size - 1)}"
            )


def _encoded(text: str, tokenizer: Any) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
