"""What a process keeps of each new length of a prompt: next to nothing, outside its ledger."""

from __future__ import annotations

import sys

import pytest

from forks import run_fork

SCRIPT = """
import ctypes, os, sys
from quire.config import keep_few_shapes
keep_few_shapes()
from quire import LLM, SamplingParams

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks".split()]
    _fields_ += [("keepcost", ctypes.c_size_t)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info

def heap():
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd

once = SamplingParams(max_tokens=1, temperature=0)
with LLM(max_model_len=1024, kv_cache_memory_bytes="16MB", enable_prefix_caching=False) as llm:
    def ask(lengths):
        for length in lengths:
            llm.generate([[7] * length], once)
    ask(range(100, 172, 2))  # more lengths than are kept
    before = heap()
    ask(range(221, 321, 2))
    print(heap() - before)
sys.stdout.flush()
os._exit(0)  # to take the libraries apart takes longer than some of this
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="glibc says how much it has given out")
def test_fifty_new_lengths_leave_next_to_nothing() -> None:
    """It was 120 megabytes where torch kept a way for each, and is one."""
    run = run_fork(SCRIPT)
    if "mallinfo2" in run.stderr:
        pytest.skip("this C library does not say how much it has given out")
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 8 * 2**20
