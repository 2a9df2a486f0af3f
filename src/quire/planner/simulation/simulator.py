"""Simulate a fleet: requests arrive at their times, and each replica steps on its own clock.

Replicas do not interact between two arrivals. So each replica runs up to the moment of the next
request, and the routing then chooses a replica for that request. It is there when it is through the
door.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import final

from quire.config import EngineConfig
from quire.engine.kv_sizing import kv_needs, ledger_for, staging_bytes, stored_spec
from quire.engine.scheduler import SchedulerLimits
from quire.engine.scheduling.offload_policy import WritePolicy
from quire.engine.sequence import Sequence as EngineSequence
from quire.errors import ConfigError
from quire.kv import CacheConfig, build_accounting
from quire.kv.interface import found_block_size
from quire.planner.capacity import PlanTarget, rank_footprint, sizes_of
from quire.planner.planned_tiers import (
    PlannedTier,
    TierTable,
    planned_peer,
    planned_tiers,
    require_tier_blocks,
)
from quire.planner.simulation.cost_model import StepCosts
from quire.planner.simulation.hand_offs import HandOffs
from quire.planner.simulation.result import (
    Goals,
    LatencyTally,
    PrefillFigures,
    SimulationResult,
    TierFigures,
    TierTotals,
)
from quire.planner.simulation.routing import DEFAULT_EVENT_DELAY_S, Router, RouterLine
from quire.planner.simulation.simulated_door import DoorCosts, SimulatedDoor
from quire.planner.simulation.simulated_engine import VirtualClock, virtual_engine
from quire.planner.simulation.simulated_replica import SimulatedReplica
from quire.planner.simulation.virtual_carrier import VirtualCarrier
from quire.planner.simulation.virtual_tiers import Places, VirtualPeer, VirtualTier
from quire.planner.simulation.waste import Waste
from quire.planner.subject import Subject
from quire.spec import ModelSpec
from quire.spec.tensor_parallel import rank_spec
from quire.traces import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Equal replicas of an engine, and the routing between them.

    ``peer``: the memory and the link of a prefill replica, for blocks that it leaves; None: there
    are none.
    """

    spec: ModelSpec  # with the dtype in which keys and values are stored
    cache: str
    sizes: CacheConfig  # of each replica
    limits: SchedulerLimits
    costs: StepCosts
    swap_bytes: int = 0
    num_replicas: int = 1
    num_prefill: int = 0  # further replicas, which compute prompts for the others
    peer: PlannedTier | None = None
    routing: str = "round-robin"
    event_delay_s: float = DEFAULT_EVENT_DELAY_S  # until the router hears of a replica
    tiers: tuple[PlannedTier, ...] = ()  # the nearest first
    door: DoorCosts = field(default_factory=DoorCosts)
    tier_write: WritePolicy = "auto"
    is_on_host: bool = True  # storing in tiers takes processor time from the steps


def make_replica(
    fleet: Fleet,
    ended: Callable[[EngineSequence], None],
    *,
    by_steps: bool = False,
    looks_at_waste: bool = False,
    places: Places | None = None,
    line: RouterLine | None = None,
) -> SimulatedReplica:
    """Make an idle replica of a fleet, with places for its blocks and this line to the router.

    Raises: ConfigError for an unknown strategy, and for tiers and one without blocks.
    """
    clock = VirtualClock()
    sizes = replace(fleet.sizes, keep_events=line is not None and line.hears_of_blocks)
    accounting = build_accounting(fleet.cache, fleet.spec, sizes)
    carrier, places = None, places or Places()
    if places.tiers or places.hands_over:
        block_size = found_block_size(accounting, fleet.sizes.block_size)
        carrier = VirtualCarrier(
            accounting.groups,
            block_size,
            places,
            fleet.costs,
            clock,
            staging_bytes=staging_bytes(
                accounting.groups, block_size, fleet.limits.max_num_batched_tokens
            ),
            shares_processor=fleet.is_on_host,
        )
    engine, cache = virtual_engine(
        accounting,
        fleet.limits,
        fleet.costs,
        clock,
        swap_bytes=fleet.swap_bytes,
        carrier=carrier,
        write=fleet.tier_write if places.tiers else "never",
        transfer=carrier if places.hands_over else None,
    )
    waste = Waste(cache.accounting) if looks_at_waste else None
    replica = SimulatedReplica(
        engine,
        cache,
        clock,
        fleet.costs,
        ended=ended,
        by_steps=by_steps,
        waste=waste,
        carrier=carrier,
    )
    replica.line = line
    return replica


