"""``quire simulate``: traffic through the real scheduler and accounting, on a virtual clock."""

import json
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from quire.cli.options import plain_table, with_engine_options
from quire.cli.plan import num_ranks_of, place_of
from quire.config import EngineConfig
from quire.engine.sequence import Sequence
from quire.errors import ConfigError
from quire.planner.capacity import PlanTarget
from quire.planner.hardware import SPEEDS, roofline
from quire.planner.simulation.cost_model import FittedCosts, StepCosts
from quire.planner.simulation.replica import ROUTES
from quire.planner.simulation.result import Goals, SimulationResult
from quire.planner.simulation.simulator import Fleet, fleet_for
from quire.planner.simulation.simulator import simulate as run_simulation
from quire.planner.simulation.timeline import ChromeTrace
from quire.planner.subject import Subject, find_subject
from quire.spec.tensor_parallel import rank_spec
from quire.traces import Trace, TraceRequest, form_names, open_trace
from quire.traces.synthetic import Gamma, LogNormal, Synthetic
from quire.units import format_bytes, format_count

# -- simulate report -------------------------------------------------------------------------------

# How ``quire simulate`` looks on a terminal: a column a variant, a row a figure.


Named = tuple[str, SimulationResult]
Row: TypeAlias = tuple[str, Callable[[SimulationResult], str]]


def print_results(several: Several[Named], *, notes: Several[str]) -> None:
    """Four sections: what was served, held and found, and how long it took."""
    console = Console(highlight=False)
    table = plain_table("", "", *(name for name, _ in several))
    table.columns[0].no_wrap = True
    results = [result for _, result in several]
    for title, rows in (
        ("served", _SERVED),
        ("held, in the mean over time", _HELD),
        ("found, and done twice", [*_misses(results), *_TWICE]),
        ("how long it took", list(_latencies())),
    ):
        table.add_section()
        table.add_row(f"[bold]{title}[/]")
        for label, figure in rows:
            table.add_row(f"  {label}", *map(figure, results))
    console.print(table)
    for note in notes:
        console.print(f"[dim]{note}[/]", soft_wrap=True)


def _ended(result: SimulationResult) -> str:
    return format_count(result.num_finished.get("length", 0) + result.num_finished.get("stop", 0))


def _good(result: SimulationResult) -> str:
    return f"{result.good_requests_per_s:,.3g}" if any(result.goals.values()) else ""


_SERVED: tuple[Row, ...] = (
    ("requests", lambda r: format_count(r.num_requests)),
    ("… that ended", _ended),
    ("… longer than could be", lambda r: format_count(r.num_refused)),
    ("virtual time", lambda r: f"{r.duration_s:,.1f} s"),
    ("requests/s", lambda r: f"{r.requests_per_s:,.3g}"),
    ("… within the goals", _good),
    ("output tokens/s", lambda r: f"{r.output_tokens_per_s:,.1f}"),
    ("tokens a step", lambda r: f"{r.num_scheduled_tokens / max(1, r.num_steps):,.1f}"),
)

_HELD: tuple[Row, ...] = (
    ("memory of all replicas", lambda r: format_bytes(r.memory_bytes * r.num_replicas)),
    ("committed", lambda r: format_bytes(round(r.committed_bytes))),
    ("… only cached", lambda r: format_bytes(round(r.cached_bytes))),
    ("… used", lambda r: format_bytes(round(r.used_bytes))),
    ("used of what is held", lambda r: f"{r.utilization:.1%}"),
    ("most committed by one", lambda r: format_bytes(r.peak_committed_bytes)),
    ("sequences running", lambda r: f"{r.num_running:,.1f}"),
    ("… most, in one", lambda r: format_count(r.most_running)),
    ("… waiting", lambda r: f"{r.num_waiting:,.1f}"),
)

_TWICE: tuple[Row, ...] = (
    ("preemptions", lambda r: format_count(r.num_preemptions)),
    ("… by swapping", lambda r: format_count(r.num_swaps)),
    ("tokens computed again", lambda r: format_count(r.num_recomputed_tokens)),
    ("bytes swapped", lambda r: format_bytes(r.saved_bytes + r.loaded_bytes)),
    ("bytes copied", lambda r: format_bytes(r.copied_bytes)),
)


