"""What an error looks like to OpenAI's clients, and to Anthropic's."""

from typing import Literal

import msgspec


class Error(msgspec.Struct, kw_only=True):
    """``param`` is the field that is wrong; ``code``, a word for programs."""

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
