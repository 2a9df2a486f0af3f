"""Bytes held against tokens generated, by each strategy's own accounting.

One sequence from its first token to the longest, and the first requests of a trace, each generating
a token a step. Memory is ample, so that none waits: what is compared is what they ask for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.kv import Accounting, CacheConfig, Fits, build_accounting
from quire.planner.capacity.course import moments
from quire.planner.report.content import Held
from quire.spec import ModelSpec

_NUM_POINTS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A request of the batch, in tokens."""

    input_tokens: int
    output_tokens: int


def held_by_one(spec: ModelSpec, sizes: Mapping[str, CacheConfig], request: Lengths) -> list[Held]:
    """By strategy. It begins with its prompt, and could go on to the longest."""
    found = []
    for strategy, own in sizes.items():
        longest = own.max_model_len - 1  # the last token is written down, never computed
        first = min(request.input_tokens, longest)
        each = _some(first, longest)
        ample = _ample(strategy, spec, own, [longest])
        several = list(moments(strategy, spec, ample, each, longest + 1))
        found.append(
            Held(
                strategy=strategy,
                num_tokens=tuple(moment.num_tokens - first for moment in several),
                committed_bytes=tuple(moment.committed_bytes for moment in several),
                used_bytes=tuple(moment.used_bytes for moment in several),
            )
        )
    return found


def held_by_batch(
    spec: ModelSpec, sizes: Mapping[str, CacheConfig], batch: Sequence[Lengths]
) -> list[Held]:
    """By strategy. All begin at once with their prompts; each ends after its own last token."""
    found = []
    for strategy, own in sizes.items():
        fitting = [each for each in batch if _last(each) < own.max_model_len]
        if fitting:
            found.append(_of_batch(strategy, spec, own, fitting))
    return found


def _of_batch(strategy: str, spec: ModelSpec, sizes: CacheConfig, batch: Sequence[Lengths]) -> Held:
    ends = [_last(each) for each in batch]
    ample = _ample(strategy, spec, sizes, ends)
    accounting = build_accounting(strategy, spec, ample)
    for number, end in enumerate(ends):
        accounting.add(number, max_tokens=end + 1)
    longest = max(each.output_tokens for each in batch)
    steps = _some(0, max(longest, 1))
    running = dict(enumerate(batch))
    committed, used = [], []
    for step in steps:
        for number, each in list(running.items()):
            if step > each.output_tokens:
                accounting.free(number)
                del running[number]
                continue
            _extend(accounting, number, min(each.input_tokens + step, ends[number]))
        accounting.drain()
        usage = accounting.usage()
        committed.append(usage.committed_bytes - usage.cached_bytes)
        used.append(usage.used_bytes)
    return Held(
        strategy=strategy,
        num_tokens=tuple(steps),
        committed_bytes=tuple(committed),
        used_bytes=tuple(used),
    )


def _extend(accounting: Accounting, number: int, num_tokens: int) -> None:
    verdict = accounting.try_extend(number, num_tokens)
    assert isinstance(verdict, Fits), f"memory is not ample: {verdict}"


def _last(each: Lengths) -> int:
    """Tokens that are computed of it."""
    return each.input_tokens + max(each.output_tokens, 1) - 1


def _some(first: int, last: int) -> list[int]:
    """All of them, or so many that a line is smooth."""
    if last - first < _NUM_POINTS:
        return list(range(first, last + 1))
    return [int(each) for each in np.linspace(first, last, _NUM_POINTS).round()]


def _ample(strategy: str, spec: ModelSpec, sizes: CacheConfig, ends: Sequence[int]) -> CacheConfig:
    """Room for all of them at their ends, and for what lives twice while it is copied."""
    several = replace(sizes, max_num_seqs=len(ends), enable_prefix_caching=False)
    probe = build_accounting(strategy, spec, replace(several, max_num_seqs=1))
    counts = np.array(ends, np.int64)
    need_bytes = int(probe.bytes_alone(counts, counts + 1).sum())
    return replace(several, capacity_bytes=3 * need_bytes, max_capacity_bytes=None)
