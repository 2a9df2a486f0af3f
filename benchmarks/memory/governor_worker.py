"""What ``bench_governor`` runs, each part in a process of its own; the last line is the result.

Blocks that are only cached are made without computing them: accounting is told that a prompt's
tokens came from outside. Their pages are as real as any others.
"""

import gc
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from quire import LLM, SamplingParams
from quire.kv import Extension, Fits
from quire.memory.budget import headroom_bytes
from quire.memory.machine.probe import process_memory
from quire.memory.machine.readings import HostGauge, MemoryReading
from quire.models.loader import load

GIB = 1 << 30
PARAMS = SamplingParams(max_tokens=160, temperature=0, ignore_eos=True)
PROMPTS = ["def fibonacci(n):\n", "class Stack:\n", "import os\n", "for i in range(10):\n"]

NEIGHBOUR = """
import sys
size = int(sys.argv[1])
taken = bytearray(size)
for start in range(0, size, 1 << 26):
    taken[start : start + (1 << 26) : 4096] = b"x" * len(taken[start : start + (1 << 26) : 4096])
print("has it", flush=True)
sys.stdin.read()
"""


def main(part: str, *arguments: str) -> None:
    print(json.dumps(PARTS[part](*arguments)), flush=True)


def neighbour(group: str, limit: str) -> dict[str, Any]:
    """Another process takes half of a control group while sequences run and the cache is full."""
    (Path(group) / "cgroup.procs").write_text("0")
    gauge, half, headroom = HostGauge(), int(limit) // 2, headroom_bytes(int(limit), "shared")
    weights = np.ones(int(limit) // 4, np.uint8)  # as a larger model has them
    # In float32 no rounding decides between two tokens, whatever was found in the cache.
    llm = LLM(kv_cache_memory_bytes=half, dtype="float32", max_num_seqs=8)
    want = [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]
    fill(llm, gauge.read().available_bytes - headroom * 3 // 2)
    cached, swapped = llm.usage().cached_bytes, _swapped_pages()
    ceiling = llm.elastic.ceiling_bytes
    low_at: list[float] = []
    seen: list[tuple[float, int]] = []

    def watch() -> None:
        while not stop.wait(0.01):
            if not low_at and gauge.read().available_bytes < headroom:
                low_at.append(time.monotonic())
            seen.append((time.monotonic(), llm.memory.committed_bytes))

    stop = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    command = [sys.executable, "-c", NEIGHBOUR, str(half)]
    got: list[tuple[int, ...]] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        reader = threading.Thread(target=other.stdout.readline)
        reader.start()
        while reader.is_alive():
            got = [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]
        time.sleep(2)
        shrunk = llm.elastic
        other.communicate()
    stop.set()
    watcher.join()
    left = next((size for at, size in seen if low_at and at >= low_at[0] + 1), cached)
    back_s = _seconds_until(lambda: llm.elastic.ceiling_bytes >= 0.9 * ceiling)
    llm.close()
    del weights
    return {
        "cached_bytes": cached,
        "returned_fraction": 1 - left / cached,
        "same_tokens": got == want,
        "swapped_pages": _swapped_pages() - swapped,
        "num_shrinks": shrunk.num_shrinks,
        "num_preemptions": shrunk.num_preemptions,
        "recovered_after_s": back_s,
    }


def lowered() -> dict[str, Any]:
    """An operator halves the capacity, again and again, while sequences run."""
    llm = LLM(kv_cache_memory_bytes=GIB, dtype="float32", max_num_seqs=8)
    want = [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]
    fill(llm, GIB)
    times: list[float] = []

    def operate() -> None:
        for _ in range(7):
            wanted = llm.elastic.capacity_bytes // 2
            begin = time.monotonic()
            llm.resize(wanted)
            assert llm.memory.committed_bytes <= wanted
            times.append(time.monotonic() - begin)
            time.sleep(0.1)

    thread = threading.Thread(target=operate)
    thread.start()
    got = [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]
    thread.join()
    llm.close()
    return {"slowest_s": max(times), "num_resizes": len(times), "same_tokens": got == want}


def idle() -> dict[str, Any]:
    """After work and half a minute of rest, against right after the model was loaded."""
    loaded = load()
    before = _rss_bytes()
    llm = LLM(loaded, kv_cache_memory_bytes=2 * GIB)
    built = _rss_bytes()
    llm.generate(PROMPTS, PARAMS)
    fill(llm, GIB)
    full = _rss_bytes()
    time.sleep(30)
    after = _rss_bytes()
    llm.close()
    return {"loaded_bytes": before, "built_bytes": built, "full_bytes": full, "idle_bytes": after}


class SmallHost(HostGauge):
    """This machine, but for what is withheld, as one of a smaller size."""

    def __init__(self, total_bytes: int, withheld_bytes: int) -> None:
        super().__init__()
        self.total_bytes, self.withheld_bytes = total_bytes, withheld_bytes

    def read(self) -> MemoryReading:
        available = super().read().available_bytes - self.withheld_bytes
        return MemoryReading(total_bytes=self.total_bytes, available_bytes=max(0, available))


def greedy(total: str, withheld: str, seconds: str) -> dict[str, Any]:
    """A cache that takes whatever it may. When it began, and what it held from then on."""
    gauge = SmallHost(int(total), int(withheld))
    llm = LLM(kv_cache_memory_bytes=int(total), gauge=gauge, max_num_seqs=8)
    llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1))
    begin, seen = time.time(), []
    numbers = iter(range(10**9))
    while time.time() < begin + float(seconds):
        room = llm.elastic.ceiling_bytes - llm.memory.committed_bytes
        fill(llm, min(room, 64 << 20), numbers)
        seen.append((time.time(), llm.memory.committed_bytes))
        time.sleep(0.1)
    llm.close()
    return {"seen": seen}


