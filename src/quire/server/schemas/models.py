"""``/v1/models`` and ``/version``."""

from typing import Literal

import msgspec
from msgspec import field


class ModelCard(msgspec.Struct, kw_only=True):
    """One name of the model that is served; ``root`` is what was loaded."""

    id: str
    kind: Literal["model"] = field(default="model", name="object")
    created: int  # when this server began, in seconds since 1970
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    kind: Literal["list"] = field(default="list", name="object")
    data: list[ModelCard]


class Version(msgspec.Struct, kw_only=True):
    version: str
