"""A step of an engine that publishes its cache's events beside one that does not, step by step.

    python -m benchmarks.engine.bench_events --threads 1 --batch 16

Three engines have the demo model, which is small, so that events weigh more than with any other:
one publishes to a subscriber in a process of its own, one does not, and one more does not either
(A/A). All get the same prompts, none of which begins like another, and take steps in turn.
"""

import os
import random
import statistics
import subprocess
import sys
import time
from typing import Annotated

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import torch
import typer

from quire import LLM, SamplingParams
from quire.models.loader import load

EVENTS, WITHOUT, AGAIN = "events", "without", "without again"
HERE = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:0"}
SEED = 1234
WARM = 2  # rounds that are not counted: kernels are compiled, and steps recorded
SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.connect(sys.argv[1])
socket.subscribe(b"")
while True:
    socket.recv_multipart()
"""


def main(
    threads: int = 1,
    batch: Annotated[int, typer.Option(help="Sequences that run together.")] = 16,
    rounds: Annotated[int, typer.Option(help="Times that so many prompts are continued.")] = 20,
    prompt_tokens: int = 256,
    output_tokens: int = 48,
) -> None:
    """Print the medians of a step's times, and ratios of pairs."""
    torch.set_num_threads(threads)
    model, rng = load(), random.Random(SEED)
    params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
    engines = {
        name: LLM(
            model,
            kv_cache_memory_bytes=2**27,
            max_num_seqs=batch,
            kv_events_config=HERE if name == EVENTS else None,
        )
        for name in (EVENTS, WITHOUT, AGAIN)
    }
    publisher = engines[EVENTS].kv_events
    assert publisher is not None
    sizes: list[int] = []  # tokens of each step
    engines[EVENTS].engine.watch = lambda plan: sizes.append(plan.num_tokens)
    times: dict[str, dict[str, list[float]]] = {
        kind: {name: [] for name in engines} for kind in ("prompts", "decode")
    }
    with subprocess.Popen([sys.executable, "-c", SUBSCRIBER, publisher.endpoint]) as subscriber:
        for number in range(WARM + rounds):
            prompts = [
                [rng.randrange(5, model.vocab_size) for _ in range(prompt_tokens)]
                for _ in range(batch)
            ]
            for llm in engines.values():
                for prompt in prompts:
                    llm.start(llm.request(prompt, params), lambda *_: None)
            more, step = True, 0
            while more:
                taken: dict[str, float] = {}
                order = list(engines)
                for name in order[step % 3 :] + order[: step % 3]:
                    begun_s = time.perf_counter()
                    more = engines[name].step()
                    taken[name] = time.perf_counter() - begun_s
                step += 1
                if number >= WARM:
                    kind = "prompts" if sizes[-1] > batch else "decode"
                    for name, own in taken.items():
                        times[kind][name].append(own)
        subscriber.kill()
    for kind, found in times.items():
        median = {name: 1e3 * statistics.median(own) for name, own in found.items()}
        print(
            f"{kind}, {len(found[EVENTS]):,} steps of each: {EVENTS} {median[EVENTS]:.3f} ms, "
            f"{WITHOUT} {median[WITHOUT]:.3f}, {AGAIN} {median[AGAIN]:.3f}; of medians "
            f"{median[EVENTS] / median[WITHOUT]:.3f}, A/A {median[AGAIN] / median[WITHOUT]:.3f}"
        )
        for name in (EVENTS, AGAIN):
            ratios = [a / b for a, b in zip(found[name], found[WITHOUT], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"  {name} / {WITHOUT}: {middle:.3f} of pairs ({low:.3f} … {high:.3f})")
    print(f"batches published: {publisher.num_published:,}, dropped: {publisher.num_dropped}")
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    typer.run(main)
