"""One route's way in and out: who may come, what errors become, and what is counted.

A route is guarded unless it says otherwise, at the place where it is entered, so that no spelling
of a path leads around the guard.
"""

import logging
import re
from contextlib import ExitStack
from typing import final
from uuid import uuid4

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.server.api_keys import UNKNOWN, Caller
from quire.server.logs import place_of
from quire.server.metrics.family import REJECTIONS
from quire.server.request_context import RequestContext
from quire.server.routes import Operation
from quire.server.service import Service
from quire.server.wire.error_responses import Dialect, Refused, refusal
from quire.server.wire.streams import ClientGone

log = logging.getLogger(__name__)

_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@final
class RouteHandler:
    """An operation as an ASGI app."""

    def __init__(self, service: Service, operation: Operation) -> None:
        self._service, self.operation = service, operation
        self._path, self._takes = operation.path, operation.takes
        service.metrics.know(self._path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        sending = _CountedAnswer(self._service, self._path, http.method, send)
        own = uuid4().hex
        headers = self._names(http.headers, own)
        with ExitStack() as stack:
            try:
                with ExitStack() as door:
                    exchange = RequestContext(
                        http, self._service, self._enter(http, door), stack, door, own, headers
                    )
                    body = () if self._takes is None else (await exchange.read(self._takes),)
                    answer = await self.operation.endpoint(exchange, *body)
            except (ClientDisconnect, ClientGone):
                return
            except Exception as error:
                answer = self._refusal(error, headers)
            try:
                await answer(scope, receive, sending)
            except ClientGone:
                return

    def _enter(self, http: Request, door: ExitStack) -> Caller:
        """Who asks. Raises: Refused for an unknown key, a foreign page, or want of room."""
        caller, access = UNKNOWN, self.operation.access
        if access != "open":
            caller = self._service.keys.caller(http.headers, access)
            self._service.origins.check(http.headers)
        if self._takes is not None:
            door.enter_context(self._service.gate.arrive(caller))
        return caller

    def _names(self, headers: Headers, own: str) -> dict[str, str]:
        """What the client finds its answer by: its own name for it if it has said one.

        Nothing here is found by it.
        """
        theirs = headers.get("x-request-id", "")
        name = theirs if _SAFE_ID.fullmatch(theirs) else own
        also = {"request-id": name} if self.operation.dialect == "anthropic" else {}
        return {"x-request-id": name, **also}

    def _refusal(self, error: Exception, headers: dict[str, str]) -> Response:
        refused = refusal(error)
        if refused.code in REJECTIONS and self.operation.access != "open":
            self._service.metrics.note_rejection(refused.code)
        if not isinstance(error, Refused) and refused.status >= 500:
            log.error("%s failed: %s", self._path, place_of(error))
        return as_answer(refused, self.operation.dialect, headers)


def as_answer(refused: Refused, dialect: Dialect, headers: dict[str, str]) -> Response:
    return Response(
        msgspec.json.encode(refused.body(dialect)),
        status_code=refused.status,
        media_type="application/json",
        headers={**headers, **refused.headers},
    )


@final
class _CountedAnswer:
    """Notes an answer's status when it begins."""

    def __init__(self, service: Service, path: str, method: str, send: Send) -> None:
        self._service, self._path, self._method, self._send = service, path, method, send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._service.metrics.note_answer(self._method, self._path, message["status"])
        await self._send(message)
