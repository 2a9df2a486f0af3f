"""Run ``quire simulate``: the engine's scheduler and accounting on traffic, without a model."""

import json
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.progress import TaskID, TextColumn

from quire.cli.options import (
    AsJson,
    Weights,
    in_panel,
    progress_bar,
    require_replicas,
    with_engine_options,
)
from quire.cli.plan import num_ranks_of, place_of
from quire.cli.planned_tiers import TierSizes, TierSpeeds
from quire.cli.simulate_table import Named, print_results
from quire.config import EngineConfig
from quire.engine.sequence import Sequence
from quire.errors import ConfigError
from quire.fleet.prefix_directory import MAX_REPLICAS
from quire.planner.hardware import named_speeds, roofline
from quire.planner.planned_tiers import TierTable
from quire.planner.simulation.cost_model import FittedCosts, StepCosts, measured_for
from quire.planner.simulation.result import Goals
from quire.planner.simulation.routing import DEFAULT_EVENT_DELAY_S, ROUTES
from quire.planner.simulation.simulated_door import DoorCosts
from quire.planner.simulation.simulator import Fleet, fleet_for
from quire.planner.simulation.simulator import simulate as run_simulation
from quire.planner.simulation.timeline import ChromeTrace
from quire.planner.subject import PUBLISHED, Subject, find_subject
from quire.spec.tensor_parallel import rank_spec
from quire.traces import Trace, TraceRequest, form_names, open_trace
from quire.traces.synthetic import Gamma, LogNormal, Synthetic
from quire.units import format_bytes

_MOST_DELAY_MS = 60_000
_LOOKED_AT = 1000  # requests of a trace, for the ids of their blocks

# -- traffic ---------------------------------------------------------------------------------------

OnProgress: TypeAlias = Callable[[int, int | None], None]