def router_of(fleet: Fleet) -> Router | None:
    """Make the router of a fleet, or None for one engine."""
    if fleet.num_replicas == 1 and not fleet.num_prefill:
        return None
    accounting = build_accounting(fleet.cache, fleet.spec, fleet.sizes)
    return Router(
        fleet.routing,
        fleet.num_replicas,
        accounting.groups,
        found_block_size(accounting, fleet.sizes.block_size),
        delay_s=fleet.event_delay_s,
        num_prefill=fleet.num_prefill,
    )


def simulate(
    trace: Iterable[TraceRequest],
    fleet: Fleet,
    *,
    goals: Goals | None = None,
    ended: Callable[[int, EngineSequence], None] = lambda *_: None,
    by_steps: bool = False,
    looks_at_waste: bool = False,
) -> SimulationResult:
    """Run a trace of any length to its end; it is read as the simulation needs it.

    ``ended`` receives the number of a replica and a sequence that has ended there. ``by_steps``
    runs every step by itself, which is slower and gives the same figures. ``looks_at_waste``
    measures how much empty memory is filled later, which takes a few seconds more.
    """
    goals = goals or Goals()
    tally = LatencyTally(goals)

    def listener(place: int) -> Callable[[EngineSequence], None]:
        def note(sequence: EngineSequence) -> None:
            tally.note(sequence)
            ended(place, sequence)

        return note

    shared = {n: VirtualTier(tier) for n, tier in enumerate(fleet.tiers) if tier.is_shared}
    router = router_of(fleet)
    peers = [VirtualPeer(_peer_of(fleet), number) for number in range(fleet.num_prefill)]

    def make(
        place: int,
        ended: Callable[[EngineSequence], None],
        *,
        leaves_at: VirtualPeer | None = None,
    ) -> SimulatedReplica:
        tiers = (shared.get(n) or VirtualTier(tier) for n, tier in enumerate(fleet.tiers))
        return make_replica(
            fleet,
            ended,
            by_steps=by_steps,
            looks_at_waste=looks_at_waste,
            places=Places(
                tiers=tuple(tiers),
                leaves_at=leaves_at,
                peers=() if leaves_at is not None else tuple(peers),
            ),
            line=router.line(place) if router is not None else None,
        )

    def make_prefill(
        peer: VirtualPeer, ended: Callable[[EngineSequence], None], refused: Callable[[int], None]
    ) -> SimulatedReplica:
        replica = make(fleet.num_replicas + peer.number, ended, leaves_at=peer)
        replica.refused = refused
        return replica

    replicas = [make(place, listener(place)) for place in range(fleet.num_replicas)]
    hand_offs = HandOffs(peers, make_prefill, delay_s=fleet.event_delay_s) if peers else None
    num_requests = _Replay(replicas, router, hand_offs, SimulatedDoor(fleet.door)).run(trace)
    prefill = () if hand_offs is None else hand_offs.replicas
    end_s = max(replica.now_s for replica in (*replicas, *prefill))
    for replica in (*replicas, *prefill):
        replica.timeline.jump(end_s)
    result = _result(fleet, replicas, prefill, tally, goals, num_requests)
    if router is None or not peers:
        return result
    return _with_apart(result, router, peers, prefill)


@final
@dataclass(frozen=True, slots=True, order=True)
class _OnWay:
    """A request that is at its replica at a moment."""

    at_s: float
    number: int  # in the trace
    place: int = field(compare=False)
    prefill: int | None = field(compare=False)  # where its prompt is computed first
    request: TraceRequest = field(compare=False)


