"""A trace through a fleet: requests come at their times, each replica steps on its own clock.

Between two arrivals replicas have nothing to do with each other. So each is taken to the moment at
which the next request comes, and that request then goes where the routing says.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Protocol

from quire.config import EngineConfig
from quire.engine.kv_sizing import kv_needs, ledger_for, stored_spec
from quire.engine.scheduler import SchedulerLimits
from quire.engine.sequence import Sequence as EngineSequence
from quire.kv import CacheConfig, build_accounting
from quire.planner.capacity import PlanTarget, rank_footprint, sizes_of
from quire.planner.simulation.cost_model import StepCosts
from quire.planner.simulation.replica import ROUTES, Replica
from quire.planner.simulation.result import Goals, LatencyTally, SimulationResult
from quire.planner.simulation.simulated_engine import VirtualClock, virtual_engine
from quire.planner.simulation.waste import Waste
from quire.planner.subject import Subject
from quire.spec import ModelSpec
from quire.spec.tensor_parallel import rank_spec
from quire.traces import TraceRequest

# -- simulator -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Equal replicas, and who gets what."""

    spec: ModelSpec  # with keys and values as they are kept
    cache: str
    sizes: CacheConfig  # of each replica
    limits: SchedulerLimits
    costs: StepCosts
    swap_bytes: int = 0
    num_replicas: int = 1
    routing: str = "round-robin"


class SimulationWatch(Protocol):
    """Sees a simulation go on."""

    def ended(self, replica: int, sequence: EngineSequence) -> None:
        """A sequence has come to its end."""
        ...


class Unwatched:
    """A simulation without a watcher."""

    def ended(self, replica: int, sequence: EngineSequence) -> None:
        """Nothing to do."""


def make_replica(
    fleet: Fleet,
    ended: Callable[[EngineSequence], None],
    *,
    by_steps: bool = False,
    looks_at_waste: bool = False,
) -> Replica:
    """One of the fleet, idle and empty. Raises: ConfigError for an unknown strategy."""
    clock = VirtualClock()
    engine, cache = virtual_engine(
        build_accounting(fleet.cache, fleet.spec, fleet.sizes),
        fleet.limits,
        fleet.costs,
        clock,
        swap_bytes=fleet.swap_bytes,
    )
    waste = Waste(cache.accounting) if looks_at_waste else None
    return Replica(engine, cache, clock, fleet.costs, ended=ended, by_steps=by_steps, waste=waste)


def simulate(
    trace: Iterable[TraceRequest],
    fleet: Fleet,
    *,
    goals: Goals | None = None,
    watch: SimulationWatch | None = None,
    by_steps: bool = False,
    looks_at_waste: bool = False,
) -> SimulationResult:
    """Run a trace to its end. It is read as it is needed, and may have any length.

    ``by_steps`` takes every step by itself: slower, and the same figures. ``looks_at_waste``: find
    out what becomes of what is held and empty, which takes a few seconds more.
    """
    goals, observer = goals or Goals(), watch or Unwatched()
    tally = LatencyTally(goals)

    def listener(place: int) -> Callable[[EngineSequence], None]:
        def ended(sequence: EngineSequence) -> None:
            tally.note(sequence)
            observer.ended(place, sequence)

        return ended

    replicas = [
        make_replica(fleet, listener(place), by_steps=by_steps, looks_at_waste=looks_at_waste)
        for place in range(fleet.num_replicas)
    ]
    num_requests = _replay(trace, replicas, fleet.routing)
    end_s = max(replica.now_s for replica in replicas)
    for replica in replicas:
        replica.timeline.jump(end_s)
    return _result(fleet, replicas, tally, goals, num_requests)


def _replay(trace: Iterable[TraceRequest], replicas: Sequence[Replica], routing: str) -> int:
    """How many requests there were."""
    route, num_requests = ROUTES[routing], 0
    for number, request in enumerate(trace):
        num_requests += 1
        for replica in replicas:
            replica.run_until(request.at_s)
        place = route(replicas, request, number) if len(replicas) > 1 else 0
        replicas[place].add(request, number)
    for replica in replicas:
        replica.run_until(inf)
    return num_requests


