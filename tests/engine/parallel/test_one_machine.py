"""Ranks beside the process that started them: they end with it, and share its cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.parallel.ranks import GREEDY, OPTIONS, PROMPTS, Folder, Watch, gone
from quire.engine.llm import LLM
from quire.engine.parallel import worker as follower
from quire.engine.parallel import worker_group as crews
from quire.engine.parallel.messages import Call
from quire.engine.parallel.process_group import share_of_threads
from quire.engine.parallel.worker_group import WorkerGroup

pytest.importorskip("accelerate", reason="Transformers loads parts of a model with it")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks would be placed on the GPU"
)

MIB = 2**20


@pytest.mark.full
def test_ranks_end_with_the_process_that_started_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
        import os, signal
        from quire.engine.parallel.worker_group import WorkerGroup
        crew = WorkerGroup(2).start()
        print(*crew.pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids
    assert gone(pids)
    assert not list(tmp_path.glob("quire-ranks-*"))


@pytest.mark.full
def test_ranks_do_not_live_for_a_fork_nor_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has all that rank 0 has open, and all that is to be done when rank 0 ends."""
    script = """
        import gc, os, signal
        from quire.engine.parallel.worker_group import WorkerGroup
        from quire.engine.parallel.messages import Call
        from quire.errors import RankLost

        crew = WorkerGroup(2).start()
        ask = Call("disassemble", (1,)), bool
        for lives_on in (False, True):
            there, said = os.pipe()
            forked = os.fork()
            if forked == 0:
                os.close(1), os.close(2)
                try:
                    crew.required(*ask)
                except RankLost as error:
                    os.write(said, str(error).encode())
                crew.close()
                del crew
                gc.collect()
                if lives_on:
                    signal.pause()
                os._exit(0)
            assert b"fork" in os.read(there, 1000)
            if not lives_on:
                os.waitpid(forked, 0)
            assert crew.required(*ask) is False
        print(forked, *crew.pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    forked, *pids = (int(pid) for pid in done.stdout.split())
    try:
        assert gone(pids)
        assert not gone([forked], within_s=0)
    finally:
        os.kill(forked, signal.SIGKILL)
    assert not list(tmp_path.glob("quire-ranks-*"))


@pytest.mark.full
def test_ranks_share_the_threads_of_a_cpu_and_give_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = torch.get_num_threads()
    told: list[Any] = []
    tell = crews._Member.tell
    monkeypatch.setattr(
        crews._Member, "tell", lambda own, message: (told.append(message), tell(own, message))[1]
    )
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "")
        torch.set_num_threads(8)
        crew = WorkerGroup(2).start()
        assert torch.get_num_threads() == 4
        crew.close()
        assert torch.get_num_threads() == 8
        assert [each.args[-1] for each in told if isinstance(each, Call)] == [4]
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        assert share_of_threads(2) is None
    finally:
        torch.set_num_threads(found)


def test_a_rank_computes_with_as_many_threads_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = torch.get_num_threads()
    monkeypatch.setattr(follower, "join", lambda *_: None)
    sizes = 1, 2, Path("nowhere"), "cpu", 1.0
    try:
        follower.Worker().join(*sizes, 3)
        assert torch.get_num_threads() == 3
        follower.Worker().join(*sizes, None)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(found)


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell")
@pytest.mark.filterwarnings("ignore")  # of Transformers, about plans and RoPE
@pytest.mark.full
def test_memory_of_a_cpu_is_backed_at_the_start_in_every_rank(tmp_path: Path) -> None:
    folder = Folder(tmp_path, None)
    options = {**OPTIONS, "kv_cache_memory_bytes": "96MiB", "residency": "prefault"}
    with LLM(folder.of("llama"), tensor_parallel_size=2, **options) as llm:
        assert llm._ranks is not None
        (pid,) = llm._ranks.workers.pids
        assert llm._resident.kept_bytes == 96 * MIB
        assert llm.generate(PROMPTS, GREEDY, observe=Watch(llm))
        assert llm._resident.kept_bytes + llm.memory.committed_bytes == 96 * MIB
        full = resident_bytes(pid)
        llm.resize(16 * MIB)
        assert llm._resident.kept_bytes + llm.memory.committed_bytes <= 16 * MIB
        assert full - resident_bytes(pid) > 64 * MIB


@pytest.mark.filterwarnings("ignore")
@pytest.mark.full
def test_a_rule_that_takes_its_memory_at_the_start_does_so_in_every_rank(tmp_path: Path) -> None:
    folder = Folder(tmp_path, None)
    options = {**OPTIONS, "kv_cache_memory_bytes": None, "budget": "llamacpp"}
    with LLM(folder.of("llama"), tensor_parallel_size=2, **options) as llm:
        assert llm.ledger.committed_whole
        assert llm._resident.kept_bytes == llm.ledger.require()
        assert llm.generate(PROMPTS, GREEDY, observe=Watch(llm))
