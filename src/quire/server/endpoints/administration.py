"""What an operator does with a server that runs, and asks of it; paths and names are vLLM's."""

from starlette.responses import Response

from quire.server.endpoints.answers import Json, as_json
from quire.server.exchange import Exchange
from quire.server.schemas.models import Load, Sleeping
from quire.server.wire.errors import Refused
from quire.server.wire.streams import while_connected


async def reset_prefix_cache(exchange: Exchange) -> Response:
    """Forget what is kept for later prompts; with reset_running_requests=true, while some run."""
    running = exchange.one_of("reset_running_requests", ("false", "true")) == "true"
    if not await exchange.service.llm.reset_prefix_cache(reset_running_requests=running):
        raise Refused(
            409,
            "sequences hold what is cached: wait for their ends, or let them compute it again "
            "(reset_running_requests=true)",
            param="reset_running_requests",
        )
    return Response(headers=exchange.headers)


async def sleep(exchange: Exchange) -> Response:
    """Give memory back: of the cache (level=1), of the model too (level=2).

    Requests that run end first, by themselves (mode=wait) or at once (mode=abort); no other one is
    let in. A client that leaves meanwhile has changed nothing.
    """
    level = exchange.number("level", 1, 1, 2)
    aborts = exchange.one_of("mode", ("wait", "abort")) == "abort"
    service = exchange.service
    service.refuse_without_engine()
    async with service.falling_asleep(level, aborts=aborts):
        await while_connected(exchange.http.receive, service.idle())
    return Response(headers=exchange.headers)


async def wake_up(exchange: Exchange) -> Response:
    """Let requests in again, with the memory that it takes. The model is read again if it must."""
    exchange.service.refuse_without_engine()
    await exchange.service.wake_up()
    return Response(headers=exchange.headers)


async def is_sleeping(exchange: Exchange) -> Json[Sleeping]:
    """Whether requests are refused since the server sleeps."""
    return as_json(exchange, Sleeping(is_sleeping=exchange.service.llm.llm.is_sleeping))


async def load(exchange: Exchange) -> Json[Load]:
    """How many requests are under way."""
    return as_json(exchange, Load(server_load=exchange.service.gate.num_under_way))
