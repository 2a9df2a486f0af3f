"""``quire bench``: throughput and latency, with ``vllm bench serve``'s figures and table."""

import asyncio
import json
import platform
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire.bench.load import (
    CacheWatch,
    CompletionsServer,
    EngineHere,
    Outcome,
    Target,
    first_model,
    send_all,
    vocabulary_of,
)
from quire.bench.metrics import details, figures, parse_goodput, parse_percentiles, table
from quire.bench.traffic import BenchTraffic, write_trace
from quire.bench.workload import Query, RandomLengths, Vocabulary
from quire.cli.options import (
    ApiKey,
    Temperature,
    Timeout,
    client,
    engine_of,
    load_llm,
    load_model,
    plain_table,
    with_engine_options,
)
from quire.config import EngineConfig
from quire.errors import ConfigError, RequestError
from quire.http import Http
from quire.planner.simulation.cost_model import COEFFICIENTS, Fit

# -- bench -----------------------------------------------------------------------------------------


_LINE_S = 5.0  # between two lines of progress, at least
_OF_VLLM = ("serve", "throughput", "latency")
_STOPPED = 128 + signal.SIGINT


def _flag(panel: str, help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel)


@with_engine_options
def bench(  # noqa: PLR0913 - each is a flag
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A local folder or a hub name; default: the demo model. With --url what the "
            "server calls it; default: its first."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Ask an OpenAI-compatible server, instead of an engine in here."),
    ] = None,
    api_key: ApiKey = None,
    header: Annotated[
        list[str] | None, typer.Option(help='With --url, e.g. "Authorization: Bearer KEY".')
    ] = None,
    timeout: Timeout = 600.0,
    num_prompts: Annotated[int, _flag("Load", "Requests; of a trace, the first ones.")] = 64,
    random_input_len: Annotated[int, _flag("Load", "Tokens in a prompt; --seed says which.")] = 128,
    random_output_len: Annotated[int, _flag("Load", "Tokens to generate for it.")] = 64,
    random_range_ratio: Annotated[
        float, _flag("Load", "Draw both lengths n from n·(1−r) to n·(1+r).")
    ] = 0.0,
    random_prefix_len: Annotated[
        int, _flag("Load", "Tokens that all prompts begin with, besides.")
    ] = 0,
    request_rate: Annotated[
        float | None,
        _flag("Load", "Requests a second. Default: all at once; a trace at its own times."),
    ] = None,
    burstiness: Annotated[
        float,
        _flag("Load", "Of that rate: 1 is a Poisson process, less burstier, inf a metronome."),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, _flag("Load", "Requests under way at once, at most.")
    ] = None,
    num_warmups: Annotated[int, _flag("Load", "Requests before the clock starts.")] = 1,
    temperature: Temperature = 0.0,
    ignore_eos: Annotated[
        bool, _flag("Load", "Generate to the full length.", "--ignore-eos/--no-ignore-eos")
    ] = True,
    trace: Annotated[
        str | None,
        _flag(
            "Load",
            "Real lengths and times, a file or an http address: Azure's LLM trace, BurstGPT, "
            "Mooncake's, Bailian's, kv-cache-tester's, ServeGen's or Quire's own (--save-trace).",
        ),
    ] = None,
    trace_scale: Annotated[float, _flag("Load", "Multiply the trace's lengths by this.")] = 1.0,
    trace_speed: Annotated[float, _flag("Load", "Replay it so many times as fast.")] = 1.0,
    trace_max_skipped: Annotated[
        int, _flag("Load", "Rows of it that may be no requests, and are left out.")
    ] = 0,
    goodput: Annotated[
        list[str] | None,
        _flag("Result", "Goals in ms, ttft:500,tpot:50,e2el:9000; counts who meets all of them."),
    ] = None,
    metric_percentiles: Annotated[str, _flag("Result", "Besides mean and median.")] = "99",
    save_result: Annotated[
        Path | None, _flag("Result", "Write vLLM's JSON, and our kv part, to this file.")
    ] = None,
    save_trace: Annotated[
        Path | None,
        _flag("Result", "Write what was sent, and when, as a trace to be replayed (--trace)."),
    ] = None,
    save_detailed: Annotated[
        bool, _flag("Result", "… with each request's times and text.", "--save-detailed")
    ] = False,
    as_json: Annotated[
        bool, _flag("Result", "One JSON object instead of the table.", "--json")
    ] = False,
    calibrate: Annotated[
        Path | None,
        _flag(
            "Result",
            "Measure steps of all sizes instead, and write what they take on this "
            "machine, for quire simulate --calibration.",
        ),
    ] = None,
    engine: dict[str, Any],
) -> None:
    """Measure throughput and latency: the figures and the table of vllm bench serve.

    Without --url the engine runs in here, and what its KV cache took is said too.

    \b
    quire bench --cache virtual --kv-cache-memory-bytes 64MiB
    quire bench --random-input-len 512 --request-rate 4 --goodput ttft:500,tpot:50
    quire bench --trace AzureLLMInferenceTrace_conv.csv --trace-scale 0.1 --trace-speed 4
    quire bench --calibrate here.json --max-num-seqs 32
    quire bench --url http://localhost:8000 --max-concurrency 16 --save-result result.json
    """
    if model in _OF_VLLM and not Path(model).exists():
        raise ConfigError(
            f"quire bench has no commands, and {model} is one of vllm bench's: leave it out, and "
            f"say with --url which server to ask"
        )
    if calibrate is not None:
        _refuse_misplaced(url, header, api_key, engine, {"--calibrate": calibrate})
        if url is not None:
            raise ConfigError("--calibrate measures an engine in here: leave out --url")
        pass  # local

        write_calibration(model, engine, calibrate)
        return
    percentiles, goals = parse_percentiles(metric_percentiles), parse_goodput(goodput or ())
    saved = {"--save-result": save_result, "--save-trace": save_trace}
    _refuse_misplaced(url, header, api_key, engine, saved)
    run = _Run(
        traffic=BenchTraffic(
            num_prompts=num_prompts,
            seed=EngineConfig.from_options(**engine).seed,
            lengths=RandomLengths(
                input_len=random_input_len,
                output_len=random_output_len,
                range_ratio=random_range_ratio,
                prefix_len=random_prefix_len,
            ),
            request_rate=request_rate,
            burstiness=burstiness,
            trace=trace,
            trace_scale=trace_scale,
            trace_speed=trace_speed,
            trace_max_skipped=trace_max_skipped,
        ),
        num_warmups=num_warmups,
        max_concurrency=max_concurrency,
        temperature=temperature,
        ignore_eos=ignore_eos,
    )
    measured = (
        run.here(model, engine)
        if url is None
        else run.there(client(url, api_key, timeout, dict(map(_header, header or []))), model)
    )
    result = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        **measured.about,
        "num_prompts": len(measured.outcomes),
        "request_rate": run.traffic.rate,
        "burstiness": burstiness,
        "max_concurrency": max_concurrency,
        **figures(measured.outcomes, measured.duration_s, percentiles=percentiles, goodput=goals),
        **measured.kv,
    }
    if save_trace is not None:
        write_trace(save_trace, measured.queries, measured.outcomes)
    each = details(measured.outcomes) if save_detailed else {}
    if save_result is not None:
        save_result.write_text(json.dumps({**result, **each}), encoding="utf-8")
    print(json.dumps({**result, **each}) if as_json else table(result, percentiles))
    num_done = len(measured.outcomes)
    for error in sorted({outcome.error for outcome in measured.outcomes if outcome.error})[:10]:
        run.console.print(f"failed: {error}", markup=False, highlight=False)
    if num_done < measured.num_wanted:
        run.console.print(
            f"stopped: {num_done:,} of {measured.num_wanted:,} requests were done, and the figures "
            "are of these",
            highlight=False,
        )
        raise typer.Exit(_STOPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    about: dict[str, Any]  # who was asked, in vLLM's keys
    num_wanted: int
    queries: list[Query]  # … of which these have ended, when it was not stopped all of them
    outcomes: list[Outcome]
    duration_s: float
    kv: dict[str, Any]  # our own part; nothing for a server elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """How traffic is sent to whom; progress goes to standard error. Raises: ConfigError."""

    traffic: BenchTraffic
    num_warmups: int
    max_concurrency: int | None
    temperature: float
    ignore_eos: bool
    console: Console = field(default_factory=lambda: Console(stderr=True))

    def __post_init__(self) -> None:
        if self.num_warmups < 0:
            raise ConfigError(f"--num-warmups {self.num_warmups} must be at least 0")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency {self.max_concurrency} must be at least 1")

    def here(self, model: str | None, engine: dict[str, Any]) -> _Measured:
        """An engine of this process. Raises: RequestError if no request succeeds."""
        config = EngineConfig.from_options(**engine)
        loaded = load_model(model, config, self.console)
        from quire.engine.async_llm import AsyncLLM

        watch = CacheWatch()

        async def measure() -> _Measured:
            with self.console.status("preparing the cache …"):
                llm = AsyncLLM(loaded, observe=watch, **engine_of(engine))
            async with llm:
                target = EngineHere(llm, temperature=self.temperature, ignore_eos=self.ignore_eos)
                vocabulary = vocabulary_of(llm.llm)
                await self._warm_up(target, vocabulary)
                watch.begin(llm)
                wanted = self.traffic.queries(vocabulary)
                queries, outcomes, duration_s = await self._send("sending", target, wanted)
                return _Measured(
                    about=_about("quire", model or loaded.name),
                    num_wanted=len(wanted),
                    queries=queries,
                    outcomes=outcomes,
                    duration_s=duration_s,
                    kv={"kv": watch.figures(llm, outcomes)},
                )

        return asyncio.run(measure())

    def there(self, server: Http, model: str | None) -> _Measured:
        """A server. Raises: ConfigError, RequestError if no request succeeds."""

        async def measure() -> _Measured:
            # Connections are kept: to make one is no part of a first token's time.
            async with server as http:
                name = model or await first_model(http)
                target = CompletionsServer(
                    http, name, temperature=self.temperature, ignore_eos=self.ignore_eos
                )
                await self._warm_up(target, Vocabulary())
                wanted = self.traffic.queries(Vocabulary())
                queries, outcomes, duration_s = await self._send("sending", target, wanted)
            return _Measured(
                about=_about("openai", name),
                num_wanted=len(wanted),
                queries=queries,
                outcomes=outcomes,
                duration_s=duration_s,
                kv={},
            )

        return asyncio.run(measure())

    async def _warm_up(self, target: Target, vocabulary: Vocabulary) -> None:
        if self.num_warmups:
            queries = self.traffic.warmups(self.num_warmups, vocabulary)
            done, *_ = await self._send("warming up", target, queries)
            if len(done) < len(queries):
                raise RequestError("stopped while warming up: nothing was measured")

    async def _send(
        self, what: str, target: Target, queries: list[Query]
    ) -> tuple[list[Query], list[Outcome], float]:
        """Those that have ended, all of them where it is not stopped (Ctrl-C), and the seconds."""
        with self._progress(what, len(queries)) as report:
            found, duration_s = await send_all(
                target, queries, max_concurrency=self.max_concurrency, report=report
            )
        done = [each for each in zip(queries, found, strict=True) if each[1] is not None]
        outcomes = [outcome for _, outcome in done if outcome is not None]
        if not outcomes:
            raise RequestError(f"{what}: stopped before one of {len(queries):,} requests was done")
        if not any(outcome.succeeded for outcome in outcomes):
            raise RequestError(
                f"{what}: none of {len(outcomes):,} requests succeeded; the first one: "
                f"{outcomes[0].error}"
            )
        return [query for query, _ in done], outcomes, duration_s

    @contextmanager
    def _progress(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """What to call for each request that has ended: a bar at a terminal, lines elsewhere."""
        if self.console.is_terminal:
            columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=self.console, transient=True) as progress:
                task = progress.add_task(what, total=total)
                yield partial(progress.advance, task)
            return
        done, said_s = 0, perf_counter()

        def advance() -> None:
            nonlocal done, said_s
            done += 1
            if done == total or perf_counter() - said_s >= _LINE_S:
                said_s = perf_counter()
                self.console.print(f"{what}: {done:,} of {total:,} done", highlight=False)

        yield advance


def _about(backend: str, model: str) -> dict[str, Any]:
    return {
        "backend": backend,
        "endpoint_type": backend,
        "label": None,
        "model_id": model,
        "tokenizer_id": model,
    }


def _refuse_misplaced(
    url: str | None,
    header: list[str] | None,
    api_key: str | None,
    engine: dict[str, Any],
    saved: dict[str, Path | None],
) -> None:
    """Flags that would do nothing. Raises: ConfigError."""
    for flag, value in (("--header", header), ("--api-key", api_key)):
        if url is None and value:
            raise ConfigError(f"{flag} goes with --url")
    misplaced = sorted(set(engine) - {"seed"})
    if url is not None and misplaced:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in misplaced)
        raise ConfigError(f"{flags}: with --url the engine is the server's; give it there")
    for flag, path in saved.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{flag} {path}: no such folder")


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or "\n" in text or "\r" in text:
        raise ConfigError(f"--header {text!r} must be a name, a colon and a value")
    return name.strip(), value.strip()