def soak(group: str, limit: str, seconds: str) -> dict[str, Any]:
    """Work at 95 % of what a control group allows."""
    folder = Path(group)
    (folder / "cgroup.procs").write_text("0")
    loaded = load()
    LLM(loaded, kv_cache_memory_bytes=64 << 20).close()  # what compiles, has compiled
    used = int((folder / "memory.usage_in_bytes").read_text())
    size = int(0.95 * int(limit)) - used
    llm = LLM(loaded, kv_cache_memory_bytes=size, memory_mode="dedicated", max_num_seqs=8)
    begin, num_tokens, most, numbers = time.monotonic(), 0, 0, iter(range(10**9))
    while time.monotonic() < begin + float(seconds):
        fill(llm, llm.elastic.ceiling_bytes - llm.memory.committed_bytes, numbers)
        most = max(most, llm.memory.committed_bytes)
        num_tokens += sum(len(c.token_ids) for c in llm.generate(PROMPTS, PARAMS))
    state = llm.elastic
    llm.close()
    peak = int((folder / "memory.max_usage_in_bytes").read_text())
    return {
        "kv_bytes": size,
        "most_kv_bytes": most,
        "peak_fraction": peak / int(limit),
        "num_tokens": num_tokens,
        "num_shrinks": state.num_shrinks,
    }


def holder(group: str, limit: str, share: str) -> dict[str, Any]:
    """Take memory until the group is at a share of its limit, and again whatever others leave."""
    (Path(group) / "cgroup.procs").write_text("0")
    most, taken = int(int(limit) * float(share)), []
    said = False
    while True:
        used = int((Path(group) / "memory.usage_in_bytes").read_text())
        if most - used >= 2**20:
            taken.append(np.ones(min(most - used, 2**24), np.uint8))
            continue
        if not said:
            print("has it", flush=True)
            said = True
        time.sleep(0.02)


def breather(group: str, limit: str, share: str) -> dict[str, Any]:
    """Take memory up to a random share of a group, keep it for a while, give a part back; for ever.

    ``share``: the most of the limit that the group is brought to.
    """
    (Path(group) / "cgroup.procs").write_text("0")
    rng, taken = random.Random(0), list[np.ndarray[Any, Any]]()
    while True:
        most, until = int(int(limit) * float(share)), time.monotonic() + rng.uniform(1, 15)
        wanted = int(most * rng.choice([0.5, 0.8, 1.0, 1.0]))
        while time.monotonic() < until:
            used = int((Path(group) / "memory.usage_in_bytes").read_text())
            if wanted - used >= 2**20:
                taken.append(np.ones(min(wanted - used, 2**24), np.uint8))
            time.sleep(0.01)  # 1.6 GB/s at most
        del taken[: rng.randint(0, len(taken))]
        time.sleep(rng.uniform(0, 10))


def stated(group: str, size: str, seconds: str) -> dict[str, Any]:
    """All that a budget in bytes gives, while sequences run, with no neighbour."""
    llm = LLM(kv_cache_memory_bytes=int(size), max_num_seqs=8)
    begin, most, ceilings, numbers = time.monotonic(), 0, [], iter(range(10**9))
    while time.monotonic() < begin + float(seconds):
        llm.generate(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))
        fill(llm, llm.elastic.ceiling_bytes - llm.memory.committed_bytes, numbers)
        most = max(most, llm.memory.committed_bytes)
        ceilings.append(llm.elastic.ceiling_bytes)
    state = llm.elastic
    peak = int((Path(group) / "memory.max_usage_in_bytes").read_text())
    found = {
        "most_kv_bytes": most,
        "least_ceiling_bytes": min(ceilings),
        "last_kv_bytes": llm.memory.committed_bytes,
        "num_shrinks": state.num_shrinks,
        "peak_bytes": peak,
        "reason": state.reason,
    }
    llm.close()
    return found


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    part.__name__: part
    for part in (neighbour, lowered, idle, greedy, soak, stated, holder, breather)
}


def fill(llm: LLM, num_bytes: int, numbers: Any = None) -> None:
    """Whole prompts' worth of blocks that are only cached, each begun like no other."""
    accounting, length = llm._kv.accounting, min(llm.max_model_len, 1024)
    each = llm.spec.bytes_per_token * length
    for number in range(num_bytes // each):
        with llm._elastic.lock:
            number = number if numbers is None else next(numbers)
            seq_id = -2 - number
            accounting.add(seq_id)
            verdict = accounting.try_extend(seq_id, length, Extension(external_tokens=length - 1))
            if isinstance(verdict, Fits):
                text = np.arange(length, dtype=np.int32) + number * length
                accounting.mark_computed([seq_id], [length], text)
            accounting.free(seq_id)
            llm._kv.carry_out()


def _rss_bytes() -> int:
    gc.collect()
    memory = process_memory()
    assert memory is not None
    return memory.rss_bytes


def _swapped_pages() -> int:
    lines = Path("/proc/vmstat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("pswpout "))


def _seconds_until(holds: Callable[[], bool], most_s: float = 120.0) -> float:
    begin = time.monotonic()
    while not holds() and time.monotonic() < begin + most_s:
        time.sleep(0.02)
    return time.monotonic() - begin


if __name__ == "__main__":
    main(*sys.argv[1:])
