"""Which replica of a fleet a request goes to."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from quire.planner.simulation.replica import Replica
from quire.traces import TraceRequest

# Defaults of SGLang's gateway (docs/getting-started/load-balancing.md, cache_aware).
MATCH_FRACTION = 0.3
IMBALANCE_REQUESTS = 64
IMBALANCE_RATIO = 1.5


class Route(Protocol):
    """Chooses by what is known when a request comes: the replicas' queues and caches."""

    def __call__(self, replicas: Sequence[Replica], request: TraceRequest, number: int) -> int: ...


def round_robin(replicas: Sequence[Replica], request: TraceRequest, number: int) -> int:
    """One after the other."""
    return number % len(replicas)


def least_loaded(replicas: Sequence[Replica], request: TraceRequest, number: int) -> int:
    """Where the fewest requests are under way; the first of equals."""
    loads = [replica.num_unfinished for replica in replicas]
    return loads.index(min(loads))


def prefix_aware(replicas: Sequence[Replica], request: TraceRequest, number: int) -> int:
    """Where most of its prompt is computed, unless that one has far more to do than others.

    Loads come first: where they differ by more than ``IMBALANCE_REQUESTS`` and by more than
    ``IMBALANCE_RATIO`` the least loaded one takes it. Else the longest match does, if it is more
    than ``MATCH_FRACTION`` of the prompt; of equals the least loaded. Else the least loaded one.

    Source: the two tiers of SGLang's cache_aware policy. That one guesses what a replica holds from
    what it was sent, or hears of it; here the cache itself is asked.
    """
    loads = [replica.num_unfinished for replica in replicas]
    least, most = min(loads), max(loads)
    if most - least > IMBALANCE_REQUESTS and most > IMBALANCE_RATIO * least:
        return loads.index(least)
    matches = [replica.num_cached_tokens(request, number) for replica in replicas]
    longest = max(matches)
    if longest <= MATCH_FRACTION * request.input_tokens:
        return loads.index(least)
    holders = [place for place, match in enumerate(matches) if match == longest]
    return min(holders, key=loads.__getitem__)


ROUTES: Mapping[str, Route] = MappingProxyType(
    {"round-robin": round_robin, "least-loaded": least_loaded, "prefix-aware": prefix_aware}
)