def _result(
    fleet: Fleet,
    replicas: Sequence[Replica],
    tally: LatencyTally,
    goals: Goals,
    num_requests: int,
) -> SimulationResult:
    counts = [replica.scheduler.statistics for replica in replicas]
    lines = [replica.timeline for replica in replicas]
    duration_s = max(line.duration_s for line in lines)

    def mean(figure: str) -> float:
        """Of all replicas together; one that is done early holds nothing that counts."""
        total = sum(line.integral(figure) for line in lines)
        return total / duration_s if duration_s else 0.0

    waste = Waste.shares([each.waste for each in replicas if each.waste is not None])
    peak = max((line.peak for line in lines), key=lambda state: state.committed_bytes)
    return SimulationResult(
        cache=fleet.cache,
        memory_bytes=fleet.sizes.capacity_bytes,
        num_replicas=len(replicas),
        routing=fleet.routing,
        num_requests=num_requests,
        num_finished=_added(each.num_finished for each in counts),
        num_refused=sum(replica.num_refused for replica in replicas),
        duration_s=duration_s,
        num_steps=sum(replica.num_steps for replica in replicas),
        num_scheduled_tokens=int(sum(each.step_tokens.sum for each in counts)),
        num_input_tokens=tally.num_input_tokens,
        num_output_tokens=tally.num_output_tokens,
        prefix_query_tokens=sum(each.prefix_query_tokens for each in counts),
        prefix_hit_tokens=sum(each.prefix_hit_tokens for each in counts),
        prefix_missed_tokens=_added(each.prefix_missed_tokens for each in counts),
        num_preemptions=sum(each.num_preemptions for each in counts),
        num_swaps=sum(each.num_swaps for each in counts),
        num_recomputed_tokens=sum(each.num_recomputed_tokens for each in counts),
        saved_bytes=sum(each.saved_bytes for each in counts),
        loaded_bytes=sum(each.loaded_bytes for each in counts),
        copied_bytes=sum(replica.cache.copied_bytes for replica in replicas),
        used_bytes=mean("used_bytes"),
        committed_bytes=mean("committed_bytes"),
        cached_bytes=mean("cached_bytes"),
        num_running=mean("num_running"),
        num_waiting=mean("num_waiting"),
        peak_committed_bytes=peak.committed_bytes,
        peak_used_bytes=peak.used_bytes,
        most_running=max(line.most_running for line in lines),
        later_fraction=waste.later_fraction,
        pieces_fraction=waste.pieces_fraction,
        latencies=tally.figures(),
        goals=asdict(goals),
        num_good=tally.num_good,
        timelines=tuple(tuple(line.points) for line in lines),
    )


def _added(several: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for counts in several:
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count
    return total


# -- scenario --------------------------------------------------------------------------------------

# From a model, options and a place to a fleet to simulate: sized as an engine would be.


def fleet_for(
    subject: Subject,
    config: EngineConfig,
    place: PlanTarget,
    costs: StepCosts,
    *,
    num_replicas: int = 1,
    routing: str = "round-robin",
    num_ranks: int = 1,
) -> Fleet:
    """Replicas of ``num_ranks`` devices each, of which one is accounted: all hold the same tokens.

    Raises: ConfigError where the budget leaves no room, with its ledger.
    """
    on_rank = rank_spec(subject.spec, num_ranks)
    own = rank_footprint(subject.own, num_ranks)
    needs = kv_needs(config, subject.name, on_rank, own, place.page_bytes)
    sizes = sizes_of(config, on_rank, place, ledger_for(config, needs, place.machine).require())
    return Fleet(
        spec=stored_spec(config, on_rank),
        cache=config.cache,
        sizes=sizes,
        limits=SchedulerLimits(
            max_model_len=sizes.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.scheduling_policy,
            watermark_bytes=int(config.watermark * sizes.capacity_bytes),
        ),
        costs=costs,
        swap_bytes=config.swap_space,
        num_replicas=num_replicas,
        routing=routing,
    )
