"""Route a simulated fleet's requests by the placement of a real one, which hears of things late.

Replicas tell of cached blocks, first tokens and ends when they happen; the placement is told after
a delay, as over a network. It is the code that a fleet runs (``quire.fleet.placement``).
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import MappingProxyType
from typing import Final, TypeAlias, final

from quire.engine.event_format import EventEncoder
from quire.fleet.detours import Detours, Prefilled
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


@dataclass(slots=True)
class _Known:
    """What is known of a replica besides its placement: as a door knows it, a little late."""

    load: Load | None = None
    begun: set[int] = field(default_factory=set)  # requests that have a token, and have not ended
    sent_tokens: int = 0  # of prompts that were sent there, and are not answered


@final
class Router:
    """Chooses replicas by their numbers, and is told by them what happens there.

    The numbers of prefill replicas follow those of the others.
    """

    def __init__(
        self,
        routing: str,
        num_replicas: int,
        groups: Sequence[Group],
        block_size: int,
        *,
        delay_s: float = DEFAULT_EVENT_DELAY_S,
        num_prefill: int = 0,
    ) -> None:
        """``delay_s``: after which the placement hears; ``num_prefill``: further replicas that
        compute prompts for the others.
        """
        self._clock = VirtualClock()
        self._directory = PrefixDirectory(groups, block_size)
        self._placement = ROUTES[routing](self._directory, self._clock)
        # Taking turns is for replicas of one kind: one for both would give each kind its every
        # other turn. What weighs loads does so for both.
        takes_turns = isinstance(self._placement, RoundRobin)
        self._placement_apart = RoundRobin() if takes_turns else self._placement
        self._encoder = EventEncoder(groups, block_size)
        self._names = [str(number) for number in range(num_replicas + num_prefill)]
        self._num_replicas, self._block_size = num_replicas, block_size
        self._heard = [_Known() for _ in self._names]
        self._detours = Detours()
        self.num_prefilled = Counter[Prefilled]()
        self._apart: dict[int, tuple[Placed, float]] = {}  # of prefill replicas, and since when
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
        names = self._names[: self._num_replicas]
        placed = self._placement.place(prompt_of(request, number), NO_KEYS, names)
        self._placed[number] = placed
        return int(placed.replica)

    @property
    def prefills_apart(self) -> bool:
        """Return whether there are prefill replicas."""
        return len(self._names) > self._num_replicas

    def choose_apart(self, request: TraceRequest, number: int) -> int | None:
        """Choose a prefill replica to compute a prompt first, whose replica is chosen.

        Returns: None where that does not pay, or there is none.
        """
        if not self.prefills_apart:
            return None
        here, others = self._placed[number], self._names[self._num_replicas :]
        if not any(self._pays(here, int(name)) for name in others):
            self.num_prefilled["here"] += 1
            return None
        placed = self._placement_apart.place(prompt_of(request, number), NO_KEYS, others)
        self._apart[number] = placed, self._clock.now_s
        self._heard[int(placed.replica)].sent_tokens += placed.num_prompt_tokens
        return int(placed.replica)

    def note_handed_over(self, *, has_blocks: bool) -> None:
        """Note that a prompt goes on after its detour, with its blocks or without them."""
        self.num_prefilled["apart" if has_blocks else "failed"] += 1

    def _pays(self, here: Placed, other: int) -> bool:
        load, heard = self._heard[int(here.replica)].load, self._heard[other]
        if load is None or heard.load is None:
            return False
        begun = len(self._heard[int(here.replica)].begun)
        trade = self._detours.weigh(
            here,
            load,
            heard.load,
            num_running=max(begun, load.num_running),
            queued_tokens=max(heard.sent_tokens, heard.load.queued_tokens),
            block_size=self._block_size,
        )
        return trade.pays

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

        def hear(placement: Placement) -> None:
            self._heard[place].load = late
            placement.report(self._names[place], late)

        self._hear(at_s, hear)

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

    def hear_first_token(self, at_s: float, place: int, number: int) -> None:
        """Have the placement told of the first token of a request, by its number in the trace."""
        is_apart = place >= self._num_replicas
        placed = self._apart[number][0] if is_apart else self._placed[number]

        def hear(placement: Placement) -> None:
            placement.note_first_token(placed)
            self._heard[place].begun.add(number)

        self._hear(at_s, hear)

    def hear_end(self, at_s: float, place: int, number: int) -> None:
        """Have the placement told of the end of a request."""
        if place >= self._num_replicas:
            self._hear_end_apart(at_s, place, number)
            return
        placed = self._placed.pop(number)

        def hear(placement: Placement) -> None:
            placement.note_end(placed)
            self._heard[place].begun.discard(number)

        self._hear(at_s, hear)

    def _hear_end_apart(self, at_s: float, place: int, number: int) -> None:
        placed, since_s = self._apart.pop(number)

        def hear(placement: Placement) -> None:
            placement.note_end(placed)
            heard = self._heard[place]
            heard.begun.discard(number)
            heard.sent_tokens -= placed.num_prompt_tokens
            if heard.load is not None:
                computing_s = placed.computed_tokens * heard.load.prompt_token_s
                self._detours.note(self._clock.now_s - since_s, computing_s)

        self._hear(at_s, hear)


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
        self._router.hear_first_token(at_s, self._place, number)

    def tell_end(self, at_s: float, number: int) -> None:
        """Tell of the end of a request."""
        self._router.hear_end(at_s, self._place, number)
