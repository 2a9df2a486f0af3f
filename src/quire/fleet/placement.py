"""Placement: which replica a request goes to, by what is cached where and how long each is busy.

``Placement`` is the protocol, and three are here: ``RoundRobin``, ``LeastLoaded``, ``PrefixAware``.
A placement counts what it has sent at the moment of its choice, so that a burst spreads before any
replica has reported. It chooses and counts; sending, streaming and health are its caller's.

One thread uses a placement.
"""

import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias, final

import numpy as np

from quire.fleet.key_table import Keys
from quire.fleet.prefix_directory import PrefixDirectory, PromptTokens
from quire.kv import NO_KEYS, PrefixKeys
from quire.kv.prefix_index import Medium
from quire.units import ceil_div

Clock: TypeAlias = Callable[[], float]  # seconds

# -- what is told ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a replica reports of itself, as measured there. The defaults stand for no report yet."""

    num_waiting: int = 0
    num_running: int = 0
    queued_tokens: int = 0  # of prompts, not computed yet
    compute_s_per_token: float = 1e-4  # of a prompt
    load_s_per_block: Mapping[Medium, float] = field(
        default_factory=dict
    )  # of a tier's; absent: not known
    decode_s_per_step: float = 0.0  # that running sequences add to a step which computes a prompt
    max_num_batched_tokens: int = 2048  # tokens of a step
    max_num_seqs: int = 256
    age_s: float = 0.0  # since it was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What was decided, and what was thought. It is also the reservation, to be given back."""

    number: int  # of the choice, unique in its placement
    replica: str
    ranked: tuple[str, ...]  # all candidates, the best first; ``replica`` is the first
    num_prompt_tokens: int
    found_tokens: Mapping[Medium, int] = field(
        default_factory=dict
    )  # that the replica is thought to have
    cost_ms: float = 0.0  # until the first token, as was thought

    @property
    def computed_tokens(self) -> int:
        """Return how many of the prompt's tokens the replica is thought to have to compute."""
        return self.num_prompt_tokens - sum(self.found_tokens.values())


class Placement(Protocol):
    """Chooses replicas, by name, and counts what they have been sent."""

    def place(
        self,
        token_ids: PromptTokens,
        keys: PrefixKeys,
        candidates: Sequence[str],
        *,
        session: str | None = None,
    ) -> Placed:
        """Choose a replica for a prompt, and count the request there from now on.

        ``session``: what the client calls a conversation; among equals it stays where it was.
        Raises: ValueError without candidates.
        """
        ...

    def note_first_token(self, placed: Placed) -> None:
        """Note that the prompt of a choice is computed. A second call does nothing."""
        ...

    def note_end(self, placed: Placed) -> None:
        """Note that a request has ended, in whatever way. A second call does nothing."""
        ...

    def report(self, replica: str, load: Load) -> None:
        """Take a replica's own report, which holds until the next one."""
        ...

    def forget(self, replica: str) -> None:
        """Forget a replica that is gone: its load, its blocks, its requests."""
        ...


# -- what is counted -------------------------------------------------------------------------------

# A request on its way is not in a report that was measured before it came.
_FLIGHT_S: Final = 0.05
_NEW_WEIGHT: Final = 0.05  # of one more request in the mean time that requests take


@dataclass(slots=True)
class _Standing:
    """One replica's load: the last report, and what has changed since by this placement's doing."""

    load: Load = field(default_factory=Load)
    queued_tokens: int = 0
    num_requests: int = 0  # running or waiting
    waits_for_token: dict[int, tuple[float, int]] = field(default_factory=dict)  # by choice
    runs: dict[int, float] = field(default_factory=dict)  # when each was placed


