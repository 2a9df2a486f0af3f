"""Prompts of a trace through our own core, and through the best that eviction could do.

A request is instantaneous: what is cached of the prompt is found and held, room is made for the
rest, all of it is known to be computed, and all of it is let go. A block of the trace is a block of
one token here, and its id is the token: the core does what it does in an engine, only that the
bytes of 512 tokens' ids are not hashed and compared with it.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.accounting.prefix_traces import BLOCK_TOKENS, PrefixTrace
from quire.kv import Extension, Fits
from quire.planner.hit_rates import Prompts, prompts_of
from quire.planner.hit_rates.optimum import Optimum
from quire.planner.hit_rates.stack_distances import infinite_hits
from quire.planner.hit_rates.tiered import prefix_accounting
from quire.traces import TraceRequest

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
    longest = max(len(chain) for chain in trace.chains)
    accounting = prefix_accounting(num_blocks, policy, longest=longest)
    # A hit leaves at least one token to compute, so each prompt gets a last token of its own.
    own, now = trace.num_blocks, time.perf_counter_ns
    spent_ns = hit_tokens = refused = 0
    gc.collect()
    gc.freeze()  # the trace is not the core's: collections need not look at it
    for request, chain in enumerate(trace.chains):
        asked = np.append(chain, np.int32(own + request))
        begun = now()
        accounting.add(request)
        hit = accounting.match_prefix(request, asked)
        verdict = accounting.try_extend(request, len(chain), Extension(hit=hit))
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


def infinite(trace: PrefixTrace) -> Replay:
    """A cache that never evicts."""
    return Replay(hit_tokens=infinite_hits(prompts(trace)))


def optimum(trace: PrefixTrace, future: Optimum, num_blocks: int, on_request: OnRequest) -> Replay:
    """The best that any order of eviction could find; quire.planner says in what sense."""
    return Replay(
        hit_tokens=future.hits(num_blocks, on_request),
        refused=sum(len(chain) > num_blocks for chain in trace.chains),
    )


def prompts(trace: PrefixTrace) -> Prompts:
    """The trace as the planner knows it."""
    return prompts_of(
        TraceRequest(
            at_s=0,
            input_tokens=num_tokens,
            output_tokens=1,
            hash_ids=tuple(chain.tolist()),
            id_tokens=BLOCK_TOKENS,
        )
        for chain, num_tokens in zip(trace.chains, trace.prompt_tokens, strict=True)
    )
