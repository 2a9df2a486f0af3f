"""``GET /openapi.json``: what the server does, for programs."""

from collections.abc import Sequence
from functools import cache

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.server.exchange import Exchange
from quire.server.openapi import document
from quire.server.operations import Endpoint, Operation


def described(operations: Sequence[Operation], *, has_keys: bool) -> Endpoint:
    """Of all of them, as they are when somebody asks for the first time."""

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(document(operations, has_keys=has_keys))

    async def openapi(exchange: Exchange) -> ASGIApp:
        """This document."""
        return Response(encoded(), media_type="application/json", headers=exchange.headers)

    return openapi
