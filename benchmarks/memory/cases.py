"""One cache, filled, measured and released, in a process of its own: the child of bench_memory.py.

    python -m benchmarks.memory.cases '{"case": "A", "cache": "paged", …}'      (see Scenario)

The last line of output is one JSON object of figures in bytes and seconds. Keys and values are
drawn at random for every token and layer, written as an engine writes them, and read back in part.
"""

import ctypes
import gc
import json
import sys
import time
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import os_memory
from quire.kv import Accounting, CacheConfig, Fits, Storage, build_accounting, build_storage
from quire.kv.layout import attention_spec
from quire.memory import HostMemory
from quire.spec import AttentionSpec, FullAttention, Layer, ModelSpec, SlidingWindow
from quire.units import align_up

PAGE_BYTES = 4096
CAPACITY_BYTES = 12 * 2**30  # ceiling of those that commit by need: never reached here


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What one child does: prompts in chunks, then token by token, all sequences in lockstep."""

    case: str
    cache: str  # a strategy of ours, "DynamicCache" or "StaticCache"
    geometry: str = "qwen3-4b"
    num_seqs: int
    prompt_tokens: int
    chunk_tokens: int
    num_tokens: int
    max_num_seqs: int | None = None  # sequences that the cache is built for, if more than it gets
    max_model_len: int = 40_960
    options: dict[str, Any] = field(default_factory=dict)  # more of CacheConfig
    writes: bool = True  # False: room is made and moved as told, but no new token is written
    seed: int = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence after each step."""
        chunks = range(self.chunk_tokens, self.prompt_tokens, self.chunk_tokens)
        return [*chunks, *range(self.prompt_tokens, self.num_tokens + 1)]


def geometry(name: str, max_model_len: int) -> ModelSpec:
    """Qwen3-4B: 36 x (8 KV heads of 128). Gemma-3-4B: 34 x (4 of 256), window 1,024 in 5 of 6."""
    if name == "qwen3-4b":
        full = FullAttention(num_kv_heads=8, head_dim=128, dtype="bfloat16")
        specs: list[AttentionSpec] = [full] * 36
    else:
        full = FullAttention(num_kv_heads=4, head_dim=256, dtype="bfloat16")
        window = SlidingWindow(num_kv_heads=4, head_dim=256, dtype="bfloat16", window=1024)
        specs = [full if layer % 6 == 5 else window for layer in range(34)]
    layers = tuple(Layer(specs=(spec,)) for spec in specs)
    return ModelSpec(model_type=name, layers=layers, max_model_len=max_model_len, dtype="bfloat16")


class RandomTokens:
    """Keys and values for any chunk, the same whenever asked again. The buffers are made once."""

    def __init__(self, spec: ModelSpec, num_tokens: int, seed: int) -> None:
        (self.heads, self.width), _ = attention_spec(spec.groups[0]).entry_shapes
        self._flat = torch.zeros(2, num_tokens * self.heads * self.width, dtype=torch.bfloat16)
        self._generator = torch.Generator()
        self._seed = seed

    def draw(self, layer: int, seq_id: int, start: int, *shape: int) -> tuple[Tensor, Tensor]:
        """k and v of ``shape``, which must be as large as the tokens asked for."""
        self._generator.manual_seed(((self._seed * 64 + layer) * 128 + seq_id) * 65_536 + start)
        k, v = (row[: prod(shape)].view(shape) for row in self._flat)
        k.normal_(generator=self._generator)
        v.normal_(generator=self._generator)
        return k, v


@dataclass(slots=True)
class Timing:
    take_s: float = 0.0  # room and writing
    room_s: float = 0.0  # of that: accounting, commits and copies
    step_s: float = 0.0  # the last step's share of take_s
    give_back_s: float = 0.0


