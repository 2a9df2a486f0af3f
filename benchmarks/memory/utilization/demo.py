"""The same lengths, a seventh of them, run by the demo model through the engine. With all tensors.

Figures are taken after each step, from the usage that an observer is given, and weighted with the
seconds that the step took. Beside them stand the system's own: of the mappings that hold keys and
values (smaps), or of the files behind them where pages are shared.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.harness import os_memory
from benchmarks.memory.utilization.lengths import Lengths
from benchmarks.memory.utilization.waste import Fate, Moment, Watch
from benchmarks.memory.virtual.caches import heap_bytes
from quire import LLM, SamplingParams
from quire.kv import Usage
from quire.memory import HostMemory
from quire.memory.provider import Region
from quire.models.loader import LoadedModel

DIVISOR = 7  # so that the longest request fits the model's 2,048 tokens
CAPACITY_BYTES = 33 * 2**20  # 8,448 tokens: four of the longest, and what newcomers must leave
_LOOK_EVERY = 4  # steps: how often the system is asked


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSystem:
    """A strategy, by the options of an engine."""

    name: str
    options: dict[str, Any]

    def range_tokens(self, lengths: Lengths, max_model_len: int) -> int:
        if self.options.get("reserve") != "request":
            return max_model_len
        return min(max_model_len, lengths.prompt_tokens + lengths.output_tokens)


DEMO_SYSTEMS = (
    DemoSystem(name="contiguous, 2,048 each", options={"cache": "contiguous"}),
    DemoSystem(
        name="contiguous, length foretold", options={"cache": "contiguous", "reserve": "request"}
    ),
    DemoSystem(
        name="growing, doubling from 16",
        options={"cache": "growing", "growth": "doubling", "growth_tokens": 16},
    ),
    DemoSystem(name="growing, uniform 32", options={"cache": "growing", "growth_tokens": 32}),
    DemoSystem(
        name="growing, staggered 16",
        options={"cache": "growing", "growth": "staggered", "growth_tokens": 16},
    ),
    DemoSystem(name="paged", options={"cache": "paged"}),
    DemoSystem(
        name="virtual, unshared", options={"cache": "virtual", "enable_prefix_caching": False}
    ),
    DemoSystem(name="virtual, shared", options={"cache": "virtual"}),
)


@dataclass(slots=True, kw_only=True)
class DemoRun:
    """What one system made of the requests."""

    moments: list[tuple[Moment, float]] = field(default_factory=list)  # with the step's seconds
    looks: list[tuple[int, int]] = field(default_factory=list)  # bytes by our counter, by Linux's
    num_preemptions: int = 0
    elapsed_s: float = 0.0


class SeenMemory:
    """Memory of the host, of which the system can be asked what it has given."""

    def __init__(self) -> None:
        self._upstream = HostMemory()
        self._ranges: list[tuple[int, int]] = []
        self._before = heap_bytes()

    @property
    def page_bytes(self) -> int:
        return self._upstream.page_bytes

    @property
    def cannot_share(self) -> str | None:
        return self._upstream.cannot_share

    def used_on(self, stream: int, *, ends: bool = False) -> None:
        self._upstream.used_on(stream, ends=ends)

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> Region:
        region = self._upstream.reserve(nbytes, heap_bytes=heap_bytes)
        if heap_bytes is None:
            first = region.tensor(torch.uint8).data_ptr()
            self._ranges.append((first, first + region.nbytes))
        return region

    def system_bytes(self) -> int:
        mapped = os_memory.mappings(self._ranges)["Pss"] if self._ranges else 0
        return mapped + heap_bytes() - self._before


def run(system: DemoSystem, loaded: LoadedModel, requests: Sequence[Lengths], seed: int) -> DemoRun:
    """All requests at once, of random tokens; every one gets all the tokens that it asks for."""
    gc.collect()  # else what the engine before has mapped may lie beside what is looked at
    found, memory = DemoRun(), SeenMemory()
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(1, 4_096, lengths.prompt_tokens).tolist() for lengths in requests]
    params = [
        SamplingParams(max_tokens=lengths.output_tokens, temperature=0, ignore_eos=True)
        for lengths in requests
    ]
    options = {"kv_cache_memory_bytes": CAPACITY_BYTES, **system.options}
    with LLM(loaded, provider=memory, **options) as llm:
        watch = Watch(llm._kv.accounting, memory.page_bytes)
        for lengths in requests:
            range_tokens = system.range_tokens(lengths, llm.max_model_len)
            watch.expect(Fate(final_tokens=lengths.final_tokens, range_tokens=range_tokens))
        begun = before = time.perf_counter()

        def observe(usage: Usage) -> None:
            nonlocal before
            seconds = time.perf_counter() - before
            if watch.one_has_waited and llm.engine.scheduler.num_waiting:
                with llm._elastic.lock:  # else a thread may give pages back meanwhile
                    if len(found.moments) % _LOOK_EVERY == 0:
                        found.looks.append((llm.memory.committed_bytes, memory.system_bytes()))
                    found.moments.append((watch.now(), seconds))
            before = time.perf_counter()

        completions = llm.generate(prompts, params, observe=observe)
        found.elapsed_s = time.perf_counter() - begun
        found.num_preemptions = llm.engine.scheduler.num_preemptions
        assert llm.elastic.num_shrinks == 0, "the machine was short of memory: the pool shrank"
    for completion, lengths in zip(completions, requests, strict=True):
        assert len(completion.token_ids) == lengths.output_tokens, completion.detail
    return found
