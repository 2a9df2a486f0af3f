"""The process around the server: it checks options, binds sockets, loads the model, then serves.

Importing this imports no torch: ``loop.py`` has the event loop and comes with the engine.
"""

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire.chat.reasoning_parsers import reasoning_format
from quire.chat.tools.registry import tool_format
from quire.config import ServerConfig
from quire.server.listen import Listeners, allow_open_files, open_listeners
from quire.server.logs import log_to_stderr
from quire.server.stop import StopSignals

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM
    from quire.server.listen import StartUp

LAST_WORDS_S = 10.0  # /health answers 503 between the engine's failure and the process's end


def serve(
    config: ServerConfig,
    load: Callable[[], "AsyncLLM"],
    *,
    announce: Callable[["StartUp"], None],
    last_words_s: float = LAST_WORDS_S,
) -> int:
    """Serve until a signal stops it. Return the exit code, which is 1 if the engine has failed.

    ``load`` is called once the sockets are bound; ``announce`` when clients are let in. After a
    failure the server still answers for ``last_words_s`` seconds.

    Raises: ConfigError for an address that cannot be bound or an unknown parser; what ``load``
    raises.
    """
    with prepared(config) as (listeners, signals):
        llm = load()
        from quire.server.loop import serve_in_loop

        with frozen_objects():
            try:
                return asyncio.run(
                    serve_in_loop(config, llm, listeners, signals, announce, last_words_s)
                )
            finally:
                llm.close()


@contextmanager
def prepared(config: ServerConfig) -> Iterator[tuple[Listeners, StopSignals]]:
    """Bind a server's sockets, which let no client in yet, and take signals, inside the block.

    Raises: ConfigError for an address that cannot be bound or an unknown parser.
    """
    log_to_stderr(config.uvicorn_log_level)
    allow_open_files()
    _refuse_unknown_parsers(config)
    listeners = open_listeners(config)
    with StopSignals(listeners.close) as signals:
        try:
            yield listeners, signals
        finally:
            listeners.close()


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Let the garbage collector pass over all objects that exist now, inside the block.

    Each full collection over them would stop every stream for a third of a second. They are
    unfrozen in the end: else the interpreter cannot free its modules, and bindings to C++ report
    leaks.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _refuse_unknown_parsers(config: ServerConfig) -> None:
    """Refuse names that no parser has; "auto" is resolved later. Raises: ConfigError."""
    for name, find in (
        (config.tool_call_parser, tool_format),
        (config.reasoning_parser, reasoning_format),
    ):
        if name not in (None, "auto"):
            find(name, "")