@final
@dataclass(frozen=True, slots=True)
class _Replay:
    """A trace on its way through replicas."""

    replicas: Sequence[SimulatedReplica]
    router: Router | None
    hand_offs: HandOffs | None
    door: SimulatedDoor
    on_way: list[_OnWay] = field(default_factory=list)  # a heap

    def run(self, trace: Iterable[TraceRequest]) -> int:
        """Run all requests. Returns: how many there were."""
        num_requests = 0
        for number, request in enumerate(trace):
            num_requests += 1
            self._run_until(request.at_s)
            self._send(request, number)
        self._run_until(inf)
        return num_requests

    def _run_until(self, moment_s: float) -> None:
        """Let all replicas take their steps up to a moment, and requests come to them meanwhile."""
        handed = self.hand_offs
        while True:
            door_s = self.on_way[0].at_s if self.on_way else inf
            hand_off_s = inf if handed is None else handed.next_s
            next_s = min(door_s, hand_off_s)
            if next_s >= moment_s:
                break
            for replica in self.replicas:
                replica.run_until(next_s)
            if door_s <= hand_off_s:
                self._enter(heapq.heappop(self.on_way))
            elif handed is not None:
                self._hand_over(handed)
        prefill = () if handed is None else handed.replicas
        for replica in (*self.replicas, *prefill):
            replica.run_until(moment_s)

    def _hand_over(self, handed: HandOffs) -> None:
        """Let the next thing happen to prompts that are computed apart."""
        going_on = handed.advance()
        if going_on is not None:
            assert self.router is not None, "a fleet with prefill replicas has a router"
            self.router.note_handed_over(has_blocks=going_on.remote is not None)
            self.replicas[going_on.place].add(
                going_on.request, going_on.number, at_s=going_on.at_s, remote=going_on.remote
            )

    def _send(self, request: TraceRequest, number: int) -> None:
        """Send a request where the router wants it, which has come to the door now."""
        place, prefill = 0, None
        if self.router is not None:
            place = self.router.choose(request, number)
            prefill = self.router.choose_apart(request, number)
        at_s = self.door.through_s(request.at_s, request.input_tokens)
        sent = _OnWay(at_s, number, place, prefill, request)
        if at_s > request.at_s:
            heapq.heappush(self.on_way, sent)
        else:
            self._enter(sent)

    def _enter(self, sent: _OnWay) -> None:
        """Let a request in where it was sent, at which all replicas have arrived in time."""
        if sent.prefill is None or self.hand_offs is None:
            self.replicas[sent.place].add(sent.request, sent.number, at_s=sent.at_s)
        else:
            prefill = sent.prefill - len(self.replicas)
            self.hand_offs.ask(prefill, sent.request, sent.number, sent.place, at_s=sent.at_s)


def _result(
    fleet: Fleet,
    replicas: Sequence[SimulatedReplica],
    prefill: Sequence[SimulatedReplica],
    tally: LatencyTally,
    goals: Goals,
    num_requests: int,
) -> SimulationResult:
    # Prefill replicas see the prompts of the others once more: their requests count as these's.
    every = (*replicas, *prefill)
    counts = [replica.scheduler.statistics for replica in replicas]
    counts_of_all = [replica.scheduler.statistics for replica in every]
    # Without a prefix cache nothing is looked up, and no prompt is missed.
    looked_up = counts if fleet.sizes.enable_prefix_caching else []
    lines = [replica.timeline for replica in every]
    duration_s = max(line.duration_s for line in lines)

    def mean(figure: str) -> float:
        """Return a mean over time, summed over the replicas; one that is done early holds none."""
        total = sum(line.integral(figure) for line in lines)
        return total / duration_s if duration_s else 0.0

    waste = Waste.shares([each.waste for each in every if each.waste is not None])
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
        num_steps=sum(replica.num_steps for replica in every),
        num_scheduled_tokens=int(sum(each.step_tokens.sum for each in counts_of_all)),
        num_input_tokens=tally.num_input_tokens,
        num_output_tokens=tally.num_output_tokens,
        prefix_query_tokens=sum(each.prefix_query_tokens for each in looked_up),
        prefix_hit_tokens=sum(each.prefix_hit_tokens for each in looked_up),
        prefix_missed_tokens=_added(each.prefix_missed_tokens for each in looked_up),
        num_preemptions=sum(each.num_preemptions for each in counts_of_all),
        num_swaps=sum(each.num_swaps for each in counts_of_all),
        num_recomputed_tokens=sum(each.num_recomputed_tokens for each in counts_of_all),
        saved_bytes=sum(each.saved_bytes for each in counts_of_all),
        loaded_bytes=sum(each.loaded_bytes for each in counts_of_all),
        copied_bytes=sum(replica.cache.copied_bytes for replica in every),
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
        busy_fraction=_busy_fraction(replicas, duration_s),
        tiers=_tier_totals(fleet, every),
        timelines=tuple(tuple(line.points) for line in lines),
    )


def _busy_fraction(replicas: Sequence[SimulatedReplica], duration_s: float) -> float:
    """Return the share of the time in which steps ran, in the mean."""
    return sum(each.busy_s for each in replicas) / (len(replicas) * duration_s or 1.0)


