"""The SHA-256 of weight files, as they were when a model was loaded from them."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from quire.errors import QuireError

_PIECE_BYTES = 2**22  # read at once


class CannotName(QuireError):
    """Nothing says what a model computes by, so that its records could be taken for another's."""


class Stamp(NamedTuple):
    """What the system says of a file: another content has another stamp.

    A program may set a file's modification time; its change time is the system's own.
    """

    device: int
    inode: int
    size: int  # bytes
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> "Stamp":
        """Make the stamp of a file that is open or was looked at."""
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


def file_hashes(files: Iterable[WeightFile], *, num_threads: int = 1) -> dict[str, str]:
    """Hash files by their names within the folder: 64 hex digits each.

    Raises: CannotName for a file that is gone or is not what it was.
    """
    several = list(files)
    with ThreadPoolExecutor(num_threads, "quire-hash") as pool:
        digests = pool.map(_hashed, several)
        return {file.path.name: digest for file, digest in zip(several, digests, strict=True)}


def _hashed(file: WeightFile) -> str:
    try:
        with open(file.path, "rb", buffering=0) as opened:
            state, piece = sha256(), bytearray(_PIECE_BYTES)
            before = Stamp.of(os.fstat(opened.fileno()))
            while num_bytes := opened.readinto(piece):
                state.update(memoryview(piece)[:num_bytes])
            after = Stamp.of(os.fstat(opened.fileno()))
    except OSError as error:
        raise CannotName(f"{file.path} cannot be read again: {error.strerror}") from None
    if not file.stamp == before == after:
        raise CannotName(f"{file.path} was changed while or after the model was loaded from it")
    return state.hexdigest()