class Ours:
    """A strategy, driven as an engine drives it."""

    def __init__(self, scenario: Scenario, spec: ModelSpec) -> None:
        whole = scenario.num_seqs * scenario.max_model_len * spec.bytes_per_token
        config = CacheConfig(
            max_model_len=scenario.max_model_len,
            max_num_seqs=scenario.max_num_seqs or scenario.num_seqs,
            capacity_bytes=whole if scenario.cache == "contiguous" else CAPACITY_BYTES,
            page_bytes=PAGE_BYTES,
            **scenario.options,
        )
        self._scenario = scenario
        self._accounting: Accounting = build_accounting(scenario.cache, spec, config)
        self._storage: Storage = build_storage(scenario.cache, self._accounting, HostMemory())
        self.peak_bytes = 0
        for seq_id in range(scenario.num_seqs):
            self._accounting.add(seq_id)

    def step(self, start: int, stop: int, tokens: RandomTokens, timing: Timing) -> None:
        begun = time.perf_counter()
        for seq_id in range(self._scenario.num_seqs):
            verdict = self._accounting.try_extend(seq_id, stop)
            assert isinstance(verdict, Fits), verdict
        self._storage.apply(self._accounting.drain())
        spent = time.perf_counter() - begun
        timing.room_s += spent
        timing.take_s += spent
        if self._scenario.writes:
            for seq_id in range(self._scenario.num_seqs):
                timing.take_s += self._write(seq_id, start, stop, tokens)

    def _write(self, seq_id: int, start: int, stop: int, tokens: RandomTokens) -> float:
        spent = 0.0
        for index, group in enumerate(self._accounting.groups):
            begun = time.perf_counter()
            slots = torch.from_numpy(self._accounting.slots(index, seq_id, start, stop))
            spent += time.perf_counter() - begun
            for layer in group.layers:
                k, v = tokens.draw(layer, seq_id, start, *self._shape(slots, tokens))
                begun = time.perf_counter()
                self._storage.write(layer, slots, k, v)
                spent += time.perf_counter() - begun
        return spent

    @staticmethod
    def _shape(slots: Tensor, tokens: RandomTokens) -> tuple[int, int, int]:
        return len(slots), tokens.heads, tokens.width

    def verify(self, start: int, stop: int, tokens: RandomTokens) -> None:
        """The last step of the first and the last sequence reads as it was written."""
        for seq_id in {0, self._scenario.num_seqs - 1}:
            for index, group in enumerate(self._accounting.groups):
                slots = torch.from_numpy(self._accounting.slots(index, seq_id, start, stop))
                for layer in group.layers:
                    k, v = tokens.draw(layer, seq_id, start, *self._shape(slots, tokens))
                    held_k, held_v = self._storage.gather(layer, slots)
                    assert torch.equal(held_k, k.transpose(0, 1)), "a key was lost"
                    assert torch.equal(held_v, v.transpose(0, 1)), "a value was lost"

    def figures(self) -> dict[str, Any]:
        """Our own counters, and the operating system's of the very mappings."""
        ranges = []
        for index, group in enumerate(self._accounting.groups):
            nbytes = self._accounting.num_slots(index) * group.spec.bytes_per_token
            for layer in group.layers:
                first = self._storage.view(layer).k.data_ptr()
                ranges.append((first, first + align_up(nbytes, PAGE_BYTES)))
        memory, usage = self._storage.memory, self._accounting.usage()
        assert usage.committed_bytes == memory.committed_bytes, "accounting and storage disagree"
        return {
            "own_bytes": memory.committed_bytes,
            "own_peak_bytes": memory.peak_committed_bytes,
            "reserved_bytes": memory.reserved_bytes,
            "mapped": os_memory.mappings(ranges),
        }

    def give_back(self) -> None:
        for seq_id in range(self._scenario.num_seqs):
            self._accounting.free(seq_id)
        self._storage.apply(self._accounting.drain())
        self._accounting.check()

    def close(self) -> None:
        self._storage.close()


