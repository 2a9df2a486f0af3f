"""The server's event loop: uvicorn around the app, until a signal or the engine's failure ends it.

``run.py`` has the process around it, its sockets and signals.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, final

import uvicorn
from starlette.applications import Starlette

from quire.config import ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.errors import QuireError
from quire.server.app import make_app
from quire.server.connections import UNIX_PEER, Connection, LoopErrors
from quire.server.listen import Listeners, StartUp, refused, start_up
from quire.server.served_engine import Administration
from quire.server.service import Service
from quire.server.stop import StopSignals
from quire.units import format_bytes

# -- the line of statistics ------------------------------------------------------------------------


log = logging.getLogger(__name__)

INTERVAL_S = 10.0


async def log_stats(llm: AsyncLLM) -> None:
    """Log a line of statistics every ten seconds in which something happens, until cancelled."""
    progress = Progress(llm)
    while True:
        await asyncio.sleep(INTERVAL_S)
        if (line := progress.line(time.monotonic())) is not None:
            log.info("%s", line)


@final
class Progress:
    """What the engine has done from one call of ``line`` to the next."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm.llm
        self._before, self._before_s = self._counted(), time.monotonic()
        self._was_quiet = True

    def line(self, now_s: float) -> str | None:
        """Return the line; None where nothing has happened twice in a row. ``now_s`` in seconds."""
        counted = self._counted()
        is_quiet, was_quiet = counted == self._before, self._was_quiet
        rates = [
            (now - then) / max(1e-9, now_s - self._before_s)
            for now, then in zip(counted, self._before, strict=True)
        ]
        self._before, self._before_s, self._was_quiet = counted, now_s, is_quiet
        return None if is_quiet and was_quiet else self._line(*rates)

    def _counted(self) -> tuple[int, int]:
        statistics = self._llm.statistics
        return statistics.num_prompt_tokens, statistics.num_generation_tokens

    def _line(self, prompt_rate: float, generation_rate: float) -> str:
        statistics, scheduler = self._llm.statistics, self._llm.engine.scheduler
        usage = self._llm.usage(wait=False)
        hits = statistics.prefix_hit_tokens / max(1, statistics.prefix_query_tokens)
        return (
            f"tokens/s: {prompt_rate:.1f} of prompts, {generation_rate:.1f} generated; "
            f"{scheduler.num_running} running, {scheduler.num_waiting} waiting; KV memory: "
            f"{format_bytes(usage.used_bytes)} used, {format_bytes(usage.cached_bytes)} cached, "
            f"{format_bytes(usage.committed_bytes)} committed, "
            f"{format_bytes(self._llm.elastic.ceiling_bytes)} the ceiling; prefix hits {hits:.1%}; "
            f"{statistics.num_preemptions} preemptions"
        )


# -- the event loop --------------------------------------------------------------------------------


_WATCH_S = 0.5  # between two checks of the engine
_FLUSH_S = 5  # for bytes that clients still take after the last request has ended


async def serve_in_loop(
    config: ServerConfig,
    llm: AsyncLLM,
    listeners: Listeners,
    signals: StopSignals,
    announce: Callable[[StartUp], None],
    last_words_s: float,
) -> int:
    """Serve until ``signals`` or the engine's failure end it. Return the exit code.

    After a failure the server still answers for ``last_words_s`` seconds.
    """
    app = make_app(llm, config)
    async with open_server(app, config, listeners, signals) as server:
        failed = asyncio.create_task(_failure(llm))
        others = [] if config.disable_log_stats else [asyncio.create_task(log_stats(llm))]
        try:
            announce(start_up(llm, config, listeners.url))
            await server.until_over(failed)
            if server.is_asked:
                until_s = time.monotonic() + config.shutdown_timeout
                if await drain(app.state.service, config.shutdown_timeout):
                    await _leave_blocks(app.state.service.administration, until_s)
            elif failed.done():
                log.error(
                    "the engine has failed: /health answers 503 for %g s, then this process ends",
                    last_words_s,
                )
                with suppress(TimeoutError):
                    await asyncio.wait_for(server.asked.wait(), last_words_s)
            code = int(llm.failure is not None)
            await llm.aclose()  # what is left ends with the finish_reason "abort"
            return code
        finally:
            for task in (failed, *others):
                task.cancel()


