"""A server within a program: OpenAI's API on a free port, for as long as the block runs.

Run: python examples/own_server.py [MODEL]

The programs that need a server use this one. A server that stays is a command: quire serve MODEL.
"""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import httpx
import uvicorn

import quire
from quire.config import ServerConfig
from quire.server.app import make_app


@contextmanager
def own_server(model: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield the address of a server and its model's name there; None is the demo model."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = make_app(llm := quire.AsyncLLM(model), ServerConfig())
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield "http://{}:{}".format(*listener.getsockname()), app.state.service.model_name
        finally:
            server.should_exit = True
            thread.join()
            llm.close()


if __name__ == "__main__":
    with own_server(*sys.argv[1:2]) as (url, name):
        print(f"{name} at {url}:", httpx.get(f"{url}/v1/models").json())
