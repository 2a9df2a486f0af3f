"""The server as an ASGI app: every route, and who may use it.

``route_handler.py`` has what all routes have in common.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.config import ServerConfig
from quire.server.dashboard.feed import Feed
from quire.server.dashboard.frames import FEED
from quire.server.dashboard.page_routes import FILES, memory_feed, page_file
from quire.server.endpoints.administration import (
    described,
    health,
    is_sleeping,
    load,
    metrics,
    model,
    models,
    reset_prefix_cache,
    sleep,
    tiers,
    trust_tiers,
    version,
    wake_up,
)
from quire.server.endpoints.anthropic_messages import count_tokens, messages
from quire.server.endpoints.chat_completions import chat_completions
from quire.server.endpoints.completions import completions
from quire.server.endpoints.embeddings import embeddings, score
from quire.server.endpoints.kept_responses import cancel, delete, input_items, response
from quire.server.endpoints.render import render_chat, render_completion
from quire.server.endpoints.responses import responses
from quire.server.endpoints.tokens import detokenize, tokenize, tokenizer_info
from quire.server.endpoints.transcriptions import transcriptions, translations
from quire.server.metrics.family import MetricSource
from quire.server.route_handler import RouteHandler, as_answer
from quire.server.routes import Operation
from quire.server.served_engine import ServedEngine
from quire.server.service import Service
from quire.server.wire.body import NO_ADAPTERS
from quire.server.wire.error_responses import Refused

_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # vLLM's


def make_app(
    engine: ServedEngine,
    config: ServerConfig,
    *,
    operations: Sequence[Operation] = (),
    figures: Sequence[MetricSource] = (),
) -> Starlette:
    """Return an app with all routes over one engine, which its owner closes.

    All routes share ``app.state.service``. ``operations`` are further routes, and ``figures``
    further metrics in ``/metrics``.
    """
    service = Service(engine, config, figures)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.close()

    middleware = []
    if config.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=("x-request-id", "retry-after"),
            )
        )
    app = Starlette(
        routes=[
            Route(each.path, RouteHandler(service, each), methods=list(each.methods))
            for each in _operations(service, operations)
        ],
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={404: _not_found, 405: _not_allowed},
    )
    app.state.service = service
    return app


def _operations(service: Service, more: Sequence[Operation]) -> list[Operation]:
    get, post = ("GET",), ("POST",)
    # What is asked of an engine, where it is elsewhere.
    lacks = () if service.engine.administration is not None else (501,)
    feed = Feed(service.engine, chats=bool(service.chat.template.source))
    all_of_them = [
        Operation("/v1/completions", completions, post),
        Operation("/v1/completions/render", render_completion, post),
        Operation("/v1/chat/completions", chat_completions, post),
        Operation("/v1/chat/completions/render", render_chat, post),
        Operation("/v1/embeddings", embeddings, post),
        Operation("/v1/score", score, post),
        Operation("/v1/audio/transcriptions", transcriptions, post, media_type="text/plain"),
        Operation("/v1/audio/translations", translations, post, media_type="text/plain"),
        Operation("/v1/messages", messages, post, dialect="anthropic"),
        Operation("/v1/messages/count_tokens", count_tokens, post, dialect="anthropic"),
        Operation("/v1/responses", responses, post),
        Operation("/v1/responses/{name}", response, get, queries=("stream", "starting_after")),
        Operation("/v1/responses/{name}", delete, ("DELETE",)),
        Operation("/v1/responses/{name}/cancel", cancel, post, refuses=(400,)),
        Operation(
            "/v1/responses/{name}/input_items",
            input_items,
            get,
            queries=("limit", "order", "after"),
        ),
        Operation("/v1/models", models, get),
        Operation("/v1/models/{name:path}", model, get, refuses=(404,)),
        Operation("/tokenize", tokenize, post),
        Operation("/detokenize", detokenize, post),
        Operation("/tokenizer_info", tokenizer_info, get, refuses=(404,)),
        Operation("/version", version, get),
        Operation(
            "/metrics",
            metrics,
            get,
            access="open" if service.config.unguarded_metrics else "all",
            media_type="text/plain",
        ),
        Operation(
            "/reset_prefix_cache",
            reset_prefix_cache,
            post,
            access="admin",
            queries=("reset_running_requests", "reset_external"),
            refuses=(409, 503, *lacks),
        ),
        Operation("/tiers", tiers, get, access="admin", refuses=lacks),
        Operation(
            "/tiers/trust",
            trust_tiers,
            post,
            access="admin",
            queries=("tier",),
            refuses=(404, *lacks),
        ),
        Operation(
            "/sleep",
            sleep,
            post,
            access="admin",
            queries=("level", "mode"),
            refuses=(503, *lacks),
        ),
        Operation("/wake_up", wake_up, post, access="admin", refuses=(503, *lacks)),
        Operation("/is_sleeping", is_sleeping, get, access="admin", refuses=lacks),
        Operation("/load", load, get, access="admin"),
        Operation("/health", health, get, access="open", refuses=(503,)),
        Operation("/ping", health, ("GET", "POST"), access="open", refuses=(503,)),
        Operation(FEED, memory_feed(feed), get, media_type="text/event-stream", refuses=lacks),
        *(
            Operation(path, page_file(path), get, access="open", media_type=media_type)
            for path, (_, media_type) in FILES.items()
        ),
        *more,
    ]
    openapi = described(
        all_of_them, needs_key=service.keys.need, root_path=service.config.root_path
    )
    all_of_them.append(Operation("/openapi.json", openapi, get, media_type="application/json"))
    return all_of_them


async def _not_found(request: Request, _: Exception) -> Response:
    path = request.url.path[:200]
    why = f": {NO_ADAPTERS}" if path in _ADAPTERS else ""
    return as_answer(Refused(404, f"there is nothing at {path!r}{why}"), "openai", {})


async def _not_allowed(request: Request, error: Exception) -> Response:
    method, path = request.method[:20], request.url.path[:200]
    headers = error.headers if isinstance(error, HTTPException) else None  # what is allowed
    refused = Refused(405, f"{method!r} is not allowed at {path!r}")
    return as_answer(refused, "openai", dict(headers or {}))
