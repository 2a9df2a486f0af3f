"""Reports for tests: small fleets, every strategy, and names as no user should choose them."""

from functools import cache

from planner.fleets import fleet_of, request
from quire.planner.hit_rates import hit_rate_curve
from quire.planner.report import Report, Variant, held_by_batch, held_by_one
from quire.planner.report.content import Lengths
from quire.planner.simulation.result import Goals
from quire.planner.simulation.simulator import simulate
from quire.traces import TraceRequest

STRATEGIES = ("contiguous", "growing", "paged", "virtual")
HOSTILE = "<script>alert('1')</script> & \"two\" </style>.jsonl"


def requests(count: int) -> list[TraceRequest]:
    """Some of them begin alike."""
    return [
        request(0.05 * number, 40 + number % 7 * 20, 5 + number % 11 * 3, *range(1 + number % 3))
        for number in range(count)
    ]


@cache
def report(
    count: int = 40, trace: str = HOSTILE, strategies: tuple[str, ...] = STRATEGIES
) -> Report:
    """Of so many requests."""
    trace_requests, goals = requests(count), Goals(ttft_s=0.5, tpot_s=0.03)
    fleets = {name: fleet_of(name, num_blocks=48, max_num_seqs=8) for name in strategies}
    sizes = {name: fleet.sizes for name, fleet in fleets.items()}
    spec = next(iter(fleets.values())).spec
    batch = [
        Lengths(input_tokens=each.input_tokens, output_tokens=each.output_tokens)
        for each in trace_requests[:8]
    ]
    rates = hit_rate_curve(trace_requests, [64, 256, 1024]) if count else None
    return Report(
        model=f"a model of {trace}",
        machine="1 × <here>",
        traces=(trace,),
        command=f"quire simulate '{trace}'",
        version="0",
        variants=tuple(
            Variant(
                name=name, result=simulate(trace_requests, fleet, goals=goals, looks_at_waste=True)
            )
            for name, fleet in fleets.items()
        ),
        notes=(f"{trace}: 3 rows were skipped",),
        one=tuple(held_by_one(spec, sizes, batch[0])) if batch else (),
        batch=tuple(held_by_batch(spec, sizes, batch)),
        num_batch=len(batch),
        hit_rates=((trace, rates),) if rates is not None else (),
        bytes_per_token=spec.bytes_per_token,
    )
