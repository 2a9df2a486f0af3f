"""Prompts of a caller: text or token ids, one or several, checked apart from their length."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.units import format_count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShownPrompt:
    """A prompt whose images have been read before."""

    token_ids: tuple[int, ...]
    images: object  # what ``Vision.read`` has returned


# A mapping is a prompt of an encoder-decoder (see ``source_prompts``), or it has images or videos:
# {"prompt": text, "multi_modal_data": {"image": one or several}}, as vLLM spells it.
Prompt: TypeAlias = str | list[int] | Mapping[str, Any] | ShownPrompt
_IMAGES = "multi_modal_data"


def split(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """Return one prompt or several as a list. Raises: RequestError for anything else."""
    if isinstance(prompts, str | Mapping | ShownPrompt):
        return [prompts]
    if isinstance(prompts, list | tuple) and prompts and _token_id(prompts[0]) is not None:
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise _wrong_kind(prompts)
    return list(prompts)


def with_images(prompt: object) -> tuple[object, list[Any], list[Any]]:
    """Return a prompt's text or token ids, its images and its videos. Raises: RequestError."""
    if not isinstance(prompt, Mapping):
        return prompt, [], []
    known = {"prompt", "prompt_token_ids", _IMAGES}
    unknown = sorted(str(name) for name in prompt.keys() - known)
    texts = [
        prompt[name] for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None
    ]
    if unknown or len(texts) != 1:
        raise RequestError(
            f"a prompt is text or a list of token ids, or has one of them as 'prompt' or "
            f"'prompt_token_ids' and images as {_IMAGES!r}; this one has "
            f"{sorted(map(str, prompt)) or 'nothing'}"
        )
    data = prompt.get(_IMAGES)
    if data is None:
        return texts[0], [], []
    if isinstance(data, Mapping) and data.get("audio") is not None:
        raise RequestError(f"{_IMAGES} has 'audio', and no model is given recordings in a prompt")
    if not isinstance(data, Mapping) or data.keys() - {"image", "video", "audio"}:
        said = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise RequestError(
            f"{_IMAGES} has 'image' and 'video', one or a list of them; this one: {said}"
        )
    images, videos = data.get("image"), data.get("video")
    several = list(images) if isinstance(images, list | tuple) else [images]
    return texts[0], [] if images is None else several, _videos(videos)


def _videos(given: Any) -> list[Any]:
    """Return one video or several as a list: an array of frames is one, and so is a list of images.

    A pair is a video with its metadata.
    """
    if given is None:
        return []
    is_pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)
    if is_pair or not isinstance(given, list | tuple) or not given:
        return [] if isinstance(given, list | tuple) and not given else [given]
    first = given[0]
    is_frame = hasattr(first, "convert") or getattr(first, "ndim", 0) == 3
    return [[*given]] if is_frame else [*given]


def encode(prompt: object, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """Return a prompt's token ids. Raises: RequestError."""
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
    """Return a whole number of any library as Python's own; None for anything else."""
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
    """Return the params of each prompt, given one for all or one each. Raises: RequestError."""
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


def bad_word_ids(
    words: tuple[str, ...], tokenizer: Any, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, at the beginning of a text and, as in vLLM, after a space.

    The second form counts where it has another first token and as many tokens.

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
    """Refuse token ids that the model does not have. Raises: RequestError."""
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise RequestError(
                f"{name}: token id {token_id} is not in the vocabulary: it ends at "
                f"{format_count(vocab_size - 1)}"
            )


def _encoded(text: str, tokenizer: Any) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
