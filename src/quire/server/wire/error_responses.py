"""What a client is told when something does not work, in the form that it knows.

400  the request is wrong, or can never fit    415  the body is packed, or of another kind
401  no key, or an unknown one                 429  this key has too many requests under way
403  a foreign web page                        500  the engine could not compute it
404  an unknown path or model                  501  no package or no engine here for it
408  the body has not come in time             503  no room in the queue, asleep, or going down
409  not while sequences run
413  the body is too long
"""

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec

from quire.engine.sequence import Fault
from quire.errors import QuireError, RequestError, RequestTooLong

# -- requests and answers --------------------------------------------------------------------------


class Error(msgspec.Struct, kw_only=True):
    """What is wrong. ``param`` is the field; ``code``, a word for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """What is wrong, and what to do about it."""

    error: Error


class AnthropicError(msgspec.Struct, kw_only=True):
    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct, kw_only=True):
    """What is wrong, and what to do about it."""

    type: Literal["error"] = "error"
    error: AnthropicError


# -- errors ----------------------------------------------------------------------------------------


Dialect: TypeAlias = Literal["openai", "anthropic"]

_MOST_SAID = 600  # characters

_OPENAI_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
        500: "server_error",
        501: "server_error",
        503: "overloaded_error",
    }
)
_ANTHROPIC_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
    }
)


class Refused(QuireError):
    """A refusal: its status, and what the client can do about it.

    ``param`` is the wrong field; ``code``, a word for programs; ``retry_after_s``, seconds after
    which it is worth asking again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, _shortened(message)
        self.param, self.code, self.retry_after_s = param, code, retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the answer."""
        if self.status == 408:  # the rest of the body may still come
            return {"connection": "close"}
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}

    def body(self, dialect: Dialect) -> ErrorAnswer | AnthropicErrorAnswer:
        """Return the answer, which is sent as JSON."""
        if dialect == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            return AnthropicErrorAnswer(error=AnthropicError(type=kind, message=self.message))
        return ErrorAnswer(
            error=Error(
                message=self.message,
                type=_OPENAI_TYPES.get(self.status, "invalid_request_error"),
                param=self.param,
                code=self.code or HTTPStatus(self.status).phrase.lower().replace(" ", "_"),
            )
        )


def elsewhere(what: str) -> Refused:
    """Return the refusal (501) of what needs an engine in this process, said in ``what``."""
    return Refused(
        501,
        f"{what}, and this process has none of its own: its engines are elsewhere, ask them",
        code="no_engine_here",
    )


def invalid(param: str | None, message: str) -> Refused:
    """Return the refusal (400) of a field's value."""
    return Refused(400, message, param=param)


def _shortened(message: str) -> str:
    """Shorten a message: it may quote what was sent, which may be long."""
    left_out = len(message) - _MOST_SAID
    if left_out <= 0:
        return message
    return f"{message[: _MOST_SAID // 2]} … {message[-_MOST_SAID // 2 :]}"


def refusal(error: Exception) -> Refused:
    """Return what a client is told of an error. Of other code's errors it says no text."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, RequestTooLong):
        return Refused(400, str(error), code="context_length_exceeded")
    if isinstance(error, RequestError):
        return Refused(400, str(error))
    if isinstance(error, QuireError):
        return Refused(503, str(error), code="engine_unavailable")
    return Refused(500, "the server could not do this; its log says why", code="internal_error")


def broken_off(detail: str, fault: Fault) -> Refused:
    """Return the refusal for a sequence that the engine could not continue."""
    if fault == "request":
        return Refused(400, detail, code="no_token_allowed")
    return Refused(500, detail or "the engine could not compute this", code="engine_error")
