"""Machine code on disk: found by the next process, never by one that it is not for."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llvmlite import ir

from quire import kept_files as kept
from quire.kernels import compile as machine
from quire.kernels.compile import Kernels, native_isa
from quire.kernels.language import I64, Code, Isa


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
    (name,) = files(tmp_path)
    assert name.endswith(".o")

    def never(*_: object) -> bytes:
        pytest.fail("it is compiled again")

    monkeypatch.setattr(machine, "_compile", never)
    load(tmp_path)
    assert files(tmp_path) == {name}


def test_another_kernel_machine_or_source_has_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    for change in ("none", "name", "isa", "source"):
        if change == "source":
            monkeypatch.setattr(machine, "source_hash", lambda folder: "of other sources")
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
    before = machine.source_hash.__wrapped__(theirs)
    for path in sorted(tmp_path.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        path.write_text(text + "\n", encoding="utf-8")
        assert machine.source_hash.__wrapped__(theirs) != before, path.name
        path.write_text(text, encoding="utf-8")
    assert machine.source_hash.__wrapped__(theirs) == before


@pytest.mark.parametrize("module", ["quire.attention.cpu.backend", "quire.layers.cpu.linear"])
def test_sources_are_hashed_when_they_are_imported(module: str) -> None:
    """Else code of this release is kept as the next one's, installed while this one runs."""
    code = f"""
import importlib, quire.kernels.compile as machine
from pathlib import Path
folder = Path(importlib.import_module("{module}").__file__).parent
before = machine.source_hash.cache_info().misses
machine.source_hash(folder)
assert machine.source_hash.cache_info().misses == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that were compiled, not found."""
    done: list[str] = []
    compile_ = machine._compile

    def note(module: ir.Module, isa: Isa) -> bytes:
        done.append(module.name)
        return compile_(module, isa)

    monkeypatch.setattr(machine, "_compile", note)
    return done


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def kept_file(folder: Path) -> Path:
    (found,) = folder.glob("*.o")
    return found


def begin_anew() -> None:
    """As the next process: it has not warned yet."""
    machine.kept_code.cache_clear()


class OtherOwners:
    """The module os, but some files belong to another user."""

    def __init__(self, owners: dict[int, int]) -> None:
        self._owners = owners  # by inode

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fstat(self, file: int) -> os.stat_result:
        return self._told(os.fstat(file))

    def stat(self, *given: Any, **options: Any) -> os.stat_result:
        return self._told(os.stat(*given, **options))

    def _told(self, found: os.stat_result) -> os.stat_result:
        words = list(found)
        words[stat.ST_UID] = self._owners.get(found.st_ino, found.st_uid)
        return os.stat_result(words)


