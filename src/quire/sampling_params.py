"""Define the parameters of a request, with vLLM's names and defaults."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError

_INFINITY = float("inf")

# Parameters whose defaults may come from a model's generation_config.json.
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The marks of the reasoning that may come before a structured output.

    With ``is_open`` the prompt ends inside the reasoning; without, the model may reason first or
    not. Reasoning is any text without special tokens and without an end. The structured output
    follows ``closes`` after up to eight blanks. A mark may be several tokens, with text between
    them. With a ``lead`` the structured output follows that text without blanks, after reasoning or
    without it.

    Raises: RequestError for an empty mark.
    """

    opens: str
    closes: str
    is_open: bool
    lead: str = ""

    def __post_init__(self) -> None:
        for name in ("opens", "closes"):
            mark = getattr(self, name)
            if not isinstance(mark, str) or not mark:
                raise RequestError(f"reasoning: {name}={mark!r} must be a text that is not empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The format of a structured output; exactly one of the first five fields is set.

    The output follows a JSON schema (``json``, as a dict or as text), is any JSON object
    (``json_object``), matches a regular expression as a whole, is one of several strings
    (``choice``), or follows a ``grammar`` in Lark's notation or GBNF. JSON may have one blank or
    line end between two of its tokens, and none with ``disable_any_whitespace``. With ``reasoning``
    the output begins where the reasoning ends.

    Raises: RequestError with the parameter, its value and its limit.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        forms = ("json", "json_object", "regex", "choice", "grammar")
        given = [name for name in forms if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs takes exactly one of {', '.join(forms)}, not "
                f"{' and '.join(given) or 'none'}"
            )
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and text):
                raise RequestError(f"{name}={text!r} must be a text that is not empty")
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.reasoning, Reasoning | None):
            raise RequestError(f"reasoning={self.reasoning!r} must be Reasoning, or None")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            if isinstance(self.choice, str) or not self.choice or not _are_strings(self.choice):
                raise RequestError(
                    f"choice={self.choice!r} must be several strings, none of them empty"
                )
            object.__setattr__(self, "choice", tuple(self.choice))

    @property
    def source(self) -> tuple[Literal["json", "regex", "choice", "grammar"], str]:
        """Return the kind of the format, and its text; a JSON object is of kind "json"."""
        if self.json is not None:
            return "json", str(self.json)
        if self.json_object:
            return "json", '{"type": "object"}'
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "choice", json.dumps(self.choice)
        return "grammar", str(self.grammar)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How to make an embedding of a prompt's last hidden state.

    ``dimensions`` keeps only the first dimensions, for models that were trained for that.
    ``normalize`` scales the embedding to length 1.

    Raises: RequestError with the parameter, its value and its limit.
    """

    dimensions: int | None = None
    normalize: bool = True

    def __post_init__(self) -> None:
        if self.dimensions is not None and not _is_int(self.dimensions, 1):
            raise RequestError(f"dimensions={self.dimensions!r} must be a whole number from 1 on")
        if not isinstance(self.normalize, bool):
            raise RequestError(f"normalize={self.normalize!r} must be True or False")

    def pooled(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """Make an embedding of a last hidden state f32[hidden size].

        Source: for the length, torch.nn.functional.normalize.
        """
        found = np.array(state[: self.dimensions])
        if self.normalize:
            found /= max(float(np.linalg.norm(found)), 1e-12)
        return found


LONGEST_RETENTION_S = 86_400.0  # a day
MAX_RETENTIONS = 4  # of one request, as Anthropic has it


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRetention:
    """Ask the prefix cache to keep a prompt's first ``num_tokens`` tokens for ``seconds``.

    Without ``num_tokens`` it is the whole prompt. It is a hint: running sequences need their room,
    and all that is kept so is a share of the cache.

    Raises: RequestError with the field, its value and its limit.
    """

    seconds: float = 300.0
    num_tokens: int | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.seconds, 0, LONGEST_RETENTION_S) and self.seconds > 0):
            raise RequestError(
                f"seconds={self.seconds!r} must be above 0 and at most {LONGEST_RETENTION_S:,.0f}"
            )
        if self.num_tokens is not None and not _is_int(self.num_tokens, 1):
            raise RequestError(
                f"num_tokens={self.num_tokens!r} must be a whole number of at least 1, or None"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample tokens, and when to end.

    ``n`` continuations share the prompt's blocks. ``temperature`` 0 is greedy. ``top_k`` 0 or -1
    and ``top_p`` 1 switch those filters off. ``presence_penalty`` and ``frequency_penalty`` count
    generated tokens, ``repetition_penalty`` those of the prompt too. ``logprobs`` and
    ``prompt_logprobs`` ask for that many of the likeliest tokens beside the sampled one, -1 for
    all. With a ``seed`` a request gives the same text in any batch. ``stop`` strings end the text
    and are not part of it, unless ``include_stop_str_in_output``; ``bad_words`` never appear. With
    ``allowed_token_ids`` no other token is sampled, not even one that would end the text. The text
    cannot end before ``min_tokens``. With the ``cache_hint`` "ends" the conversation ends with this
    request: what it alone has in the prefix cache may go first. A ``CacheRetention``, or several of
    parts of the prompt, ask that they be kept for a while.

    Raises: RequestError with the parameter, its value and its limit.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    cache_hint: Literal["ends"] | CacheRetention | tuple[CacheRetention, ...] | None = None

    def __post_init__(self) -> None:
        for name, (holds, limit) in self._limits().items():
            if not holds:
                raise RequestError(f"{name}={getattr(self, name)!r} must be {limit}")
        for name in ("stop", "bad_words"):  # a list, or one string
            given = getattr(self, name)
            several = (given,) if isinstance(given, str) else tuple(given)
            object.__setattr__(self, name, several)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))

    @property
    def retentions(self) -> tuple[CacheRetention, ...]:
        """What the prefix cache is asked to keep of the prompt."""
        hint = self.cache_hint
        if isinstance(hint, CacheRetention):
            return (hint,)
        return hint if isinstance(hint, tuple) else ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how it is pickled: a bias that cannot be changed cannot be pickled either."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.logit_bias is not None:
            given["logit_bias"] = dict(self.logit_bias)
        return _made_of, (given,)

    def _limits(self) -> dict[str, tuple[bool, str]]:
        """Return for each parameter whether it is within its limit, and the limit in words."""
        strings = "a string or several, none of them empty"
        count = "a whole number of 0 or more, -1 for all, or None"
        penalty = "a number from -2 to 2"
        return {
            "n": (_is_int(self.n, 1), "a whole number of at least 1"),
            "max_tokens": (_is_int(self.max_tokens, 1), "a whole number of at least 1"),
            "min_tokens": (
                _is_int(self.min_tokens, 0)
                and (not _is_int(self.max_tokens) or self.min_tokens <= self.max_tokens),
                f"a whole number from 0 to max_tokens={self.max_tokens}",
            ),
            "temperature": (_is_number(self.temperature, 0, _INFINITY), "a number of 0 or more"),
            "top_k": (_is_int(self.top_k, -1), "a whole number: 0 or -1 (off), or more"),
            "top_p": (_is_number(self.top_p, 0, 1) and self.top_p > 0, "above 0 and at most 1"),
            "min_p": (_is_number(self.min_p, 0, 1), "between 0 and 1"),
            "repetition_penalty": (
                _is_number(self.repetition_penalty, 1e-6, 1e6),  # else logits overflow
                "a number from 1e-6 to 1e6",
            ),
            "presence_penalty": (_is_number(self.presence_penalty, -2, 2), penalty),
            "frequency_penalty": (_is_number(self.frequency_penalty, -2, 2), penalty),
            "logit_bias": (_is_bias(self.logit_bias), "token ids with numbers from -100 to 100"),
            "logprobs": (self.logprobs is None or _is_int(self.logprobs, -1), count),
            "prompt_logprobs": (
                self.prompt_logprobs is None or _is_int(self.prompt_logprobs, -1),
                count,
            ),
            "seed": (self.seed is None or _is_int(self.seed), "a whole number, or None"),
            "stop": (_are_strings(self.stop), strings),
            "stop_token_ids": (_are_ids(self.stop_token_ids), "token ids"),
            "allowed_token_ids": (
                self.allowed_token_ids is None
                or (_are_ids(self.allowed_token_ids) and len(self.allowed_token_ids) > 0),
                "token ids, at least one, or None",
            ),
            "bad_words": (_are_strings(self.bad_words), strings),
            "structured_outputs": (
                isinstance(self.structured_outputs, StructuredOutputsParams | None),
                "StructuredOutputsParams, or None",
            ),
            "cache_hint": (
                self.cache_hint in ("ends", None) or _are_retentions(self.cache_hint),
                f'"ends", at most {MAX_RETENTIONS} CacheRetention, or None',
            ),
        }


def _are_retentions(given: Any) -> bool:
    several = given if isinstance(given, tuple) else (given,)
    return len(several) <= MAX_RETENTIONS and all(
        isinstance(each, CacheRetention) for each in several
    )


def _made_of(given: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search, with vLLM's names.

    A beam's score is the sum of its tokens' log-probabilities, divided by the number of its tokens
    to the power of ``length_penalty``: above 0 longer beams gain, and 0 gives the sum alone. ``n``
    of the ``beam_width`` best are returned, or all if it is None. ``early_stopping`` is as in
    Transformers: the search ends when no beam can become better than the finished ones ("never"),
    when none would be at its present length (False), or as soon as ``beam_width`` have ended
    (True).

    Raises: RequestError with the parameter, its value and its limit.
    """

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = "never"
    n: int | None = None

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not _is_int(value, 1):
                raise RequestError(f"{name}={value!r} must be a whole number of at least 1")
        if self.temperature != 0:
            raise RequestError(
                f"temperature={self.temperature!r} must be 0: a beam search does not sample"
            )
        penalty = self.length_penalty
        if not isinstance(penalty, int | float) or not math.isfinite(penalty):
            raise RequestError(f"length_penalty={penalty!r} must be a number")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise RequestError(
                f"early_stopping={self.early_stopping!r} must be True, False or 'never'"
            )
        if self.n is not None and not (_is_int(self.n, 1) and self.n <= self.beam_width):
            raise RequestError(f"n={self.n!r} must be from 1 to beam_width={self.beam_width}")

    @property
    def num_choices(self) -> int:
        return self.beam_width if self.n is None else self.n

    def sampling(self, eos_token_ids: Iterable[int], vocab_size: int) -> SamplingParams:
        """Return the parameters for the beams' sequences.

        They ask for so many of the likeliest tokens that ``beam_width`` beams go on, even if all
        tokens that end a text are among them.
        """
        num_ends = 0 if self.ignore_eos else len(list(eos_token_ids))
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            temperature=0,
            logprobs=min((1 + max(1, num_ends)) * self.beam_width, vocab_size),
            ignore_eos=self.ignore_eos,
        )


Params: TypeAlias = SamplingParams | PoolingParams | BeamSearchParams


def _schema(given: Any) -> str:
    """Return a JSON schema as text. Raises: RequestError."""
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        text = json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"json={str(given)[:60]!r} must be a JSON schema: {error}") from error
    if not isinstance(schema, Mapping):
        raise RequestError(f"json={str(given)[:60]!r} must be a JSON schema: an object")
    return text


def _is_int(value: Any, least: int | None = None) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and (least is None or value >= least)


def _is_number(value: Any, least: float, most: float) -> bool:
    """Return whether a value is a number in [least, most], and not infinity or NaN."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and least <= value <= most and value != _INFINITY


def _are_strings(value: Any) -> bool:
    several = [value] if isinstance(value, str) else value
    return isinstance(several, list | tuple) and all(
        isinstance(text, str) and bool(text) for text in several
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_int(item, 0) for item in value)


def _is_bias(value: Any) -> bool:
    return value is None or (
        isinstance(value, Mapping)
        and all(
            _is_int(token_id, 0) and _is_number(bias, -100, 100) for token_id, bias in value.items()
        )
    )
