"""Recorded prompts through a tier: what of each is found again when only so much is kept."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.accounting.prefix_traces import PrefixTrace
from quire.tiers import Deadline, Tier
from quire.tiers.files import FileTier
from quire.tiers.host_memory import HostMemoryTier

RECORD_BYTES = 64  # what is in it does not matter
_FILE_BYTES = 4096  # that it takes on a disk
_BATCH = 16
_FOREVER_S = 1e6


class TraceClock:
    """The seconds of the trace: its requests come evenly."""

    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


def memory_tier(num_blocks: int, clock: TraceClock) -> HostMemoryTier:
    return HostMemoryTier(num_blocks * RECORD_BYTES, RECORD_BYTES, clock)


def hit_percent(trace: PrefixTrace, make: Callable[[TraceClock], Tier], seconds: float) -> float:
    """Ask for each prompt's blocks, load those that are there, store the others, in batches.

    ``seconds``: of the whole trace. Returns: found tokens in percent of the prompts' tokens.
    """
    names = [
        hashlib.sha256(number.to_bytes(4, "little")).digest() for number in range(trace.num_blocks)
    ]
    record, buffer = memoryview(bytes(RECORD_BYTES)), memoryview(bytearray(RECORD_BYTES))
    clock, found_tokens, deadline = TraceClock(), 0, Deadline.after(_FOREVER_S)
    tier = make(clock)
    for number, chain in enumerate(trace.chains):
        clock.now_s = 1e9 + seconds * number / len(trace.chains)
        several = [names[block] for block in chain]
        found = tier.find(several, deadline)
        for start in range(0, found, _BATCH):
            some = several[start : min(found, start + _BATCH)]
            tier.load(some, [buffer] * len(some), deadline)
        for start in range(found, len(several), _BATCH):
            some = several[start : start + _BATCH]
            tier.store(some, [record] * len(some), deadline)
        found_tokens += trace.hit_tokens(number, found)
    tier.close()
    return 100 * found_tokens / trace.num_tokens


def file_hit_percent(trace: PrefixTrace, num_blocks: int, seconds: float) -> float:
    """The same in a folder, in memory (tmpfs) where the system has one."""
    shared = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None))
    try:
        return hit_percent(
            trace,
            lambda clock: FileTier(
                path / "kv",
                "0" * 16,
                size_bytes=num_blocks * _FILE_BYTES,
                reserve_bytes=0,
                expected_records=num_blocks,
                clock=clock,
            ),
            seconds,
        )
    finally:
        shutil.rmtree(path)
