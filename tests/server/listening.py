"""A server on a port of this machine, for client libraries that want a real one."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from server.asking import Client


@asynccontextmanager
async def listening(client: Client) -> AsyncIterator[str]:
    """Its address. It runs in this event loop, beside the clients."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(client.app, log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = asyncio.ensure_future(server._serve(sockets=[listener]))
        try:
            yield "http://{}:{}".format(*listener.getsockname())
        finally:
            server.should_exit = True
            await serving
