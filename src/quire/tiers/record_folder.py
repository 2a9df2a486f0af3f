"""A folder of records: where each lies, how many bytes they take, and which of them goes.

    PATH/                     mode 0700
      usage                   the bytes of all records, under a lock of the system's (flock)
      tmp/                    records that are being written
      <16 hex digits>/        a namespace: records that one configuration can read
        namespace.json        what that configuration is
        <2 hex digits>/       the first byte of the names in it
          <64 hex digits>     a record: its name; modified when it was written, read when last used

The folder is the index, so a process that ends at any moment leaves nothing to mend but files in
``tmp``, and a count of bytes that is too high until a search for room finds less. Files with other
names, and links, are not ours: they are neither read nor removed.

A process that needs room looks at some shards (equal first bytes, in all namespaces), which names
spread evenly, and removes what should go first among these: a look costs the same however many
records there are. Whether a record was used since it was written, and when, its two times say.
"""

import errno
import fcntl
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import final

from quire.errors import ConfigError
from quire.tiers.evicted_names import EvictedNames
from quire.tiers.fingerprint import LARGEST_DESCRIPTION_BYTES, BadDescription, Fingerprint
from quire.tiers.tier import Deadline, TierError, TierFull
from quire.units import align_up, format_bytes

NUM_SHARDS = 256
NAMESPACE_FILE = "namespace.json"

_USAGE_FILE, _TMP_FOLDER = "usage", "tmp"
_USAGE = struct.Struct("<8sQ")
_USAGE_MAGIC = b"QUIRE\0US"
_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_RECORD = re.compile(r"[0-9a-f]{64}")
DISK_BLOCK_BYTES = 4096  # a file takes whole ones
_LOOK_RECORDS = 4096  # that a search for the oldest ones sees at least: some 30 ms
_LOOK_SHARE = 0.05  # of the bytes seen, which may go beyond what is needed
NEW_SHARE = 0.5  # of the bytes, which new records keep from those that were used
ROUND_S = 4.0  # in which what comes later counts as older, as the last blocks of a chain do
_SLACK_SHARE = 0.02  # of the size, which goes beyond what is needed: to look less often
_TIDY_S = 1.0  # between looks at a shard for what is too old
_LEFT_BEHIND_S = 60.0  # a file in tmp that is older, and that no process writes, is removed
_LOCK_PAUSE_S = 0.002
_CLOSE_S = 2.0  # that closing waits for a call under way
_MOST_DRIFT = 0.10  # of the bytes counted, from what a look finds
_FUTURE_S = 60.0  # a time so far ahead is no time of use: a clock was set back
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFile:
    """A record's file, as the folder shows it."""

    path: str
    name: str  # 64 hex digits
    num_bytes: int
    written_s: float  # seconds since 1970
    used_s: float  # … when it was read last, or written

    @property
    def was_used(self) -> bool:
        """Return whether it was read since it was written."""
        return self.used_s > self.written_s


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceContents:
    """What a folder holds of one namespace."""

    name: str  # 16 hex digits
    fingerprint: Fingerprint | None  # None where its description is absent, or another's
    num_records: int
    num_bytes: int
    oldest_s: float | None  # when a record was last used, in seconds since 1970; None: no record
    newest_s: float | None


def as_tier_error(what: str, error: OSError) -> TierError:
    """Return the system's error as TierError, or TierFull where a disk or a quota is used up."""
    raised = TierFull if error.errno in _FULL else TierError
    return raised(f"kv_tier=file: {what}: {error.strerror or error}")


@contextmanager
def tier_errors(what: str) -> Iterator[None]:
    """Have the system's errors be those of a tier. Raises: TierError, TierFull."""
    try:
        yield
    except OSError as error:
        raise as_tier_error(what, error) from error


def is_too_old(found: os.stat_result, age_s: float | None, now_s: float) -> bool:
    """Return whether a file was last used more than ``age_s`` seconds before ``now_s``."""
    return age_s is not None and now_s - max(found.st_atime, found.st_mtime) > age_s


def list_namespaces(path: Path) -> list[str]:
    """Return the names of the namespaces in a folder. Raises: TierError."""
    with tier_errors(f"{path} cannot be listed"), os.scandir(path) as entries:
        return sorted(
            entry.name
            for entry in entries
            if _NAMESPACE.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )


def list_records(path: Path, namespace: str, shard: int | None = None) -> Iterator[RecordFile]:
    """Yield the records of a namespace, or those of one of its shards. Raises: TierError."""
    shards = range(NUM_SHARDS) if shard is None else (shard,)
    for each in shards:
        folder = path / namespace / f"{each:02x}"
        with tier_errors(f"{folder} cannot be listed"), suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                continue
            yield from _records_in(str(folder))


