"""``file:PATH?size=50GiB&age=7d``: records as files, which outlive the process.

A record is written into a file of its own and renamed when it is whole. Nothing is forced to the
disk: after a loss of power a file may be short or hold zeros, and callers check what they read.
``record_folder`` says where files lie, what they may take together, and which of them go.
"""

import errno
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import final
from urllib.parse import unquote

from quire.errors import ConfigError
from quire.tiers.address import TierAddress, parse_age
from quire.tiers.evicted_names import EvictedNames
from quire.tiers.fingerprint import LARGEST_DESCRIPTION_BYTES
from quire.tiers.record_folder import (
    NAMESPACE_FILE,
    RecordFolder,
    as_tier_error,
    is_too_old,
    tier_errors,
)
from quire.tiers.tier import (
    NAME_BYTES,
    Deadline,
    Name,
    TierError,
    TierTraits,
    TierUsage,
)
from quire.units import ceil_div, format_bytes, parse_bytes

DEFAULT_SIZE_BYTES = 10 * 2**30  # without an option
_MOST_RESERVE_BYTES = 10 * 2**30  # … of the disk, kept free …
_RESERVE_SHARE = 0.05  # … but no more than this
_STEP_NS = 1000  # a difference that every file system keeps
_USED_STEP_S = 10.0  # a file that was used again so soon keeps its time of use
_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def make_file_tier(address: TierAddress, largest_bytes: int, namespace: str) -> "FileTier":
    """Make the tier of an address such as ``file:/var/cache/quire?size=50GiB&age=7d``.

    ``largest_bytes``: of a record. Raises: ConfigError.
    """
    address.require_known("size", "age", "reserve")
    if address.url.netloc not in ("", "localhost") or not address.url.path:
        raise ConfigError(f"kv_tier={address}: needs a folder of this machine: file:PATH")
    size_bytes = address.option("size", parse_bytes, DEFAULT_SIZE_BYTES)
    tier = FileTier(
        folder_of(address),
        namespace,
        size_bytes=size_bytes,
        age_s=address.option("age", parse_age, None),
        reserve_bytes=address.option("reserve", parse_bytes, None),
        expected_records=ceil_div(size_bytes, max(1, largest_bytes)),
    )
    if size_bytes < largest_bytes:
        raise ConfigError(
            f"kv_tier={address}: size={format_bytes(size_bytes)} holds no record: one takes "
            f"{format_bytes(largest_bytes)}"
        )
    return tier


def folder_of(address: TierAddress) -> Path:
    """Return the folder that an address names. Raises: ConfigError for ~ without a home."""
    try:
        return Path(unquote(address.url.path)).expanduser().absolute()
    except RuntimeError as error:  # no shell has seen the ~ behind "file:"
        raise ConfigError(f"kv_tier={address}: {error}") from None


