"""One HTTP request while it is answered: who asks, and what is to be undone at its end."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from quire.server.api_keys import Caller
from quire.server.service import Service
from quire.server.wire.error_responses import invalid

R = TypeVar("R")


@dataclass(eq=False)
class RequestContext:
    """What an endpoint knows of its request besides the body.

    What is entered in ``until_answered`` lasts until the answer is sent, or its client has left;
    what is entered in ``until_queued``, until the request joins the queue.
    """

    http: HttpRequest
    service: Service
    caller: Caller
    until_answered: ExitStack
    until_queued: ExitStack
    id: str  # the server's own, whatever the client's is
    headers: dict[str, str]  # of the answer
    arrived_unix_s: float = field(default_factory=time.time)
    num_body_bytes: int = 0  # as read so far

    @property
    def created(self) -> int:
        """Return when the request came, in whole seconds since 1970."""
        return int(self.arrived_unix_s)

    def without_client(self, until_over: ExitStack) -> "RequestContext":
        """Return the same request while no client waits: it lasts as long as ``until_over``."""
        return replace(self, until_answered=until_over)

    def number(self, name: str, usual: int, least: int, most: int) -> int:
        """Return a number of the query. Raises: Refused if it is not from ``least`` to ``most``."""
        text = self.http.query_params.get(name, str(usual))
        try:
            number = int(text) if len(text) < 12 else most + 1
        except ValueError:
            number = most + 1
        if not least <= number <= most:
            raise invalid(name, f"{name}={text[:40]!r} must be from {least} to {most}")
        return number

    def one_of(self, name: str, words: tuple[str, ...]) -> str:
        """Return a word of the query, by default the first of ``words``. Raises: Refused."""
        word = self.http.query_params.get(name, words[0])
        if word not in words:
            raise invalid(name, f"{name}={word[:40]!r} must be {' or '.join(words)}")
        return word

    async def in_text_thread(self, function: Callable[..., R], *args: Any, num_bytes: int = 0) -> R:
        """Call a function of texts in a thread, where other keys have turns. Return its result.

        ``num_bytes``: about how long the texts are, if longer than the body.
        """
        return await self.service.text_threads.run(
            partial(function, *args), self.caller, num_bytes=max(num_bytes, self.num_body_bytes)
        )

    def ignore(self, *fields: str) -> None:
        """Name fields that do nothing in the answer's headers."""
        if fields:
            known = self.headers.get("x-ignored-fields")
            self.headers["x-ignored-fields"] = ",".join([*([known] if known else []), *fields])
