"""Replicas in processes of their own, each on one processor, as handles of a fleet.

A call is a connection to a Unix socket: the method and its arguments are pickled, and so is each
thing that comes back. Hanging up ends the call. It is what a benchmark needs and no more: both
ends are this program.
"""

import asyncio
import multiprocessing
import os
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, final

from quire.engine.outputs import TextDelta
from quire.engine.sequence import Request
from quire.fleet.fleet_engine import FleetEngine
from quire.fleet.placement import Placement
from quire.fleet.replica import ReplicaFacts, ReplicaLost, ReplicaReport, to_send
from quire.kv.evidence import Evidence
from quire.server.metrics.family import Figures

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_model_len": 640,
    "kv_cache_memory_bytes": "1GiB",
}
_SIZE_BYTES = 8
_BORN_S = 300.0  # with its passes recorded
_PATIENCE_S = 300.0  # with a replica whose first step compiles kernels


async def _send(writer: asyncio.StreamWriter, what: Any) -> None:
    data = pickle.dumps(what)
    writer.write(len(data).to_bytes(_SIZE_BYTES, "big") + data)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(_SIZE_BYTES), "big")
    return pickle.loads(await reader.readexactly(size))


# -- there -----------------------------------------------------------------------------------------


def _serve(
    path: str, processor: int, model: str | None, options: dict[str, Any], is_warm: bool
) -> None:
    """Serve an engine until the process is ended; ``is_warm``: once its passes are recorded."""
    os.sched_setaffinity(0, {processor})
    os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"] = "1", "PASSIVE"
    from quire.bench.calibrate import warm_up
    from quire.engine.async_llm import AsyncLLM
    from quire.fleet.replica import LocalReplica

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, args, keywords = await _receive(reader)
        gone = asyncio.ensure_future(reader.read())  # the end of what comes: it has hung up
        work = asyncio.ensure_future(_answer(replica, writer, method, args, keywords))
        await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
        for task in (gone, work):
            task.cancel()
        await asyncio.gather(gone, work, return_exceptions=True)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_unix_server(answer, path)
        async with server:
            await server.serve_forever()

    llm = AsyncLLM(model, **options)
    if is_warm:
        warm_up(llm.llm)  # which no thread steps yet
    replica = LocalReplica(Path(path).name, llm)
    asyncio.run(run())


async def _answer(
    replica: Any, writer: asyncio.StreamWriter, method: str, args: Any, keywords: Any
) -> None:
    try:
        if method == "generate":
            async with aclosing(replica.generate(*args, **keywords)) as pieces:
                async for delta in pieces:
                    await _send(writer, ("piece", delta))
            await _send(writer, ("end", None))
        else:
            await _send(writer, ("end", await getattr(replica, method)(*args, **keywords)))
    except Exception as error:
        with suppress(Exception):
            await _send(writer, ("error", error))


# -- here ------------------------------------------------------------------------------------------


@final
class ProcessReplica:
    """A replica in a process of its own, which ends with ``close``."""

    def __init__(
        self,
        folder: Path,
        name: str,
        processor: int,
        model: str | None,
        *,
        is_warm: bool = False,
        **options: Any,
    ) -> None:
        self._name, self._path = name, str(folder / name)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=_serve, args=(self._path, processor, model, options, is_warm), daemon=True
        )
        self._process.start()

    @property
    def name(self) -> str:
        return self._name

    async def facts(self) -> ReplicaFacts:
        async with asyncio.timeout(_BORN_S):
            while not Path(self._path).exists():
                if not self._process.is_alive():
                    raise ReplicaLost(f"replica {self._name} has not been born")
                await asyncio.sleep(0.1)
        facts: ReplicaFacts = await self._call("facts")
        return facts

    async def generate(
        self, request: Request, *, request_id: str
    ) -> AsyncGenerator[TextDelta, None]:
        calls = self._calls("generate", to_send(request), request_id=request_id)
        async with aclosing(calls) as several:
            async for kind, delta in several:
                if kind == "piece":
                    yield delta

    async def abort(self, request_ids: Iterable[str] | None) -> None:
        await self._call("abort", None if request_ids is None else list(request_ids))

    async def report(self) -> ReplicaReport:
        report: ReplicaReport = await self._call("report")
        return report

    async def hear_evidence(self, others: tuple[Evidence | None, ...]) -> None:
        await self._call("hear_evidence", others)

    async def figures(self) -> Mapping[str, Figures]:
        figures: Mapping[str, Figures] = await self._call("figures")
        return figures

    async def begin_drain(self) -> None:
        await self._call("begin_drain")

    async def close(self) -> None:
        self._process.terminate()
        await asyncio.to_thread(self._process.join, 10)

    async def _call(self, method: str, *args: Any, **keywords: Any) -> Any:
        async with aclosing(self._calls(method, *args, **keywords)) as several:
            return (await anext(several))[1]

    async def _calls(
        self, method: str, *args: Any, **keywords: Any
    ) -> AsyncGenerator[tuple[str, Any], None]:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            raise ReplicaLost(f"replica {self._name}: {error}") from error
        try:
            await _send(writer, (method, args, keywords))
            while True:
                kind, what = await _receive(reader)
                if kind == "error":
                    raise what
                yield kind, what
                if kind == "end":
                    return
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ReplicaLost(f"replica {self._name}: {error!r}") from error
        finally:
            writer.close()


def replicas_of(
    folder: Path, model: str | None, options: Iterable[dict[str, Any]], *, is_warm: bool = False
) -> list[ProcessReplica]:
    """Start a replica for each of these options, which go before ``OPTIONS``."""
    processors = sorted(os.sched_getaffinity(0))
    return [
        ProcessReplica(
            folder,
            f"replica-{n}",
            processors[n % len(processors)],
            model,
            is_warm=is_warm,
            **{**OPTIONS, **own},
        )
        for n, own in enumerate(options)
    ]


@asynccontextmanager
async def running(
    replicas: list[ProcessReplica], placement: Placement, **options: Any
) -> AsyncIterator[FleetEngine]:
    """Make a fleet of replicas, all up, and end them behind the block. ``options``: the fleet's."""
    engine = await FleetEngine.start(
        replicas, placement, replica_timeout_s=_PATIENCE_S, report_interval_s=0.1, **options
    )
    try:
        while [each.state for each in engine.members.values()] != ["up"] * len(replicas):
            await asyncio.sleep(0.1)
        yield engine
    finally:
        await engine.aclose()
