"""vLLM's own block pool and cache manager, timed: the peer's side of bench_blocks.

Runs in the environment that vllm_environment.py makes; workers.py documents the protocol. Nothing
of vLLM is replaced or stubbed. Timers enclose the calls that its scheduler makes and the loop over
requests that its scheduler has too.
"""

import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from benchmarks.accounting.workers import (
    BLOCK_SIZE,
    Answer,
    CaseFunction,
    Figures,
    blocks_taken,
    prompt,
    serve,
    shuffled,
)
from benchmarks.harness.quiet import no_collection

NEW_TOKEN = 7
MAX_MODEL_LEN = 32_768
now = time.perf_counter_ns


def sampling() -> SamplingParams:
    params = SamplingParams(max_tokens=4096)
    params.update_from_generation_config({}, eos_token_id=2)
    return params


def make_request(name: str, tokens: list[int], *, hashed: bool, params: SamplingParams) -> Request:
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256) if hashed else None
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=params,
        pooling_params=None,
        block_hasher=hasher,
    )


def make_manager(
    num_blocks: int, windows: Sequence[int | None], *, caching: bool
) -> KVCacheManager:
    shape: dict[str, Any] = {
        "block_size": BLOCK_SIZE, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16,
    }  # fmt: skip
    specs = [
        FullAttentionSpec(**shape)
        if window is None
        else SlidingWindowSpec(**shape, sliding_window=window)
        for window in windows
    ]
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=MAX_MODEL_LEN,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=caching,
        max_in_flight_tokens=2048,
    )


# -- pool ----------------------------------------------------------------------------------------


