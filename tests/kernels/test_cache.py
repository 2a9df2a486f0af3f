"""Machine code on disk: found by the next process, never by one that it is not for."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import ir

from quire.kernels import machine
from quire.kernels.language import I64, Code, Isa
from quire.kernels.machine import Kernels, native_isa


def write_answer(module: ir.Module, answer: int = 42) -> None:
    """work(address): the answer goes there."""
    code = Code(module, "work", 1, native_isa())
    code.write(ir.Constant(I64, answer), code.params[0])
    code.end()


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def load(folder: Path, name: str = "answer", isa: Isa | None = None) -> None:
    Kernels(isa or native_isa(), folder).address(name, write_answer)


def test_what_was_compiled_once_is_loaded_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tmp_path)
    (kept,) = files(tmp_path)
    assert kept.endswith(".o")

    def never(*_: object) -> bytes:
        pytest.fail("it is compiled again")

    monkeypatch.setattr(machine, "_compile", never)
    load(tmp_path)
    assert files(tmp_path) == {kept}


def test_another_kernel_machine_or_source_has_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    for change in ("none", "name", "isa", "source"):
        if change == "source":
            monkeypatch.setattr(machine, "_source_hash", lambda folder: "of other sources")
        load(
            tmp_path,
            "another" if change == "name" else "answer",
            machine.isa("x86-64", "") if change == "isa" else None,
        )
        seen.append(files(tmp_path))
    assert [len(names) for names in seen] == [1, 2, 3, 4]


def test_a_change_of_any_source_is_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path(machine.__file__).parent
    for path in real.glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "worker.py").write_text("a kernel", encoding="utf-8")
    before = machine._source_hash.__wrapped__(theirs)
    for path in sorted(tmp_path.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        path.write_text(text + "\n", encoding="utf-8")
        assert machine._source_hash.__wrapped__(theirs) != before, path.name
        path.write_text(text, encoding="utf-8")
    assert machine._source_hash.__wrapped__(theirs) == before


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        load(tmp_path / "file")
        load(tmp_path / "file" / "deeper", "another")
    assert len(caplog.records) == 2
    assert "cannot be written" in caplog.text
    assert str(tmp_path) in caplog.text


def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full: as above, and no part of a file stays under the kernel's name."""

    def refuse(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    load(tmp_path)
    assert not [name for name in files(tmp_path) if name.endswith(".o")]


# Each forked child is a process of its own that finds the folder as it is. (It has used no threads,
# so a fork is safe; starting Python anew costs seconds.)
MANY_PROCESSES = """
import ctypes, os, sys, time, traceback
from pathlib import Path

from quire.kernels import machine
from quire.kernels.language import I64, Code
from quire.kernels.machine import Kernels, native_isa
from llvmlite import ir

folder = Path(sys.argv[1])
compiled = machine._compile
native_isa()
done = []

def note(module, isa):
    done.append(module)
    return compiled(module, isa)

machine._compile = note

def write(module):
    code = Code(module, "work", 1, native_isa())
    code.write(ir.Constant(I64, 42), code.params[0])
    code.end()

def child(start):
    '''Exit code 0: loaded; 1: compiled; 2: refused; 3: wrong.'''
    pid = os.fork()
    if pid:
        return pid
    try:
        time.sleep(max(0, start - time.monotonic()))
        kernels = Kernels(native_isa(), folder)
        found = ctypes.c_int64(0)
        work = ctypes.CFUNCTYPE(None, ctypes.c_int64)(kernels.address("answer", write))
        work(ctypes.addressof(found))
        code = 3 if found.value != 42 else len(done)
    except BaseException:
        traceback.print_exc()
        code = 2
    sys.stderr.flush()
    os._exit(code)

def results(count):
    start = time.monotonic() + 0.05
    children = [child(start) for _ in range(count)]
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]

together = results(4)
after = results(1)
(kept,) = folder.iterdir()
image = kept.read_bytes()
print("together", *together, "after", *after)

def damaged():
    yield "empty", b""
    yield "garbage", b"garbage" * 100
    yield "zeros", bytes(len(image))
    for share in (0.1, 0.5, 0.9, 0.999):
        yield f"cut-{share}", image[: int(share * len(image))]
    for place in range(20, len(image), max(1, len(image) // 24)):
        yield f"flipped-{place}", image[:place] + bytes([image[place] ^ 0xFF]) + image[place + 1 :]

for name, broken in damaged():
    kept.write_bytes(broken)
    print(name, *results(1), flush=True)
"""


@pytest.fixture(scope="module")
def many_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    folder = tmp_path_factory.mktemp("kernels")
    done = subprocess.run(
        [sys.executable, "-c", MANY_PROCESSES, str(folder)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    words = first.split()
    found = {line.split()[0]: [int(line.split()[1])] for line in rest}
    return {"together": [int(n) for n in words[1:5]], "after": [int(words[6])], **found}


def test_processes_that_compile_at_once_do_not_disturb_each_other(
    many_processes: dict[str, list[int]],
) -> None:
    assert all(code in (0, 1) for code in many_processes["together"])
    assert 1 in many_processes["together"]
    assert many_processes["after"] == [0], "the next one compiled again"


def test_a_damaged_file_is_as_good_as_none(many_processes: dict[str, list[int]]) -> None:
    """Whatever is in it, a process compiles again; none crashes, and none trusts it."""
    damaged = {n: c for n, c in many_processes.items() if n not in ("together", "after")}
    assert len(damaged) > 20
    assert {name: codes for name, codes in damaged.items() if codes != [1]} == {}
