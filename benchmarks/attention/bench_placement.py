"""Decode attention over blocks that lie side by side, and over blocks that do not.

    python -m benchmarks.attention.bench_placement --threads 1

``interleaved`` is how sequences lie that grow in turn where any free block will do; ``scattered``
how they lie in a pool whose blocks have changed hands. Calls take turns, and the caches are swept
before each. Wall-clock time and CPU time are printed: on a machine that others share, only the
latter means anything.
"""

import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import numpy as np
import torch
import typer

from quire.attention import AttentionBatch
from quire.attention.cpu.backend import CpuAttention
from quire.kv import LayerView
from quire.spec import FullAttention

BLOCK_SIZE = 16
BASE, AGAIN = "side by side", "side by side again"
# (dtype, sequences, tokens of each, key-value heads, query heads, width of a head)
CASES = (
    ("bfloat16", 1, 2_048, 2, 14, 64),
    ("bfloat16", 16, 2_048, 2, 14, 64),
    ("bfloat16", 1, 8_192, 8, 16, 128),
    ("bfloat16", 16, 2_048, 8, 16, 128),
    ("float32", 16, 1_024, 8, 16, 128),
)


def main(threads: int = 1, rounds: int = 21) -> None:
    """Print the time of a call for each placement, and its ratio to blocks side by side."""
    torch.set_num_threads(threads)
    backend, swept = CpuAttention(), torch.zeros(2**24)
    for dtype, num_seqs, num_tokens, kv_heads, heads, width in CASES:
        own = getattr(torch, dtype)
        width_of_table, numbers = num_tokens // BLOCK_SIZE, np.random.default_rng(0)
        num_blocks = num_seqs * width_of_table
        shape = 2 * num_blocks, kv_heads, BLOCK_SIZE, width
        keys, values = (torch.randn(shape).to(own) for _ in range(2))
        view = LayerView(k=keys, v=values, slots_per_row=BLOCK_SIZE)
        spec = FullAttention(num_kv_heads=kv_heads, head_dim=width, dtype=dtype)
        queries, ids = torch.randn(num_seqs, heads, width).to(own), np.arange(num_blocks)
        tables = {
            BASE: ids.reshape(num_seqs, -1),
            AGAIN: ids.reshape(num_seqs, -1),
            "interleaved": ids.reshape(-1, num_seqs).T,
            "scattered": numbers.permutation(2 * num_blocks)[:num_blocks].reshape(num_seqs, -1),
        }
        batches = {
            name: AttentionBatch(
                query_starts=np.arange(num_seqs + 1),
                context_lens=np.full(num_seqs, num_tokens),
                tables=torch.from_numpy(np.ascontiguousarray(table)),
                slots=torch.zeros(num_seqs, dtype=torch.long),
                block_size=BLOCK_SIZE,
            )
            for name, table in tables.items()
        }
        taken: dict[str, dict[str, list[float]]] = {
            clock: {name: [] for name in tables} for clock in ("wall clock", "CPU")
        }
        for turn in range(rounds + 1):
            names = list(tables)
            for name in names[turn % 4 :] + names[: turn % 4]:
                swept.add_(1)
                cpu_s, wall_s = time.process_time(), time.perf_counter()
                backend.attend(queries, view, batches[name], spec=spec, scale=width**-0.5)
                wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
                if turn:  # the first one plans
                    taken["wall clock"][name].append(1e3 * wall_s)
                    taken["CPU"][name].append(1e3 * cpu_s)
        print(f"{dtype}, {num_seqs} x {num_tokens:,} tokens, {heads}/{kv_heads} heads of {width}")
        for clock, own_times in taken.items():
            for name, times in own_times.items():
                ratios = [b / a for a, b in zip(own_times[BASE], times, strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                print(
                    f"  {clock}, {name}: {min(times):.2f} ms at least, median "
                    f"{statistics.median(times):.2f}; {min(times) / min(own_times[BASE]):.2f} of "
                    f"the least, {middle:.2f} of pairs (quartiles {low:.2f} … {high:.2f})"
                )


if __name__ == "__main__":
    typer.run(main)
