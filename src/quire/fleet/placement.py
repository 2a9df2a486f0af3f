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
from math import inf, nan
from random import Random
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias, final

import numpy as np
import numpy.typing as npt

from quire.fleet.key_table import Keys, Numbers
from quire.fleet.prefix_directory import MEDIA, PrefixDirectory, PromptTokens
from quire.kv import NO_KEYS, PrefixKeys
from quire.kv.prefix_index import Medium

Clock: TypeAlias = Callable[[], float]  # seconds
Costs: TypeAlias = npt.NDArray[np.float64]

_GUESSED_TOKEN_S: Final = 1e-4

# -- what is told ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a replica reports of itself, as measured there. The defaults stand for no report yet."""

    num_waiting: int = 0
    num_running: int = 0
    queued_tokens: int = 0  # of prompts, not computed yet
    compute_s_per_token: float | None = None  # of a prompt; None: not known
    load_s_per_block: Mapping[Medium, float] = field(
        default_factory=dict
    )  # of a tier's; absent: not known
    decode_s_per_step: float = 0.0  # that running sequences add to a step which computes a prompt
    max_num_batched_tokens: int = 2048  # tokens of a step
    max_num_seqs: int = 256
    age_s: float = 0.0  # since it was measured

    @property
    def prompt_token_s(self) -> float:
        """Return the seconds to compute a token of a prompt: a guess where they are not known."""
        known = self.compute_s_per_token
        return _GUESSED_TOKEN_S if known is None else known


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What was decided, and what was thought. It is also the reservation, to be given back."""

    number: int  # of the choice, unique in its placement
    replica: str
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


# What a choice reads of each replica, a row of ``Loads.of`` each: the first two change with each
# request, the others with a report, but for the last, of which no report speaks.
_QUEUED_TOKENS, _NUM_REQUESTS = 0, 1
_COMPUTE_S, _DECODE_S, _BATCHED_TOKENS, _MAX_SEQS = 2, 3, 4, 5
_LOAD_S: Final[Mapping[Medium, int]] = MappingProxyType(
    {medium: 6 + number for number, medium in enumerate(MEDIA)}
)  # of a block; not a number where it is not known
_NEW_TOKENS: Final = 6 + len(MEDIA)  # that were to be computed there, lately


@dataclass(slots=True)
class _Standing:
    """What a replica was sent by this placement, and where its load is."""

    column: int
    waits_for_token: dict[int, tuple[float, int]] = field(default_factory=dict)  # by choice
    runs: dict[int, float] = field(default_factory=dict)  # when each was placed


@final
class Loads:
    """What each replica is busy with: its last report, and what was sent there since.

    The numbers are in one table, a column a replica, so that a choice reads those of all at once.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.mean_run_s = 0.0  # that requests take, from their choice to their end
        self._clock = clock
        self._standings: dict[str, _Standing] = {}
        self._asked: tuple[str, ...] | None = None  # the replicas of the last choice …
        self._columns: Numbers = np.zeros(0, np.int64)  # … their columns …
        self.places: Mapping[str, int] = {}  # … and which of them each is
        self._table = np.zeros((_NEW_TOKENS + 1, 8))
        self._free = list(reversed(range(8)))  # columns

    def of(self, replicas: Sequence[str]) -> Costs:
        """Return the numbers of replicas, an idle one's for one that is new: f64[rows, n]."""
        asked = tuple(replicas)
        if asked != self._asked:
            self._columns = np.array([self._standing(each).column for each in asked], np.int64)
            self.places = {name: place for place, name in enumerate(asked)}
            self._asked = asked
        numbers: Costs = self._table.take(self._columns, axis=1)
        return numbers

    def num_requests(self, replica: str) -> int:
        """Return how many requests run or wait there, as far as is known."""
        return int(self._table[_NUM_REQUESTS, self._standing(replica).column])

    def queued_tokens(self, replica: str) -> int:
        """Return how many tokens of prompts are to be computed there, as far as is known."""
        return int(self._table[_QUEUED_TOKENS, self._standing(replica).column])

    def num_open(self, replica: str) -> int:
        """Return how many requests were sent there and have not ended."""
        standing = self._standing(replica)
        return len(standing.runs.keys() | standing.waits_for_token.keys())

    def reserve(self, placed: Placed) -> None:
        """Count a request that is sent now."""
        standing, now_s = self._standing(placed.replica), self._clock()
        standing.waits_for_token[placed.number] = now_s, placed.computed_tokens
        standing.runs[placed.number] = now_s
        self._add(standing, placed.computed_tokens, 1)

    def note_new(self, placed: Placed, held_tokens: int) -> None:
        """Note what a prompt adds to a cache; all caches hold ``held_tokens``.

        Older notes count less: by a factor e once as much was added as is held.
        """
        if held_tokens:
            column = self._standing(placed.replica).column  # which may make a larger table
            new = self._table[_NEW_TOKENS]
            new *= held_tokens / (held_tokens + placed.computed_tokens)
            new[column] += placed.computed_tokens

    def note_first_token(self, placed: Placed) -> bool:
        """Take a prompt off its replica's queue. Returns: whether it was on it."""
        standing = self._standing(placed.replica)
        waited = standing.waits_for_token.pop(placed.number, None)
        if waited is None:
            return False
        self._add(standing, -waited[1], 0)
        return True

    def note_end(self, placed: Placed) -> bool:
        """Take a request off its replica. Returns: whether it was there."""
        self.note_first_token(placed)
        standing = self._standing(placed.replica)
        began_s = standing.runs.pop(placed.number, None)
        if began_s is None:
            return False
        run_s = self._clock() - began_s
        self.mean_run_s += _NEW_WEIGHT * (run_s - self.mean_run_s) if self.mean_run_s else run_s
        self._add(standing, 0, -1)
        return True

    def report(self, replica: str, load: Load) -> None:
        """Take a report in place of what was counted, but for requests that may be on their way."""
        standing, since_s = self._standing(replica), self._clock() - load.age_s - _FLIGHT_S
        self._take(standing.column, load)
        self._add(
            standing,
            sum(tokens for at_s, tokens in standing.waits_for_token.values() if at_s > since_s),
            sum(at_s > since_s for at_s in standing.runs.values()),
        )

    def forget(self, replica: str) -> None:
        """Forget a replica, and what it was sent."""
        standing = self._standings.pop(replica, None)
        if standing is not None:
            self._free.append(standing.column)
            self._asked = None

    def _standing(self, replica: str) -> _Standing:
        standing = self._standings.get(replica)
        if standing is None:
            if not self._free:
                num = self._table.shape[1]
                self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
                self._free = list(reversed(range(num, 2 * num)))
            standing = self._standings[replica] = _Standing(self._free.pop())
            self._take(standing.column, Load())
            self._table[_NEW_TOKENS, standing.column] = 0.0
        return standing

    def _take(self, column: int, load: Load) -> None:
        self._table[:_NEW_TOKENS, column] = (
            load.queued_tokens,
            load.num_waiting + load.num_running,
            load.prompt_token_s,
            load.decode_s_per_step,
            load.max_num_batched_tokens,
            load.max_num_seqs,
            *(load.load_s_per_block.get(medium, nan) for medium in MEDIA),
        )

    def _add(self, standing: _Standing, queued_tokens: int, num_requests: int) -> None:
        for row, more in ((_QUEUED_TOKENS, queued_tokens), (_NUM_REQUESTS, num_requests)):
            if more:
                at = row, standing.column
                self._table[at] = max(0, self._table[at] + more)


