"""``HandOffs``: prompts that simulated prefill replicas compute for the replicas that go on.

A prompt goes on when the door has heard of its answer and its blocks are all copied out. A real
replica that goes on is asked a little earlier, and waits for the last blocks itself.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TypeAlias, final

from quire.engine.sequence import RemoteBlocks
from quire.engine.sequence import Sequence as EngineSequence
from quire.planner.simulation.simulated_replica import SimulatedReplica
from quire.planner.simulation.virtual_tiers import VirtualPeer
from quire.traces import TraceRequest

# Makes a replica that leaves blocks there, and tells of answers and of requests that never run.
MakePrefillReplica: TypeAlias = Callable[
    [VirtualPeer, Callable[[EngineSequence], None], Callable[[int], None]], SimulatedReplica
]


@dataclass(frozen=True, slots=True, order=True)
class HandOff:
    """A prompt that goes on at a moment."""

    at_s: float
    number: int  # of the request, in the trace
    place: int = field(compare=False)  # of the replica that goes on
    request: TraceRequest = field(compare=False)
    remote: RemoteBlocks | None = field(compare=False)  # None: nothing is left of it


@dataclass(slots=True)
class _OpenPrompt:
    """A prompt at a prefill replica."""

    request: TraceRequest
    place: int  # of the replica that goes on
    answered_s: float | None = None
    remote: RemoteBlocks | None = None  # that is left of it; None: nothing, or not yet


@final
class HandOffs:
    """All prompts that are at prefill replicas, or on their way from there.

    The replicas' clocks are those of ``SimulatedReplica``: other replicas run up to ``next_s``
    before ``advance`` is called, so that none acts on what is still to come.
    """

    def __init__(
        self,
        peers: Sequence[VirtualPeer],
        make: MakePrefillReplica,
        *,
        delay_s: float,
    ) -> None:
        """Make a replica for each of ``peers``, where it leaves blocks.

        ``delay_s``: until the door hears of an answer.
        """
        self._peers, self._delay_s = tuple(peers), delay_s
        self.replicas = tuple(
            make(peer, partial(self._answered, peer.number), partial(self._refused, peer.number))
            for peer in peers
        )
        self._asked: list[dict[int, _OpenPrompt]] = [{} for _ in peers]  # by number
        self._due: list[HandOff] = []  # a heap

    def ask(
        self, prefill: int, request: TraceRequest, number: int, place: int, *, at_s: float
    ) -> None:
        """Ask a prefill replica for a prompt that comes there now, and goes on at a place."""
        self._asked[prefill][number] = _OpenPrompt(request, place)
        self.replicas[prefill].add(request, number, at_s=at_s)

    def _answered(self, prefill: int, sequence: EngineSequence) -> None:
        """Note that a prefill replica has answered."""
        asked = self._asked[prefill][sequence.request.request_id]
        asked.answered_s = self.replicas[prefill].now_s
        left = sequence.kv_transfer_params
        if left:
            lease, port = str(left["remote_request_id"]), self._peers[prefill].number
            asked.remote = RemoteBlocks(host="", port=port, lease=lease)

    def _refused(self, prefill: int, number: int) -> None:
        """Note that a prompt is longer than a prefill replica can have it."""
        self._asked[prefill][number].answered_s = self.replicas[prefill].now_s

    @property
    def next_s(self) -> float:
        """Return the moment before which nothing happens here; infinite: nothing is left."""
        first_s = self._due[0].at_s if self._due else inf
        return min(first_s, *(replica.next_s for replica in self.replicas))

    def advance(self) -> HandOff | None:
        """Let the next thing happen. Returns: the prompt that goes on, if that is it."""
        prefill = min(range(len(self.replicas)), key=lambda n: self.replicas[n].next_s)
        if self._due and self._due[0].at_s <= self.replicas[prefill].next_s:
            return heapq.heappop(self._due)
        self.replicas[prefill].do_next()
        self._look(prefill)
        return None

    def _look(self, prefill: int) -> None:
        """Find the prompts of a prefill replica that are answered, and whose blocks are out."""
        for number, asked in list(self._asked[prefill].items()):
            if asked.answered_s is None:
                continue
            at_s = asked.answered_s + self._delay_s
            if asked.remote is not None:
                whole_s = self._peers[prefill].whole_s(asked.remote.lease)
                if whole_s is not None:
                    at_s = max(at_s, whole_s)
                elif self._peers[prefill].is_open(asked.remote.lease):
                    continue
                else:  # it ended before all was written: nothing of it can be had
                    at_s, asked.remote = max(at_s, self.replicas[prefill].now_s), None
            del self._asked[prefill][number]
            goes_on = HandOff(at_s, number, asked.place, asked.request, asked.remote)
            heapq.heappush(self._due, goes_on)
