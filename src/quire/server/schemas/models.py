"""What is served, and how it is: ``/v1/models``, ``/version``, ``/is_sleeping``, ``/load``."""

from typing import Literal

import msgspec
from msgspec import field


class ModelCard(msgspec.Struct, kw_only=True):
    """One name of the model that is served; ``root`` is what was loaded.

    It has what OpenAI's clients read, and what Anthropic's do: their fields do not meet.
    """

    id: str
    type: Literal["model"] = "model"  # Anthropic's word for ``object``
    display_name: str
    created_at: str  # ``created`` as RFC 3339 has it
    kind: Literal["model"] = field(default="model", name="object")
    created: int  # when this server began, in seconds since 1970
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    kind: Literal["list"] = field(default="list", name="object")
    data: list[ModelCard]
    has_more: bool = False
    first_id: str
    last_id: str


class Version(msgspec.Struct, kw_only=True):
    version: str


class Sleeping(msgspec.Struct, kw_only=True):
    is_sleeping: bool


class Load(msgspec.Struct, kw_only=True):
    server_load: int
