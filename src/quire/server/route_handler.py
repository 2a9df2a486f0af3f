"""One route's way in and out: who may come, how much may come, what errors become.

A request is refused in three places: here, before and while its body is read; in ``wire/body.py``,
by its fields; and in ``endpoints/generation.py``, where the engine and its queue take it or not.

The handler of a route guards it, so that no spelling of a path leads around the guard.
"""

import asyncio
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
from quire.server.schemas.request_fields import ModelRequest, Upload
from quire.server.service import Service
from quire.server.wire.body import parse, typed_request
from quire.server.wire.error_responses import Dialect, Refused, refusal
from quire.server.wire.form import boundary_of, parse_form
from quire.server.wire.streams import ClientGone
from quire.units import format_bytes

log = logging.getLogger(__name__)

_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@final
class RouteHandler:
    """An operation as an ASGI app."""

    def __init__(self, service: Service, operation: Operation) -> None:
        self._service, self.operation = service, operation
        self._path, self._takes = operation.path, operation.takes
        service.metrics.counts.know(self._path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        http, own = Request(scope, receive), uuid4().hex
        headers = self._names(http.headers, own)
        with ExitStack() as until_answered:
            try:
                with ExitStack() as until_queued:
                    caller = self._enter(http.headers, until_queued)
                    context = RequestContext(
                        http, self._service, caller, until_answered, until_queued, own, headers
                    )
                    body = () if self._takes is None else (await self._read(context, self._takes),)
                    answer = await self.operation.endpoint(context, *body)
            except (ClientDisconnect, ClientGone):
                return
            except Exception as error:
                answer = self._refusal(error, headers)

            async def counted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    self._service.metrics.counts.note_answer(http.method, self._path, status)
                await send(message)

            try:
                await answer(scope, receive, counted)
            except ClientGone:
                return

    def _enter(self, headers: Headers, until_queued: ExitStack) -> Caller:
        """Return who asks. Raises: Refused for an unknown key, a foreign page, or a full queue."""
        caller, access = UNKNOWN, self.operation.access
        if access != "open":
            caller = self._service.keys.caller(headers, access)
            self._service.origins.check(headers)
        if self._takes is not None:
            until_queued.enter_context(self._service.admission.arrive(caller))
        return caller

    async def _read(self, context: RequestContext, kind: type[ModelRequest]) -> ModelRequest:
        """Return the body as a request of its kind. Raises: Refused; ClientDisconnect."""
        if issubclass(kind, Upload):
            boundary = boundary_of(context.http.headers)
            # The file in it is read until the answer is there.
            data = await self._read_bytes(context, context.until_answered)
            given = await context.in_text_thread(parse_form, data, boundary)
        else:
            data = await self._read_bytes(context, context.until_queued)
            given = parse(data, most_values=self._service.most_values)
        return typed_request(given, kind, self._service.names, ignore=context.ignore)

    async def _read_bytes(self, context: RequestContext, until: ExitStack) -> bytes:
        """Return the body, which counts among its key's until ``until`` is left. Raises: Refused
        (408, 413, 415, 503); ClientDisconnect.
        """
        http, config = context.http, self._service.config
        packed = ", ".join(http.headers.getlist("content-encoding"))
        if packed.strip().lower() not in ("", "identity"):
            raise Refused(
                415,
                f"content-encoding: {packed[:60]!r} is not supported: send the body "
                "uncompressed, without that header",
                code="unsupported_content_encoding",
            )
        most_bytes, parts = config.max_request_bytes, list[bytes]()
        declared = http.headers.get("content-length", "")
        if declared.isdigit() and len(declared) < 19 and int(declared) > most_bytes:
            raise _too_long(most_bytes)
        take = until.enter_context(self._service.bodies.one(context.caller))
        try:
            async with asyncio.timeout(config.body_timeout):
                async for part in http.stream():
                    context.num_body_bytes += len(part)
                    if context.num_body_bytes > most_bytes:
                        raise _too_long(most_bytes)
                    take(len(part))
                    parts.append(part)
        except TimeoutError:
            raise Refused(
                408,
                f"the body has not come within {config.body_timeout:g} s (body_timeout): send less "
                "at a time",
                code="body_timeout",
            ) from None
        context.until_queued.enter_context(self._service.admission.prepare())
        return b"".join(parts)

    def _names(self, headers: Headers, own: str) -> dict[str, str]:
        """Return headers with a name for the answer: the client's if it has sent one.

        The server finds nothing by it.
        """
        theirs = headers.get("x-request-id", "")
        name = theirs if _SAFE_ID.fullmatch(theirs) else own
        also = {"request-id": name} if self.operation.dialect == "anthropic" else {}
        return {"x-request-id": name, **also}

    def _refusal(self, error: Exception, headers: dict[str, str]) -> Response:
        refused = refusal(error)
        if refused.code in REJECTIONS and self.operation.access != "open":
            self._service.metrics.counts.note_rejection(refused.code)
        if not isinstance(error, Refused) and refused.status >= 500:
            log.error("%s failed: %s", self._path, place_of(error))
        return as_answer(refused, self.operation.dialect, headers)


def as_answer(refused: Refused, dialect: Dialect, headers: dict[str, str]) -> Response:
    """Return a refusal as an answer in the client's dialect."""
    return Response(
        msgspec.json.encode(refused.body(dialect)),
        status_code=refused.status,
        media_type="application/json",
        headers={**headers, **refused.headers},
    )


def _too_long(most_bytes: int) -> Refused:
    return Refused(413, f"the body is longer than {format_bytes(most_bytes)} (max_request_bytes)")
