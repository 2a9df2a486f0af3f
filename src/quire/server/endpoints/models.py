"""What is served, and how it is: models, version, health, metrics, and the document of it all."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version as version_of

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.server.endpoints.answers import Json, as_json
from quire.server.exchange import Exchange
from quire.server.guard.keys import Access
from quire.server.openapi import document
from quire.server.operations import Endpoint, Operation
from quire.server.schemas.models import ModelCard, ModelList, Version


async def models(exchange: Exchange) -> Json[ModelList]:
    """All names of the model that is served."""
    cards = [_card(exchange, name) for name in exchange.service.names]
    return as_json(exchange, ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))


async def model(exchange: Exchange) -> Json[ModelCard]:
    """One of them."""
    name: str = exchange.http.path_params["name"]
    exchange.service.refuse_unknown_model(name)
    return as_json(exchange, _card(exchange, name))


async def version(exchange: Exchange) -> Json[Version]:
    """Of Quire."""
    return as_json(exchange, Version(version=version_of("quire")))


async def health(exchange: Exchange) -> Response:
    """Nothing, if requests are served; 503 after the engine has failed, and while going down.

    Raises: Refused.
    """
    service = exchange.service
    service.refuse_without_engine()
    if service.gate.draining:
        raise service.gate.refused("draining")
    return Response(headers=exchange.headers)


async def metrics(exchange: Exchange) -> ASGIApp:
    """What Prometheus scrapes.

    Read without waiting for a step, and also after the engine has failed.
    """
    body, content_type = exchange.service.metrics.render()
    return Response(body, headers={**exchange.headers, "content-type": content_type})


def described(
    operations: Sequence[Operation], *, needs_key: Callable[[Access], bool], root_path: str
) -> Endpoint:
    """Of all of them, as they are when a client first asks."""

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(document(operations, needs_key=needs_key, root_path=root_path))

    async def openapi(exchange: Exchange) -> ASGIApp:
        """This document."""
        return Response(encoded(), media_type="application/json", headers=exchange.headers)

    return openapi


def _card(exchange: Exchange, name: str) -> ModelCard:
    service = exchange.service
    return ModelCard(
        id=name,
        display_name=name,
        created=service.created,
        created_at=datetime.fromtimestamp(service.created, UTC).isoformat(),
        owned_by="quire",
        root=service.llm.llm.name,
        max_model_len=service.max_model_len,
    )
