"""Attention and threads: Python's lock is free, callers do not meet, a forked child is refused."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attention.machines import cpu_backend, kernel_folder
from conformance.attention_cases import Case, make_case, make_spec, same_bits
from quire.kernels import threads as machine_threads

Threads = Callable[[int], None]


def one_case(seed: int, *, history: int = 300, length: int = 20) -> Case:
    spec = make_spec("full", kv_heads=2, dims=(64, 64), dtype="float32")
    chunks = ((history, length), (history, 1))
    return make_case(spec, sharing=4, block_size=16, chunks=chunks, seed=seed)


def test_python_goes_on_during_a_call() -> None:
    backend, case = cpu_backend("native"), one_case(0, history=2000, length=600)
    case.attend(backend, scale=0.1)  # compiled, and planned
    ticks: list[float] = []
    over = threading.Event()

    def tick() -> None:
        while not over.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0002)

    other = threading.Thread(target=tick)
    other.start()
    try:
        for _ in range(200):  # a busy machine may let the other thread wait through many a call
            begin = time.perf_counter()
            case.attend(backend, scale=0.1)
            end = time.perf_counter()
            # Not at its edges, where Python itself is still at work.
            quarter = (end - begin) / 4
            if any(begin + quarter < t < end - quarter for t in ticks):
                return
    finally:
        over.set()
        other.join()
    pytest.fail("no other thread ran during a call: is Python's lock held?")


def test_callers_in_several_threads_get_what_each_gets_alone(use_threads: Threads) -> None:
    """One backend, not even compiled when they begin; each caller has its own step."""
    cases = [one_case(seed, history=100 + 50 * seed) for seed in range(4)]
    backend = cpu_backend("native")
    found: list[list[torch.Tensor]] = [[] for _ in cases]
    together = threading.Barrier(len(cases))

    def call(index: int) -> None:
        torch.set_num_threads(2)  # of this thread
        together.wait()
        for _ in range(15):
            found[index].append(cases[index].attend(backend, scale=0.1))

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(cases))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    use_threads(2)
    alone = cpu_backend("native")
    for case, outs in zip(cases, found, strict=True):
        want = case.attend(alone, scale=0.1)
        assert len(outs) == 15
        assert all(same_bits(out, want) for out in outs)


def test_the_library_is_found_where_the_system_lists_no_mappings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container that shows no /proc: the one that torch has loaded, not another copy."""
    loaded = machine_threads._loaded_gomp()

    def not_there(path: Path, *_: object, **__: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", not_there)
    found = machine_threads._loaded_gomp()
    assert (loaded is None) == (found is None)
    if loaded is not None and found is not None:
        assert Path(found).samefile(loaded)


PROCESSES = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
from attention.machines import find_isa
from conformance.attention_cases import make_case, make_spec
from quire.attention.cpu import CpuAttention

torch.set_num_threads(2)
spec = make_spec("full", kv_heads=2, dims=(64, 64), dtype="float32")
case = make_case(spec, sharing=4, block_size=16, chunks=((300, 20), (300, 1)))
backend = CpuAttention(find_isa("native"), Path(sys.argv[2]))
writer = backend.make_writer(case.view)
entries = case.slots[0], case.keys[0], case.values[0]
writer(*entries)
print(float(case.attend(backend, scale=0.1).double().sum()))

for call in (lambda: case.attend(backend, scale=0.1), lambda: writer(*entries)):
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(20)  # or else it would wait for threads that do not exist
        try:
            call()
            told = "nothing was raised"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(write, told.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    print(os.read(read, 4096).decode())
"""


@pytest.mark.full
def test_a_process_of_its_own_works_and_a_forked_child_of_it_is_told(use_threads: Threads) -> None:
    use_threads(2)
    case = one_case(0)
    want = float(case.attend(cpu_backend("native"), scale=0.1).double().sum())
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", PROCESSES, str(tests), str(kernel_folder())],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    found, attended, wrote = done.stdout.splitlines()
    assert float(found) == want
    for told in (attended, wrote):
        assert told.startswith("RuntimeError: the kernels were first used in process")
        assert "spawn" in told