def pool(*, num_blocks: int, batch: int, caching: str, repeats: int) -> Answer:
    some = BlockPool(num_blocks, caching != "off", BLOCK_SIZE)
    params = sampling()
    keyed = caching in ("evicting", "scattered")
    if keyed:
        every = some.get_new_blocks(num_blocks - 1)
        give_keys(some, every, 0, params)
        order = shuffled(len(every)) if caching == "scattered" else reversed(range(len(every)))
        some.free_blocks([every[i] for i in order])
        del every
    num_taken = blocks_taken(num_blocks, batch)
    figures: Figures = {"allocate": [], "free": []}
    with no_collection():
        for repetition in range(repeats + 1):
            begun = now()
            held = [some.get_new_blocks(batch) for _ in range(num_taken // batch)]
            taken = now()
            if keyed:
                flat = [block for blocks in held for block in blocks]
                assert all(block.block_hash is None for block in flat)
                give_keys(some, flat, repetition + 1, params)
            begun_free = now()
            for blocks in held:
                some.free_blocks(reversed(blocks))
            freed = now()
            if repetition:
                figures["allocate"].append((taken - begun) / num_taken)
                figures["free"].append((freed - begun_free) / num_taken)
    return {"figures": figures, "facts": {"blocks": num_taken, "batches": num_taken // batch}}


def give_keys(some: BlockPool, blocks: list[Any], content: int, params: SamplingParams) -> None:
    """One long request, different for each ``content``: a chained hash for each block."""
    tokens = prompt(content, BLOCK_SIZE) * len(blocks)
    request = make_request("keys", tokens, hashed=True, params=params)
    some.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK_SIZE, 0)


# -- a decode step -------------------------------------------------------------------------------


def decode(
    *,
    num_blocks: int,
    num_seqs: int,
    windows: list[int | None],
    caching: bool,
    prompt_tokens: int,
    rewind: bool,
    repeats: int,
) -> Answer:
    cycles = 1 if rewind else repeats + 1
    most_tokens = prompt_tokens + BLOCK_SIZE * (cycles + 1)
    each = -(-most_tokens // BLOCK_SIZE) * len(windows)
    manager = make_manager(num_blocks or num_seqs * each + 1, windows, caching=caching)
    params = sampling()
    figures: Figures = {"allocate": [], "append": []}
    running = start(manager, 0, num_seqs, prompt_tokens, caching, params)
    net = set()
    with no_collection():
        for repetition in range(repeats + 1):
            if rewind and repetition:
                for request in running:
                    manager.free(request)
                first = repetition * num_seqs
                running = start(manager, first, num_seqs, prompt_tokens, caching, params)
            free_before = manager.block_pool.get_num_free_blocks()
            allocate_ns, append_ns = cycle(manager, running)
            if repetition:
                net.add(free_before - manager.block_pool.get_num_free_blocks())
                figures["allocate"].append(allocate_ns / (BLOCK_SIZE * num_seqs))
                figures["append"].append(append_ns / (BLOCK_SIZE * num_seqs))
    assert len(net) == 1, f"cycles took different numbers of blocks: {net}"
    return {"figures": figures, "facts": {"blocks_per_cycle": net.pop()}}


def start(
    manager: KVCacheManager,
    first: int,
    num_seqs: int,
    prompt_tokens: int,
    caching: bool,
    params: SamplingParams,
) -> list[Request]:
    """Requests past their prompts, sequence i another i % 16 tokens further."""
    running = []
    for seq in range(num_seqs):
        tokens = prompt(first + seq, prompt_tokens)
        request = make_request(f"r{first + seq}", tokens, hashed=caching, params=params)
        assert manager.allocate_slots(request, prompt_tokens) is not None, "the pool is too small"
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = prompt_tokens
        request.append_output_token_ids(NEW_TOKEN)
        for _ in range(seq % BLOCK_SIZE):
            assert manager.allocate_slots(request, 1) is not None, "the pool is too small"
            request.num_computed_tokens += 1
            request.append_output_token_ids(NEW_TOKEN)
        running.append(request)
    return running


def cycle(manager: KVCacheManager, running: list[Request]) -> tuple[int, int]:
    """16 steps: nanoseconds for allocate_slots, and for what follows a sampled token."""
    allocate_ns = append_ns = 0
    for _ in range(BLOCK_SIZE):
        begun = now()
        manager.new_step_starts()
        for request in running:
            if manager.allocate_slots(request, 1) is None:
                raise RuntimeError("the pool is too small")
        allocated = now()
        for request in running:
            request.num_computed_tokens += 1
            request.append_output_token_ids(NEW_TOKEN)
        append_ns += now() - allocated
        allocate_ns += allocated - begun
    return allocate_ns, append_ns


# -- a prompt that is cached ---------------------------------------------------------------------


def full_hit(*, prompt_tokens: int, windows: list[int | None], repeats: int) -> Answer:
    per_prompt = -(-prompt_tokens // BLOCK_SIZE) + 1
    manager = make_manager(8 * per_prompt * len(windows), windows, caching=True)
    params = sampling()
    tokens = prompt(0, prompt_tokens)
    make = partial(make_request, tokens=tokens, params=params)
    first = make("first", hashed=True)
    assert manager.allocate_slots(first, prompt_tokens) is not None
    manager.free(first)
    figures: Figures = {"hash": [], "lookup": [], "adopt": [], "free": []}
    hits = set()
    with no_collection():
        for repetition in range(repeats + 1):
            t0 = now()
            make("unhashed", hashed=False)
            t1 = now()
            request = make(f"r{repetition}", hashed=True)
            t2 = now()
            blocks, num_hit, _ = manager.get_computed_blocks(request)
            t3 = now()
            taken = manager.allocate_slots(request, prompt_tokens - num_hit, num_hit, blocks)
            t4 = now()
            assert taken is not None
            t5 = now()
            manager.free(request)
            t6 = now()
            hits.add(num_hit)
            if repetition:
                spent = ((t2 - t1) - (t1 - t0), t3 - t2, t4 - t3, t6 - t5)
                for name, nanoseconds in zip(figures, spent, strict=True):
                    figures[name].append(nanoseconds / prompt_tokens)
    assert len(hits) == 1, f"hits of different lengths: {hits}"
    return {"figures": figures, "facts": {"hit_tokens": hits.pop()}}


# -- bytes ---------------------------------------------------------------------------------------


def metadata(*, num_blocks: int) -> Answer:
    params = sampling()
    some, unhashed = traced(lambda: BlockPool(num_blocks, True, BLOCK_SIZE))
    held = some.get_new_blocks(num_blocks - 1)
    _, hashed = traced(lambda: give_keys(some, held, 0, params))
    keys = [block.block_hash for block in held]
    key = sum(map(len, keys)) + len(keys) * b"".__sizeof__()
    figures = {"unhashed": unhashed, "beside_key": unhashed + hashed - key, "key": float(key)}
    return {"figures": {name: [value / num_blocks] for name, value in figures.items()}}


def traced(action: Callable[[], Any]) -> tuple[Any, float]:
    """What an action returns, and the bytes that it leaves allocated."""
    tracemalloc.start()
    try:
        result = action()
        return result, float(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    torch.set_num_threads(1)
    init_none_hash(sha256)
    cases: dict[str, CaseFunction] = {
        "pool": pool,
        "decode": decode,
        "full_hit": full_hit,
        "metadata": metadata,
    }
    serve("vLLM", vllm.__version__, cases)