def give_away(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """To a user that is neither root nor this one."""
    inode = path.lstat().st_ino
    monkeypatch.setattr(kept, "os", OtherOwners({inode: os.geteuid() + 4711}))


def test_another_users_file_is_not_run(
    tmp_path: Path,
    compiled: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load(tmp_path)
    give_away(monkeypatch, kept_file(tmp_path))
    load(tmp_path)
    assert compiled == ["answer", "answer"]
    (told,) = warnings(caplog)
    assert f"{kept_file(tmp_path)} belongs to user {os.geteuid() + 4711}" in told
    assert "QUIRE_CACHE_DIR" in told


@pytest.mark.parametrize("whose", ["folder", "above", "link"])
def test_nothing_is_read_from_or_written_to_what_another_user_may_exchange(
    whose: str,
    tmp_path: Path,
    compiled: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "above" / "folder").mkdir(parents=True)
    (tmp_path / "link").symlink_to("above")
    folder = tmp_path / "link" / "folder"
    load(folder)
    given = {"folder": folder, "above": tmp_path / "above", "link": tmp_path / "link"}[whose]
    give_away(monkeypatch, given)
    load(folder)
    load(folder, "another")
    assert compiled == ["answer", "answer", "another"]
    assert len(files(folder)) == 1
    (told,) = warnings(caplog)
    assert f"belongs to user {os.geteuid() + 4711}" in told


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
@pytest.mark.parametrize("which", ["file", "folder", "above"])
def test_what_others_may_write_to_is_not_run(
    which: str,
    mode: int,
    tmp_path: Path,
    compiled: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A sticky folder above, as /tmp is, lets others exchange nothing that is this user's."""
    folder = tmp_path / "above" / "folder"
    load(folder)
    {"file": kept_file(folder), "folder": folder, "above": folder.parent}[which].chmod(mode)
    load(folder)
    if which == "above" and mode & stat.S_ISVTX:
        assert (compiled, warnings(caplog)) == (["answer"], [])
        return
    assert compiled == ["answer", "answer"]
    (told,) = warnings(caplog)
    assert "chmod go-w" in told


def test_a_file_under_another_files_name_is_not_run(tmp_path: Path, compiled: list[str]) -> None:
    load(tmp_path)
    image = kept_file(tmp_path).read_bytes()
    kept_file(tmp_path).unlink()
    load(tmp_path, "another")
    kept_file(tmp_path).write_bytes(image)
    load(tmp_path, "another")
    assert compiled == ["answer", "another", "another"]


def test_a_link_is_not_followed_to_a_file(tmp_path: Path, compiled: list[str]) -> None:
    """Neither to be read nor to be written: what it leads to stays as it is."""
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    load(folder)
    link = kept_file(folder)
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    load(folder)
    assert compiled == ["answer", "answer"]
    assert elsewhere.read_bytes() == before
    assert not kept_file(folder).is_symlink()


def test_a_home_behind_a_link_is_as_good_as_any(
    tmp_path: Path,
    compiled: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "disk" / "me").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    for _ in range(2):
        Kernels(native_isa()).address("answer", write_answer)
    assert compiled == ["answer"]
    assert not warnings(caplog)
    folder = tmp_path / "disk" / "me" / ".cache" / "quire"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(kept_file(folder).stat().st_mode) == 0o600


def test_links_in_a_circle_end(tmp_path: Path, compiled: list[str]) -> None:
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    load(tmp_path / "one" / "folder")
    assert compiled == ["answer"]


def kept_size() -> int:
    """Return the bytes of the largest file that is read: its content's, behind a digest."""
    return machine.LARGEST_BYTES + 32


def replaced_by(kind: str, path: Path) -> None:
    """Something else under a kept file's name."""
    content = path.read_bytes()
    key, image = path.stem, content[32:]
    path.unlink()
    match kind:
        case "garbage":
            image = b"garbage" * 100
            path.write_bytes(kept._digest(key, image) + image)
        case "half":
            image = image[: len(image) // 2]
            path.write_bytes(kept._digest(key, image) + image)
        case "no work":
            image = machine._compile(ir.Module("nothing"), native_isa())
            path.write_bytes(kept._digest(key, image) + image)
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "huge":
            with path.open("wb") as file:
                file.truncate(kept_size() + 1)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("garbage", "LLVM cannot load what was kept for answer"),
        ("half", "LLVM cannot load what was kept for answer"),
        ("no work", "LLVM cannot load what was kept for answer"),
        ("folder", "is no file: remove it"),
        ("pipe", "is no file: remove it"),
        ("huge", f"has {kept_size() + 1} bytes: remove it"),
    ],
)
def test_what_is_no_machine_code_costs_a_warning(
    kind: str, words: str, tmp_path: Path, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Also with the digest that it should have; and it is replaced, if it is no folder."""
    load(tmp_path)
    replaced_by(kind, kept_file(tmp_path))
    compiled.clear()
    load(tmp_path)
    assert compiled == ["answer"]
    (told,) = warnings(caplog)
    assert words in told
    load(tmp_path)
    assert len(compiled) == (2 if kind == "folder" else 1)
    assert len(warnings(caplog)) == 1
    assert len(files(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One, for all kernels."""
    (tmp_path / "file").write_text("no folder")
    for name in ("answer", "another"):
        load(tmp_path / "file", name)
    assert compiled == ["answer", "another"]
    (told,) = warnings(caplog)
    assert str(tmp_path / "file") in told


def test_a_user_without_a_home_is_told_of_the_option(
    compiled: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    begin_anew()
    monkeypatch.setattr(Path, "expanduser", no_home)
    for name in ("answer", "another"):
        Kernels(native_isa()).address(name, write_answer)
    assert compiled == ["answer", "another"]
    (told,) = warnings(caplog)
    assert "QUIRE_CACHE_DIR" in told


def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full: as above, and no part of a file stays."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    load(tmp_path)
    assert files(tmp_path) == set()


# Each forked child is a process of its own that finds the folder as it is. (It has used no threads,
# so a fork is safe; starting Python anew costs seconds.)
MANY_PROCESSES = """
import ctypes, os, sys, time, traceback
from pathlib import Path

from quire import kept_files as kept
from quire.kernels import compile as machine
from quire.kernels.language import I64, Code
from quire.kernels.compile import Kernels, native_isa
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


@pytest.mark.full
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
