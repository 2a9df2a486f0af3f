"""One HTTP request while it is answered: who asks, what of it is read, and what is to be undone."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from quire.engine.sequence import Request
from quire.server.admission_control import Permit
from quire.server.api_keys import Caller
from quire.server.schemas.request_fields import Addressed, Upload
from quire.server.service import Service
from quire.server.wire.body import (
    check,
    ignored,
    names_of,
    parse,
    read_body,
    refuse_what_is_not_done,
)
from quire.server.wire.error_responses import Refused
from quire.server.wire.form import boundary_of, parse_form

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class RequestContext:
    """``stack`` is left when the answer is sent, or its client has left: what is entered there
    lasts as long as the request does; what is entered at the ``door``, until it joins the queue."""

    http: HttpRequest
    service: Service
    caller: Caller
    stack: ExitStack
    door: ExitStack
    id: str  # our own, whatever the client calls it
    headers: dict[str, str]  # of the answer
    arrived_unix_s: float = field(default_factory=time.time)
    num_body_bytes: int = 0  # as read so far

    @property
    def created(self) -> int:
        """Whole seconds since 1970."""
        return int(self.arrived_unix_s)

    def apart(self, stack: ExitStack) -> "RequestContext":
        """The same request while no client waits for its answer: it lasts as long as ``stack``."""
        return replace(self, stack=stack)

    def number(self, name: str, usual: int, least: int, most: int) -> int:
        """What stands behind the path under this name. Raises: Refused."""
        text = self.http.query_params.get(name, str(usual))
        try:
            number = int(text) if len(text) < 12 else most + 1
        except ValueError:
            number = most + 1
        if not least <= number <= most:
            raise Refused(400, f"{name}={text[:40]!r} must be from {least} to {most}", param=name)
        return number

    def one_of(self, name: str, words: tuple[str, ...]) -> str:
        """The same; without it the first of the words. Raises: Refused."""
        word = self.http.query_params.get(name, words[0])
        if word not in words:
            raise Refused(400, f"{name}={word[:40]!r} must be {' or '.join(words)}", param=name)
        return word

    async def fields(self) -> dict[str, Any]:
        """The body, a JSON object. Raises: Refused; ClientDisconnect."""
        data = await self._body(self.door)
        return parse(data, most_values=self.service.most_values)

    async def form(self) -> dict[str, Any]:
        """The body, a form: texts and files. It is kept for as long as the request lasts.

        Raises: Refused; ClientDisconnect.
        """
        boundary = boundary_of(self.http.headers)
        return await self.in_text_thread(parse_form, await self._body(self.stack), boundary)

    async def _body(self, kept: ExitStack) -> bytes:
        """Counted among its key's until ``kept`` is left. Raises: Refused; ClientDisconnect."""
        config = self.service.config
        take = kept.enter_context(self.service.bodies.one(self.caller))
        try:
            async with asyncio.timeout(config.body_timeout):
                data = await read_body(self.http, config.max_request_bytes, take)
        except TimeoutError:
            raise Refused(
                408,
                f"the body has not come within {config.body_timeout:g} s (body_timeout): send less "
                "at a time",
                code="body_timeout",
            ) from None
        self.num_body_bytes = len(data)
        self.door.enter_context(self.service.gate.prepare())
        return data

    async def read(self, kind: type[T]) -> T:
        """The body as a struct. Fields that mean nothing here are named in the answer's headers.

        Raises: Refused; ClientDisconnect.
        """
        is_form = issubclass(kind, Upload)
        given = await (self.form() if is_form else self.fields())
        value = check(given, kind, strict=not is_form)
        known = names_of(kind)
        refuse_what_is_not_done(given, known)
        self.ignore(*ignored(given, known))
        return value

    async def in_text_thread(self, function: Callable[..., R], *args: Any, num_bytes: int = 0) -> R:
        """What a function of texts gives, while the event loop goes on and other keys have turns.

        ``num_bytes``: about how much there is to do, if that is more than the body.
        """
        return await self.service.text_threads.run(
            partial(function, *args), self.caller, num_bytes=max(num_bytes, self.num_body_bytes)
        )

    async def prompt_ids(
        self, prompt: str | list[int], asked: Addressed, *, leaves: int = 1
    ) -> list[int]:
        """A text's tokens, or those given; of more than are wanted, the last. What it ``leaves``
        of the context is for its continuation.

        Raises: RequestError.
        """
        if isinstance(prompt, str):
            special = asked.add_special_tokens is not False
            prompt = await self.in_text_thread(
                partial(self.service.texts.encode, prompt, add_special_tokens=special)
            )
        return self.service.shortened(prompt, asked.truncate_prompt_tokens, leaves=leaves)

    def admit(self, requests: Sequence[Request]) -> list[Permit]:
        """Let the engine's requests into the queue until this ends. Raises: Refused."""
        self.door.close()
        sizes = [(request.params.n, len(request.prompt_token_ids)) for request in requests]
        return self.stack.enter_context(self.service.gate.admit(self.caller, sizes))

    def ignore(self, *fields: str) -> None:
        """Tell the client that these have done nothing. They are no text of its own."""
        if fields:
            known = self.headers.get("x-ignored-fields")
            self.headers["x-ignored-fields"] = ",".join([*([known] if known else []), *fields])
