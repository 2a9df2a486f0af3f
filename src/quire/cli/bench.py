"""Run ``quire bench``: measure throughput and latency with the figures of ``vllm bench serve``."""

import asyncio
import json
import platform
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn

from quire.bench.comparison import compared, comparison_table
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
    AsJson,
    Temperature,
    Timeout,
    check_folder,
    client,
    import_engine_for,
    in_panel,
    load_llm,
    plain_table,
    progress_bar,
    with_engine_options,
)
from quire.config import EngineConfig
from quire.errors import ConfigError, RequestError
from quire.http import Http
from quire.planner.simulation.cost_model import COEFFICIENTS, Fit

_LINE_S = 5.0  # least time between two lines of progress
_OF_VLLM = ("serve", "throughput", "latency")
_STOPPED = 128 + signal.SIGINT
_ROUNDS = 3


@with_engine_options
def bench(  # noqa: PLR0913 - each is a flag
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A local folder or a hub name; default: the demo model. With --url: the server's "
            "name of the model; default: its first."
        ),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of a server with OpenAI's API to measure; of several, given by one --url "
            "each, all get the same load, and are compared with the first. Default: an engine in "
            "this process."
        ),
    ] = None,
    api_key: ApiKey = None,
    header: Annotated[
        list[str] | None,
        typer.Option(help='With --url: an HTTP header, e.g. "Authorization: Bearer KEY".'),
    ] = None,
    timeout: Timeout = 600.0,
    num_prompts: Annotated[
        int, in_panel("Load", "Number of requests; of a trace, the first ones.")
    ] = 64,
    random_input_len: Annotated[
        int, in_panel("Load", "Tokens per random prompt; --seed draws them.")
    ] = 128,
    random_output_len: Annotated[int, in_panel("Load", "Tokens to generate per request.")] = 64,
    random_range_ratio: Annotated[
        float, in_panel("Load", "Draw both lengths from n·(1−r) to n·(1+r).")
    ] = 0.0,
    random_prefix_len: Annotated[
        int, in_panel("Load", "Tokens of a common prefix, added to all prompts.")
    ] = 0,
    request_rate: Annotated[
        float | None,
        in_panel("Load", "Requests per second. Default: all at once; a trace at its own times."),
    ] = None,
    burstiness: Annotated[
        float,
        in_panel(
            "Load",
            "Burstiness of arrivals: 1 is a Poisson process, less is burstier, inf has equal gaps.",
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, in_panel("Load", "Maximum number of requests at a time. Default: no maximum.")
    ] = None,
    num_warmups: Annotated[int, in_panel("Load", "Number of requests before the measurement.")] = 1,
    rounds: Annotated[
        int | None,
        in_panel(
            "Load",
            "With several --url: times that each is measured; they take turns. Default: "
            f"{_ROUNDS}.",
        ),
    ] = None,
    temperature: Temperature = 0.0,
    ignore_eos: Annotated[
        bool, in_panel("Load", "Generate the full length.", "--ignore-eos/--no-ignore-eos")
    ] = True,
    trace: Annotated[
        str | None,
        in_panel(
            "Load",
            "Send a trace's lengths at its times; a file or an http address: Azure's, BurstGPT, "
            "Mooncake's, Bailian's, kv-cache-tester's, ServeGen's or Quire's own (--save-trace).",
        ),
    ] = None,
    trace_scale: Annotated[float, in_panel("Load", "Factor for the trace's lengths.")] = 1.0,
    trace_speed: Annotated[float, in_panel("Load", "Factor for the trace's speed.")] = 1.0,
    trace_max_skipped: Annotated[
        int, in_panel("Load", "Number of invalid rows of the trace to skip before giving up.")
    ] = 0,
    goodput: Annotated[
        list[str] | None,
        in_panel(
            "Result",
            "Goals in milliseconds, e.g. ttft:500,tpot:50,e2el:9000; goodput counts the requests "
            "that meet all of them.",
        ),
    ] = None,
    metric_percentiles: Annotated[
        str, in_panel("Result", "Percentiles to print beside mean and median, e.g. 90,99.")
    ] = "99",
    save_result: Annotated[
        Path | None,
        in_panel("Result", "Write the result as vLLM's JSON, with a kv part, to this file."),
    ] = None,
    save_trace: Annotated[
        Path | None,
        in_panel("Result", "Write the sent requests to this file, as a trace for --trace."),
    ] = None,
    save_detailed: Annotated[
        bool,
        in_panel("Result", "Add each request's times and text to the JSON.", "--save-detailed"),
    ] = False,
    as_json: AsJson = False,
    calibrate: Annotated[
        Path | None,
        in_panel(
            "Result",
            "Instead of a load, measure steps of all sizes on this machine, and write their times "
            "to this file, for quire simulate --calibration.",
        ),
    ] = None,
    engine: dict[str, Any],
) -> None:
    """Measure throughput and latency, and print the table of vllm bench serve.

    Without --url, the engine runs in this process, and the table also shows its KV cache.

    \b
    quire bench --cache virtual --kv-cache-memory-bytes 64MiB
    quire bench --random-input-len 512 --request-rate 4 --goodput ttft:500,tpot:50
    quire bench --trace azure.csv --trace-scale 0.1 --trace-speed 4
    quire bench --calibrate here.json --max-num-seqs 32
    quire bench --url http://localhost:8000 --save-result result.json
    quire bench --url http://one:8000 --url http://two:8000 --request-rate 4

    Raises: ConfigError, RequestError; typer.Exit after a Ctrl-C.
    """
    if model in _OF_VLLM and not Path(model).exists():
        raise ConfigError(
            f"{model} is a command of vllm bench, and quire bench has no commands: leave it out "
            "(--url names a server to measure)"
        )
    urls = url or []
    if calibrate is not None:
        _refuse_misplaced(urls, header, api_key, engine, {"--calibrate": calibrate})
        if urls:
            raise ConfigError("--calibrate measures an engine of its own: leave out --url")
        write_calibration(model, engine, calibrate)
        return
    percentiles, goals = parse_percentiles(metric_percentiles), parse_goodput(goodput or ())
    saved = {"--save-result": save_result, "--save-trace": save_trace}
    _refuse_misplaced(urls, header, api_key, engine, saved)
    _refuse_rounds(rounds, urls, {"--save-trace": save_trace, "--save-detailed": save_detailed})
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
    headers = dict(map(_header, header or []))
    if len(urls) > 1:
        found = _compare(
            run,
            urls,
            lambda each: client(each, api_key, timeout, headers),
            model,
            rounds=rounds or _ROUNDS,
            figures_of=lambda measured: figures(
                measured.outcomes, measured.duration_s, percentiles=percentiles, goodput=goals
            ),
            percentiles=percentiles,
        )
        if save_result is not None:
            save_result.write_text(json.dumps(found), encoding="utf-8")
        print(json.dumps(found) if as_json else comparison_table(found, percentiles))
        return
    measured = (
        run.here(model, engine)
        if not urls
        else run.there(client(urls[0], api_key, timeout, headers), model)
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
            f"stopped after {num_done:,} of {measured.num_wanted:,} requests; the figures cover "
            "these",
            highlight=False,
        )
        raise typer.Exit(_STOPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    about: dict[str, Any]  # the target, in vLLM's keys
    num_wanted: int
    queries: list[Query]  # those that have ended: all, unless Ctrl-C stopped the run
    outcomes: list[Outcome]
    duration_s: float
    kv: dict[str, Any]  # figures of the KV cache; empty for a server


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Sends traffic to a target, with progress on standard error. Raises: ConfigError."""

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
        """Measure an engine of this process. Raises: RequestError if no request succeeds."""
        import_engine_for(model, EngineConfig.from_options(**engine))
        from quire.engine.async_llm import AsyncLLM

        watch = CacheWatch()

        async def measure() -> _Measured:
            self.console.print(f"loading {model or 'the demo model'} …", highlight=False)
            llm = AsyncLLM(model, observe=watch, show_progress=model is not None, **engine)
            async with llm:
                target = EngineHere(llm, temperature=self.temperature, ignore_eos=self.ignore_eos)
                vocabulary = vocabulary_of(llm.llm)
                await self._warm_up(target, vocabulary)
                watch.begin(llm)
                wanted = self.traffic.queries(vocabulary)
                queries, outcomes, duration_s = await self._send("sending", target, wanted)
                return _Measured(
                    about=_about("quire", model or llm.llm.name),
                    num_wanted=len(wanted),
                    queries=queries,
                    outcomes=outcomes,
                    duration_s=duration_s,
                    kv={"kv": watch.figures(llm, outcomes)},
                )

        return asyncio.run(measure())

    def there(self, server: Http, model: str | None) -> _Measured:
        """Measure a server. Raises: ConfigError; RequestError if no request succeeds."""

        async def measure() -> _Measured:
            # Connections stay open, so that connecting is no part of a time to first token.
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
                raise RequestError("stopped during the warm-up: nothing was measured")

    async def _send(
        self, what: str, target: Target, queries: list[Query]
    ) -> tuple[list[Query], list[Outcome], float]:
        """Send queries. Returns: those that ended before a Ctrl-C, their outcomes, the seconds."""
        with self._progress(what, len(queries)) as report:
            found, duration_s = await send_all(
                target, queries, max_concurrency=self.max_concurrency, report=report
            )
        done = [each for each in zip(queries, found, strict=True) if each[1] is not None]
        outcomes = [outcome for _, outcome in done if outcome is not None]
        if not outcomes:
            raise RequestError(f"{what}: stopped before any of {len(queries):,} requests ended")
        if not any(outcome.succeeded for outcome in outcomes):
            raise RequestError(
                f"{what}: none of {len(outcomes):,} requests succeeded; the first one: "
                f"{outcomes[0].error}"
            )
        return [query for query, _ in done], outcomes, duration_s

    @contextmanager
    def _progress(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a bar on a terminal and lines elsewhere; yields a call for each finished request."""
        if self.console.is_terminal:
            with progress_bar(MofNCompleteColumn(), console=self.console) as progress:
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


def _compare(
    run: "_Run",
    urls: list[str],
    client_of: Callable[[str], Http],
    model: str | None,
    *,
    rounds: int,
    figures_of: Callable[["_Measured"], dict[str, Any]],
    percentiles: tuple[float, ...],
) -> dict[str, Any]:
    """Measure servers in turns, each round with prompts of its own, the same for all.

    Raises: ConfigError; RequestError if no request of one succeeds; typer.Exit after a Ctrl-C.
    """
    done: list[list[dict[str, Any]]] = []
    for number in range(rounds):
        traffic = replace(run.traffic, seed=run.traffic.seed + number)
        own, found = replace(run, traffic=traffic), dict[int, dict[str, Any]]()
        for turn in range(len(urls)):
            place = (number + turn) % len(urls)  # none of them always comes first
            run.console.print(
                f"round {number + 1} of {rounds}: {urls[place]}", markup=False, highlight=False
            )
            measured = own.there(client_of(urls[place]), model)
            if len(measured.outcomes) < measured.num_wanted:
                raise typer.Exit(_STOPPED)
            found[place] = figures_of(measured)
        done.append([found[place] for place in range(len(urls))])
    return compared(urls, done, percentiles)


def _refuse_misplaced(
    urls: list[str],
    header: list[str] | None,
    api_key: str | None,
    engine: dict[str, Any],
    saved: dict[str, Path | None],
) -> None:
    """Refuse flags that would have no effect. Raises: ConfigError."""
    for flag, value in (("--header", header), ("--api-key", api_key)):
        if not urls and value:
            raise ConfigError(f"{flag} needs --url")
    misplaced = sorted(set(engine) - {"seed"})
    if urls and misplaced:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in misplaced)
        raise ConfigError(f"{flags}: --url measures a server, whose own flags set its engine")
    for flag, path in saved.items():
        if path is not None:
            check_folder(flag, path)


