"""Route a simulated fleet's requests by the placement of a real one, which hears of things late.

Replicas tell of cached blocks, first tokens and ends when they happen; the placement is told after
a delay, as over a network. It is the code that a fleet runs (``quire.fleet.placement``).
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import MappingProxyType
from typing import Final, TypeAlias, final

from quire.engine.event_format import EventEncoder
from quire.fleet.placement import LeastLoaded, Load, Placed, Placement, PrefixAware, RoundRobin
from quire.fleet.prefix_directory import PrefixDirectory
from quire.fleet.shared_evidence import SharedEvidence
from quire.kv import NO_KEYS
from quire.kv.evidence import Evidence
from quire.kv.prefix_index import BlockEvent
from quire.planner.simulation.simulated_engine import VirtualClock, prompt_of
from quire.spec import Group
from quire.traces import TraceRequest

DEFAULT_EVENT_DELAY_S: Final = 0.005  # through a publisher's thread, a network and a decoder
_SEED: Final = 0  # of draws among equals: a simulation says the same twice

MakePlacement: TypeAlias = Callable[[PrefixDirectory, VirtualClock], Placement]
ROUTES: Final[Mapping[str, MakePlacement]] = MappingProxyType(
    {
        "round-robin": lambda _, clock: RoundRobin(),
        "least-loaded": lambda _, clock: LeastLoaded(clock=clock, seed=_SEED),
        "prefix-aware": lambda directory, clock: PrefixAware(directory, clock=clock, seed=_SEED),
    }
)


@final
class Router:
    """Chooses replicas by their numbers, and is told by them what happens there."""

    def __init__(
        self,
        routing: str,
        num_replicas: int,
        groups: Sequence[Group],
        block_size: int,
        *,
        delay_s: float = DEFAULT_EVENT_DELAY_S,
    ) -> None:
        """``delay_s``: after which the placement hears."""
        self._clock = VirtualClock()
        self._directory = PrefixDirectory(groups, block_size)
        self._placement = ROUTES[routing](self._directory, self._clock)
        self._encoder = EventEncoder(groups, block_size)
        self._names = [str(number) for number in range(num_replicas)]
        self._delay_s = delay_s
        self._told: list[
            tuple[float, int, Callable[[Placement], None]]
        ] = []  # a heap, by when it is heard
        self._order = count()
        self._evidence = SharedEvidence()
        self._placed: dict[int, Placed] = {}  # by the requests' numbers

    def line(self, place: int) -> "RouterLine":
        """Return the line on which the ``place``-th replica tells of itself."""
        return RouterLine(self, place)

    def choose(self, request: TraceRequest, number: int) -> int:
        """Choose a replica for the ``number``-th request of a trace, at its arrival."""
        while self._told and self._told[0][0] <= request.at_s:
            self._clock.now_s, _, hear = heapq.heappop(self._told)
            hear(self._placement)
        self._clock.now_s = request.at_s
        placed = self._placement.place(prompt_of(request, number), NO_KEYS, self._names)
        self._placed[number] = placed
        return int(placed.replica)

    def _hear(self, at_s: float, what: Callable[[Placement], None]) -> None:
        """Have the placement told of what happened at a moment, after the delay."""
        heapq.heappush(self._told, (at_s + self._delay_s, next(self._order), what))

    def hear_blocks(self, at_s: float, place: int, events: Sequence[BlockEvent]) -> None:
        """Have the directory told of blocks that a replica's cache has gained and lost."""
        wire = self._encoder.joined(events)
        self._hear(at_s, lambda _: self._directory.apply(self._names[place], wire))

    def hear_load(self, at_s: float, place: int, load: Load) -> None:
        """Have the placement told of a replica's load."""
        late = replace(load, age_s=self._delay_s)
        self._hear(at_s, lambda placement: placement.report(self._names[place], late))

    def hear_evidence(self, at_s: float, place: int, said: tuple[Evidence | None, ...]) -> None:
        """Have the door told of what a replica's eviction policies have found."""
        self._hear(at_s, lambda _: self._evidence.note(self._names[place], said))

    def evidence_of_others(self, place: int) -> tuple[Evidence | None, ...]:
        """Return what the door has heard of eviction policies, but for one replica's."""
        return self._evidence.of_others(self._names[place])

    @property
    def hears_of_blocks(self) -> bool:
        """Return whether the placement wants to know what caches have."""
        return isinstance(self._placement, PrefixAware)

    def hear_first_token(self, at_s: float, number: int) -> None:
        """Have the placement told of the first token of a request, by its number in the trace."""
        placed = self._placed[number]
        self._hear(at_s, lambda placement: placement.note_first_token(placed))

    def hear_end(self, at_s: float, number: int) -> None:
        """Have the placement told of the end of a request."""
        placed = self._placed.pop(number)
        self._hear(at_s, lambda placement: placement.note_end(placed))


@final
class RouterLine:
    """What one replica tells the router of its fleet."""

    def __init__(self, router: Router, place: int) -> None:
        self._router, self._place = router, place

    @property
    def hears_of_blocks(self) -> bool:
        return self._router.hears_of_blocks

    def tell_blocks(self, at_s: float, events: Sequence[BlockEvent]) -> None:
        """Tell of blocks that the cache has gained and lost."""
        if events:
            self._router.hear_blocks(at_s, self._place, events)

    def tell_load(self, at_s: float, load: Load) -> None:
        """Tell of the replica's load."""
        self._router.hear_load(at_s, self._place, load)

    def tell_evidence(
        self, at_s: float, said: tuple[Evidence | None, ...]
    ) -> tuple[Evidence | None, ...]:
        """Tell of what the eviction policies have found. Returns: what is known of the others."""
        self._router.hear_evidence(at_s, self._place, said)
        return self._router.evidence_of_others(self._place)

    def tell_first_token(self, at_s: float, number: int) -> None:
        """Tell of the first token of a request, by its number in the trace."""
        self._router.hear_first_token(at_s, number)

    def tell_end(self, at_s: float, number: int) -> None:
        """Tell of the end of a request."""
        self._router.hear_end(at_s, number)