class HuggingFace:
    """A Transformers cache, fed all sequences as one batch, as a model feeds it."""

    def __init__(self, scenario: Scenario, spec: ModelSpec) -> None:
        from transformers import DynamicCache, StaticCache

        config = _hf_config(scenario.geometry, spec)
        self._scenario, self._num_layers = scenario, spec.num_layers
        self._cache: Any = (
            DynamicCache(config=config)
            if scenario.cache == "DynamicCache"
            else StaticCache(config=config, max_cache_len=scenario.max_model_len)
        )

    def step(self, start: int, stop: int, tokens: RandomTokens, timing: Timing) -> None:
        shape = (self._scenario.num_seqs, tokens.heads, stop - start, tokens.width)
        for layer in range(self._num_layers):
            k, v = tokens.draw(layer, 0, start, *shape)
            begun = time.perf_counter()
            self._cache.update(k, v, layer)
            timing.take_s += time.perf_counter() - begun

    def verify(self, start: int, stop: int, tokens: RandomTokens) -> None:
        assert int(self._cache.get_seq_length(5)) == stop, "tokens were lost"

    def figures(self) -> dict[str, Any]:
        return {}

    def give_back(self) -> None:
        del self._cache

    def close(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)


def _hf_config(name: str, spec: ModelSpec) -> Any:
    from transformers import Gemma3TextConfig, Qwen3Config

    if name == "qwen3-4b":
        return Qwen3Config(num_hidden_layers=spec.num_layers, num_key_value_heads=8, head_dim=128)
    return Gemma3TextConfig(
        num_hidden_layers=spec.num_layers,
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=1024,
        layer_types=[
            "sliding_attention" if isinstance(layer.specs[0], SlidingWindow) else "full_attention"
            for layer in spec.layers
        ],
    )


def run(scenario: Scenario) -> dict[str, Any]:
    """Fill, measure, release, measure again."""
    spec = geometry(scenario.geometry, scenario.max_model_len)
    is_ours = scenario.cache not in ("DynamicCache", "StaticCache")
    lengths = scenario.lengths
    longest_step = max(b - a for a, b in zip([0, *lengths], lengths, strict=False))
    batch = 1 if is_ours else scenario.num_seqs
    tokens = RandomTokens(spec, batch * longest_step, scenario.seed)
    timing = Timing()
    gc.collect()
    before = os_memory.process()
    rss_before = os_memory.reset_peak()

    cache = Ours(scenario, spec) if is_ours else HuggingFace(scenario, spec)
    built = os_memory.process().since(before)
    start = 0
    for stop in lengths:
        so_far = timing.take_s
        cache.step(start, stop, tokens, timing)
        timing.step_s = timing.take_s - so_far
        last_step, start = (start, stop), stop
    result: dict[str, Any] = {
        "built": built,
        "peak_bytes": os_memory.peak_rss() - rss_before,
        "held": os_memory.process().since(before) | cache.figures(),
        "ideal_bytes": scenario.num_seqs * spec.bytes_for(start),
        "peak_ideal_bytes": scenario.num_seqs * spec.peak_bytes(start, scenario.chunk_tokens),
    }
    if scenario.writes:
        cache.verify(*last_step, tokens)
    begun = time.perf_counter()
    cache.give_back()
    timing.give_back_s = time.perf_counter() - begun
    gc.collect()
    result["freed"] = os_memory.process().since(before) | cache.figures()
    cache.close()
    result["closed"] = os_memory.process().since(before) | cache.figures()
    del cache
    gc.collect()
    result["gone"] = os_memory.process().since(before)
    return result | {name: getattr(timing, name) for name in Timing.__slots__}


def main() -> None:
    torch.set_num_threads(1)
    scenario = Scenario(**json.loads(sys.argv[1]))
    # Everything that a first call loads and allocates is there before the first figure is taken.
    small = replace(
        scenario, num_seqs=1, prompt_tokens=8, chunk_tokens=8, num_tokens=9, max_model_len=256
    )
    run(small)
    print(json.dumps(run(scenario)))


if __name__ == "__main__":
    main()
