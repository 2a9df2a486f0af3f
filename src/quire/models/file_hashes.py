"""The SHA-256 of weight files, kept from one start to the next under what the system says of them.

A name or a revision says what a file should be, its hash what it is. To hash 100 GB takes minutes,
so hashes are kept by device, inode, size, modification time and change time. A program can set the
modification time of what it has exchanged; the change time is the system's own. Where that clock
is too coarse to tell a change from the one before, the hash is used and not kept.
"""

import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, TypeAlias

from quire.errors import QuireError
from quire.kept_files import KeptFiles, own_folder
from quire.units import format_bytes

log = logging.getLogger(__name__)

OnHashed: TypeAlias = Callable[[int], None]  # gets how many more bytes are hashed, in any thread

_PIECE_BYTES = 2**20  # read at once: it stays in a processor's cache until it is hashed
_MOST_THREADS = 8
LONG_BYTES = 2**30  # from which on it is told that hashing takes a while
# A file system may count time in steps of two seconds (FAT; others in milliseconds). A change
# within one step leaves no trace.
_CLOCK_STEP_NS = 2 * 10**9
_MOST_KEPT = 4096  # files, of 100 bytes each
_KEPT = struct.Struct("<Qqq32s")  # size, modification time, change time, SHA-256


class CannotName(QuireError):
    """Nothing says what a model computes by, so that its records could be taken for another's."""


class Stamp(NamedTuple):
    """What the system says of a file: another content has another stamp."""

    device: int
    inode: int
    size: int  # bytes
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> "Stamp":
        """Make the stamp of a file that was looked at."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file with weights, and its stamp before it was read."""

    path: Path
    stamp: Stamp

    @classmethod
    def at(cls, path: Path) -> "WeightFile":
        """Look at a file, or at what a link leads to. Raises: OSError."""
        return cls(path, Stamp.of(path.stat()))


class KeptHashes:
    """Hashes of files that other processes, or earlier ones, have read."""

    def __init__(self, folder: Path | None = None) -> None:
        """``folder``: of compiled kernels too; None: ~/.cache/quire."""
        self._kept = KeptFiles(
            own_folder() if folder is None else folder,
            ".sha256",
            largest_bytes=_KEPT.size,
            most_files=_MOST_KEPT,
            loss="weights are hashed again at each start",
        )

    def find(self, stamp: Stamp) -> bytes | None:
        """Return the SHA-256 of a file, 32 bytes, or None if it has another stamp now."""
        content = self._kept.read(_key(stamp))
        if content is None or len(content) != _KEPT.size:
            return None
        *found, digest = _KEPT.unpack(content)
        return digest if tuple(found) == stamp[2:] else None

    def keep(self, stamp: Stamp, digest: bytes, now_ns: int) -> None:
        """Keep a hash of 32 bytes, unless the file was changed just before ``now_ns``."""
        if now_ns - stamp.ctime_ns >= _CLOCK_STEP_NS:
            self._kept.write(_key(stamp), _KEPT.pack(*stamp[2:], digest))


def file_hashes(
    files: Sequence[WeightFile],
    kept: KeptHashes,
    *,
    num_threads: int = 1,
    on_hashed: OnHashed | None = None,
) -> dict[str, str]:
    """Return the SHA-256 of each file by its name in the folder: 64 hex digits.

    ``num_threads`` hash a file each, at most eight.

    Raises: CannotName for a file that is gone or is not what it was when it was looked at.
    """
    found = {file: kept.find(_same(file).stamp) for file in files}
    missing = [file for file, digest in found.items() if digest is None]
    if missing:
        total = sum(file.stamp.size for file in missing)
        start = time.monotonic()
        if total >= LONG_BYTES:
            log.info("hashing %s of weights, once for these files", format_bytes(total))
        found |= _hashed(missing, kept, min(num_threads, _MOST_THREADS), on_hashed)
        took_s = time.monotonic() - start
        if total >= LONG_BYTES:
            rate = format_bytes(int(total / max(took_s, 1e-9)))
            log.info("hashed %s of weights in %.1f s, %s/s", format_bytes(total), took_s, rate)
    return {file.path.name: digest.hex() for file, digest in found.items() if digest is not None}


def _hashed(
    files: Sequence[WeightFile], kept: KeptHashes, num_threads: int, on_hashed: OnHashed | None
) -> dict[WeightFile, bytes | None]:
    stop = threading.Event()

    def hashed(file: WeightFile) -> bytes:
        now_ns = time.time_ns()
        digest = _digest(file, stop, on_hashed)
        kept.keep(file.stamp, digest, now_ns)
        return digest

    with ThreadPoolExecutor(num_threads, "quire-hash") as pool:
        try:
            return dict(zip(files, pool.map(hashed, files), strict=True))
        except BaseException:  # the threads would read on to the end
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _digest(file: WeightFile, stop: threading.Event, on_hashed: OnHashed | None) -> bytes:
    """Read a file. Raises: CannotName."""
    state, piece = sha256(), memoryview(bytearray(_PIECE_BYTES))
    try:
        with open(file.path, "rb", buffering=0) as opened:
            _require(file, os.fstat(opened.fileno()))
            while num_bytes := opened.readinto(piece):
                state.update(piece[:num_bytes])
                if on_hashed is not None:
                    on_hashed(num_bytes)
                if stop.is_set():
                    raise CannotName(f"{file.path} was not read to its end")
            _require(file, os.fstat(opened.fileno()))
    except OSError as error:
        raise _unreadable(file, error) from None
    return state.digest()


def _same(file: WeightFile) -> WeightFile:
    """Return a file that is what it was. Raises: CannotName."""
    try:
        _require(file, file.path.stat())
    except OSError as error:
        raise _unreadable(file, error) from None
    return file


def _require(file: WeightFile, found: os.stat_result) -> None:
    if Stamp.of(found) != file.stamp:
        raise CannotName(f"{file.path} was changed while or after the model was loaded from it")


def _unreadable(file: WeightFile, error: OSError) -> CannotName:
    return CannotName(f"{file.path} cannot be read again: {error.strerror}")


def _key(stamp: Stamp) -> str:
    return f"{stamp.device:x}-{stamp.inode:x}"