def _misses(results: Several[SimulationResult]) -> Iterator[Row]:
    """Shares of the prompts' tokens: hits, and why the rest was not found."""
    yield "prompt tokens found", lambda r: f"{r.hit_rate:.1%}"
    reasons = dict.fromkeys(
        reason
        for result in results
        for reason, count in result.prefix_missed_tokens.items()
        if count
    )

    def missed(reason: str) -> Callable[[SimulationResult], str]:
        return lambda r: (
            f"{r.prefix_missed_tokens.get(reason, 0) / max(1, r.prefix_query_tokens):.1%}"
        )

    for reason in reasons:
        yield f"… not: {_WORDS.get(reason, reason)}", missed(reason)


# Of ``PrefixHit.shortfall``, for people.
_WORDS = MappingProxyType({"unknown": "never seen", "strategy": "none are kept"})


def _latencies() -> Iterator[Row]:
    def figure(key: str, part: str) -> Callable[[SimulationResult], str]:
        return lambda r: _duration(r.latencies[key][part])

    for key, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E")):
        for part in ("p50", "p90", "p99"):
            yield f"{name} {part}", figure(key, part)


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:,.1f} ms"
    return f"{seconds:,.2f} s" if seconds < 100 else f"{seconds:,.0f} s"


# -- simulate traffic ------------------------------------------------------------------------------

# The traffic that ``quire simulate`` plays: of traces, or drawn where none is given.


OnProgress: TypeAlias = Callable[[int, int | None], None]

