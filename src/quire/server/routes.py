"""One route: where it is, who may use it, and what it takes and gives.

The endpoint's signature says what it takes and gives: the body is read as the type that the OpenAPI
document describes, and the type checker checks the same.
"""

from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from types import UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

from starlette.types import ASGIApp

from quire.server.api_keys import Access
from quire.server.endpoints.answers import Json
from quire.server.request_context import RequestContext
from quire.server.schemas.request_fields import ModelRequest, Upload
from quire.server.wire.error_responses import Dialect
from quire.server.wire.streams import EventStream

# Called with the context, and with the body if it has a parameter for one.
Endpoint: TypeAlias = Callable[..., Awaitable[ASGIApp]]


@dataclass(frozen=True, slots=True)
class Operation:
    """A route. ``access``: which key it needs. ``media_type``: of answers that are not JSON."""

    path: str
    endpoint: Endpoint
    methods: tuple[str, ...]
    _: KW_ONLY
    dialect: Dialect = "openai"
    access: Access = "key"
    media_type: str | None = None
    queries: tuple[str, ...] = ()  # names in the query
    refuses: tuple[int, ...] = ()  # statuses besides those that ``errors`` derives

    @property
    def name(self) -> str:
        """Return the endpoint's name."""
        return self.endpoint.__name__

    @property
    def takes(self) -> type[ModelRequest] | None:
        """Return the type that the body is read as."""
        hints = get_type_hints(self.endpoint)
        kinds = [
            kind for name, kind in hints.items() if name != "return" and kind is not RequestContext
        ]
        return kinds[0] if kinds else None

    @property
    def is_form(self) -> bool:
        """Return whether the body is a form with a file in it, and not JSON."""
        return self.takes is not None and issubclass(self.takes, Upload)

    @property
    def gives(self) -> tuple[Any, ...]:
        """Return the types of its JSON answers."""
        return self._given(Json)

    @property
    def streams(self) -> tuple[Any, ...]:
        """Return the types of an event's data."""
        return self._given(EventStream)

    @property
    def errors(self) -> tuple[int, ...]:
        """Return the statuses with which it may refuse."""
        takes = self.takes
        names_model = "{" in self.path or "model" in getattr(takes, "__struct_fields__", ())
        found = {
            *self.refuses,
            *(() if self.access == "open" else (401, 403)),
            *((400, 408, 413, 415, 429, 500, 503) if takes else ()),
            *((501,) if self.is_form else ()),
            *((404,) if names_model else ()),
            *((400,) if self.queries else ()),
        }
        return tuple(sorted(found))

    def _given(self, way: type) -> tuple[Any, ...]:
        return tuple(
            each
            for kind in _members(get_type_hints(self.endpoint)["return"])
            if get_origin(kind) is way
            for each in _members(get_args(kind)[0])
        )


def _members(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
