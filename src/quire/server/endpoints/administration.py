"""Models, version, health, metrics, the OpenAPI document; sleep and what else an
operator asks for.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Literal

import msgspec
from msgspec import field
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.errors import RequestError
from quire.kv.prefix_index import Medium
from quire.server.api_keys import Access
from quire.server.endpoints.answers import Json, as_json
from quire.server.openapi import document
from quire.server.request_context import RequestContext
from quire.server.routes import Endpoint, Operation
from quire.server.schemas.request_fields import refuse_unknown_model
from quire.server.wire.error_responses import Refused
from quire.server.wire.streams import while_connected
from quire.tiers import TierError
from quire.version import VERSION

# -- requests and answers --------------------------------------------------------------------------


class ModelCard(msgspec.Struct, kw_only=True):
    """One name of the served model; ``root`` is what was loaded.

    It has the fields that OpenAI's clients read, and those that Anthropic's do.
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


class ServerLoad(msgspec.Struct, kw_only=True):
    server_load: int


class TierStatus(msgspec.Struct, kw_only=True):
    """One tier, the fields of ``TierReport`` that an operator acts on."""

    name: str
    medium: Medium
    state: Literal["ok", "suspect", "broken"]
    is_shared: bool
    is_persistent: bool
    num_records: int | None  # None, here and below: the tier does not say
    used_bytes: int | None
    capacity_bytes: int | None
    hit_tokens: int
    num_loaded: int
    num_stored: int
    num_dropped: int
    num_errors: dict[str, int]  # by call
    num_bad: dict[str, int]  # by reason


class TierList(msgspec.Struct, kw_only=True):
    kind: Literal["list"] = field(default="list", name="object")
    data: list[TierStatus]
    why_off: str | None  # they are used no longer


# -- models ----------------------------------------------------------------------------------------


async def models(context: RequestContext) -> Json[ModelList]:
    """Return all names of the served model."""
    cards = [_card(context, name) for name in context.service.names]
    return as_json(context, ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))


async def model(context: RequestContext) -> Json[ModelCard]:
    """Return one name of the served model."""
    name: str = context.http.path_params["name"]
    refuse_unknown_model(name, context.service.names)
    return as_json(context, _card(context, name))


async def version(context: RequestContext) -> Json[Version]:
    """Return Quire's version."""
    return as_json(context, Version(version=VERSION))


async def health(context: RequestContext) -> Response:
    """Return 200 while requests are served; 503 once the engine has failed or the server stops.

    Raises: Refused.
    """
    service = context.service
    service.refuse_without_engine()
    if service.admission.draining:
        raise service.admission.refused("draining")
    return Response(headers=context.headers)


async def metrics(context: RequestContext) -> ASGIApp:
    """Return Prometheus' metrics.

    They are read without waiting for a step, and also after the engine has failed.
    """
    body, content_type = await context.service.metrics.scrape()
    return Response(body, headers={**context.headers, "content-type": content_type})


def described(
    operations: Sequence[Operation], *, needs_key: Callable[[Access], bool], root_path: str
) -> Endpoint:
    """Return the endpoint of the OpenAPI document, which is made when a client first asks."""

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(document(operations, needs_key=needs_key, root_path=root_path))

    async def openapi(context: RequestContext) -> ASGIApp:
        """Return this document."""
        return Response(encoded(), media_type="application/json", headers=context.headers)

    return openapi


def _card(context: RequestContext, name: str) -> ModelCard:
    service = context.service
    return ModelCard(
        id=name,
        display_name=name,
        created=service.created,
        created_at=datetime.fromtimestamp(service.created, UTC).isoformat(),
        owned_by="quire",
        root=service.engine.facts.name,
        max_model_len=service.max_model_len,
    )


# -- administration --------------------------------------------------------------------------------


async def reset_prefix_cache(context: RequestContext) -> Response:
    """Forget cached prefixes; with reset_external=true, what tiers have of this model, too.

    With reset_running_requests=true also while some requests run, which compute them again.

    Raises: Refused (409) while sequences hold them, (400) where tiers cannot forget, (503) where
    one has not.
    """
    running = context.one_of("reset_running_requests", ("false", "true")) == "true"
    external = context.one_of("reset_external", ("false", "true")) == "true"
    engine = context.service.administration
    if external:
        try:
            engine.check_reset_external()
        except RequestError as error:
            raise Refused(400, str(error), param="reset_external") from None
    try:
        done = await engine.reset_prefix_cache(running, external)
    except TierError as error:
        raise Refused(503, str(error), param="reset_external") from None
    if not done:
        raise Refused(
            409,
            "sequences hold what is cached: wait for their ends, or let them compute it again "
            "(reset_running_requests=true)",
            param="reset_running_requests",
        )
    return Response(headers=context.headers)


async def sleep(context: RequestContext) -> Response:
    """Give the cache's memory back (level=1), and the model's too (level=2).

    Requests that run end first, by themselves (mode=wait) or at once (mode=abort), and no other one
    is let in. If the client leaves meanwhile nothing has changed.
    """
    level = context.number("level", 1, 1, 2)
    aborts = context.one_of("mode", ("wait", "abort")) == "abort"
    service = context.service
    service.refuse_without_engine()
    async with service.falling_asleep(level, aborts=aborts):
        await while_connected(context.http.receive, service.idle())
    return Response(headers=context.headers)


async def wake_up(context: RequestContext) -> Response:
    """Let requests in again, with the memory that they need; read the model again if needed."""
    context.service.refuse_without_engine()
    await context.service.wake_up()
    return Response(headers=context.headers)


async def is_sleeping(context: RequestContext) -> Json[Sleeping]:
    """Return whether the server sleeps and refuses requests."""
    return as_json(context, Sleeping(is_sleeping=context.service.administration.is_sleeping))


async def tiers(context: RequestContext) -> Json[TierList]:
    """Return what each tier holds and has done, the nearest first."""
    return as_json(context, _tiers(context))


async def trust_tiers(context: RequestContext) -> Json[TierList]:
    """Load from tiers again that gave bad records: from each, or from tier=NAME.

    Raises: Refused (404) without tiers, and for a name that none of them has.
    """
    name = context.http.query_params.get("tier")
    try:
        context.service.administration.trust_tiers(name)
    except RequestError as error:
        raise Refused(404, str(error), param="tier") from None
    return as_json(context, _tiers(context))


def _tiers(context: RequestContext) -> TierList:
    report = context.service.administration.tiers
    if report is None:
        return TierList(data=[], why_off=None)
    several = [
        TierStatus(
            name=tier.name,
            medium=tier.medium,
            state=tier.state,
            is_shared=tier.is_shared,
            is_persistent=tier.is_persistent,
            num_records=tier.num_records,
            used_bytes=tier.used_bytes,
            capacity_bytes=tier.capacity_bytes,
            hit_tokens=tier.hit_tokens,
            num_loaded=tier.num_loaded,
            num_stored=tier.num_stored,
            num_dropped=tier.num_dropped,
            num_errors=dict(tier.num_errors),
            num_bad=dict(tier.num_bad),
        )
        for tier in report.tiers
    ]
    return TierList(data=several, why_off=report.why_off)


async def load(context: RequestContext) -> Json[ServerLoad]:
    """Return how many requests are under way."""
    return as_json(context, ServerLoad(server_load=context.service.admission.num_under_way))
