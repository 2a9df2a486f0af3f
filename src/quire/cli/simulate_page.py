"""Write the page of ``quire simulate --report``, with what the results alone do not tell."""

import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from quire.cli.options import check_folder
from quire.errors import ConfigError
from quire.kv import DEFAULT_POLICY
from quire.planner.hit_rates import OPTIMUM, HitRates, Prompts, hit_rate_curve, prompts_of
from quire.planner.report import Report, Variant, held_by_batch, held_by_one, render
from quire.planner.report.content import Lengths
from quire.planner.simulation.result import SimulationResult
from quire.planner.simulation.simulator import Fleet
from quire.planner.subject import Subject
from quire.traces import TraceRequest
from quire.version import VERSION

OnWork: TypeAlias = Callable[[str], None]
_NUM_BATCH = 32  # requests that the page draws side by side
_NUM_SIZES = 7  # cache sizes, each half the next; the largest cache evicts nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """All that a command has simulated. ``open_trace`` reads a trace once more for the page."""

    subject: Subject
    machine: str
    traces: Sequence[str]
    open_trace: Callable[[str], Iterable[TraceRequest]]
    fleets: Sequence[Fleet]
    found: Sequence[tuple[str, SimulationResult]]
    notes: Sequence[str]


def check_report(path: Path) -> None:
    """Check before a simulation that its page can be written. Raises: ConfigError."""
    check_folder("--report", path)
    if path.is_dir():
        raise ConfigError(f"--report {path} is a folder: name a file in it")


def write_report(path: Path, simulated: Simulated, on_work: OnWork) -> None:
    """Write the page; ``on_work`` receives the name of each part of the work.

    Raises: ConfigError if the file cannot be written.
    """
    page = render(_report(simulated, on_work))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {path} cannot be written: {error.strerror}") from error


def _report(simulated: Simulated, on_work: OnWork) -> Report:
    on_work("what each strategy holds")
    requests = islice(simulated.open_trace(simulated.traces[0]), _NUM_BATCH)
    batch = [
        Lengths(input_tokens=each.input_tokens, output_tokens=each.output_tokens)
        for each in requests
    ]
    fleets = simulated.fleets
    spec, sizes = fleets[0].spec, {fleet.cache: fleet.sizes for fleet in fleets}
    for strategy in ("contiguous", "paged"):  # every page compares these two
        sizes.setdefault(strategy, fleets[0].sizes)
    ordered = {name: sizes[name] for name in sorted(sizes)}
    each = ((one, _hit_rates(simulated.open_trace(one), on_work)) for one in simulated.traces)
    return Report(
        model=simulated.subject.name,
        machine=simulated.machine,
        traces=tuple(simulated.traces),
        command=shlex.join(["quire", *sys.argv[1:]]),
        version=VERSION,
        variants=tuple(Variant(name=name, result=result) for name, result in simulated.found),
        notes=tuple(simulated.notes),
        one=tuple(held_by_one(spec, ordered, batch[0])) if batch else (),
        batch=tuple(held_by_batch(spec, ordered, batch)),
        num_batch=len(batch),
        hit_rates=tuple((source, rates) for source, rates in each if rates is not None),
        bytes_per_token=spec.bytes_per_token,
    )


def _hit_rates(requests: Iterable[TraceRequest], on_work: OnWork) -> HitRates | None:
    """Compute the hit rates, or None for a trace that has no hash ids."""
    on_work("common prefixes of prompts")
    try:
        prompts = prompts_of(requests)
    except ConfigError:  # no hash ids, or hash ids of several sizes
        return None
    return hit_rate_curve(
        prompts,
        _sizes(prompts),
        (DEFAULT_POLICY, "lru", OPTIMUM),
        on_work=lambda what, done, of: on_work(f"hit rates, {what}: {done:,} of {of:,} requests"),
    )


def _sizes(prompts: Prompts) -> list[int]:
    """Return cache sizes in tokens, in ascending order."""
    most = max(1, prompts.num_blocks)
    blocks = {max(1, most >> halvings) for halvings in range(_NUM_SIZES)}
    return sorted(size * prompts.block_tokens for size in blocks)
