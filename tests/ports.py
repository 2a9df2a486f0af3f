"""Ports of this machine for servers that a test starts later."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a port that the system gives to no other socket meanwhile.

    One that was free and is given back may be another process's by the time a server binds it. This
    one is bound and nothing listens: a client is refused, and a server that sets SO_REUSEADDR, as
    servers do, binds it too.
    """
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(("127.0.0.1", 0))
        yield own.getsockname()[1]