@final
class Loads:
    """What each replica is busy with: its reports, and what was sent there since."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.mean_run_s = 0.0  # that requests take, from their choice to their end
        self._clock = clock
        self._standings: dict[str, _Standing] = {}

    def of(self, replica: str) -> _Standing:
        """Return a replica's standing, an idle one for a replica that is new."""
        standing = self._standings.get(replica)
        if standing is None:
            standing = self._standings[replica] = _Standing()
        return standing

    def reserve(self, placed: Placed) -> None:
        """Count a request that is sent now."""
        standing, now_s = self.of(placed.replica), self._clock()
        standing.queued_tokens += placed.computed_tokens
        standing.num_requests += 1
        standing.waits_for_token[placed.number] = now_s, placed.computed_tokens
        standing.runs[placed.number] = now_s

    def note_first_token(self, placed: Placed) -> bool:
        """Take a prompt off its replica's queue. Returns: whether it was on it."""
        standing = self.of(placed.replica)
        waited = standing.waits_for_token.pop(placed.number, None)
        if waited is None:
            return False
        standing.queued_tokens = max(0, standing.queued_tokens - waited[1])
        return True

    def note_end(self, placed: Placed) -> bool:
        """Take a request off its replica. Returns: whether it was there."""
        self.note_first_token(placed)
        standing = self.of(placed.replica)
        began_s = standing.runs.pop(placed.number, None)
        if began_s is None:
            return False
        run_s = self._clock() - began_s
        self.mean_run_s += _NEW_WEIGHT * (run_s - self.mean_run_s) if self.mean_run_s else run_s
        standing.num_requests = max(0, standing.num_requests - 1)
        return True

    def report(self, replica: str, load: Load) -> None:
        """Take a report in place of what was counted, but for requests that may be on their way."""
        standing, since_s = self.of(replica), self._clock() - load.age_s - _FLIGHT_S
        standing.load = load
        standing.queued_tokens = load.queued_tokens + sum(
            tokens for at_s, tokens in standing.waits_for_token.values() if at_s > since_s
        )
        standing.num_requests = (
            load.num_waiting
            + load.num_running
            + sum(at_s > since_s for at_s in standing.runs.values())
        )

    def forget(self, replica: str) -> None:
        """Forget a replica, and what it was sent."""
        self._standings.pop(replica, None)


# -- without the caches ----------------------------------------------------------------------------


@final
class RoundRobin:
    """Takes one replica after the other."""

    def __init__(self) -> None:
        self._next = count()

    def place(
        self,
        token_ids: PromptTokens,
        keys: PrefixKeys = NO_KEYS,
        candidates: Sequence[str] = (),
        *,
        session: str | None = None,
    ) -> Placed:
        if not candidates:
            raise ValueError(_NO_CANDIDATES)
        number = next(self._next)
        first = number % len(candidates)
        ranked = (*candidates[first:], *candidates[:first])
        return Placed(
            number=number,
            replica=ranked[0],
            ranked=ranked,
            num_prompt_tokens=len(token_ids),
        )

    def note_first_token(self, placed: Placed) -> None:
        """Do nothing: no load is counted."""

    def note_end(self, placed: Placed) -> None:
        """Do nothing: no load is counted."""

    def report(self, replica: str, load: Load) -> None:
        """Do nothing: no load is counted."""

    def forget(self, replica: str) -> None:
        """Do nothing: no load is counted."""


@final
class LeastLoaded:
    """Takes the replica with the fewest requests, running or waiting; of equals one at random."""

    def __init__(self, *, clock: Clock = time.monotonic, seed: int | None = None) -> None:
        self._loads = Loads(clock)
        self._random = Random(seed)
        self._numbers = count()

    def place(
        self,
        token_ids: PromptTokens,
        keys: PrefixKeys = NO_KEYS,
        candidates: Sequence[str] = (),
        *,
        session: str | None = None,
    ) -> Placed:
        placed = self.thought(token_ids, candidates)
        self.reserve(placed)
        return placed

    def thought(self, token_ids: PromptTokens, candidates: Sequence[str]) -> Placed:
        """Return what ``place`` would choose, without counting it. Raises: ValueError."""
        if not candidates:
            raise ValueError(_NO_CANDIDATES)
        of, draw = self._loads.of, self._random.random
        ranked = tuple(sorted(candidates, key=lambda each: (of(each).num_requests, draw())))
        return Placed(
            number=next(self._numbers),
            replica=ranked[0],
            ranked=ranked,
            num_prompt_tokens=len(token_ids),
        )

    def reserve(self, placed: Placed) -> None:
        """Count a choice."""
        self._loads.reserve(placed)

    def note_first_token(self, placed: Placed) -> None:
        self._loads.note_first_token(placed)

    def note_end(self, placed: Placed) -> None:
        self._loads.note_end(placed)

    def report(self, replica: str, load: Load) -> None:
        self._loads.report(replica, load)

    def forget(self, replica: str) -> None:
        self._loads.forget(replica)


_NO_CANDIDATES = "there is no replica to choose from"


# -- by the caches ---------------------------------------------------------------------------------

# What loading a block costs where no tier has been measured, of computing it.
_LOAD_FRACTION: Final[Mapping[Medium, float]] = MappingProxyType(
    {"GPU": 0.0, "CPU": 0.2, "STORAGE": 0.4}
)
# What a second of computing weighs, against one of waiting. A prompt waits for both alike, but what
# is computed twice keeps others waiting, too, and takes the place of blocks that would be found.
DEFAULT_WORK_WEIGHT: Final = 9.0
# How much less computing weighs where a prefix was sent before and is gone by now. The cache there
# knows that it comes again and keeps it longer now; another one sees it for the first time.
_FORMER_WEIGHT: Final = 4.0
# Costs are estimates: those above the least one by so much of its time are equals.
_EQUAL_FRACTION: Final = 0.05
_EQUAL_S: Final = 0.001
_MOST_SESSIONS: Final = 65_536
_MOST_REMEMBERED: Final = 131_072


