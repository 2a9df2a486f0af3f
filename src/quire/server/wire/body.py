"""A request's fields: JSON that has one meaning only, checked by a struct.

Python's own parser reads it, and not a faster one, because it can be told to refuse what two
readers may understand differently: a name twice in an object, NaN, numbers beyond a float.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from quire.server.schemas.request_fields import ModelRequest, Upload
from quire.server.wire.error_responses import Refused, invalid
from quire.units import format_count

T = TypeVar("T")
M = TypeVar("M", bound=ModelRequest)

_PLACE = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MOST_VALUES = 2**18  # of a body, counted by its marks
_MOST_IGNORED = 16  # names in one answer

# Other servers' fields that would change the text, and the value with which they would not.
UNSUPPORTED: Mapping[str, object] = MappingProxyType(
    {
        "audio": None,
        "chat_template": None,
        "documents": None,
        "echo": False,
        "function_call": None,
        "functions": None,
        "guided_whitespace_pattern": None,
        "length_penalty": 1.0,
        "logits_processors": None,
        "lora": None,
        "lora_path": None,
        "lora_request": None,
        "prompt_embeds": None,
        "structural_tag": None,
        "thinking_token_budget": None,
        "use_beam_search": False,
    }
)

NO_ADAPTERS = "a server has one set of weights: merge the adapter into them, and serve the result"
_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "echo": "only /v1/completions says the prompt again, leave it out",
        "function_call": "give tools, and tool_choice",
        "functions": "give tools, each with the type function",
        **dict.fromkeys(("lora", "lora_path", "lora_request"), NO_ADAPTERS),
    }
)


def parse(data: bytes, *, most_values: int = MOST_VALUES) -> dict[str, Any]:
    """Return a JSON object.

    Its values are counted before they are made, by the marks between them: sixteen megabytes of
    ``[],[],`` took the event loop fourteen seconds.

    Raises: Refused (400) saying what is wrong, and where.
    """
    num_marks = sum(map(data.count, (b",", b"[", b"{")))
    if num_marks > most_values:
        raise Refused(
            400,
            f"the body has {format_count(num_marks)} commas and brackets and may have "
            f"{format_count(most_values)}: send less at a time",
            code="too_many_values",
        )
    try:
        given = json.loads(
            data.decode(),  # UTF-8 only: json itself would accept five other encodings
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_number,
        )
        _refuse_half_characters(data, given)
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise Refused(
            400, f"the body is no valid Unicode, in UTF-8: {error.reason}", code="bad_json"
        ) from None
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {str(error)[:200]}", code="bad_json") from None
    if not isinstance(given, dict):
        raise Refused(400, "the body must be a JSON object, in braces", code="bad_json")
    return given


def typed_request(
    given: dict[str, Any],
    kind: type[M],
    names: Sequence[str],
    *,
    ignore: Callable[..., None] = lambda *_: None,
) -> M:
    """Return a body's fields as a request of its kind, which is all that an endpoint sees of it.

    ``names``: of the model that is served. ``ignore`` is told the names of fields that mean nothing
    here.

    Raises: Refused (400, or 404 for another model).
    """
    known = names_of(kind)
    asked = check(given, kind, strict=not issubclass(kind, Upload))
    refuse_unsupported(given, known)
    ignore(*ignored(given, known))
    asked.validate(names)
    return asked


def names_of(kind: type[T]) -> tuple[str, ...]:
    """Return the names of a struct's fields."""
    names: tuple[str, ...] = kind.__struct_encode_fields__  # type: ignore[attr-defined]
    return names


def check(given: dict[str, Any], kind: type[T], *, strict: bool = True) -> T:
    """Return the fields as a struct. Unless ``strict``, texts may stand for numbers, as in forms.
    Raises: Refused (400) naming the field and its limit.
    """
    try:
        return msgspec.convert(given, kind, strict=strict)
    except msgspec.ValidationError as error:
        message = str(error)
        place = _PLACE.search(message)
        param = place["path"].lstrip(".") if place else None
        if place:
            message = message[: place.start()]
        if not param and (missing := re.search(r"field `([^`]*)`", message)):
            param = missing[1]
        hint = _hint(given, param, names_of(kind))
        said = f"{param}: {message}{hint}" if param else f"{message}{hint}"
        raise invalid(param, said) from None
    except (RecursionError, OverflowError) as error:
        raise Refused(400, f"the body cannot be read: {error}") from None


def ignored(given: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the unknown names, as far as a header can have them."""
    unknown = [name for name in given if name not in known]
    return [name for name in unknown if _NAME.fullmatch(name)][:_MOST_IGNORED]


def refuse_unsupported(given: dict[str, Any], known: Sequence[str]) -> None:
    """Refuse fields that would change the text and cannot be honoured.

    ``known``: the fields of this kind of request. Raises: Refused.
    """
    for name, harmless in UNSUPPORTED.items():
        if name not in known and given.get(name) not in (None, harmless):
            instead = _INSTEAD.get(name, "leave it out")
            raise invalid(name, f"{name} is not supported: {instead}")


def _hint(given: dict[str, Any], param: str | None, known: Sequence[str]) -> str:
    """Return a hint at a misspelt field where a required one is missing."""
    if param is None or param in given:
        return ""
    near = get_close_matches(param, [name for name in given if name not in known], n=1)
    return f"; there is {near[0]!r}" if near else ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    given = dict(pairs)
    if len(given) < len(pairs):
        raise ValueError("an object has the same name twice")
    return given


def _refuse_half_characters(data: bytes, given: Any) -> None:
    """Refuse half of a surrogate pair: it is JSON, and no text that can be encoded. Raises:
    UnicodeEncodeError.
    """
    if b"\\ud" in data or b"\\uD" in data:
        json.dumps(given, ensure_ascii=False).encode()


def _number(text: str) -> float:
    """Return 16.0 as 16: JSON has one kind of number, and some clients write it so."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is beyond what a float can be")
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
