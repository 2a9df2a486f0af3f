"""``GET /v1/models``, ``/version``, ``/health``: what is served, and whether it is."""

from importlib.metadata import version as version_of

from starlette.responses import Response

from quire.server.endpoints.answers import Json, as_json
from quire.server.exchange import Exchange
from quire.server.schemas.models import ModelCard, ModelList, Version


async def models(exchange: Exchange) -> Json[ModelList]:
    """All names of the model that is served."""
    names = exchange.service.names
    return as_json(exchange, ModelList(data=[_card(exchange, name) for name in names]))


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
    if service.draining:
        raise service.gate.refused("draining")
    return Response(headers=exchange.headers)


def _card(exchange: Exchange, name: str) -> ModelCard:
    service = exchange.service
    return ModelCard(
        id=name,
        created=service.created,
        owned_by="quire",
        root=service.llm.llm.name,
        max_model_len=service.max_model_len,
    )