@final
class PrefixAware:
    """Takes the replica that has least to do until the first token, by its cache and its queue.

    The cost of a replica is what it would have to compute of the prompt, load from tiers, and do
    before, in the seconds that it has measured; computing weighs more than waiting. What is being
    computed there, for a request that has no first token yet, counts as found. Among equals a
    session stays where it was, then the least loaded one is taken, then one at random.
    """

    def __init__(
        self,
        directory: PrefixDirectory,
        *,
        work_weight: float = DEFAULT_WORK_WEIGHT,
        clock: Clock = time.monotonic,
        seed: int | None = None,
    ) -> None:
        """``directory``: told by the replicas' events, beside this.

        ``work_weight``: of a second of computing, against one of waiting; 1 looks only at this
        request's own first token.
        """
        self._work_weight = work_weight
        self.directory = directory
        self._clock, self._loads = clock, Loads(clock)
        self._promises, self._former_places = Promises(), FormerPlaces()
        self._sessions = OrderedDict[str, str]()
        self._random = Random(seed)
        self._numbers = count()

    def place(
        self,
        token_ids: PromptTokens,
        keys: PrefixKeys = NO_KEYS,
        candidates: Sequence[str] = (),
        *,
        session: str | None = None,
    ) -> Placed:
        if not candidates:
            raise ValueError(_NO_CANDIDATES)
        hashes = self.directory.hashes(token_ids, keys)
        found = self.directory.find(hashes, candidates)
        promised = self._promises.find(hashes)
        formerly = self._former_places.find(hashes)
        size, longest = self.directory.block_size, len(token_ids) - 1
        costs: dict[str, tuple[float, float]] = {}
        # Of each replica: seconds of computing and of waiting, and what it has of the prompt.
        thought: dict[str, tuple[float, float, dict[Medium, int]]] = {}
        for replica in candidates:
            blocks = found.get(replica, {})
            if (coming := promised.get(replica, 0)) > sum(blocks.values()):
                blocks = {"GPU": coming}
            tokens = tokens_of(blocks, size, longest) if blocks else {}
            num_found = sum(tokens.values())
            compute_s, wait_s = self._costs_s(replica, len(token_ids) - num_found, blocks)
            thought[replica] = compute_s, wait_s, tokens
            weight = self._work_weight
            if (lost := formerly.get(replica, 0) * size - num_found) > 0:
                weight -= _FORMER_WEIGHT * lost / len(token_ids)
            costs[replica] = weight * compute_s + wait_s, compute_s + wait_s
        last = self._sessions.get(session) if session is not None else None
        ranked = self._ranked(costs, last)
        compute_s, wait_s, tokens = thought[ranked[0]]
        placed = Placed(
            number=next(self._numbers),
            replica=ranked[0],
            ranked=ranked,
            num_prompt_tokens=len(token_ids),
            found_tokens=tokens,
            cost_ms=1000 * (compute_s + wait_s),
        )
        self._loads.reserve(placed)
        self._promises.add(placed, hashes)
        self._former_places.add(placed.replica, hashes)
        if session is not None:
            self._sessions[session] = placed.replica
            self._sessions.move_to_end(session)
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return placed

    def note_first_token(self, placed: Placed) -> None:
        self._loads.note_first_token(placed)
        self._promises.remove(placed)

    def note_end(self, placed: Placed) -> None:
        self._loads.note_end(placed)
        self._promises.remove(placed)

    def report(self, replica: str, load: Load) -> None:
        self._loads.report(replica, load)

    def forget(self, replica: str) -> None:
        self.directory.forget(replica)
        self._loads.forget(replica)
        self._promises.forget(replica)
        self._former_places.forget(replica)

    def _costs_s(
        self, replica: str, compute: int, blocks: Mapping[Medium, int]
    ) -> tuple[float, float]:
        """Estimate how long a prompt computes and how long it waits at a replica, in seconds.

        ``compute``: tokens; ``blocks``: that are found.
        """
        standing = self._loads.of(replica)
        load, block_size = standing.load, self.directory.block_size
        wait_s = standing.queued_tokens * load.compute_s_per_token
        for medium, num in blocks.items():
            computing_s = block_size * load.compute_s_per_token
            default_s = _LOAD_FRACTION[medium] * computing_s
            wait_s += num * load.load_s_per_block.get(medium, default_s)
        num_steps = ceil_div(compute + standing.queued_tokens, load.max_num_batched_tokens)
        wait_s += num_steps * load.decode_s_per_step
        if (waiting := standing.num_requests - load.max_num_seqs + 1) > 0:
            wait_s += waiting * self._loads.mean_run_s / load.max_num_seqs
        return compute * load.compute_s_per_token, wait_s

    def _ranked(
        self, costs: Mapping[str, tuple[float, float]], last: str | None
    ) -> tuple[str, ...]:
        """Order replicas by cost; among the first equals, as the class says.

        ``costs``: what a replica costs, and the seconds that it was thought to take.
        """
        least, seconds = min(costs.values())
        equal = least + _EQUAL_FRACTION * seconds + _EQUAL_S
        of, draw = self._loads.of, self._random.random

        def rank(replica: str) -> tuple[float, bool, int, float]:
            return (
                max(costs[replica][0], equal),
                replica != last,
                of(replica).num_requests,
                draw(),
            )

        return tuple(sorted(costs, key=rank))


