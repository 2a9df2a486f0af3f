"""How much computing should weigh against waiting: a model of queues and LRU caches, in seconds.

    python -m benchmarks.fleet.queue_model TRACES

Each replica computes one prompt after the other at a constant speed, and has an LRU cache of the
trace's own blocks of 512 tokens. A request goes where weight x computing + waiting is least. It
leaves out decoding, batching, events and their delay: bench_placement has them, and takes long.
"""

import random
from collections import OrderedDict
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.fleet.bench_placement import TRACE
from benchmarks.harness.report import Run, Table
from quire.traces import TraceRequest, open_trace

TOKENS = 512  # of the trace's blocks
# Replicas, tokens a second of each, blocks of each one's cache.
FLEETS = (
    (4, 30_000, 963),
    (8, 30_000, 963),
    (4, 12_000, 963),
    (8, 6_000, 963),
    (4, 30_000, 20_000),
    (8, 6_000, 8_000),
    (64, 30_000, 963),
)
WEIGHTS = (1, 2, 5, 9, 17)
EQUAL_FRACTION, EQUAL_S, SEED = 0.05, 0.001, 0


def play(
    trace: list[TraceRequest], num: int, tokens_per_s: float, num_blocks: int, weight: float
) -> tuple[float, float, float]:
    """Play a trace. Returns: the share of tokens found, seconds to a prompt's end: mean, p99."""
    draw = random.Random(SEED).random
    caches = [OrderedDict[int, None]() for _ in range(num)]
    free_s, found, asked = [0.0] * num, 0, 0
    took_s: list[float] = []
    for request in trace:
        asked += request.input_tokens
        costs = []
        for place, cache in enumerate(caches):
            count = 0
            for block in request.hash_ids:
                if block not in cache:
                    break
                count += 1
            hit = min(count * TOKENS, request.input_tokens - 1)
            compute_s = (request.input_tokens - hit) / tokens_per_s
            wait_s = max(0.0, free_s[place] - request.at_s)
            costs.append((weight * compute_s + wait_s, wait_s, draw(), compute_s, hit, place))
        equal = min(costs)[0] * (1 + EQUAL_FRACTION) + EQUAL_S
        _, wait_s, _, compute_s, hit, place = min(
            (each for each in costs if each[0] <= equal), key=lambda each: each[1:3]
        )
        free_s[place] = max(free_s[place], request.at_s) + compute_s
        took_s.append(wait_s + compute_s)
        found += hit
        for block in reversed(request.hash_ids):
            caches[place][block] = None
            caches[place].move_to_end(block)
        while len(caches[place]) > num_blocks:
            caches[place].popitem(last=False)
    took_s.sort()
    return found / asked, sum(took_s) / len(took_s), took_s[int(0.99 * len(took_s))]


def main(traces: Annotated[Path, typer.Argument(help=f"Folder with {TRACE}.")]) -> None:
    """Print the share of what one cache finds, and seconds, by weight."""
    run = Run("fleet.queue_model", width=140)
    trace = list(open_trace(str(traces / TRACE)))
    ones = {fleet: _one(trace, *fleet) for fleet in FLEETS}
    rows = []
    for (fleet, one), weight in product(ones.items(), WEIGHTS):
        run.say(f"{fleet}, weight {weight}")
        share, mean_s, p99_s = play(trace, *fleet, weight)
        rows.append(
            [
                *(f"{each:,}" for each in fleet),
                str(weight),
                f"{share / one:.3f}",
                f"{mean_s:.2f}",
                f"{p99_s:.2f}",
            ]
        )
    columns = ("replicas", "tokens/s", "blocks", "weight", "of one cache", "mean, s", "p99, s")
    title = "Tokens found, as a share of what one cache and engine as large as all finds"
    run.end([Table(title=title, columns=columns, rows=rows)], run.setting(" …", also=["seed 0"]))


def _one(trace: list[TraceRequest], num: int, tokens_per_s: float, num_blocks: int) -> float:
    return play(trace, 1, num * tokens_per_s, num * num_blocks, 1)[0]


if __name__ == "__main__":
    typer.run(main)
