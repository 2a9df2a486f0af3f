"""Route a simulated fleet's requests by the placement of a real one, which hears of things late.

Replicas tell of cached blocks, first tokens and ends when they happen; the placement is told after
a delay, as over a network. It is the code that a fleet runs (``quire.fleet.placement``).
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Final, TypeAlias, final

from quire.engine.event_format import EventEncoder
from quire.fleet.placement import LeastLoaded, Load, Placed, Placement, PrefixAware, RoundRobin
from quire.fleet.prefix_directory import PrefixDirectory
from quire.kv import NO_KEYS
from quire.kv.prefix_index import BlockEvent, Medium
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
        shared: Sequence[Medium] = (),
    ) -> None:
        """``delay_s``: after which the placement hears; ``shared``: media that all reach."""
        self._clock = VirtualClock()
        self._directory = PrefixDirectory(groups, block_size, shared=shared)
        self._placement = ROUTES[routing](self._directory, self._clock)
        self._encoder = EventEncoder(groups, block_size)
        self._names = [str(number) for number in range(num_replicas)]
        self._delay_s = delay_s
        self._told: list[tuple[float, int, Callable[[], None]]] = []  # a heap, by when it is heard
        self._order = count()
        self._placed: dict[int, Placed] = {}  # by the requests' numbers

    def choose(self, request: TraceRequest, number: int) -> int:
        """Choose a replica for the ``number``-th request of a trace, at its arrival."""
        while self._told and self._told[0][0] <= request.at_s:
            self._clock.now_s, _, hear = heapq.heappop(self._told)
            hear()
        self._clock.now_s = request.at_s
        placed = self._placement.place(prompt_of(request, number), NO_KEYS, self._names)
        self._placed[number] = placed
        return int(placed.replica)

    # -- what replicas tell ----------------------------------------------------------------------

    def tell_blocks(self, at_s: float, place: int, events: Sequence[BlockEvent]) -> None:
        """Tell of blocks that a replica's cache has gained and lost."""
        if events:
            wire = self._encoder.joined(events)
            self._tell(at_s, lambda: self._directory.apply(self._names[place], wire))

    def tell_first_token(self, at_s: float, number: int) -> None:
        """Tell of the first token of a request."""
        if (placed := self._placed.get(number)) is not None:
            self._tell(at_s, lambda: self._placement.note_first_token(placed))

    def tell_end(self, at_s: float, number: int) -> None:
        """Tell of the end of a request."""
        if (placed := self._placed.pop(number, None)) is not None:
            self._tell(at_s, lambda: self._placement.note_end(placed))

    def tell_load(self, at_s: float, place: int, load: Load) -> None:
        """Tell of a replica's load."""
        self._tell(at_s, lambda: self._placement.report(self._names[place], load))

    def _tell(self, at_s: float, hear: Callable[[], None]) -> None:
        heapq.heappush(self._told, (at_s + self._delay_s, next(self._order), hear))