def _records_in(folder: str) -> Iterator[RecordFile]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not _RECORD.fullmatch(entry.name):
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # evicted by another process
            if stat.S_ISREG(found.st_mode):
                yield RecordFile(
                    path=entry.path,
                    name=entry.name,
                    num_bytes=found.st_size,
                    written_s=found.st_mtime,
                    used_s=max(found.st_atime, found.st_mtime),
                )


def read_description(path: Path, namespace: str) -> Fingerprint | None:
    """Return what a namespace is, if the folder says so; None also for another's description."""
    file = path / namespace / NAMESPACE_FILE
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, LARGEST_DESCRIPTION_BYTES + 1)
        finally:
            os.close(descriptor)
        found = Fingerprint.parse(text)
    except (OSError, BadDescription):
        return None
    return found if found.namespace == namespace else None


def namespaces_of(path: Path) -> list[NamespaceContents]:
    """Return which namespaces a folder holds, and how much of each. Raises: TierError."""
    several = []
    for name in list_namespaces(path):
        count = num_bytes = 0
        oldest_s = newest_s = None
        for record in list_records(path, name):
            count, num_bytes = count + 1, num_bytes + record.num_bytes
            oldest_s = record.used_s if oldest_s is None else min(oldest_s, record.used_s)
            newest_s = record.used_s if newest_s is None else max(newest_s, record.used_s)
        several.append(
            NamespaceContents(
                name=name,
                fingerprint=read_description(path, name),
                num_records=count,
                num_bytes=num_bytes,
                oldest_s=oldest_s,
                newest_s=newest_s,
            )
        )
    return several


