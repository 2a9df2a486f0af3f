"""Hashes of weight files: kept by what the system says of a file, and of no file that changed."""

import os
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from forks import run_fork
from quire.models import file_hashes as module
from quire.models.file_hashes import CannotName, KeptHashes, Stamp, WeightFile, file_hashes

OLD, NEW = b"old" * 1000, b"new" * 1000


class Counted:
    """Hashes files in a folder, and counts the bytes that are read for it."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_read = path, 0

    def __call__(self, *files: Path, kept: KeptHashes | None = None) -> dict[str, str]:
        looked_at = [WeightFile.at(file) for file in files]
        return self.of(*looked_at, kept=kept)

    def of(self, *files: WeightFile, kept: KeptHashes | None = None) -> dict[str, str]:
        self.num_read = 0

        def note(num_bytes: int) -> None:
            self.num_read += num_bytes

        return file_hashes(files, kept or KeptHashes(self.path), on_hashed=note)


@pytest.fixture
def hashes(tmp_path: Path) -> Counted:
    return Counted(tmp_path / "kept")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(OLD)
    return path


@pytest.fixture
def _fine_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of these tests are younger than a clock's step; changes wait for the next tick."""
    monkeypatch.setattr(module, "_CLOCK_STEP_NS", 0)


def told(content: bytes, name: str = "model.safetensors") -> dict[str, str]:
    return {name: sha256(content).hexdigest()}


def kept_in(hashes: Counted) -> list[Path]:
    return sorted(hashes.path.glob("*.sha256"))


def ticked(path: Path, change: Callable[[], object]) -> None:
    """Change a file so that its change time moves: the clock has steps of some milliseconds."""
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:
        time.sleep(0.002)
        change()


@pytest.mark.usefixtures("_fine_clock")
def test_a_file_is_read_once(hashes: Counted, file: Path) -> None:
    assert hashes(file) == told(OLD)
    assert hashes.num_read == len(OLD)
    assert hashes(file) == told(OLD)
    assert hashes.num_read == 0
    assert [path.stat().st_mode & 0o777 for path in kept_in(hashes)] == [0o600]


@pytest.mark.usefixtures("_fine_clock")
def test_a_change_in_place_with_its_time_set_back_is_seen(hashes: Counted, file: Path) -> None:
    """The size and the modification time are the same; the change time is not a program's."""
    assert hashes(file) == told(OLD)
    before = file.stat()

    def change() -> None:
        file.write_bytes(NEW)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    ticked(file, change)
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert after.st_ino == before.st_ino
    assert hashes(file) == told(NEW)


@pytest.mark.usefixtures("_fine_clock")
def test_a_swapped_file_is_another(hashes: Counted, file: Path, tmp_path: Path) -> None:
    assert hashes(file) == told(OLD)
    other = tmp_path / "other"
    other.write_bytes(NEW)
    found = file.stat()
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    other.replace(file)
    assert hashes(file) == told(NEW)