def _with_apart(
    result: SimulationResult,
    router: Router,
    peers: Sequence[VirtualPeer],
    prefill: Sequence[SimulatedReplica],
) -> SimulationResult:
    """Return a result with what prefill replicas did for the others.

    Of a prompt that was computed apart, that counts as found which neither of both computed.
    """
    moved_tokens = sum(peer.tier.hit_tokens for peer in peers)
    own = sum(each.scheduler.statistics.prefix_hit_tokens for each in prefill)
    asked = sum(each.scheduler.statistics.prefix_query_tokens for each in prefill)
    apart = PrefillFigures(
        num_replicas=len(prefill),
        num_prompts={each: router.num_prefilled[each] for each in ("apart", "here", "failed")},
        moved_bytes=sum(peer.tier.loaded_bytes for peer in peers),
        moved_tokens=moved_tokens,
        busy_fraction=_busy_fraction(prefill, result.duration_s),
    )
    hits = max(0, result.prefix_hit_tokens + own - asked)
    return replace(result, prefill=apart, prefix_hit_tokens=hits)


def _peer_of(fleet: Fleet) -> PlannedTier:
    if fleet.peer is None:
        raise ConfigError("a fleet with prefill replicas needs the speed of the links to them")
    return fleet.peer


def _tier_totals(fleet: Fleet, replicas: Sequence[SimulatedReplica]) -> TierTotals | None:
    """Add up what all replicas did with their tiers; None if there are none."""
    carriers = [each.carrier for each in replicas if each.carrier is not None]
    if not (carriers and fleet.tiers):
        return None
    counts = [each.offload_counts for each in replicas]
    hit_tokens = sum(each.hit_tokens for each in counts)
    figures = []
    for number, planned in enumerate(fleet.tiers):
        several = {id(each.tiers[number]): each.tiers[number] for each in carriers}.values()
        figures.append(
            TierFigures(
                name=planned.name,
                kind=planned.kind,
                capacity_bytes=planned.capacity_bytes,
                speed=str(planned.speed),
                speed_source=planned.speed.source,
                num_records=sum(each.records.num_records for each in several),
                num_evicted=sum(each.records.num_evicted for each in several),
                used_bytes=sum(each.records.used_bytes for each in several),
                read_bytes=sum(each.loaded_bytes for each in several),
                written_bytes=sum(each.stored_bytes for each in several),
                hit_tokens=sum(each.hit_tokens for each in several),
            )
        )

    def total(name: str) -> int:
        return sum(getattr(each, name) for each in counts)

    return TierTotals(
        tiers=tuple(figures),
        queried_tokens=total("queried_tokens"),
        hit_tokens=hit_tokens,
        num_late=total("num_late"),
        late_tokens=total("late_tokens"),
        evicted_tokens=total("evicted_tokens"),
        saved_s=sum(each.saved_s for each in counts),
        stored_blocks=total("stored_blocks"),
        dropped_blocks=total("dropped_blocks"),
    )


def _added(several: Iterable[dict[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for counts in several:
        total.update(counts)
    return dict(total)


def fleet_for(  # noqa: PLR0913 - each is a choice of a fleet
    subject: Subject,
    config: EngineConfig,
    place: PlanTarget,
    costs: StepCosts,
    *,
    num_replicas: int = 1,
    num_prefill: int = 0,
    routing: str = "round-robin",
    num_ranks: int = 1,
    tier_table: TierTable | None = None,
) -> Fleet:
    """Make a fleet of a model on a machine, with caches of the size that an engine would choose.

    A replica has ``num_ranks`` devices. One of them is accounted, since all hold the same tokens.
    ``num_prefill`` further replicas compute prompts for the others; ``tier_table`` has the speeds
    of tiers and of the links to them.

    Raises: ConfigError with the ledger if the budget leaves no room, or for tiers or prefill
    replicas that the engine would refuse.
    """
    on_rank = rank_spec(subject.spec, num_ranks)
    own = rank_footprint(subject.own, num_ranks)
    on_gpu = place.machine.device is not None
    needs = kv_needs(config, subject.name, on_rank, own, place.page_bytes, on_gpu=on_gpu)
    sizes = sizes_of(config, on_rank, place, ledger_for(config, needs, place.machine).require())
    spec = stored_spec(config, on_rank)
    accounting = build_accounting(config.cache, spec, sizes)
    require_tier_blocks(
        config,
        subject.name,
        accounting,
        num_ranks=num_ranks,
        source_tokens=subject.spec.source_tokens,
        has_peers=num_prefill > 0,
    )
    groups, block_size = accounting.groups, found_block_size(accounting, config.block_size)
    peer = planned_peer(groups, block_size=block_size, table=tier_table) if num_prefill else None
    return Fleet(
        spec=spec,
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
        num_prefill=num_prefill,
        peer=peer,
        routing=routing,
        tiers=planned_tiers(config, groups, block_size=block_size, table=tier_table),
        tier_write=config.kv_tier_write,
        is_on_host=not on_gpu,
    )