@final
class FileTier:
    """Keeps records as files in a folder, which several processes may share."""

    traits = TierTraits(is_shared=False, is_persistent=True)

    def __init__(
        self,
        path: Path,
        namespace: str,  # 16 hex digits
        *,
        size_bytes: int,
        age_s: float | None = None,  # what was used longer ago is not found; None: no limit
        reserve_bytes: int | None = None,  # of the disk, which stay free; None: by the disk's size
        expected_records: int = 1024,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make the folder if it is not there. Raises: ConfigError."""
        if not _NAMESPACE.fullmatch(namespace):
            raise ConfigError(f"kv_tier=file: namespace {namespace!r} is not 16 hex digits")
        if reserve_bytes is None:
            reserve_bytes = _reserve_bytes(path)
        self._files = RecordFolder(
            path, size_bytes=size_bytes, age_s=age_s, reserve_bytes=reserve_bytes, clock=clock
        )
        self._folder, self._path = path / namespace, path
        self._prefix = f"{self._folder}/"
        self._evicted = EvictedNames(expected_records)
        self._description = b""
        self._shards: frozenset[str] = frozenset()  # that are folders, and no links
        self._lock, self._num_written, self._is_open = threading.Lock(), 0, True
        self._writer = os.urandom(8).hex()  # of temporary files

    def describe(self, text: bytes) -> None:
        """Keep a namespace's description beside its records, for ``quire cache ls`` and ``doctor``.

        Raises: TierError.
        """
        if len(text) > LARGEST_DESCRIPTION_BYTES:
            raise TierError(
                f"kv_tier=file: a description has {len(text):,} bytes: at most "
                f"{LARGEST_DESCRIPTION_BYTES:,}"
            )
        with tier_errors(f"{self._folder}: its description"):
            self._files.make_folders(self._folder)
            with self._written(memoryview(text)) as tmp:
                os.rename(tmp, self._folder / NAMESPACE_FILE)
        self._description = text

    def find(self, names: Sequence[Name], deadline: Deadline) -> int:
        self._require_open()
        now_s = self._files.now_s()
        for count, name in enumerate(names):
            if not deadline.left_s:
                deadline.check(f"kv_tier=file:{self._path}: find")
            if self._found(name, now_s) is None:
                return count
        return len(names)

    def load(self, names: Sequence[Name], into: Sequence[memoryview], deadline: Deadline) -> int:
        self._require_open()
        now_s, count = self._files.now_s(), 0
        try:
            for name, buffer in zip(names, into, strict=True):
                if not deadline.left_s:
                    deadline.check(f"kv_tier=file:{self._path}: load")
                if not self._read(name, buffer, now_s):
                    break
                count += 1
        except TierError:
            if not count:
                raise
        return count

    def store(
        self, names: Sequence[Name], records: Sequence[memoryview], deadline: Deadline
    ) -> int:
        self._require_open()
        now_s, lacking = self._files.now_s(), list[int]()
        for place, (name, record) in enumerate(zip(names, records, strict=True)):
            deadline.check(f"kv_tier=file:{self._path}: store")
            found = self._found(name, now_s)
            if found is None or found.st_size != record.nbytes:
                lacking.append(place)
        if not lacking:
            return len(names)
        sizes = [records[place].nbytes for place in lacking]
        try:
            room = self._files.make_room(sizes, self._evicted, deadline)
            chosen = [(names[place], records[place]) for place in lacking[:room]]
            num_kept = self._write(chosen, deadline)
        except TierError:
            if lacking[0]:
                return lacking[0]
            raise
        if self._description and not os.path.lexists(self._folder / NAMESPACE_FILE):
            with suppress(TierError):  # the folder was removed meanwhile
                self.describe(self._description)
        return len(names) if num_kept == len(lacking) else lacking[num_kept]

    def drop(self, names: Sequence[Name], deadline: Deadline) -> None:
        self._require_open()
        self._files.drop([self._file(name) for name in names], deadline)

    def clear(self, deadline: Deadline) -> None:
        self._require_open()
        self._files.remove_records(self._folder.name, deadline)

    def usage(self) -> TierUsage:
        self._require_open()
        return TierUsage(used_bytes=self._files.used_bytes, capacity_bytes=self._files.size_bytes)

    def close(self) -> None:
        self._is_open = False
        self._files.close()

    # -- one record --------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if not self._is_open:
            raise TierError(f"kv_tier=file:{self._path} is closed")

    def _file(self, name: Name) -> str:
        """Return where a record lies. Raises: TierError if a link leads elsewhere."""
        if len(name) != NAME_BYTES:
            raise TierError(f"a name has {NAME_BYTES} bytes, not {len(name)}")
        digits = name.hex()
        shard = digits[:2]
        if shard not in self._shards:
            with tier_errors(f"{self._folder}/{shard}"), suppress(FileNotFoundError):
                for folder in (self._folder, self._folder / shard):
                    if not stat.S_ISDIR(os.lstat(folder).st_mode):
                        raise TierError(f"kv_tier=file: {folder} is no folder: remove it")
                self._shards |= {shard}
        return f"{self._prefix}{shard}/{digits}"

    def _found(self, name: Name, now_s: float) -> os.stat_result | None:
        file = self._file(name)
        with tier_errors(f"{file} cannot be looked up"), suppress(FileNotFoundError):
            found = os.lstat(file)
            if stat.S_ISREG(found.st_mode) and not is_too_old(found, self._files.age_s, now_s):
                return found
        return None

    # Of a small record a load takes as long in Python as in the system: no context managers here,
    # and no text that is not shown.

    def _read(self, name: Name, buffer: memoryview, now_s: float) -> bool:
        """Fill a buffer with a record. Returns: whether there is one of its length."""
        file = self._file(name)
        try:
            descriptor = os.open(file, _READ)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                return False  # ELOOP: a link; ENXIO: a socket
            raise as_tier_error(f"{file} cannot be read", error) from error
        try:
            try:
                found, num_bytes = os.fstat(descriptor), len(buffer)
                if (
                    found.st_size != num_bytes
                    or not stat.S_ISREG(found.st_mode)
                    or is_too_old(found, self._files.age_s, now_s)
                ):
                    return False
                at = os.readv(descriptor, (buffer,))
                while at < num_bytes:
                    got = os.readv(descriptor, (buffer[at:],))
                    if not got:
                        return False  # cut short by another hand
                    at += got
                was_used = found.st_atime_ns > found.st_mtime_ns
                if not (was_used and 0 <= now_s - found.st_atime < _USED_STEP_S):
                    self._note_use(descriptor, found)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise as_tier_error(f"{file} cannot be read", error) from error
        return True

    def _note_use(self, descriptor: int, found: os.stat_result) -> None:
        with suppress(OSError):  # a folder that may only be read has no times of use
            used_ns = max(self._files.stamp_ns(), found.st_mtime_ns + _STEP_NS)
            os.utime(descriptor, ns=(used_ns, found.st_mtime_ns))

    def _write(self, records: Sequence[tuple[Name, memoryview]], deadline: Deadline) -> int:
        """Keep records, the first ones first. Returns: how many. Raises: TierError if none."""
        what = f"kv_tier=file:{self._path}: store"
        files = list[tuple[str, str, int]]()
        cannot = f"{self._path}: a record cannot be written"
        with tier_errors(cannot), ExitStack() as written:
            try:
                for name, record in records:
                    deadline.check(what)
                    with tier_errors(cannot):
                        tmp = written.enter_context(self._written(record))
                        written_ns = self._files.stamp_ns()
                        came_back = self._evicted.take(name) is not None
                        used_ns = written_ns + (_STEP_NS if came_back else 0)
                        os.utime(tmp, ns=(used_ns, written_ns))
                    files.append((tmp, self._file(name), record.nbytes))
            except TierError:
                if not files:
                    raise
            return self._files.enter(files, self._evicted, deadline)

    @contextmanager
    def _written(self, data: memoryview) -> Iterator[str]:
        """Write a file that is to be renamed, and else goes.

        It is locked meanwhile, so that no process sweeps it away.
        """
        with self._lock:
            self._num_written += 1
            tmp = f"{self._files.tmp}/{self._writer}-{self._num_written}"
        try:
            descriptor = os.open(tmp, _WRITE, 0o600)
        except FileNotFoundError:
            self._files.make_folders(self._files.tmp)
            descriptor = os.open(tmp, _WRITE, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            at = 0
            while at < data.nbytes:
                at += os.write(descriptor, data[at:])
            yield tmp
        finally:
            with suppress(OSError):
                os.unlink(tmp)  # as a rule it has another name by now
            os.close(descriptor)


def _reserve_bytes(path: Path) -> int:
    """Return how much of a folder's disk stays free."""
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        found = os.statvfs(path)
    except OSError as error:
        raise ConfigError(f"kv_tier=file:{path}: {error.strerror or error}") from error
    return min(_MOST_RESERVE_BYTES, int(_RESERVE_SHARE * found.f_blocks * found.f_frsize))