def _refuse_rounds(rounds: int | None, urls: list[str], of_one: dict[str, Any]) -> None:
    """Refuse flags that one server has no use for, or several. Raises: ConfigError."""
    if rounds is not None and rounds < 1:
        raise ConfigError(f"--rounds {rounds} must be at least 1")
    if rounds is not None and len(urls) < 2:
        raise ConfigError("--rounds needs several --url, which are compared")
    for flag, value in of_one.items():
        if value and len(urls) > 1:
            raise ConfigError(f"{flag} is of one server: give it with one --url")


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or "\n" in text or "\r" in text:
        raise ConfigError(f"--header {text!r} must have the form NAME: VALUE")
    return name.strip(), value.strip()


# -- quire bench --calibrate -----------------------------------------------------------------------


def write_calibration(model: str | None, engine: dict[str, Any], path: Path) -> None:
    """Measure how long steps take, and write it. Raises: ConfigError, RequestError."""
    # Without a prefix cache a repeated prompt is computed again.
    llm = load_llm(model, {**engine, "enable_prefix_caching": False})
    from torch import get_num_threads

    from quire.bench.calibrate import about, calibrate

    with llm, progress_bar(MofNCompleteColumn()) as progress:
        task = progress.add_task("running steps")
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
    table = plain_table("Time of a step on this machine", "", "µs", "per")
    for name, unit in zip(COEFFICIENTS, _UNITS, strict=True):
        seconds = getattr(found.costs, name)
        table.add_row(name.removesuffix("_s").replace("_", " "), f"{seconds * 1e6:,.4g}", unit)
    console.print(table)
    console.print(
        f"{found.num_steps:,} steps of {found.num_kinds:,} kinds. Error of a kind's time: "
        f"{found.median_error:.1%} in the median, at most {found.p90_error:.1%} for nine kinds of "
        f"ten, {found.total_error:+.1%} over all. Half of the steps of a kind lie within "
        f"{found.spread:.1%} of its median: smaller errors are noise of the machine.",
        soft_wrap=True,
    )
    console.print(f"written to {path}: quire simulate … --calibration {path}", soft_wrap=True)


_UNITS = (
    *("step", "step of over 128 tokens, more", "sequence", "sampled token"),
    *("chunk of a prompt", "token, of the first 8", "token, up to 64", "token, up to 128"),
    *("token, beyond", "entry read", "token and entry"),
)
