"""One route's way in and out: who may come, what errors become, and what is counted.

A route is guarded unless it says otherwise, at the place where it is entered, so that no spelling
of a path leads around the guard.
"""

import logging
from contextlib import ExitStack
from typing import final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.server.exchange import Exchange
from quire.server.guard.keys import NOBODY_ELSE
from quire.server.logs import place_of
from quire.server.metrics import REJECTIONS
from quire.server.operations import Operation
from quire.server.service import Service
from quire.server.wire.errors import Dialect, Refused, refusal
from quire.server.wire.streams import ClientGone

log = logging.getLogger(__name__)


@final
class Entrance:
    """An operation as an ASGI app."""

    def __init__(self, service: Service, operation: Operation) -> None:
        self._service, self.operation = service, operation
        self._path, self._takes = operation.path, operation.takes
        service.metrics.know(self._path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        sending = _Counted(self._service, self._path, http.method, send)
        headers: dict[str, str] = {}
        with ExitStack() as stack:
            try:
                exchange = self._enter(http, stack)
                headers = exchange.headers
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

    def _enter(self, http: Request, stack: ExitStack) -> Exchange:
        """Raises: Refused."""
        caller = NOBODY_ELSE
        if not self.operation.is_open:
            caller = self._service.keys.caller(http.headers)
            self._service.origins.check(http.headers)
        door = stack.enter_context(ExitStack())
        if self.operation.joins_queue:
            door.enter_context(self._service.gate.arrive(caller))
        exchange = Exchange(http, self._service, caller, stack, door)
        if self.operation.dialect == "anthropic":
            exchange.headers["request-id"] = exchange.headers["x-request-id"]
        return exchange

    def _refusal(self, error: Exception, headers: dict[str, str]) -> Response:
        refused = refusal(error)
        if refused.code in REJECTIONS and not self.operation.is_open:
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
class _Counted:
    """Notes an answer's status when it begins."""

    def __init__(self, service: Service, path: str, method: str, send: Send) -> None:
        self._service, self._path, self._method, self._send = service, path, method, send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._service.metrics.note_answer(self._method, self._path, message["status"])
        await self._send(message)