def _best(costs: Costs, equal: float, num_requests: Costs, last: int | None, random: Random) -> int:
    """Choose among replicas that cost no more than ``equal`` (costs: f64[n]).

    The ``last`` one if it is among them; else one with the fewest requests (f64[n]), at random.
    """
    if last is not None and costs[last] <= equal:
        return last
    fits = (costs <= equal).nonzero()[0]
    if len(fits) > 1:
        their_requests = num_requests[fits]
        fits = fits[their_requests == np.minimum.reduce(their_requests)]
    return int(fits[0] if len(fits) == 1 else fits[random.randrange(len(fits))])


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
        replica = candidates[number % len(candidates)]
        return Placed(number=number, replica=replica, num_prompt_tokens=len(token_ids))

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
        num_requests = self._loads.of(candidates)[_NUM_REQUESTS]
        best = _best(num_requests, inf, num_requests, None, self._random)
        return Placed(
            number=next(self._numbers), replica=candidates[best], num_prompt_tokens=len(token_ids)
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
LOAD_FRACTION: Final[Mapping[Medium, float]] = MappingProxyType(
    {"GPU": 0.0, "CPU": 0.2, "STORAGE": 0.4}
)
# What a second of computing weighs, against one of waiting. A prompt waits for both alike, but what
# is computed twice keeps others waiting, too, and takes the place of blocks that would be found.
DEFAULT_WORK_WEIGHT: Final = 9.0
# How much less computing weighs where a prefix was sent before and is gone by now. The cache there
# knows that it comes again and keeps it longer now; another one sees it for the first time.
_FORMER_WEIGHT: Final = 4.0
# How much more computing weighs where e times as much was computed lately as in the mean of the
# replicas, and the least of that mean which a replica counts with.
_CROWDING_WEIGHT: Final = 0.1
_LEAST_CROWDING: Final = 0.125
# Costs are estimates: those above the least one by so much of its time are equals.
_EQUAL_FRACTION: Final = 0.05
_EQUAL_S: Final = 0.001
_MOST_SESSIONS: Final = 65_536
_NEAREST: Final[Medium] = MEDIA[0]
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
        loads, blocks = self._loads.of(candidates), self.directory.count(hashes, candidates)
        places = self._loads.places
        promised, formerly = self._promises.marks.of(hashes), self._former_places.marks.of(hashes)
        self._add_promised(blocks, self._promises.find(promised), places)
        found = self._tokens_of(blocks, len(token_ids))
        num_found: Costs = np.zeros(len(candidates))
        for tokens in found.values():
            num_found += tokens
        compute_s, wait_s = self._costs_s(loads, len(token_ids) - num_found, blocks)
        weights = self._weights(
            self._former_places.find(formerly), places, num_found, len(token_ids)
        )
        weights *= _crowding(loads[_NEW_TOKENS])
        costs, seconds = weights * compute_s + wait_s, compute_s + wait_s
        least = int(costs.argmin())
        equal = costs[least] + _EQUAL_FRACTION * seconds[least] + _EQUAL_S
        last = self._sessions.get(session) if session is not None else None
        where = None if last is None else places.get(last)
        best = _best(costs, equal, loads[_NUM_REQUESTS], where, self._random)
        placed = Placed(
            number=next(self._numbers),
            replica=candidates[best],
            num_prompt_tokens=len(token_ids),
            found_tokens={medium: int(n[best]) for medium, n in found.items() if n[best]},
            cost_ms=1000 * float(seconds[best]),
        )
        self._loads.reserve(placed)
        self._promises.add(placed, promised)
        self._loads.note_new(placed, len(self.directory) * self.directory.block_size)
        self._former_places.add(placed.replica, formerly)
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

    def _add_promised(
        self, blocks: dict[Medium, Numbers], promised: Mapping[str, int], places: Mapping[str, int]
    ) -> None:
        """Count blocks that are being computed (by replica) where they are more than is there."""
        for replica, coming in promised.items():
            place = places.get(replica)
            if place is not None and coming > sum(int(num[place]) for num in blocks.values()):
                for num in blocks.values():
                    num[place] = 0
                blocks.setdefault(_NEAREST, np.zeros(len(places), np.int64))[place] = coming

    def _tokens_of(
        self, blocks: Mapping[Medium, Numbers], num_prompt_tokens: int
    ) -> dict[Medium, Numbers]:
        """Return the tokens of found blocks (i64[n] each). The last of all is always computed."""
        found: dict[Medium, Numbers] = {}
        longest: Any = num_prompt_tokens - 1
        for medium in MEDIA:
            if medium in blocks:
                found[medium] = np.minimum(blocks[medium] * self.directory.block_size, longest)
                longest = longest - found[medium]
        return found

    def _costs_s(
        self, loads: Costs, compute: Costs, blocks: Mapping[Medium, Numbers]
    ) -> tuple[Costs, Costs]:
        """Estimate how long a prompt computes and how long it waits at each replica, in seconds.

        ``compute``: tokens (f64[n]); ``blocks``: that are found (i64[n] each).
        """
        queued, token_s = loads[_QUEUED_TOKENS], loads[_COMPUTE_S]
        wait_s = queued * token_s
        for medium, num in blocks.items():
            load_s = loads[_LOAD_S[medium]]
            default_s = LOAD_FRACTION[medium] * self.directory.block_size * token_s
            wait_s += num * np.where(np.isnan(load_s), default_s, load_s)
        steps = compute + queued
        steps /= loads[_BATCHED_TOKENS]
        wait_s += np.ceil(steps, out=steps) * loads[_DECODE_S]
        waiting = loads[_NUM_REQUESTS] - loads[_MAX_SEQS]
        if np.maximum.reduce(waiting) >= 0:  # seats are taken, all of them somewhere
            waiting += 1
            wait_s += np.maximum(waiting, 0) * self._loads.mean_run_s / loads[_MAX_SEQS]
        return compute * token_s, wait_s

    def _weights(
        self,
        formerly: Mapping[str, int],
        places: Mapping[str, int],
        num_found: Costs,
        num_prompt_tokens: int,
    ) -> Costs:
        """Return what a second of computing weighs at each replica: f64[n].

        ``formerly``: blocks that were sent there last, of which ``num_found`` tokens are there.
        """
        weights = np.full(len(places), self._work_weight)
        for replica, num in formerly.items():
            place = places.get(replica)
            if place is not None:
                lost = num * self.directory.block_size - num_found[place]
                weights[place] -= _FORMER_WEIGHT * max(0.0, lost) / num_prompt_tokens
        return weights


def _crowding(new_tokens: Costs) -> Costs:
    """Return how much more computing weighs where much was computed lately (f64[n]): f64[n].

    What a prompt adds to a cache takes the place of other blocks, and its own will be taken by what
    comes next. Both cost more the sooner a cache forgets.
    """
    mean = np.add.reduce(new_tokens) / len(new_tokens)
    if not mean:
        return np.ones(len(new_tokens))
    found: Costs = 1.0 + _CROWDING_WEIGHT * np.log(new_tokens / mean + _LEAST_CROWDING)
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
        self.marks = Marks(4)  # which prefixes are kept

    def add(self, placed: Placed, kept: list[int]) -> None:
        """Promise a prompt's prefixes, by their hashes, for where it was placed."""
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

    def find(self, kept: list[int]) -> dict[str, int]:
        """Return how many of a prompt's blocks are promised, by replica, from its prefixes."""
        found: dict[str, int] = {}
        if self._replicas:
            for length, each in zip(self.marks.lengths, kept, strict=False):
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
        self.marks = Marks(2)  # which prefixes are kept

    def add(self, replica: str, kept: list[int]) -> None:
        """Remember where a prompt was sent, by hashes of its prefixes."""
        for each in kept:
            self._replicas[each] = replica
            self._replicas.move_to_end(each)
        while len(self._replicas) > _MOST_REMEMBERED:
            self._replicas.popitem(last=False)

    def find(self, kept: list[int]) -> dict[str, int]:
        """Return how many of a prompt's blocks were sent last to where, from its prefixes."""
        found: dict[str, int] = {}
        for length, each in zip(self.marks.lengths, kept, strict=False):
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
        self._last = np.zeros(1, np.int64)  # the blocks that they end with

    def of(self, hashes: Keys) -> list[int]:
        """Return the hashes of a prompt's prefixes (u64[n]) that have these lengths."""
        if self.lengths[-1] < len(hashes):
            while self.lengths[-1] < len(hashes):
                self.lengths.append(self.lengths[-1] + 1 + self.lengths[-1] // self._part)
            self._last = np.array(self.lengths) - 1
        kept: list[int] = hashes[self._last[: bisect_right(self.lengths, len(hashes))]].tolist()
        return kept