DRAWN = "drawn traffic"
NUM_DRAWN = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests to simulate: of traces, or synthetic ones if no trace is named.

    The fields after ``rate`` shape synthetic requests, with names and units as in quire bench; None
    means that the flag is not given. Raises: ConfigError.
    """

    traces: Several[str]
    trace_format: str | None
    max_skipped: int
    num_requests: int | None  # the first ones of each trace
    rate: float  # speed-up of the arrival times
    request_rate: float | None
    burstiness: float | None
    input_len: int | None
    output_len: int | None
    prefix_len: int | None
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise ConfigError(f"--rate {self.rate} must be a number above 0")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError(f"--num-requests {self.num_requests} must be at least 1")
        lengths = (self.input_len, self.output_len, self.prefix_len)
        drawn = (self.request_rate, self.burstiness, *lengths)
        if self.traces and any(given is not None for given in drawn):
            raise ConfigError(
                "--request-rate, --burstiness and --random-… shape synthetic traffic: leave them "
                "out with a trace (--rate plays it faster), or leave out the trace"
            )

    @property
    def sources(self) -> Several[str]:
        """The names of the traces, or of the synthetic traffic."""
        return self.traces or (DRAWN,)

    def open(self, source: str, on_progress: OnProgress | None = None) -> Trace | Synthetic:
        """Open one of ``sources`` at its own pace. Raises: ConfigError."""
        if self.traces:
            return open_trace(
                source, self.trace_format, max_skipped=self.max_skipped, on_progress=on_progress
            )
        burstiness = 1.0 if self.burstiness is None else self.burstiness
        if not burstiness > 0:
            raise ConfigError(f"--burstiness {burstiness} must be above 0; 1 is a Poisson process")
        rate = 4.0 if self.request_rate is None else self.request_rate
        return Synthetic(
            arrivals=Gamma(rate=rate, cv=burstiness**-0.5),
            input_tokens=LogNormal(mean_tokens=1024 if self.input_len is None else self.input_len),
            output_tokens=LogNormal(
                mean_tokens=128 if self.output_len is None else self.output_len
            ),
            num_requests=self.num_requests or NUM_DRAWN,
            prefix_tokens=self.prefix_len or 0,
            seed=self.seed,
        )

    def tells_prefixes(self, source: str) -> bool:
        """Return whether a source says which prompts begin alike, by its first requests.

        Of drawn traffic it is known. Raises: ConfigError.
        """
        if not self.traces:
            return True
        return any(request.hash_ids for request in islice(self.open(source), _LOOKED_AT))

    def first(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """Yield the first ``num_requests`` requests."""
        return islice(requests, self.num_requests)

    def paced(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """Yield the first requests at ``rate`` times their pace."""
        for request in self.first(requests):
            yield request if self.rate == 1 else replace(request, at_s=request.at_s / self.rate)


# -- the command -----------------------------------------------------------------------------------

DEFAULT_DEVICE = "h100"
# Options that take several values with commas between them; all combinations are simulated.
_LISTS = ("cache", "kv_cache_memory_bytes", "scheduling_policy", "prefix_caching_policy", "budget")


@with_engine_options
def simulate(  # noqa: PLR0913 - each is a flag
    *,
    traces: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TRACE...]",
            help="Files, folders or web addresses of traces: Mooncake's, Azure's, "
            "kv-cache-tester's, BurstGPT's, Bailian's, ServeGen's or Quire's own log. Default: "
            "synthetic traffic.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder, a name of the table of quire plan --list, or a hub name. "
            "Default: the demo model."
        ),
    ] = None,
    device: Annotated[
        str | None,
        in_panel(
            "Machine",
            f"Memory and speed by data sheet: {named_speeds()}. Default: {DEFAULT_DEVICE}.",
        ),
    ] = None,
    memory: Annotated[
        str | None, in_panel("Machine", "Memory size, e.g. 24GB, instead of the device's own.")
    ] = None,
    calibration: Annotated[
        Path | None,
        in_panel("Machine", "Take the speed from a file that quire bench --calibrate wrote."),
    ] = None,
    weights: Weights = PUBLISHED,
    expert_skew: Annotated[
        float,
        in_panel(
            "Machine",
            "How unevenly tokens choose the experts of a mixture. 0: all experts alike; S: the "
            "n-th in proportion to n to the power of -S.",
        ),
    ] = 0.0,
    tp: Annotated[int, in_panel("Machine", "Devices per replica (tensor parallelism).")] = 1,
    replicas: Annotated[int, in_panel("Machine", "Engines that share the traffic.")] = 1,
    prefill_replicas: Annotated[
        int,
        in_panel(
            "Machine",
            "Further engines, which compute prompts for the others where that costs less, as in "
            "quire fleet. --tier-speed peer=… gives the speed of the links to them.",
        ),
    ] = 0,
    routing: Annotated[
        str, in_panel("Machine", f"How a request is routed to a replica: {', '.join(ROUTES)}.")
    ] = "round-robin",
    event_delay: Annotated[
        float,
        in_panel(
            "Machine", "Milliseconds after which the routing hears of blocks, tokens and loads."
        ),
    ] = 1000 * DEFAULT_EVENT_DELAY_S,
    door_delay: Annotated[
        float | None,
        in_panel(
            "Machine",
            "Milliseconds of a request beside its engine's steps: HTTP, checks, the way there and "
            "back. Default: what the calibration has measured, else 0.",
        ),
    ] = None,
    tier_speed: TierSpeeds = None,
    tier_size: TierSizes = None,
    trace_format: Annotated[
        str | None,
        in_panel(
            "Traffic", f"Format of the traces: {', '.join(form_names())}. Default: by content."
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        in_panel(
            "Traffic",
            f"Number of requests of each trace. Default: all; synthetic: {NUM_DRAWN:,}.",
        ),
    ] = None,
    request_rate: Annotated[
        float | None, in_panel("Traffic", "Synthetic: requests per second. Default: 4.")
    ] = None,
    burstiness: Annotated[
        float | None,
        in_panel(
            "Traffic",
            "Synthetic: 1 is a Poisson process (default), less is burstier.",
        ),
    ] = None,
    random_input_len: Annotated[
        int | None, in_panel("Traffic", "Synthetic: tokens per prompt. Default: 1024.")
    ] = None,
    random_output_len: Annotated[
        int | None, in_panel("Traffic", "Synthetic: tokens per answer. Default: 128.")
    ] = None,
    random_prefix_len: Annotated[
        int | None,
        in_panel(
            "Traffic", "Synthetic: tokens of a common prefix, added to all prompts. Default: 0."
        ),
    ] = None,
    rate: Annotated[float, in_panel("Traffic", "Factor for the traffic's speed.")] = 1.0,
    max_skipped: Annotated[
        int, in_panel("Traffic", "Number of invalid rows of a trace to skip before giving up.")
    ] = 0,
    slo_ttft: Annotated[
        float | None, in_panel("Result", "Goal of goodput: maximum seconds to the first token.")
    ] = None,
    slo_tpot: Annotated[
        float | None,
        in_panel("Result", "Goal of goodput: maximum seconds per token after the first."),
    ] = None,
    chrome_trace: Annotated[
        Path | None,
        in_panel("Result", "Write a trace of one simulation to this file, for Perfetto."),
    ] = None,
    report: Annotated[
        Path | None,
        in_panel(
            "Result", "Write an HTML page with plots to this file; the page needs no network."
        ),
    ] = None,
    as_json: AsJson = False,
    engine: dict[str, Any],
) -> None:
    """Simulate traffic with the engine's own scheduler and accounting, without a model.

    --cache, --kv-cache-memory-bytes, --scheduling-policy, --prefix-caching-policy and --budget
    take several values with commas between them. Each combination is simulated and compared.

    --kv-tier adds a tier behind the KV memory, as for quire serve. No address is opened: a tier
    has the size of its address or of --tier-size, and the speed of its kind or of --tier-speed.

    \b
    quire simulate --model Qwen3-8B --request-rate 8 --random-prefix-len 512
    quire simulate conversation.jsonl --model Llama-3.1-8B --device h100
    quire simulate trace.csv --device l40s --cache contiguous,growing,paged
    quire simulate trace.jsonl --tp 8 --replicas 4 --routing prefix-aware
    quire simulate trace.jsonl --replicas 3 --prefill-replicas 1
    quire simulate trace.csv --calibration here.json --budget auto,vllm
    quire simulate trace.jsonl --cache paged,virtual --report out.html
    quire simulate trace.jsonl --kv-tier 'memory:?size=160GiB' \\
        --tier-speed memory=25,25

    Raises: ConfigError, ModelNotLoadable, MemoryUnavailable.
    """
    _refuse(replicas, prefill_replicas, tp, routing)
    _refuse_delays({"--event-delay": event_delay, "--door-delay": door_delay})
    if calibration is not None and device is not None:
        raise ConfigError("--calibration and --device both give the speed: give one")
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
        request_rate=request_rate,
        burstiness=burstiness,
        input_len=random_input_len,
        output_len=random_output_len,
        prefix_len=random_prefix_len,
        seed=variants[0][1].seed,
    )
    if chrome_trace is not None and len(variants) * len(traffic.sources) > 1:
        raise ConfigError("--chrome-trace takes one simulation: name one trace and no lists")
    tier_table = TierTable.of(tier_speed or (), tier_size or ())
    tier_table.require_used(variants[0][1].tiers, has_peers=prefill_replicas > 0)
    subject = find_subject(model, dtype=variants[0][1].dtype, weights=weights)
    strategies = {config.cache for _, config in variants}
    costs, notes = _costs(subject, device, calibration, tp, strategies, expert_skew)
    door = _door_of(costs, door_delay, notes)
    here = device or (DEFAULT_DEVICE if calibration is None else None)
    place = place_of(memory, here)
    goals = Goals(ttft_s=slo_ttft, tpot_s=slo_tpot)
    found: list[Named] = []
    fleets: list[Fleet] = []
    with ExitStack() as stack:
        chrome = stack.enter_context(ChromeTrace(chrome_trace)) if chrome_trace else None
        view = stack.enter_context(_View())

        def ended(replica: int, sequence: Sequence) -> None:
            view.ended()
            if chrome is not None:
                chrome.ended(replica, sequence)

        for source in traffic.sources:
            for name, config in _as_told(
                traffic, source, variants, notes, has_peers=prefill_replicas > 0
            ):
                # An engine here has a limit of mappings; that of another machine is not known.
                fleet = replace(
                    fleet_for(
                        subject,
                        config,
                        replace(place, max_mappings=None),
                        costs,
                        num_replicas=replicas,
                        num_prefill=prefill_replicas,
                        routing=routing,
                        num_ranks=tp,
                        tier_table=tier_table,
                    ),
                    event_delay_s=event_delay / 1000,
                    door=door,
                )
                label = " · ".join(filter(None, [source if len(traffic.sources) > 1 else "", name]))
                view.begin(label)
                requests = traffic.open(source, view.read)
                result = run_simulation(
                    traffic.paced(requests),
                    fleet,
                    goals=goals,
                    ended=ended,
                    looks_at_waste=report is not None,
                )
                if chrome is not None:
                    chrome.held(result.timelines)
                if isinstance(requests, Trace) and (skipped := requests.counts.num_skipped):
                    notes.append(f"{source}: {skipped:,} rows were skipped")
                found.append((label, result))
                fleets.append(fleet)
        notes += _speeds_of_tiers(fleets[0])
        if report is not None:
            simulated = Simulated(
                subject=subject,
                machine=f"{(replicas + prefill_replicas) * tp} × {here or 'this machine'}",
                traces=traffic.sources,
                open_trace=lambda source: traffic.first(traffic.open(source)),
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
    """A progress bar of bytes read, with the number of requests that have ended."""

    def __init__(self) -> None:
        self._progress = progress_bar(TextColumn("{task.fields[ended]:,} requests ended"))
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

    def ended(self) -> None:
        self._num_ended += 1
        if self._task is not None and self._num_ended % 64 == 0:
            self._progress.update(self._task, ended=self._num_ended)


def _variants(engine: dict[str, Any]) -> Iterator[tuple[str, EngineConfig]]:
    """Yield a config for each combination of lists, with a name that says what differs."""
    lists = {
        name: [part.strip() for part in str(engine[name]).split(",")]
        for name in _LISTS
        if name in engine
    }
    varied = [name for name, values in lists.items() if len(values) > 1]
    for values in product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        config = EngineConfig.from_options(**{**engine, **chosen})
        if config.memory_provider != "auto":
            raise ConfigError(
                f"memory_provider={config.memory_provider} is not simulated: only the engine makes "
                f"it and learns the size of its pages; leave it out here"
            )
        if config.speculative_config is not None:
            raise ConfigError(
                "speculative_config is not simulated: a trace does not say which drafts a model "
                "would accept"
            )
        label = " ".join(chosen[name] for name in varied)
        yield label or config.cache, config


def _costs(
    subject: Subject,
    device: str | None,
    calibration: Path | None,
    tp: int,
    strategies: set[str],
    expert_skew: float,
) -> tuple[StepCosts, list[str]]:
    """Return a model of how long a step takes, and notes on where it is from."""
    if calibration is not None:
        fitted, told = measured_for(calibration, subject.name, strategies)
        return fitted, [f"speed: {each}" for each in told]
    name = device or DEFAULT_DEVICE
    note = (
        f"speed: a roofline of {name}{f' × {tp}' if tp > 1 else ''}, weights in "
        f"{subject.precision.name}, not a measurement; docs/concepts/simulator.md says what it "
        f"leaves out"
    )
    on_rank = rank_spec(subject.spec, tp)
    return roofline(subject, on_rank, name, tp, expert_skew=expert_skew), [note]


def _as_told(
    traffic: Traffic,
    source: str,
    variants: list[tuple[str, EngineConfig]],
    notes: list[str],
    *,
    has_peers: bool,
) -> list[tuple[str, EngineConfig]]:
    """Return the variants, without a prefix cache for a trace that has no ids of blocks; note it.

    ``has_peers``: with one all the same, by which blocks of prefill replicas are found.

    Raises: ConfigError for tiers behind such a trace.
    """
    if traffic.tells_prefixes(source):
        return variants
    if variants[0][1].tiers:
        raise ConfigError(
            f"trace {source} does not tell which prompts begin alike, so tiers have nothing to "
            f"find: leave out --kv-tier, or take a trace with hash_ids"
        )
    if has_peers:
        notes.append(
            f"{source}: the trace does not tell which prompts begin alike, so none is found in a "
            f"prefix cache; a server that finds some computes less"
        )
        return variants
    notes.append(
        f"{source}: the trace does not tell which prompts begin alike, so it is simulated without "
        f"a prefix cache; a server that finds some computes less"
    )
    return [(name, replace(config, enable_prefix_caching=False)) for name, config in variants]


def _refuse_delays(delays_ms: dict[str, float | None]) -> None:
    """Check delays, by their flags. Raises: ConfigError."""
    for flag, delay_ms in delays_ms.items():
        if delay_ms is not None and not 0 <= delay_ms <= _MOST_DELAY_MS:
            raise ConfigError(
                f"{flag} {delay_ms:g} must be from 0 to {_MOST_DELAY_MS:,} milliseconds"
            )


def _refuse(replicas: int, prefill: int, tp: int, routing: str) -> None:
    """Check the numbers of engines and the routing. Raises: ConfigError."""
    require_replicas(replicas, prefill)
    if not 1 <= tp <= 1024:
        raise ConfigError(f"--tp {tp} must be from 1 to 1,024")
    if routing not in ROUTES:
        raise ConfigError(f"--routing {routing!r} is unknown; known: {', '.join(ROUTES)}")
    if routing == "prefix-aware" and replicas + prefill > MAX_REPLICAS:
        own = f"--replicas {replicas}" + (f" and --prefill-replicas {prefill}" if prefill else "")
        raise ConfigError(
            f"{own} is too many for --routing prefix-aware, which knows the caches "
            f"of {MAX_REPLICAS} at most; take least-loaded"
        )


def _door_of(costs: StepCosts, delay_ms: float | None, notes: list[str]) -> DoorCosts:
    """Return what a request takes at the door: what is said, or measured, which is noted."""
    if delay_ms is not None:
        return DoorCosts(request_s=delay_ms / 1000)
    door = costs.door if isinstance(costs, FittedCosts) else DoorCosts()
    if door.request_s or door.token_s:
        notes.append(
            f"door: measured, {1000 * door.request_s:.3g} ms a request and "
            f"{1000 * door.token_s:.3g} ms a token of its prompt; busy with a request for "
            f"{1000 * door.busy_s:.3g} ms; --door-delay gives another time"
        )
    return door


def _speeds_of_tiers(fleet: Fleet) -> Iterator[str]:
    for tier in fleet.tiers:
        size = "no limit" if tier.capacity_bytes is None else format_bytes(tier.capacity_bytes)
        holder = "shared by all replicas" if tier.is_shared else "of each replica"
        yield f"{tier.name}: {size}, {holder}; {tier.speed} ({tier.speed.source})"
    if (peer := fleet.peer) is not None:
        yield (
            f"{peer.name}: room for {format_bytes(peer.capacity_bytes or 0)} of blocks that wait "
            f"at each; {peer.speed} ({peer.speed.source})"
        )


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
