"""The process around the server: sockets, signals, the drain, and what is said at the start.

The app is ``app``'s; what it answers is not this module's matter.
"""

import asyncio
import gc
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, final

import uvicorn
from starlette.applications import Starlette

from quire.config import ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.server.app import make_app
from quire.server.connections import UNIX_PEER, Connection, LoopErrors
from quire.server.listen import Doors, allow_open_files, open_doors, refused
from quire.server.log_stats import log_stats
from quire.server.logs import log_to_stderr
from quire.server.service import Service
from quire.server.startup import StartUp, start_up
from quire.server.stop import StopSignals

log = logging.getLogger(__name__)

LAST_WORDS_S = 10.0  # that /health says 503 after the engine has failed, before the process ends
_WATCH_S = 0.5  # between two looks at the engine
_FLUSH_S = 5  # for what is on its way to clients after the last request has ended


def serve(
    config: ServerConfig,
    load: Callable[[], AsyncLLM],
    *,
    announce: Callable[[StartUp], None],
    last_words_s: float = LAST_WORDS_S,
) -> int:
    """Serve until a signal says stop. Returns: the exit code, 1 if the engine has failed.

    ``load`` is called once it is certain that there is something to listen at; ``announce`` when
    clients are let in. After a failure the server still answers for ``last_words_s``.

    Raises: ConfigError for what cannot be listened at, and what ``load`` raises.
    """
    log_to_stderr(config.uvicorn_log_level)
    allow_open_files()
    doors = open_doors(config)
    with StopSignals(doors.close) as signals:
        try:
            llm = load()
            # What is there now stays: to look through it again and again for what does not would
            # stop every stream for a third of a second each time.
            gc.collect()
            gc.freeze()
            try:
                return asyncio.run(_serve(config, llm, doors, signals, announce, last_words_s))
            finally:
                # Else the interpreter could not take its modules apart at its end, and bindings
                # to C++ print what they then think has leaked.
                gc.unfreeze()
                llm.close()
        finally:
            doors.close()


async def _serve(
    config: ServerConfig,
    llm: AsyncLLM,
    doors: Doors,
    signals: StopSignals,
    announce: Callable[[StartUp], None],
    last_words_s: float,
) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(LoopErrors())
    signals.when_asked(partial(loop.call_soon_threadsafe, stop.set))
    app = make_app(llm, config)
    server = _Server(uvicorn_config(app, config))
    serving = asyncio.create_task(server.serve(_listening(doors)))
    asked, failed = asyncio.create_task(stop.wait()), asyncio.create_task(_failure(llm))
    others = [] if config.disable_log_stats else [asyncio.create_task(log_stats(llm))]
    try:
        await _until_open(server, serving)
        announce(start_up(llm, config, doors.url))
        await asyncio.wait((serving, asked, failed), return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            await _drain(app.state.service, config.shutdown_timeout)
        elif failed.done():
            log.error(
                "the engine has failed: /health says so for %g s, then this process ends",
                last_words_s,
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), last_words_s)
        code = int(llm.failure is not None)
        await llm.aclose()  # what is left ends with the finish_reason "abort"
        server.should_exit = True
        await serving
        return code
    finally:
        for task in (serving, asked, failed, *others):
            task.cancel()


async def _drain(service: Service, timeout_s: float) -> None:
    """Let no request in, and let what runs finish, for so long."""
    log.info("told to stop: what runs has %g s to finish; a second signal ends at once", timeout_s)
    if not await service.drain(timeout_s):
        log.warning("after %g s (shutdown_timeout) what still runs is aborted", timeout_s)


async def _failure(llm: AsyncLLM) -> Exception:
    """What has ended the engine, as soon as something has."""
    while (failure := llm.failure) is None:
        await asyncio.sleep(_WATCH_S)
    return failure


def uvicorn_config(app: Starlette, config: ServerConfig) -> uvicorn.Config:
    """For the event loop that is running, which is asyncio's own: uvloop lets in a third cheaper,
    and without files left it drops each client that comes and says nothing.
    """
    own = uvicorn.Config(
        app,
        http=partial(  # type: ignore[arg-type]
            Connection,
            read_timeout_s=config.read_timeout,
            send_timeout_s=config.send_timeout,
        ),
        ws="none",
        workers=1,
        log_config=None,  # it is set up already
        server_header=False,
        root_path=config.root_path,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        timeout_keep_alive=config.timeout_keep_alive,
        timeout_graceful_shutdown=_FLUSH_S,
    )
    # The file system has let in a peer at a Unix socket, so it is trusted as a proxy, as gunicorn
    # does; with "*" each peer is.
    if config.uds is not None and own.forwarded_allow_ips != "*":
        own.forwarded_allow_ips = f"{own.forwarded_allow_ips},{UNIX_PEER}"
    return own


def _listening(doors: Doors) -> list[Any]:
    """The sockets, with clients waiting at them. Raises: ConfigError."""
    for each in doors.sockets:
        try:
            each.listen(2048)
        except OSError as error:
            raise refused(f"host={doors.config.host} port={doors.config.port}", error) from error
    return list(doors.sockets)


async def _until_open(server: "_Server", serving: "asyncio.Task[None]") -> None:
    """Raises: what keeps it from opening."""
    while not server.started:
        if serving.done():
            serving.result()
            raise RuntimeError("the server ended before it had begun")
        await asyncio.sleep(0.01)


@final
class _Server(uvicorn.Server):
    """uvicorn's, without signal handlers of its own."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
