"""``GET /metrics``: what Prometheus scrapes."""

from starlette.responses import Response
from starlette.types import ASGIApp

from quire.server.exchange import Exchange


async def metrics(exchange: Exchange) -> ASGIApp:
    """What Prometheus scrapes.

    Read without waiting for a step, and also after the engine has failed.
    """
    body, content_type = exchange.service.metrics.render()
    return Response(body, headers={**exchange.headers, "content-type": content_type})
