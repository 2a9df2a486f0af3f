"""Placement: which replica a request goes to, by what is cached where and how long each is busy.

``Placement`` is the protocol; ``PLACEMENTS`` has the names that a fleet and the simulator take.
A placement counts what it has sent at the moment of its choice, so that a burst spreads before any
replica has reported. It chooses and counts; sending, streaming and health are its caller's.

One thread uses a placement.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Protocol, TypeAlias, final

from quire.kv import NO_KEYS, PrefixKeys, TokenIds
from quire.kv.prefix_index import Medium

PromptTokens: TypeAlias = Sequence[int] | TokenIds  # an array (i32[n]) spares its conversion
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

    def note_first_token(self, choice: Placed) -> None:
        """Note that the prompt of a choice is computed. A second call does nothing."""
        ...

    def note_end(self, choice: Placed) -> None:
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
_FLIGHT_S = 0.05


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
        self._clock = clock
        self._standings: dict[str, _Standing] = {}

    def of(self, replica: str) -> _Standing:
        """Return a replica's standing, an idle one for a replica that is new."""
        standing = self._standings.get(replica)
        if standing is None:
            standing = self._standings[replica] = _Standing()
        return standing

    def reserve(self, choice: Placed) -> None:
        """Count a request that is sent now."""
        standing, now_s = self.of(choice.replica), self._clock()
        standing.queued_tokens += choice.computed_tokens
        standing.num_requests += 1
        standing.waits_for_token[choice.number] = now_s, choice.computed_tokens
        standing.runs[choice.number] = now_s

    def note_first_token(self, choice: Placed) -> bool:
        """Take a prompt off its replica's queue. Returns: whether it was on it."""
        standing = self.of(choice.replica)
        waited = standing.waits_for_token.pop(choice.number, None)
        if waited is None:
            return False
        standing.queued_tokens = max(0, standing.queued_tokens - waited[1])
        return True

    def note_end(self, choice: Placed) -> bool:
        """Take a request off its replica. Returns: whether it was there."""
        self.note_first_token(choice)
        standing = self.of(choice.replica)
        if standing.runs.pop(choice.number, None) is None:
            return False
        standing.num_requests = max(0, standing.num_requests - 1)
        return True

    def report(self, replica: str, load: Load) -> None:
        """Take a report in place of what was counted, but for requests that may be on their way."""
        standing, since_s = self.of(replica), self._clock() - _FLIGHT_S
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

    def note_first_token(self, choice: Placed) -> None:
        """Do nothing: no load is counted."""

    def note_end(self, choice: Placed) -> None:
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
        if not candidates:
            raise ValueError(_NO_CANDIDATES)
        of, draw = self._loads.of, self._random.random
        ranked = tuple(sorted(candidates, key=lambda each: (of(each).num_requests, draw())))
        choice = Placed(
            number=next(self._numbers),
            replica=ranked[0],
            ranked=ranked,
            num_prompt_tokens=len(token_ids),
        )
        self._loads.reserve(choice)
        return choice

    def note_first_token(self, choice: Placed) -> None:
        self._loads.note_first_token(choice)

    def note_end(self, choice: Placed) -> None:
        self._loads.note_end(choice)

    def report(self, replica: str, load: Load) -> None:
        self._loads.report(replica, load)

    def forget(self, replica: str) -> None:
        self._loads.forget(replica)


_NO_CANDIDATES = "there is no replica to choose from"