@final
class RecordFolder:
    """A folder's records under limits of bytes, age and free disk space, shared with processes."""

    def __init__(
        self,
        path: Path,
        *,
        size_bytes: int | None = None,
        age_s: float | None = None,
        reserve_bytes: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make the folder if it is not there. ``reserve_bytes``: of the disk, which stay free.

        Raises: ConfigError if it is no folder of this user's own.
        """
        self.path, self.size_bytes, self.age_s = path, size_bytes, age_s
        self.tmp = path / _TMP_FOLDER  # files that are being written, made by their writer
        self._reserve_bytes, self._clock = reserve_bytes, clock
        _make_own(path)
        self._lock, self._usage_file, self._is_open = threading.Lock(), -1, True
        self._used_bytes = 0  # as of the last call that held the count …
        self.is_counted = False  # … if there was one
        self._shard = int.from_bytes(os.urandom(1), "little")  # the next to be looked at
        self._next_tidy_s = 0.0
        self._round_end_ns = self._round_ns = 0

    @property
    def used_bytes(self) -> int | None:
        """Return what records take on the disk, as of the last store, or as the folder says.

        None: neither is there.
        """
        return self._used_bytes if self.is_counted else _count_told_by(self.path)

    def now_s(self) -> float:
        """Return the seconds since 1970, by the clock of the files' times."""
        return self._clock()

    def stamp_ns(self) -> int:
        """Return a time of use in nanoseconds since 1970.

        Within a round later stamps are older: a chain's later blocks are to go first.
        """
        now_ns = int(self._clock() * 1e9)
        if not self._round_end_ns - int(ROUND_S * 1e9) <= now_ns < self._round_end_ns:
            self._round_ns, self._round_end_ns = now_ns, now_ns + int(ROUND_S * 1e9)
        self._round_ns -= 1000  # a step that every file system keeps
        return self._round_ns

    def make_folders(self, folder: Path) -> None:
        """Make a folder in this one, for this user alone. Raises: OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)

    def close(self) -> None:
        """Close what is open, unless a call hangs that uses it: on a disk that does not answer."""
        self._is_open = False
        if self._lock.acquire(timeout=_CLOSE_S):
            self._close_usage()
            self._lock.release()

    # -- room --------------------------------------------------------------------------------------

    def make_room(self, sizes: list[int], evicted: EvictedNames, deadline: Deadline) -> int:
        """Remove records until files of these bytes have room, the first ones first.

        Returns: how many have room, until another process takes it. Raises: TierError, TierFull if
        none has.
        """
        with self._counted(deadline):
            self._tidy(deadline)
            return self._count_fitting(sizes, evicted, deadline)

    def enter(
        self, files: list[tuple[str, str, int]], evicted: EvictedNames, deadline: Deadline
    ) -> int:
        """Give written files (their path, that of the record, bytes) the names of records.

        Returns: how many, the first ones first. Raises: TierError, TierFull if there is no room.
        """
        with self._counted(deadline):
            sizes = [size for _, _, size in files]
            count = self._count_fitting(sizes, evicted, deadline, are_written=True)
            # Counted before they are there: a process that is killed counts too much, not too
            # little, and the next one to look at all records sees that.
            before = self._used_bytes
            self._write_count(before + sum(map(_on_disk, sizes[:count])))
            entered = freed = 0
            try:
                for tmp, path, _ in files[:count]:
                    freed += _rename(tmp, path)
                    entered += 1
            except (OSError, TierError):
                if not entered:
                    raise
            finally:
                added = sum(map(_on_disk, sizes[:entered]))
                self._write_count(before + added - freed)
        return entered

    def drop(self, paths: list[str], deadline: Deadline) -> None:
        """Remove records. Those that are not there are gone already. Raises: TierError."""
        with self._counted(deadline):
            gone = 0
            try:
                for path in paths:
                    with suppress(FileNotFoundError):
                        found = os.lstat(path)
                        if stat.S_ISREG(found.st_mode):
                            os.unlink(path)
                            gone += _on_disk(found.st_size)
            finally:
                if gone:
                    self._write_count(self._used_bytes - gone)

    def prune(
        self, *, size_bytes: int | None, age_s: float | None, deadline: Deadline
    ) -> tuple[int, int]:
        """Remove what is older than ``age_s``, and then what goes first beyond ``size_bytes``.

        Returns: the records and bytes that were removed. Raises: TierError.
        """
        gone, num_shards, left = list[RecordFile](), 0, 0
        while num_shards < NUM_SHARDS:
            with self._counted(deadline):
                look = self._look_at(NUM_SHARDS - num_shards, deadline, _LOOK_RECORDS)
                gone += self._remove([x for x in look.records if self._is_aged(x, age_s)], deadline)
            num_shards, left = num_shards + look.num_shards, left + look.num_bytes
        left, num_shards = left - _sum_on_disk(gone), 0
        excess = max(0, left - size_bytes) / max(1, left) if size_bytes is not None else 0.0
        while excess and num_shards < NUM_SHARDS:
            with self._counted(deadline):
                look = self._look_at(NUM_SHARDS - num_shards, deadline, _LOOK_RECORDS)
                gone += self._remove(self._oldest(look, ceil(excess * look.num_bytes)), deadline)
            num_shards += look.num_shards
        return len(gone), sum(each.num_bytes for each in gone)

    def remove_namespace(self, namespace: str, deadline: Deadline) -> tuple[int, int]:
        """Remove the records of a namespace, and its folders if nothing else is in them.

        Returns: the records and bytes that were removed. Raises: TierError.
        """
        removed = self.remove_records(namespace, deadline)
        folder = self.path / namespace
        for shard in range(NUM_SHARDS):
            with suppress(OSError):
                os.rmdir(folder / f"{shard:02x}")
        with suppress(OSError):
            os.unlink(folder / NAMESPACE_FILE)
        with suppress(OSError):
            os.rmdir(folder)
        return removed

    def remove_records(self, namespace: str, deadline: Deadline) -> tuple[int, int]:
        """Remove the records of a namespace, which may be in use.

        Returns: the records and bytes that were removed. Raises: TierError.
        """
        num_records = num_bytes = 0
        for shard in range(NUM_SHARDS):
            with self._counted(deadline):
                gone = self._remove(list(list_records(self.path, namespace, shard)), deadline)
            num_records += len(gone)
            num_bytes += sum(each.num_bytes for each in gone)
        return num_records, num_bytes

    def _room(self, written: int) -> int:
        room = self._free_disk_bytes() + written - self._reserve_bytes
        return room if self.size_bytes is None else min(room, self.size_bytes - self._used_bytes)

    def _free_disk_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def _full_message(self, num_bytes: int) -> str:
        size = "no limit" if self.size_bytes is None else format_bytes(self.size_bytes)
        return (
            f"kv_tier=file:{self.path}: no room for {format_bytes(num_bytes)}: "
            f"{format_bytes(self._used_bytes)} are in use of {size} (the option is size), and the "
            f"disk has {format_bytes(self._free_disk_bytes())} free, of which "
            f"{format_bytes(self._reserve_bytes)} stay free (the option is reserve)"
        )

    def _count_fitting(
        self,
        sizes: list[int],
        evicted: EvictedNames,
        deadline: Deadline,
        *,
        are_written: bool = False,  # and take room on the disk already
    ) -> int:
        needed = sum(map(_on_disk, sizes))
        written = needed if are_written else 0
        if (lacking := needed - self._room(written)) > 0:
            self._evict(lacking, evicted, deadline)
        room, count, taken = self._room(written), 0, 0
        while count < len(sizes) and taken + _on_disk(sizes[count]) <= room:
            taken += _on_disk(sizes[count])
            count += 1
        if sizes and not count:
            raise TierFull(self._full_message(sizes[0]))
        return count

    def _evict(self, lacking: int, evicted: EvictedNames, deadline: Deadline) -> None:
        """Remove records of at least so many bytes, if there are so many."""
        slack = int(_SLACK_SHARE * (self.size_bytes or 0))
        num_shards = 0
        while lacking > 0 and num_shards < NUM_SHARDS:
            look = self._look_at(NUM_SHARDS - num_shards, deadline, _LOOK_RECORDS)
            num_shards += look.num_shards
            before = self._used_bytes
            if look.num_shards == NUM_SHARDS or (
                len(look.records) >= _LOOK_RECORDS
                and abs(look.estimated_bytes - before) > _MOST_DRIFT * before
            ):
                # A process was killed before it had done what it had counted.
                self._write_count(look.estimated_bytes)
                lacking -= before - look.estimated_bytes
            beyond = min(slack, int(_LOOK_SHARE * look.num_bytes))
            gone = (
                self._remove(self._oldest(look, lacking + beyond), deadline) if lacking > 0 else []
            )
            for record in gone:
                evicted.add(bytes.fromhex(record.name))
            lacking -= _sum_on_disk(gone)

    def _oldest(self, look: "_Look", num_bytes: int) -> list[RecordFile]:
        """Return the records that go first, of at least so many bytes, or all."""
        new = sorted((x for x in look.records if not x.was_used), key=lambda x: -x.used_s)
        used = sorted((x for x in look.records if x.was_used), key=lambda x: -x.used_s)
        new_bytes = _sum_on_disk(new)
        left, chosen = new_bytes + _sum_on_disk(used), list[RecordFile]()
        while num_bytes > 0 and (new or used):
            first = new if new and (not used or new_bytes > NEW_SHARE * left) else used
            chosen.append(first.pop())
            size = _on_disk(chosen[-1].num_bytes)
            num_bytes, left = num_bytes - size, left - size
            new_bytes -= size if first is new else 0
        return chosen

    def _remove(self, records: list[RecordFile], deadline: Deadline) -> list[RecordFile]:
        gone = list[RecordFile]()
        try:
            for record in records:
                deadline.check(f"kv_tier=file:{self.path}: removing records")
                with suppress(FileNotFoundError):  # dropped by another process, which counts it
                    os.unlink(record.path)
                    gone.append(record)
        finally:
            self._write_count(self._used_bytes - _sum_on_disk(gone))
        return gone

    # -- what is there -----------------------------------------------------------------------------

    def _look_at(self, most_shards: int, deadline: Deadline, enough: int) -> "_Look":
        """Look at the next shards, until so many records were seen."""
        look, now_s = _Look(), self._clock()
        namespaces = list_namespaces(self.path)
        while look.num_shards < most_shards and len(look.records) < enough:
            deadline.check(f"kv_tier=file:{self.path}: looking at its records")
            for namespace in namespaces:
                for record in list_records(self.path, namespace, self._shard):
                    if record.used_s > now_s + _FUTURE_S:
                        with suppress(OSError):  # from now on it ages like others
                            os.utime(record.path, (now_s, now_s), follow_symlinks=False)
                    look.records.append(record)
                    look.num_bytes += _on_disk(record.num_bytes)
            look.num_shards += 1
            self._shard = (self._shard + 1) % NUM_SHARDS
        return look

    def _is_aged(self, record: RecordFile, age_s: float | None) -> bool:
        return age_s is not None and self._clock() - record.used_s > age_s

    def _tidy(self, deadline: Deadline) -> None:
        """Remove what is too old in one shard, and what processes left behind that were killed."""
        if 0 <= self._next_tidy_s - self._clock() <= _TIDY_S:
            return
        self._next_tidy_s = self._clock() + _TIDY_S
        self._sweep()
        if self.age_s is not None:
            look = self._look_at(1, deadline, _LOOK_RECORDS)
            self._remove([x for x in look.records if self._is_aged(x, self.age_s)], deadline)

    def _sweep(self) -> None:
        with suppress(OSError), os.scandir(self.path / _TMP_FOLDER) as entries:
            for entry in entries:
                with suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    is_recent = abs(self._clock() - found.st_mtime) < _LEFT_BEHIND_S
                    if stat.S_ISREG(found.st_mode) and not is_recent:
                        _remove_left_behind(entry.path)

    # -- the count of bytes ------------------------------------------------------------------------

    @contextmanager
    def _counted(self, deadline: Deadline) -> Iterator[None]:
        """Hold the count of bytes, which other threads and processes use too."""
        what = f"kv_tier=file:{self.path}: the count of its bytes"
        if not self._lock.acquire(timeout=deadline.left_s):
            raise TierError(f"{what}: out of time")
        try:
            if not self._is_open:
                raise TierError(f"kv_tier=file:{self.path} is closed")
            with tier_errors(f"{self.path}: the count of its bytes"):
                self._lock_usage(deadline, what)
                try:
                    self._used_bytes = self._read_count(deadline)
                    self.is_counted = True
                    yield
                finally:
                    fcntl.flock(self._usage_file, fcntl.LOCK_UN)
        finally:
            self._lock.release()

    def _close_usage(self) -> None:
        descriptor, self._usage_file = self._usage_file, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)

    def _lock_usage(self, deadline: Deadline, what: str) -> None:
        if self._usage_file >= 0 and not os.fstat(self._usage_file).st_nlink:
            self._close_usage()  # the folder was removed under us
        if self._usage_file < 0:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._usage_file = os.open(self.path / _USAGE_FILE, flags, 0o600)
        while True:
            try:
                fcntl.flock(self._usage_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                deadline.check(what)
                time.sleep(_LOCK_PAUSE_S)
            else:
                return

    def _read_count(self, deadline: Deadline) -> int:
        """Read the count. Where there is none, what some shards hold says how much it is."""
        count = _count_in(os.pread(self._usage_file, _USAGE.size + 1, 0))
        if count is None:
            return self._look_at(NUM_SHARDS, deadline, _LOOK_RECORDS).estimated_bytes
        return count

    def _write_count(self, count: int) -> None:
        self._used_bytes = max(0, count)
        os.pwrite(self._usage_file, _USAGE.pack(_USAGE_MAGIC, self._used_bytes), 0)


@dataclass(slots=True)
class _Look:
    """What some shards hold."""

    records: list[RecordFile] = field(default_factory=list)
    num_bytes: int = 0  # on the disk
    num_shards: int = 0

    @property
    def estimated_bytes(self) -> int:
        """What all shards hold, over which names spread evenly: right within some percent."""
        return self.num_bytes * NUM_SHARDS // max(1, self.num_shards)


def _count_in(data: bytes) -> int | None:
    magic, count = _USAGE.unpack(data) if len(data) == _USAGE.size else (b"", 0)
    return int(count) if magic == _USAGE_MAGIC else None


def _count_told_by(path: Path) -> int | None:
    """Read a folder's count of bytes without waiting for a process that holds it."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):
        descriptor = os.open(path / _USAGE_FILE, flags)
        try:
            return _count_in(os.pread(descriptor, _USAGE.size + 1, 0))
        finally:
            os.close(descriptor)
    return None


def _rename(tmp: str, path: str) -> int:
    """Give a file the name of a record. Returns: bytes on the disk of one that it replaces."""
    freed = 0
    with suppress(FileNotFoundError):
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            raise TierError(f"kv_tier=file: {path} is no record: remove it")
        freed = _on_disk(found.st_size)
    try:
        os.rename(tmp, path)
    except FileNotFoundError:  # a new shard, or one that was removed
        shard = Path(path).parent
        for each in (shard.parent, shard):
            each.mkdir(mode=0o700, exist_ok=True)
        os.rename(tmp, path)
    return freed


def _remove_left_behind(path: str) -> None:
    """Remove a file that no process has locked. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(descriptor)


def _on_disk(num_bytes: int) -> int:
    return align_up(num_bytes, DISK_BLOCK_BYTES)


def _sum_on_disk(records: list[RecordFile]) -> int:
    return sum(_on_disk(record.num_bytes) for record in records)


def _make_own(path: Path) -> None:
    """Make a folder that only this user can write into. Raises: ConfigError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(f"kv_tier=file:{path}: {error.strerror or error}") from error
    if found.st_mode & 0o022:
        raise ConfigError(
            f"kv_tier=file:{path}: other users may write there (mode "
            f"{stat.S_IMODE(found.st_mode):04o}), and who writes records chooses answers: chmod "
            f"700 it, or name a folder below it, which is made with that mode"
        )
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"kv_tier=file:{path}: belongs to user {found.st_uid}, who could write records there "
            f"and so choose answers: name a folder of user {os.geteuid()}"
        )