DRAWN = "drawn traffic"
NUM_DRAWN = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What is drawn, as flags say it; None where nothing was said. Units as in quire bench."""

    request_rate: float | None = None
    burstiness: float | None = None
    input_len: int | None = None
    output_len: int | None = None
    prefix_len: int | None = None
    seed: int = 0

    @property
    def is_asked(self) -> bool:
        return any(
            given is not None
            for given in (
                *(self.request_rate, self.burstiness),
                *(self.input_len, self.output_len, self.prefix_len),
            )
        )

    def requests(self, count: int) -> Synthetic:
        """Raises: ConfigError."""
        burstiness = 1.0 if self.burstiness is None else self.burstiness
        if not burstiness > 0:
            raise ConfigError(f"--burstiness {burstiness} must be above 0; 1 is a Poisson process")
        return Synthetic(
            arrivals=Gamma(rate=_given(self.request_rate, 4.0), cv=burstiness**-0.5),
            input_tokens=LogNormal(mean_tokens=_given(self.input_len, 1024)),
            output_tokens=LogNormal(mean_tokens=_given(self.output_len, 128)),
            num_requests=count,
            prefix_tokens=self.prefix_len or 0,
            seed=self.seed,
        )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Raises: ConfigError for what cannot be played."""

    traces: Several[str]
    trace_format: str | None
    max_skipped: int
    num_requests: int | None  # of each, the first ones
    rate: float  # times as fast
    drawing: Drawing

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise ConfigError(f"--rate {self.rate} must be a number above 0")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError(f"--num-requests {self.num_requests} must be at least 1")
        if self.traces and self.drawing.is_asked:
            raise ConfigError(
                "--request-rate, --burstiness and --random-… are of traffic that is drawn: leave "
                "them out with a trace, which --rate plays faster, or leave out the trace"
            )

    @property
    def sources(self) -> Several[str]:
        return self.traces or (DRAWN,)

    def open(self, source: str, on_progress: OnProgress | None = None) -> Iterable[TraceRequest]:
        """From its first request, at its own pace."""
        if source == DRAWN and not self.traces:
            return self.drawing.requests(self.num_requests or NUM_DRAWN)
        trace = open_trace(
            source, self.trace_format, max_skipped=self.max_skipped, on_progress=on_progress
        )
        return _First(trace, self.num_requests)

    def paced(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """As fast as was asked for."""
        for request in requests:
            yield request if self.rate == 1 else replace(request, at_s=request.at_s / self.rate)


@dataclass(frozen=True, slots=True)
class _First:
    """A trace's first requests; each iteration reads it anew."""

    trace: Trace
    count: int | None

    def __iter__(self) -> Iterator[TraceRequest]:
        return islice(iter(self.trace), self.count)


def num_skipped(requests: Iterable[TraceRequest]) -> int:
    """Rows that were no requests, of what ``Traffic.open`` gave and was read."""
    return requests.trace.counts.num_skipped if isinstance(requests, _First) else 0


# -- simulate --------------------------------------------------------------------------------------


DEFAULT_DEVICE = "h100"
# Of these several can be given, with commas between them: each is simulated with each.
_LISTS = ("cache", "kv_cache_memory_bytes", "scheduling_policy", "prefix_caching_policy", "budget")


def _flag(panel: str, help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel)


@with_engine_options
def simulate(  # noqa: PLR0913 - each is a flag
    *,
    traces: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TRACE...]",
            help="Files, folders or web addresses of traffic: Mooncake's, Azure's, "
            "kv-cache-tester's, BurstGPT's, Bailian's, ServeGen's or Quire's own log. Default: "
            "traffic that is drawn.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="As quire plan takes it: a folder, a name of its table, a hub name. "
            "Default: the demo model."
        ),
    ] = None,
    device: Annotated[
        str | None,
        _flag(
            "Machine",
            f"Speed by its data sheet, and memory: {', '.join(SPEEDS)}. Default: {DEFAULT_DEVICE}.",
        ),
    ] = None,
    memory: Annotated[
        str | None, _flag("Machine", "Memory of a machine or device, instead of the device's own.")
    ] = None,
    calibration: Annotated[
        Path | None,
        _flag("Machine", "Speed as it was measured: a file of quire bench --calibrate."),
    ] = None,
    tp: Annotated[
        int, _flag("Machine", "Devices of a replica that share the heads (tensor parallelism).")
    ] = 1,
    replicas: Annotated[int, _flag("Machine", "Engines that share the traffic.")] = 1,
    routing: Annotated[
        str, _flag("Machine", f"Which of them gets a request: {', '.join(ROUTES)}.")
    ] = "round-robin",
    trace_format: Annotated[
        str | None,
        _flag("Traffic", f"Where its beginning does not say: {', '.join(form_names())}."),
    ] = None,
    num_requests: Annotated[
        int | None, _flag("Traffic", f"The first ones only; drawn, so many: {NUM_DRAWN:,}.")
    ] = None,
    request_rate: Annotated[
        float | None, _flag("Traffic", "Drawn: requests a second, 4 where nothing is said.")
    ] = None,
    burstiness: Annotated[
        float | None, _flag("Traffic", "Drawn: 1 is a Poisson process, less burstier.")
    ] = None,
    random_input_len: Annotated[
        int | None, _flag("Traffic", "Drawn: tokens of a prompt, besides the prefix; 1,024.")
    ] = None,
    random_output_len: Annotated[
        int | None, _flag("Traffic", "Drawn: tokens of an answer; 128.")
    ] = None,
    random_prefix_len: Annotated[
        int | None, _flag("Traffic", "Drawn: tokens that all prompts begin with; none.")
    ] = None,
    rate: Annotated[float, _flag("Traffic", "Play it so many times as fast.")] = 1.0,
    max_skipped: Annotated[
        int, _flag("Traffic", "Rows that may be no requests; what is skipped is counted.")
    ] = 0,
    slo_ttft: Annotated[
        float | None, _flag("Result", "Seconds to the first token, for goodput.")
    ] = None,
    slo_tpot: Annotated[
        float | None, _flag("Result", "Seconds a token after that, for goodput.")
    ] = None,
    chrome_trace: Annotated[
        Path | None, _flag("Result", "Write requests and memory for Perfetto (of one variant).")
    ] = None,
    report: Annotated[
        Path | None, _flag("Result", "Write one page with plots: an HTML file by itself.")
    ] = None,
    as_json: Annotated[
        bool, _flag("Result", "One JSON object, with what was held over time.", "--json")
    ] = False,
    engine: dict[str, Any],
) -> None:
    """Say what traffic would meet: the engine's own scheduler and accounting, and no model.

    Of --cache, --kv-cache-memory-bytes, --scheduling-policy, --prefix-caching-policy and --budget
    several can be given, with commas between them, and are compared.

    \b
    quire simulate --model Qwen3-8B --request-rate 8 --random-prefix-len 512
    quire simulate conversation.jsonl --model Llama-3.1-8B --device h100
    quire simulate trace.csv --model Qwen3-8B --device l40s --cache contiguous,growing,paged,virtual
    quire simulate trace.jsonl --model Llama-3.1-70B --tp 8 --replicas 4 --routing prefix-aware
    quire simulate trace.csv --calibration here.json --kv-cache-memory-bytes 1GiB,4GiB
    quire simulate trace.jsonl --cache contiguous,growing,paged,virtual --report out.html
    """
    _refuse(replicas, tp, routing)
    if calibration is not None and device is not None:
        raise ConfigError("--calibration is another machine's speed than --device's: give one")
    if report is not None:
        from quire.cli.simulate_page import Simulated, check_report, write_report

        check_report(report)
    variants = list(_variants(engine))
    tp = num_ranks_of(tp, variants[0][1])
    traffic = Traffic(
        traces=traces or (),
        trace_format=trace_format,
        max_skipped=max_skipped,
        num_requests=num_requests,
        rate=rate,
        drawing=Drawing(
            request_rate=request_rate,
            burstiness=burstiness,
            input_len=random_input_len,
            output_len=random_output_len,
            prefix_len=random_prefix_len,
            seed=variants[0][1].seed,
        ),
    )
    if chrome_trace is not None and len(variants) * len(traffic.sources) > 1:
        raise ConfigError("--chrome-trace is of one variant and one trace: give no lists")
    subject = find_subject(model, dtype=variants[0][1].dtype)
    costs, notes = _costs(subject, device, calibration, tp)
    if calibration is not None:
        notes += _other_strategies(costs, {config.cache for _, config in variants})
    here = device or (DEFAULT_DEVICE if calibration is None else None)
    place = place_of(memory, here)
    goals = Goals(ttft_s=slo_ttft, tpot_s=slo_tpot)
    found: list[Named] = []
    fleets: list[Fleet] = []
    with ExitStack() as stack:
        chrome = stack.enter_context(ChromeTrace(chrome_trace)) if chrome_trace else None
        view = stack.enter_context(_View())
        for source in traffic.sources:
            for name, config in variants:
                fleet = _fleet(
                    subject, config, place, costs, replicas=replicas, routing=routing, tp=tp
                )
                label = " · ".join(filter(None, [source if len(traffic.sources) > 1 else "", name]))
                view.begin(label)
                requests = traffic.open(source, view.read)
                result = run_simulation(
                    traffic.paced(requests),
                    fleet,
                    goals=goals,
                    watch=_Both(view, chrome),
                    looks_at_waste=report is not None,
                )
                if chrome is not None:
                    chrome.held(result.timelines)
                if skipped := num_skipped(requests):
                    notes.append(f"{source}: {skipped:,} rows were skipped")
                found.append((label, result))
                fleets.append(fleet)
        if report is not None:
            simulated = Simulated(
                subject=subject,
                machine=f"{replicas * tp} × {here or 'this machine'}",
                traces=traffic.sources,
                open_trace=traffic.open,
                fleets=fleets,
                found=found,
                notes=[*notes, *_refusals(found)],
            )
            write_report(report, simulated, view.begin)
    if as_json:
        print(json.dumps(_as_dict(subject, found, notes)))
    else:
        print_results(found, notes=[*notes, *_refusals(found)])


