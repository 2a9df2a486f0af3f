"""Records as files: rights, links, limits that processes share, clocks, errors of the system."""

import errno
import fcntl
import itertools
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from conformance.tier_cases import buffers, content, loaded, new_names, soon, store, views
from quire.errors import ConfigError
from quire.tiers import TIERS, Deadline, TierAddress, TierError, TierFull
from quire.tiers.evicted_names import EvictedNames
from quire.tiers.files import FileTier, folder_of
from quire.tiers.fingerprint import LARGEST_DESCRIPTION_BYTES, Fingerprint
from quire.tiers.record_folder import (
    RecordFolder,
    list_records,
    namespaces_of,
)

NAMESPACE, OTHER = "0123456789abcdef", "fedcba9876543210"
DAY_S = 86_400
LARGEST = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def make(path: Path, namespace: str = NAMESPACE, *, num_fit: int = 32, **options: Any) -> FileTier:
    options = {"reserve_bytes": 0, **options}
    return FileTier(path, namespace, size_bytes=num_fit * LARGEST, **options)


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if len(file.name) == 64)


def set_back(file: Path, seconds: float) -> None:
    at_s = time.time() - seconds
    os.utime(file, (at_s, at_s))


# -- addresses and rights --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("file:", "needs a folder"),
        ("file://host/path", "needs a folder"),
        ("file:PATH?size=many", "size='many'.*is not a size"),
        ("file:PATH?age=soon", "age='soon'.*such as 7d"),
        ("file:PATH?ages=7d", "unknown option 'ages'; known: size, age, reserve"),
        ("file:PATH?size=1KiB", "size=1.00 KiB holds no record: one takes 4.00 KiB"),
        ("file:/dev/null/x", "Not a directory"),
        ("file:PATH#2?size=1GiB", "write %23"),
        ("file:PATH%00", "cannot be printed"),
        ("file:PATH\nx", "cannot be printed"),
        ("file:/tmp/" + 300 * "a", "File name too long"),
        ("file:~no-such-user/x", "no-such-user|home"),
    ],
)
def test_an_address_that_cannot_work_says_why(path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TIERS["file"](TierAddress.parse(text.replace("PATH", str(path))), LARGEST, NAMESPACE)


def test_a_folder_may_lie_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell replaces the ~ of ``file:~/kv``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder_of(TierAddress.parse("file:~/kv?size=1GiB")) == tmp_path / "kv"
    assert folder_of(TierAddress.parse("file:kv%232")) == Path("kv#2").absolute()


def test_a_namespace_is_hex_digits() -> None:
    for namespace in ("../../etc", "", "0" * 15, "G" * 16):
        with pytest.raises(ConfigError, match="16 hex digits"):
            make(Path("/nowhere"), namespace)


def test_nothing_is_open_to_other_users(path: Path) -> None:
    before = os.umask(0)
    try:
        tier = make(path)
        tier.describe(b"{}")
        assert store(tier, new_names(4)) == 4
    finally:
        os.umask(before)
    for each in (path, *path.rglob("*")):
        mode = stat.S_IMODE(each.lstat().st_mode)
        assert mode == (0o700 if each.is_dir() else 0o600), f"{each} has mode {mode:04o}"


def test_a_folder_that_others_may_write_into_is_refused(path: Path) -> None:
    path.mkdir(mode=0o700)
    path.chmod(0o770)
    with pytest.raises(ConfigError, match="other users may write there"):
        make(path)
    make(path / "below").close()


def test_a_folder_of_another_user_is_refused(path: Path) -> None:
    path.mkdir(mode=0o700)
    if os.geteuid():
        pytest.skip("only the system's own user can give a folder away")
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        make(path)


# -- what is not ours ------------------------------------------------------------------------------


def test_links_and_other_files_are_neither_read_nor_removed(path: Path, tmp_path: Path) -> None:
    tier, names = make(path, num_fit=4), sorted(new_names(3))
    target = tmp_path / "secret"
    target.write_bytes(content(names[0]))
    assert store(tier, names) == 3
    link, pipe, plain = files_of(path)
    link.unlink()
    link.symlink_to(target)
    pipe.unlink()
    os.mkfifo(pipe)
    (plain.parent / "notes.txt").write_text("mine")
    (path / NAMESPACE / ("f" * 64)).write_text("in no shard")
    (path / "README").write_text("mine")
    assert [loaded(tier, [name]) for name in names] == [0, 0, 1]
    assert tier.find(names[:1], soon()) == tier.find(names[1:2], soon()) == 0
    for name in names[:2]:
        with pytest.raises(TierError, match="is no record: remove it"):
            store(tier, [name])
        tier.drop([name], soon())
    store(tier, new_names(20))
    tier.close()
    RecordFolder(path).prune(size_bytes=0, age_s=None, deadline=soon())
    RecordFolder(path).remove_namespace(NAMESPACE, soon())
    assert target.read_bytes() == content(names[0])
    assert link.is_symlink()
    assert pipe.is_fifo()
    assert not plain.exists()
    for left in (plain.parent / "notes.txt", path / "README", path / NAMESPACE / ("f" * 64)):
        assert left.exists()


def test_a_shard_that_is_a_link_is_not_entered(path: Path, tmp_path: Path) -> None:
    (name,) = new_names(1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / name.hex()).write_bytes(content(name))
    (path / NAMESPACE).mkdir(parents=True, mode=0o700)
    path.chmod(0o700)
    (path / NAMESPACE / name.hex()[:2]).symlink_to(tmp_path / "elsewhere")
    tier = make(path, num_fit=2)
    for call in (lambda: loaded(tier, [name]), lambda: store(tier, [name])):
        with pytest.raises(TierError, match="is no folder: remove it"):
            call()
    store(tier, [each for each in new_names(9) if each[0] != name[0]])
    assert (tmp_path / "elsewhere" / name.hex()).exists()
    assert namespaces_of(path)[0].num_records <= 2


def test_a_file_that_was_cut_is_no_record_and_is_replaced(path: Path) -> None:
    tier, names = make(path), new_names(3)
    assert store(tier, names) == 3
    os.truncate(path / NAMESPACE / names[1].hex()[:2] / names[1].hex(), 100)
    assert loaded(tier, names) == 1
    assert store(tier, names) == 3
    assert loaded(tier, names) == 3


# -- limits ----------------------------------------------------------------------------------------


def on_disk(path: Path) -> int:
    """Return what records take, those under way too."""
    total = 0
    for file in path.rglob("*"):
        try:
            found = file.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(found.st_mode) and file.name not in ("usage", "namespace.json"):
            total += -(-found.st_size // 4096) * 4096
    return total


def test_what_was_used_outlives_a_flood_of_what_was_not(path: Path) -> None:
    tier, good = make(path, num_fit=40), new_names(10)
    assert store(tier, good) == 10
    for file in files_of(path):
        set_back(file, 100)
    assert loaded(tier, good) == 10
    for _ in range(20):
        store(tier, new_names(10))
    assert loaded(tier, good) == 10


def test_what_comes_back_soon_after_it_went_counts_as_used(path: Path) -> None:
    tier, names = make(path, num_fit=8), new_names(4)
    assert store(tier, names) == 4
    for file in files_of(path):
        set_back(file, 100)
    store(tier, new_names(8))
    assert tier.find(names[:1], soon()) == 0
    assert store(tier, names[:1]) == 1
    (record,) = (r for r in list_records(path, NAMESPACE) if r.name == names[0].hex())
    assert record.was_used


def test_the_last_blocks_of_a_chain_go_first(path: Path) -> None:
    tier, chain = make(path, num_fit=20), new_names(16)
    for start in range(0, 16, 4):
        assert store(tier, chain[start : start + 4]) == 4
    for file in files_of(path):
        found = file.stat()
        os.utime(file, ns=(found.st_atime_ns - 10**11, found.st_mtime_ns - 10**11))
    assert store(tier, new_names(10)) == 10
    assert tier.find(chain, soon()) == 16 - 7  # one more than must


def test_namespaces_share_the_limit_and_the_older_one_goes(path: Path) -> None:
    old, new, names = make(path), make(path, OTHER), new_names(30)
    assert store(old, names) == 30
    for file in files_of(path):
        set_back(file, DAY_S)
    assert store(new, names, 1000) == 30
    assert on_disk(path) <= 32 * LARGEST
    assert loaded(new, names, 1000) == 30
    assert sum(loaded(old, [name]) for name in names) <= 2


def test_two_processes_keep_one_limit(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from quire.tiers import Deadline\n"
        "from quire.tiers.files import FileTier\n"
        "from random import Random\n"
        f"tier = FileTier(Path(sys.argv[1]), '{NAMESPACE}', size_bytes=16*4096, reserve_bytes=0)\n"
        "draw = Random(sys.argv[2])\n"
        "for _ in range(60):\n"
        "    names = [draw.randbytes(32) for _ in range(4)]\n"
        "    tier.store(names, [memoryview(bytes(4096))] * 4, Deadline.after(30))\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    children = [subprocess.Popen([*command, which]) for which in ("one", "other")]
    seen = []
    while any(child.poll() is None for child in children):
        with suppress(FileNotFoundError), (path / "usage").open("rb") as count:
            fcntl.flock(count, fcntl.LOCK_EX)  # so that nothing is evicted beside the walk
            seen.append(LARGEST * len(files_of(path)))
        time.sleep(0.01)
    assert [child.returncode for child in children] == [0, 0]
    assert max(seen, default=0) <= 16 * LARGEST
    assert 8 * LARGEST <= on_disk(path) <= 16 * LARGEST


@pytest.mark.parametrize("spoiled", [b"", b"x", b"QUIRE\0US" + b"\xff" * 8, b"y" * 1000])
def test_a_spoiled_count_of_bytes_is_made_anew(path: Path, spoiled: bytes) -> None:
    first = make(path)
    assert store(first, new_names(32)) == 32
    first.close()
    (path / "usage").write_bytes(spoiled)
    second = make(path)
    for _ in range(10):
        assert store(second, new_names(4)) == 4
        assert on_disk(path) <= 32 * LARGEST
    assert on_disk(path) >= 20 * LARGEST


def test_disk_space_is_kept_in_reserve(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, free_blocks = os.statvfs, 10

    def fake(where: Any) -> Any:
        found = list(real(where))
        found[0] = found[1] = 4096
        written = [*files_of(path), *path.glob("tmp/*")]
        found[4] = max(0, free_blocks - len(written))
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", fake)
    tier = make(path, reserve_bytes=4 * 4096)
    assert store(tier, new_names(20)) == 6
    assert store(tier, new_names(2)) == 2
    assert len(files_of(path)) <= 6
    free_blocks = 0
    with pytest.raises(TierFull, match="the disk has 0 B free, of which 16"):
        store(tier, new_names(2))
    assert not files_of(path)


def test_a_disk_that_is_full_is_a_full_tier(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small disk")
    tier, names = make(disk, num_fit=1000), new_names(40)
    try:
        for name in names:  # they make room for one another
            assert store(tier, [name]) == 1
        assert 8 <= sum(loaded(tier, [name]) for name in names) <= 16
        with suppress(OSError), (disk / "other").open("wb") as other:
            while True:
                other.write(bytes(1000))
                other.flush()
        with pytest.raises(TierFull):
            tier.store(new_names(1), views([bytes(64_000)]), soon())
        assert not list((disk / "tmp").iterdir())
    finally:
        tier.close()
        subprocess.run(["umount", str(disk)], check=True)


# -- time ------------------------------------------------------------------------------------------


def test_what_is_too_old_is_not_found_and_goes(path: Path) -> None:
    tier, names = make(path, age_s=DAY_S), new_names(3)
    assert store(tier, names) == 3
    set_back(path / NAMESPACE / names[1].hex()[:2] / names[1].hex(), DAY_S + 10)
    assert tier.find(names, soon()) == 1
    assert loaded(tier, names) == 1
    assert loaded(tier, names[1:2]) == 0
    assert store(tier, names) == 3
    assert loaded(tier, names) == 3
    assert tier.usage().used_bytes == on_disk(path)


def test_a_clock_that_was_set_back_harms_nothing(path: Path) -> None:
    tier, names = make(path, num_fit=8, age_s=DAY_S), new_names(6)
    assert store(tier, names) == 6
    for file in files_of(path):
        set_back(file, -365 * DAY_S)
    assert loaded(tier, names[:2]) == 2
    for _ in range(4):
        assert store(tier, new_names(2)) == 2
    assert on_disk(path) <= 8 * LARGEST
    assert all(each.used_s <= time.time() + 60 for each in list_records(path, NAMESPACE))


def test_the_clock_may_jump_between_calls(path: Path) -> None:
    now_s = 1e9
    folder = RecordFolder(path, size_bytes=10**6, clock=lambda: now_s)
    stamps = [folder.stamp_ns(), folder.stamp_ns()]
    assert stamps[0] > stamps[1] > (now_s - 1) * 1e9
    for now_s in (1e9 - 10**6, 1e9 + 10**6, 5.0):
        assert abs(folder.stamp_ns() / 1e9 - now_s) < 1


# -- what a killed process left --------------------------------------------------------------------


def test_what_was_left_behind_is_swept_and_what_is_written_is_not(path: Path) -> None:
    tier = make(path)
    assert store(tier, new_names(1)) == 1
    left, recent, locked = (path / "tmp" / name for name in ("left", "recent", "locked"))
    for file in (left, recent, locked):
        file.write_bytes(b"half")
    (path / "tmp" / "link").symlink_to(recent)
    set_back(left, 1000)
    set_back(locked, 1000)
    with locked.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        again = make(path)
        assert store(again, new_names(1)) == 1
    assert sorted(file.name for file in (path / "tmp").iterdir()) == ["link", "locked", "recent"]


def test_the_folder_may_be_removed_under_a_tier(path: Path) -> None:
    own = Fingerprint.of({"model": "tiny"})
    tier, names = make(path, own.namespace), new_names(3)
    tier.describe(own.description.encode())
    assert store(tier, names) == 3
    subprocess.run(["rm", "-rf", str(path)], check=True)
    assert loaded(tier, names) == 0
    assert store(tier, names) == 3
    assert loaded(tier, names) == 3
    assert on_disk(path) == 3 * LARGEST
    assert [each.fingerprint for each in namespaces_of(path)] == [own]


# -- errors of the system --------------------------------------------------------------------------

FULL = (errno.ENOSPC, errno.EDQUOT)
SYSCALLS = (
    *("open", "lstat", "fstat", "preadv", "utime", "close", "rename", "unlink", "write"),
    *("pread", "pwrite", "statvfs", "scandir", "mkdir", "rmdir", "flock"),
)


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_any_call_of_the_system_may_fail(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    tier, names = make(path, num_fit=8), new_names(4)
    assert store(tier, names) == 4
    calls: list[Callable[[], object]] = [
        lambda: tier.find(names, soon()),
        lambda: tier.load(names, buffers([LARGEST] * 4), soon()),
        lambda: store(tier, names[:2]),
        lambda: store(tier, new_names(6)),
        lambda: tier.drop(names[:1], soon()),
        lambda: tier.describe(b"{}"),
    ]
    for syscall, call in itertools.product(SYSCALLS, calls):
        # The first call of the kind fails, or each.
        for left in (1, 10**6):
            full = TierFull if code in FULL else TierError
            with failing(monkeypatch, syscall, code, left), suppress(full):
                call()
        if syscall == "close":
            continue
        store(tier, names)
        assert loaded(tier, names) == 4, f"after {syscall}"
    assert on_disk(path) <= 8 * LARGEST
    assert not list((path / "tmp").iterdir())


class failing:
    """Has a call of the system fail, the first ``left`` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, syscall: str, code: int, left: int) -> None:
        self._patch = monkeypatch.context()
        self._place: Any = fcntl if syscall == "flock" else os
        self._syscall, self._code, self._left = syscall, code, left

    def __enter__(self) -> None:
        real = getattr(self._place, self._syscall)

        def fail(*args: Any, **named: Any) -> Any:
            if self._left:
                self._left -= 1
                if self._syscall == "close":
                    real(*args, **named)  # the system closes it all the same
                raise OSError(self._code, os.strerror(self._code))
            return real(*args, **named)

        self._patch.__enter__().setattr(self._place, self._syscall, fail)

    def __exit__(self, *error: object) -> None:
        self._patch.__exit__(None, None, None)


def test_a_folder_that_may_only_be_read_still_gives_records(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, names = make(path), new_names(3)
    assert store(first, names) == 3
    first.close()
    real = os.open

    def refuse(file: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(file, flags, *args, **named)

    def refuse_all(*args: Any, **named: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    for syscall in ("utime", "unlink", "rename"):
        monkeypatch.setattr(os, syscall, refuse_all)
    second = make(path)
    assert second.find(names, soon()) == 3
    assert loaded(second, names) == 3
    for call in (lambda: store(second, new_names(1)), lambda: second.drop(names, soon())):
        with pytest.raises(TierError, match="Read-only file system"):
            call()


def test_a_lock_that_another_process_holds_is_waited_for_until_the_deadline(path: Path) -> None:
    tier, names = make(path), new_names(2)
    assert store(tier, names[:1]) == 1
    with (path / "usage").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        begin_s = time.monotonic()
        with pytest.raises(TierError, match="out of time"):
            tier.store(names[1:], views([bytes(64)]), Deadline.after(0.1))
        assert time.monotonic() - begin_s >= 0.1
        assert loaded(tier, names[:1]) == 1
    assert store(tier, names[1:]) == 1


# -- descriptions ----------------------------------------------------------------------------------


def test_closing_waits_for_no_call_that_hangs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may never answer: the engine ends all the same."""
    monkeypatch.setattr("quire.tiers.record_folder._CLOSE_S", 0.01)
    folder, begun, hold = RecordFolder(path), threading.Event(), threading.Event()

    def hang() -> float:
        begun.set()
        hold.wait(20)
        return 0.0

    folder._clock = hang  # as a call of the system would, while it holds the count
    call = threading.Thread(target=folder.make_room, args=([1], EvictedNames(1), soon()))
    call.start()
    assert begun.wait(10)
    folder.close()
    assert call.is_alive()
    hold.set()
    call.join(10)


def test_a_folder_says_what_it_holds(path: Path) -> None:
    fingerprint = Fingerprint.of({"model": "tiny", "dtype": "bfloat16"})
    tier, other = make(path, fingerprint.namespace), make(path, "f" * 16)
    tier.describe(fingerprint.description.encode())
    assert store(tier, new_names(3), 1000) == 3
    assert store(other, new_names(1)) == 1
    first, second = namespaces_of(path)
    assert (first.name, first.num_records, first.num_bytes) == (fingerprint.namespace, 3, 3000)
    assert first.fingerprint == fingerprint
    assert first.oldest_s is not None
    assert first.newest_s is not None
    assert time.time() - 60 < first.oldest_s <= first.newest_s <= time.time()
    assert (second.name, second.num_records, second.fingerprint) == ("f" * 16, 1, None)


@pytest.mark.parametrize(
    "text",
    [b"", b"[1]", b"\xff\xfe", b"[" * 60_000, b'{"a": ' * 9_000, b"{}" + b" " * 2**20, b"{}"],
)
def test_a_description_that_is_none_or_anothers_is_not_told(path: Path, text: bytes) -> None:
    make(path).describe(b"{}")
    (path / NAMESPACE / "namespace.json").write_bytes(text)
    assert namespaces_of(path)[0].fingerprint is None


def test_a_description_has_a_limit(path: Path) -> None:
    with pytest.raises(TierError, match="at most 65,536"):
        make(path).describe(b" " * (LARGEST_DESCRIPTION_BYTES + 1))


def test_a_namespace_can_be_removed_alone(path: Path) -> None:
    tier, other, names = make(path), make(path, OTHER), new_names(3)
    tier.describe(b"{}")
    assert store(tier, names) == store(other, names) == 3
    assert RecordFolder(path).remove_namespace(NAMESPACE, soon()) == (3, 3 * LARGEST)
    assert not (path / NAMESPACE).exists()
    assert loaded(other, names) == 3
    assert loaded(tier, names) == 0
    assert store(tier, names) == 3


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close each tier that a test makes."""
    made, init = list[FileTier](), FileTier.__init__

    def note(self: FileTier, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        made.append(self)

    monkeypatch.setattr(FileTier, "__init__", note)
    yield
    monkeypatch.undo()
    for tier in made:
        tier.close()