@pytest.mark.usefixtures("_fine_clock")
def test_a_snapshot_of_links_is_what_they_lead_to(hashes: Counted, tmp_path: Path) -> None:
    """As the hub's cache has it: a revision's links to blobs, and another revision's."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for name, content in (("one", OLD), ("two", NEW)):
        (blobs / name).write_bytes(content)
    link = tmp_path / "snapshots" / "revision" / "model.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../blobs/one")
    assert hashes(link) == told(OLD)
    assert hashes(link) == told(OLD)
    assert hashes.num_read == 0
    link.unlink()
    link.symlink_to("../../blobs/two")
    assert hashes(link) == told(NEW)
    link.unlink()
    link.symlink_to("../../blobs/one")
    assert hashes(link) == told(OLD)
    assert hashes.num_read == 0


@pytest.mark.parametrize("when", ["before", "while"])
@pytest.mark.usefixtures("_fine_clock")
def test_a_file_that_changes_after_it_was_looked_at_has_no_hash(
    when: str, hashes: Counted, file: Path
) -> None:
    """The model was made of what was there then."""
    looked_at = WeightFile.at(file)
    kept = KeptHashes(hashes.path)
    if when == "before":
        ticked(file, lambda: file.write_bytes(NEW))
    with pytest.raises(CannotName, match="was changed while or after the model was loaded"):
        file_hashes(
            [looked_at],
            kept,
            on_hashed=lambda _: None if when == "before" else ticked(file, file.touch),
        )
    assert kept_in(hashes) == []


def test_a_file_that_is_gone_has_no_hash(hashes: Counted, file: Path) -> None:
    looked_at = WeightFile.at(file)
    file.unlink()
    with pytest.raises(CannotName, match="cannot be read again: No such file"):
        hashes.of(looked_at)


def test_a_change_within_the_clocks_step_leaves_nothing_kept(hashes: Counted, file: Path) -> None:
    """The next change could have the same times."""
    assert hashes(file) == told(OLD)
    assert kept_in(hashes) == []
    kept, stamp = KeptHashes(hashes.path), WeightFile.at(file).stamp
    digest = sha256(OLD).digest()
    kept.keep(stamp, digest, stamp.ctime_ns + module._CLOCK_STEP_NS - 1)
    assert kept.find(stamp) is None
    kept.keep(stamp, digest, stamp.ctime_ns + module._CLOCK_STEP_NS)
    assert kept.find(stamp) == digest


@pytest.mark.parametrize("field", ["size", "mtime_ns", "ctime_ns", "inode", "device"])
def test_each_part_of_a_stamp_counts(field: str, hashes: Counted) -> None:
    stamp = Stamp(1, 2, 3, 4, 5)
    kept = KeptHashes(hashes.path)
    kept.keep(stamp, bytes(32), now_ns=2**62)
    assert kept.find(stamp) == bytes(32)
    assert kept.find(stamp._replace(**{field: 9})) is None


@pytest.mark.usefixtures("_fine_clock")
def test_a_damaged_hash_is_as_good_as_none(
    hashes: Counted, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hashes(file)
    (path,) = kept_in(hashes)
    good = path.read_bytes()
    flipped = (bytes([*good[:n], good[n] ^ 1, *good[n + 1 :]]) for n in range(0, len(good), 7))
    for broken in (b"", good[:-1], good + b"x", bytes(len(good)), b"x" * 2**20, *flipped):
        path.write_bytes(broken)
        assert hashes(file) == told(OLD)
        assert hashes.num_read == len(OLD)
        assert path.read_bytes() == good
    path.chmod(0o666)
    assert hashes(file) == told(OLD)
    assert hashes.num_read == len(OLD)
    assert "weights are hashed again at each start: other users can write to" in caplog.text


@pytest.mark.usefixtures("_fine_clock")
def test_the_oldest_hashes_go(
    hashes: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_KEPT", 3)
    kept = KeptHashes(hashes.path)
    files = []
    for number in range(5):
        files.append(tmp_path / f"{number}.bin")
        files[-1].write_bytes(bytes(number + 1))
        hashes(files[-1], kept=kept)
        new = max(kept_in(hashes), key=lambda path: path.stat().st_mtime_ns)
        os.utime(new, (number, number))
    hashes(*files[:2], kept=kept)
    assert hashes.num_read == 1 + 2, "the oldest stayed"
    assert len(kept_in(hashes)) == 3


MANY = """
import os, sys
from pathlib import Path
from quire.models import file_hashes as module

module._CLOCK_STEP_NS = 0
own = [module.WeightFile.at(path) for path in sorted(Path(sys.argv[1]).glob("*.bin"))]
children = []
for _ in range(4):
    children.append(os.fork())
    if not children[-1]:
        for _ in range(20):
            found = module.file_hashes(own, module.KeptHashes(Path(sys.argv[2])), num_threads=2)
            os.write(1, f"{sorted(found.items())}\\n".encode())
        os._exit(0)
print(*(os.waitpid(child, 0)[1] for child in children))
"""


@pytest.mark.usefixtures("_fine_clock")
def test_processes_at_once_keep_all_hashes(hashes: Counted, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.bin" for number in range(8)]
    for file in files:
        file.write_bytes(file.name.encode() * 1000)
    expected = {file.name: sha256(file.read_bytes()).hexdigest() for file in files}
    done = run_fork(MANY, str(tmp_path), str(hashes.path))
    *lines, codes = done.stdout.splitlines()
    assert codes == "0 0 0 0", done.stderr
    assert lines == [f"{sorted(expected.items())}"] * 80
    assert hashes(*files) == expected
    assert hashes.num_read == 0
    assert len(list(hashes.path.iterdir())) == 8


def test_several_threads_find_the_same(hashes: Counted, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.bin" for number in range(5)]
    for file in files:
        file.write_bytes(os.urandom(3 * module._PIECE_BYTES // 2))
    looked_at = [WeightFile.at(file) for file in files]
    found = [
        file_hashes(looked_at, KeptHashes(tmp_path / f"{n}"), num_threads=n) for n in (1, 3, 99)
    ]
    assert found[0] == found[1] == found[2]
    assert found[0] == {file.name: sha256(file.read_bytes()).hexdigest() for file in files}
