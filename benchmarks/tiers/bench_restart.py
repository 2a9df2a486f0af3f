"""The first token of a long prompt after a restart: computed, and with its blocks in a tier.

    python -m benchmarks.tiers.bench_restart --rounds 3

An engine of the 0.45 B model gets a prompt and stores it. Another engine, which begins with an
empty pool as after a restart, gets it again. Kinds take turns within a round; each has an engine of
its own in each round. Times are from the request to its first token, in the thread that steps.
"""

import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import torch
import typer

from benchmarks.engine.model import make
from benchmarks.harness.server import free_port
from quire import LLM, SamplingParams
from quire.models.loader import LoadedModel, load

SEED = 1234
WITHIN_S = 20.0  # until Redis answers
MODEL = Path(tempfile.gettempdir()) / "quire-bench-model"


def main(
    rounds: int = 3,
    prompt_tokens: int = 2000,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    model: Annotated[Path, typer.Option(help="Its folder; made if it is not there.")] = MODEL,
) -> None:
    """Print the seconds to the first token, and ratios of pairs to computing."""
    torch.set_num_threads(threads)
    loaded, rng = load(make(model)), random.Random(SEED)
    times: dict[str, list[float]] = {}
    found: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder, _redis(Path(folder)) as redis:
        tiers = {
            "computed": {},
            "computed again": {},
            "file": _tier(f"file:{folder}/blocks?size=8GiB"),
        }
        if redis is not None:
            tiers["redis, TCP"] = _tier(f"redis://127.0.0.1:{redis}")
            tiers["redis, sealed"] = {
                "kv_tier": (f"redis://127.0.0.1:{redis}",),
                "kv_tier_key": _key(Path(folder)),
                "kv_tier_write": "always",
            }
        for number in range(rounds):
            prompt = [rng.randrange(5, loaded.vocab_size) for _ in range(prompt_tokens)]
            for options in tiers.values():
                if options:
                    _first_token(loaded, prompt, options)  # which stores it
            names = list(tiers)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                seconds, cached = _first_token(loaded, prompt, tiers[name])
                times.setdefault(name, []).append(seconds)
                found.setdefault(name, []).append(cached)
    print(f"{prompt_tokens:,} tokens, {rounds} rounds, {threads} threads of torch")
    for name in tiers:
        ratios = [a / b for a, b in zip(times[name], times["computed"], strict=True)]
        print(
            f"{name:15} first token {_spread(times[name], 's')}, × computed {_spread(ratios)}, "
            f"cached tokens {min(found[name])} … {max(found[name])}"
        )


def _tier(address: str) -> dict[str, Any]:
    return {"kv_tier": (address,), "kv_tier_write": "always", "kv_tier_trusted": True}


def _first_token(
    loaded: LoadedModel, prompt: list[int], options: dict[str, Any]
) -> tuple[float, int]:
    """Give a prompt to a new engine. Returns: seconds to its first token, cached tokens."""
    with LLM(
        loaded, kv_cache_memory_bytes=2**29, max_model_len=4096, max_num_seqs=4, **options
    ) as llm:
        llm.generate([[7] * 300], SamplingParams(max_tokens=2, temperature=0))  # what is warmed up
        params = SamplingParams(max_tokens=1, temperature=0)
        begun_s = time.perf_counter()
        (end,) = llm.generate([prompt], params)
        return time.perf_counter() - begun_s, end.num_cached_tokens


def _key(folder: Path) -> str:
    path = folder / "key"
    path.write_bytes(os.urandom(32))
    return str(path)


@contextmanager
def _redis(folder: Path) -> Iterator[int | None]:
    """Run a server on a free port, if there is one."""
    if shutil.which("redis-server") is None:
        print("no redis-server: its rows are left out")
        yield None
        return
    import socket

    port = free_port()
    options = ["--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    with subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL) as process:
        until_s = time.monotonic() + WITHIN_S
        while time.monotonic() < until_s:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        try:
            yield port
        finally:
            process.terminate()


def _spread(values: list[float], unit: str = "") -> str:
    return f"{statistics.median(values):.3f}{unit} ({min(values):.3f} … {max(values):.3f})"


if __name__ == "__main__":
    typer.run(main)