class _View:
    """A bar of bytes read, and how many requests have ended."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[ended]:,} requests ended"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task: TaskID | None = None
        self._num_ended = 0

    def __enter__(self) -> "_View":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, label: str) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._num_ended = 0
        self._task = self._progress.add_task(label or "simulating", total=None, ended=0)

    def read(self, num_bytes: int, total: int | None) -> None:
        assert self._task is not None
        self._progress.update(self._task, completed=num_bytes, total=total)

    def ended(self, replica: int, sequence: Sequence) -> None:
        self._num_ended += 1
        if self._task is not None and self._num_ended % 64 == 0:
            self._progress.update(self._task, ended=self._num_ended)


class _Both:
    """The bar, and the file if there is one."""

    def __init__(self, view: _View, chrome: ChromeTrace | None) -> None:
        self._view, self._chrome = view, chrome

    def ended(self, replica: int, sequence: Sequence) -> None:
        self._view.ended(replica, sequence)
        if self._chrome is not None:
            self._chrome.ended(replica, sequence)


def _variants(engine: dict[str, Any]) -> Iterator[tuple[str, EngineConfig]]:
    """Each combination of what was given as lists; its name says what differs."""
    lists = {
        name: [part.strip() for part in str(engine[name]).split(",")]
        for name in _LISTS
        if name in engine
    }
    varied = [name for name, values in lists.items() if len(values) > 1]
    for values in product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        config = EngineConfig.from_options(**{**engine, **chosen})
        label = " ".join(chosen[name] for name in varied)
        yield label or config.cache, config


def _costs(
    subject: Subject, device: str | None, calibration: Path | None, tp: int
) -> tuple[StepCosts, list[str]]:
    """What a step takes, and where that is from."""
    if calibration is not None:
        fitted = FittedCosts.read(calibration)
        machine, of = fitted.about.get("machine", "?"), fitted.about.get("model", "?")
        note = f"speed: measured on {machine} with {of}, {calibration}"
        return fitted, [note]
    name = device or DEFAULT_DEVICE
    note = (
        f"speed: a roofline of {name}{f' × {tp}' if tp > 1 else ''}, not a measurement; "
        f"docs/concepts/simulator.md says what it leaves out"
    )
    return roofline(subject, rank_spec(subject.spec, tp), name, tp), [note]


def _other_strategies(costs: StepCosts, simulated: set[str]) -> list[str]:
    """What a calibration does not know: how fast a cache is read that it was not taken with."""
    assert isinstance(costs, FittedCosts)
    known = str(costs.about.get("cache", "?"))
    others = ", ".join(sorted(simulated - {known}))
    if not others:
        return []
    return [f"speed: measured with --cache {known}, and taken for {others} too: not compared"]


def _fleet(
    subject: Subject,
    config: EngineConfig,
    place: PlanTarget,
    costs: StepCosts,
    *,
    replicas: int,
    routing: str,
    tp: int,
) -> Fleet:
    if config.memory_provider != "auto":
        raise ConfigError(
            f"memory_provider={config.memory_provider} is not simulated: only the engine makes it "
            f"and learns the size of its pages; leave it out here"
        )
    if config.speculative_config is not None:
        raise ConfigError(
            "speculative_config is not simulated: what would be guessed, no trace says"
        )
    # An engine here has a limit of mappings; that of another machine is not known.
    return fleet_for(
        subject,
        config,
        replace(place, max_mappings=None),
        costs,
        num_replicas=replicas,
        routing=routing,
        num_ranks=tp,
    )


def _refuse(replicas: int, tp: int, routing: str) -> None:
    """Raises: ConfigError."""
    for name, value, most in (("replicas", replicas, 4096), ("tp", tp, 1024)):
        if not 1 <= value <= most:
            raise ConfigError(f"--{name} {value} must be from 1 to {most:,}")
    if routing not in ROUTES:
        raise ConfigError(f"--routing {routing!r} is unknown; known: {', '.join(ROUTES)}")


def _refusals(found: list[Named]) -> Iterator[str]:
    for name, result in found:
        if result.num_refused:
            yield (
                f"{name}: {result.num_refused:,} requests are longer than max_model_len or than "
                f"the memory, and were refused"
            )


def _as_dict(subject: Subject, found: list[Named], notes: list[str]) -> dict[str, Any]:
    return {
        "model": subject.name,
        "notes": notes,
        "variants": [{"name": name, **result.to_json()} for name, result in found],
    }