def tokens_of(blocks: Mapping[Medium, int], size: int, longest: int) -> dict[Medium, int]:
    """Return the tokens of found blocks of ``size`` tokens, ``longest`` in all, by medium."""
    found: dict[Medium, int] = {}
    for medium, num in blocks.items():
        if (tokens := min(num * size, longest)) > 0:
            found[medium] = tokens
            longest -= tokens
    return found


@final
class Promises:
    """Prefixes that are being computed: of prompts which were sent, and have no first token yet.

    Of each prompt a few prefixes are kept, at lengths that grow by a quarter: what two prompts have
    in common is known to be at least so long as the longest of these that both have.
    """

    def __init__(self) -> None:
        self._replicas: dict[int, dict[str, int]] = {}  # how many requests, by prefix hash
        self._open: dict[int, tuple[str, list[int]]] = {}  # by choice
        self._marks = Marks(4)

    def add(self, placed: Placed, hashes: Keys) -> None:
        """Promise a prompt's prefixes (hashes: u64[n]) for where it was placed."""
        kept = self._marks.of(hashes)
        self._open[placed.number] = placed.replica, kept
        for each in kept:
            replicas = self._replicas.setdefault(each, {})
            replicas[placed.replica] = replicas.get(placed.replica, 0) + 1

    def remove(self, placed: Placed) -> None:
        """Take a promise back, if it is still there."""
        self._take_back(placed.number)

    def _take_back(self, number: int) -> None:
        replica, kept = self._open.pop(number, ("", []))
        for each in kept:
            replicas = self._replicas[each]
            replicas[replica] -= 1
            if not replicas[replica]:
                del replicas[replica]
                if not replicas:
                    del self._replicas[each]

    def find(self, hashes: Keys) -> dict[str, int]:
        """Return how many of a prompt's blocks are promised, by replica."""
        found: dict[str, int] = {}
        if self._replicas:
            for length, each in zip(self._marks.lengths, self._marks.of(hashes), strict=False):
                replicas = self._replicas.get(each)
                if replicas is None:
                    break
                for replica in replicas:
                    found[replica] = length
        return found

    def forget(self, replica: str) -> None:
        """Forget what a replica that is gone has promised."""
        for number in [number for number, (name, _) in self._open.items() if name == replica]:
            self._take_back(number)


@final
class FormerPlaces:
    """Where prefixes were sent last, of the latest ``_MOST_REMEMBERED`` that were kept."""

    def __init__(self) -> None:
        self._replicas = OrderedDict[int, str]()  # by prefix hash
        self._marks = Marks(2)

    def add(self, replica: str, hashes: Keys) -> None:
        """Remember where a prompt was sent (hashes of its blocks: u64[n])."""
        for each in self._marks.of(hashes):
            self._replicas[each] = replica
            self._replicas.move_to_end(each)
        while len(self._replicas) > _MOST_REMEMBERED:
            self._replicas.popitem(last=False)

    def find(self, hashes: Keys) -> dict[str, int]:
        """Return how many of a prompt's blocks were sent last to where, by replica."""
        found: dict[str, int] = {}
        for length, each in zip(self._marks.lengths, self._marks.of(hashes), strict=False):
            if (replica := self._replicas.get(each)) is not None:
                found[replica] = length
        return found

    def forget(self, replica: str) -> None:
        """Forget what was sent to a replica that is gone."""
        for each in [each for each, name in self._replicas.items() if name == replica]:
            del self._replicas[each]


@final
class Marks:
    """Lengths of prefixes, in blocks, each longer than the last by a ``part``-th and one block."""

    def __init__(self, part: int) -> None:
        self.lengths = [1]
        self._part = part

    def of(self, hashes: Keys) -> list[int]:
        """Return the hashes of a prompt's prefixes (u64[n]) that have these lengths."""
        while self.lengths[-1] < len(hashes):
            self.lengths.append(self.lengths[-1] + 1 + self.lengths[-1] // self._part)
        ends = self.lengths[: bisect_right(self.lengths, len(hashes))]
        return hashes[np.array(ends) - 1].tolist() if ends else []
