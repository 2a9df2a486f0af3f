"""Prompts of a trace through our own core, and through the best that eviction could do.

A request is instantaneous: what is cached of the prompt is found and held, room is made for the
rest, all of it is known to be computed, and all of it is let go. A block of the trace is a block of
one token here, and its id is the token: the core does what it does in an engine, only that the
bytes of 512 tokens' ids are not hashed and compared with it.
"""

import gc
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from prefix_traces import PrefixTrace

from quire.blocks import Fits
from quire.spec import FullAttention, Group
from quire.strategies.base import CacheConfig
from quire.strategies.paged import PagedAccounting

OnRequest = Callable[[int], None]  # told how many requests are done, now and then
_TELL_EVERY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What became of a trace."""

    hit_tokens: int
    refused: int = 0  # requests that do not fit even in an empty cache: found, but not kept
    us_a_request: float = 0.0  # in the core's calls alone


def replay(trace: PrefixTrace, num_blocks: int, policy: str, on_request: OnRequest) -> Replay:
    """The trace through ``PagedAccounting`` with so many blocks under an eviction policy."""
    accounting = _accounting(trace, num_blocks, policy)
    # A hit leaves at least one token to compute. A last token that nobody else has makes that one.
    own, now = trace.num_blocks, time.perf_counter_ns
    spent_ns = hit_tokens = refused = 0
    gc.collect()
    gc.freeze()  # the trace is not the core's: collections need not look at it
    for request, chain in enumerate(trace.chains):
        asked = np.append(chain, np.int32(own + request))
        begun = now()
        accounting.add(request)
        hit = accounting.match_prefix(request, asked)
        verdict = accounting.try_extend(request, len(chain), hit=hit)
        if isinstance(verdict, Fits):
            if hit.num_tokens < len(chain):
                rest = chain[hit.num_tokens :]
                accounting.mark_computed([request], [len(rest)], rest)
        else:
            refused += 1
        accounting.free(request)
        accounting.drain()
        spent_ns += now() - begun
        hit_tokens += trace.hit_tokens(request, hit.num_tokens)
        if request % _TELL_EVERY == 0:
            on_request(request)
    gc.unfreeze()
    accounting.check()
    return Replay(
        hit_tokens=hit_tokens,
        refused=refused,
        us_a_request=spent_ns / 1e3 / len(trace.chains),
    )


def _accounting(trace: PrefixTrace, num_blocks: int, policy: str) -> PagedAccounting:
    spec = FullAttention(num_kv_heads=1, head_dim=1, dtype="float8_e4m3fn")
    group = Group(spec=spec, layers=(0,))
    config = CacheConfig(
        max_model_len=1 + max(len(chain) for chain in trace.chains),
        max_num_seqs=1,
        capacity_bytes=num_blocks * group.bytes_per_token,
        block_size=1,
        page_bytes=1,
        eviction_policy=policy,
    )
    return PagedAccounting((group,), config)


def infinite(trace: PrefixTrace) -> Replay:
    """A cache that never evicts."""
    seen, hit_tokens = np.zeros(trace.num_blocks, bool), 0
    for request, chain in enumerate(trace.chains):
        hit_tokens += trace.hit_tokens(request, _num_first(seen[chain]))
        seen[chain] = True
    return Replay(hit_tokens=hit_tokens)


def optimum(trace: PrefixTrace, num_blocks: int, on_request: OnRequest) -> Replay:
    """Belady's: evict what will be used again last, or never.

    A block is used whenever its child is, so its next use is never later. Of equal ones the deepest
    goes first; what is cached then stays closed under prefixes, and no other order of eviction
    finds more blocks. A prompt is held while it is computed, here as anywhere.
    """
    next_uses = _next_uses(trace)
    kept = _ByNextUse(trace.num_blocks)
    cached = np.zeros(trace.num_blocks, bool)
    num_cached = hit_tokens = refused = 0
    for request, (chain, next_use) in enumerate(zip(trace.chains, next_uses, strict=True)):
        num_hit = _num_first(cached[chain])
        hit_tokens += trace.hit_tokens(request, num_hit)
        stop = len(chain)
        if stop > num_blocks:
            refused, stop = refused + 1, num_hit
        kept.remove(chain[:num_hit])
        excess = num_cached + stop - num_hit - num_blocks
        if excess > 0:
            cached[kept.pop(excess)] = False
            num_cached -= excess
        cached[chain[:stop]] = True
        num_cached += stop - num_hit
        kept.add(chain[:stop], next_use[:stop])
        if request % _TELL_EVERY == 0:
            on_request(request)
    assert num_cached == np.count_nonzero(cached) <= num_blocks
    return Replay(hit_tokens=hit_tokens, refused=refused)


class _ByNextUse:
    """Blocks in order of their next use, the last first; of equal ones the deepest first."""

    def __init__(self, num_blocks: int) -> None:
        self._next_use = np.full(num_blocks, -1, np.int64)  # -1: not here
        self._pieces: dict[int, list[npt.NDArray[np.int32]]] = {}  # of chains, by next use
        self._latest: list[int] = []  # a heap of negated next uses

    def add(self, chain: npt.NDArray[np.int32], next_use: npt.NDArray[np.int64]) -> None:
        if not len(chain):
            return
        self._next_use[chain] = next_use
        cuts = np.flatnonzero(np.diff(next_use)) + 1
        for piece, first in zip(np.split(chain, cuts), [0, *cuts.tolist()], strict=True):
            when = int(next_use[first])
            if when not in self._pieces:
                self._pieces[when] = []
                heapq.heappush(self._latest, -when)
            self._pieces[when].append(piece)

    def remove(self, chain: npt.NDArray[np.int32]) -> None:
        self._next_use[chain] = -1

    def pop(self, count: int) -> npt.NDArray[np.int32]:
        found: list[npt.NDArray[np.int32]] = []
        while count:
            when = -self._latest[0]
            pieces = self._pieces[when]
            while pieces and count:
                piece = pieces.pop()
                piece = piece[self._next_use[piece] == when]
                if len(piece) > count:
                    pieces.append(piece[:-count])
                    piece = piece[-count:]
                self._next_use[piece] = -1
                found.append(piece)
                count -= len(piece)
            if not pieces:
                heapq.heappop(self._latest)
                del self._pieces[when]
        return np.concatenate(found)


def _next_uses(trace: PrefixTrace) -> list[npt.NDArray[np.int64]]:
    """For each block of each prompt the next request that has it; the number of requests: none."""
    lengths = [len(chain) for chain in trace.chains]
    flat = np.concatenate(trace.chains)
    requests = np.repeat(np.arange(len(lengths)), lengths)
    order = np.argsort(flat, kind="stable")
    again = flat[order][1:] == flat[order][:-1]
    found = np.full(len(flat), len(lengths), np.int64)
    found[order[:-1][again]] = requests[order[1:][again]]
    return np.split(found, np.cumsum(lengths)[:-1])


def _num_first(known: npt.NDArray[np.bool_]) -> int:
    """How many blocks are known before the first that is not."""
    return len(known) if known.all() else int(known.argmin())