@final
class OpenServer:
    """A server that lets clients in, until a signal asks it to stop."""

    def __init__(self, serving: "asyncio.Task[None]") -> None:
        self.asked = asyncio.Event()
        self._serving = serving

    @property
    def is_asked(self) -> bool:
        """Return whether a signal has asked the server to stop."""
        return self.asked.is_set()

    async def until_over(self, *others: "asyncio.Task[Any]") -> None:
        """Wait for a signal, for the server's own end, or for one of these tasks."""
        asked = asyncio.create_task(self.asked.wait())
        try:
            await asyncio.wait((self._serving, asked, *others), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()


@asynccontextmanager
async def open_server(
    app: Starlette, config: ServerConfig, listeners: Listeners, signals: StopSignals
) -> AsyncIterator[OpenServer]:
    """Serve an app inside the block; behind it, take what clients are still being sent along.

    Raises: ConfigError for an address where no client can be let in.
    """
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(LoopErrors())
    server = _Server(uvicorn_config(app, config))
    serving = asyncio.create_task(server.serve(_listening(listeners)))
    opened = OpenServer(serving)
    signals.when_asked(partial(loop.call_soon_threadsafe, opened.asked.set))
    try:
        await _until_open(server, serving)
        yield opened
        server.should_exit = True
        await serving
    finally:
        serving.cancel()


async def drain(service: Service, timeout_s: float) -> bool:
    """Let no request in, and return whether those inside finish within ``timeout_s``."""
    log.info(
        "told to stop: running requests have %g s to finish (shutdown_timeout); a second signal "
        "stops at once",
        timeout_s,
    )
    if await service.drain(timeout_s):
        return True
    log.warning("after %g s (shutdown_timeout) the requests that still run are aborted", timeout_s)
    return False


async def _leave_blocks(engine: Administration, until_s: float) -> None:
    """Store the hottest cached blocks for those who come after, in what is left of the time."""
    begun_s = time.monotonic()
    left_s = until_s - begun_s
    try:
        num_blocks = await engine.store_hottest(left_s) if left_s > 0 else 0
    except QuireError as error:  # the engine has failed meanwhile
        log.warning("cached blocks cannot be stored: %s", error)
        return
    if num_blocks:
        log.info(
            "%d cached blocks are stored for those who come after, in %.2f s",
            num_blocks,
            time.monotonic() - begun_s,
        )


async def _failure(llm: AsyncLLM) -> Exception:
    """Return what has ended the engine, as soon as something has."""
    while (failure := llm.failure) is None:
        await asyncio.sleep(_WATCH_S)
    return failure


def uvicorn_config(app: Starlette, config: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's options for the event loop that runs, which is asyncio's own.

    uvloop would be a third cheaper, but without files left it drops each client and says nothing.
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
        log_config=None,  # logging is set up already
        server_header=False,
        root_path=config.root_path,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        timeout_keep_alive=config.timeout_keep_alive,
        timeout_graceful_shutdown=_FLUSH_S,
    )
    # The file system decides who reaches a Unix socket, so its peers are trusted as proxies, as in
    # gunicorn; with "*" all peers are.
    if config.uds is not None and own.forwarded_allow_ips != "*":
        own.forwarded_allow_ips = f"{own.forwarded_allow_ips},{UNIX_PEER}"
    return own


def _listening(listeners: Listeners) -> list[Any]:
    """Let the sockets take clients. Raises: ConfigError."""
    for each in listeners.sockets:
        try:
            each.listen(2048)
        except OSError as error:
            raise refused(
                f"host={listeners.config.host} port={listeners.config.port}", error
            ) from error
    return list(listeners.sockets)


async def _until_open(server: "_Server", serving: "asyncio.Task[None]") -> None:
    """Wait until the server is open. Raises: what keeps it from opening."""
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