# -- calibrate -------------------------------------------------------------------------------------

# ``quire bench --calibrate``: what steps take on this machine, written for ``quire simulate``.


def write_calibration(model: str | None, engine: dict[str, Any], path: Path) -> None:
    """Raises: ConfigError, RequestError."""
    # A prompt that comes again is to be computed again.
    llm = load_llm(model, {**engine, "enable_prefix_caching": False})
    from torch import get_num_threads

    from quire.bench.calibrate import about, calibrate

    columns = (TextColumn("stepping"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with llm, Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")
        found = calibrate(
            llm, report=lambda done, total: progress.update(task, completed=done, total=total)
        )
        name, cache = llm.name, llm.config.cache
    found = about(
        found,
        machine=f"{platform.node()}, {platform.machine()}",
        model=model or name,
        cache=cache,
        num_threads=get_num_threads(),
    )
    found.costs.write(path)
    _print(found, path)


def _print(found: Fit, path: Path) -> None:
    console = Console(highlight=False)
    table = plain_table("What a step takes here", "", "µs", "of")
    for name, unit in zip(COEFFICIENTS, _UNITS, strict=True):
        seconds = getattr(found.costs, name)
        table.add_row(name.removesuffix("_s").replace("_", " "), f"{seconds * 1e6:,.4g}", unit)
    console.print(table)
    console.print(
        f"{found.num_steps:,} steps of {found.num_kinds:,} kinds. A kind's time is off by "
        f"{found.median_error:.1%} in the median, by {found.p90_error:.1%} at most in nine of ten, "
        f"all together by {found.total_error:+.1%}. Half of the steps of a kind lay within "
        f"{found.spread:.1%} of each other: what is off by less than that is the machine.",
        soft_wrap=True,
    )
    console.print(f"written to {path}: quire simulate … --calibration {path}", soft_wrap=True)


_UNITS = (
    *("a step", "more for one of over 128 tokens", "a sequence in it", "a token drawn"),
    *("a chunk of a prompt", "a token, of the first 8", "a token, up to 64", "a token, up to 128"),
    *("a token, beyond", "an entry read", "a token and an entry"),
)
