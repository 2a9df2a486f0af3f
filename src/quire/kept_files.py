"""Small files that one process keeps for the next, and that only their own user may have written.

Machine code gets this process's rights, and hashes say what its answers are made of. So the folder
and the file belong to the user that this process runs as, and no other user can write to them. Each
folder above belongs to that user or to root, and no other user can rename what lies in it. The
checks look at what was opened, not at a path, so nothing can be exchanged between the check and the
use. Where one of these does not hold, nothing is read and nothing is written, and the process warns
once of what that costs.
"""

import errno
import hashlib
import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import final

log = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size
_MOST_LINKS = 40  # that a path leads through, as in Linux
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_CHOOSE = "set QUIRE_CACHE_DIR to a folder that only this user can write to"


def own_folder() -> Path | None:
    """Return the folder in the user's home; None for a user without one."""
    try:
        return Path("~/.cache/quire").expanduser()
    except RuntimeError:
        return None


@final
class KeptFiles:
    """The files of one kind in a folder, by key. Several processes may use them at once."""

    def __init__(
        self,
        folder: Path | None,  # None: there is none
        suffix: str,  # of their names: ".o"
        *,
        largest_bytes: int,  # of a file's content
        most_files: int | None = None,  # beyond which the oldest go
        loss: str,  # what a process does where it may not use them, for a warning
    ) -> None:
        self._folder, self._suffix, self._loss = folder, suffix, loss
        self._largest_bytes, self._most_files = largest_bytes + _DIGEST_BYTES, most_files
        self._has_warned = False

    def read(self, key: str) -> bytes | None:
        """Read what ``write`` was given; None if there is none that can be trusted."""
        try:
            content = _read(self._path(), self._name(key), self._largest_bytes)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.warn(self._told_by(error))
            return None
        digest, kept = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if digest == _digest(key, kept):
            return kept
        self.warn(f"{self._folder}/{self._name(key)} is not what was written there")
        return None

    def write(self, key: str, content: bytes) -> None:
        """Write a file for the next process, which finds it whole or not at all."""
        try:
            folder = self._path()
            _write(folder, self._name(key), _digest(key, content) + content)
            if self._most_files is not None:
                _remove_oldest(folder, self._suffix, self._most_files)
        except OSError as error:
            self.warn(self._told_by(error))

    def warn(self, reason: str) -> None:
        """Warn once of the loss: what is wrong with one file is wrong with all."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s: %s", self._loss, reason)

    def _name(self, key: str) -> str:
        return f"{key}{self._suffix}"

    def _path(self) -> Path:
        if self._folder is None:
            raise PermissionError(f"this user has no home folder: {_CHOOSE}")
        if os.open not in os.supports_dir_fd or not hasattr(os, "geteuid"):
            raise PermissionError("this system does not say which user can write to a folder")
        return self._folder.absolute()

    def _told_by(self, error: OSError) -> str:
        if error.strerror is None:  # it is one of ours
            return str(error)
        return f"{self._folder} cannot be used ({error.strerror}: {error.filename}): {_CHOOSE}"


def _digest(key: str, content: bytes) -> bytes:
    """Hash the key too: a file under another file's name is not what was written there."""
    return hashlib.sha256(key.encode() + content).digest()


def _read(folder: Path, name: str, largest_bytes: int) -> bytes:
    """Read a file. Raises: OSError, FileNotFoundError among them."""
    place = _open_folder(folder, make=False)
    try:
        # A pipe in its place would otherwise be waited for.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        file = os.open(name, flags, dir_fd=place)
    finally:
        os.close(place)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{folder / name} is no file: remove it")
        _require_own(found, folder / name)
        if found.st_size > largest_bytes:
            raise PermissionError(f"{folder / name} has {found.st_size} bytes: remove it")
        with os.fdopen(file, "rb", closefd=False) as opened:
            return opened.read(largest_bytes)
    finally:
        os.close(file)


def _write(folder: Path, name: str, content: bytes) -> None:
    """Write a file. Raises: OSError; then the file is as it was."""
    place = _open_folder(folder, make=True)
    try:
        part = f"{name}.{secrets.token_hex(8)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(part, flags, 0o600, dir_fd=place)
        try:
            with os.fdopen(file, "wb") as opened:
                opened.write(content)
            os.replace(part, name, src_dir_fd=place, dst_dir_fd=place)
        except BaseException:
            with suppress(OSError):
                os.unlink(part, dir_fd=place)
            raise
    finally:
        os.close(place)


def _remove_oldest(folder: Path, suffix: str, most: int) -> None:
    """Remove files of a kind beyond so many, the ones written first. Raises: OSError."""
    place = _open_folder(folder, make=False)
    try:
        listed = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
        try:
            names = [name for name in os.listdir(listed) if name.endswith(suffix)]
        finally:
            os.close(listed)
        ages = []
        for name in names if len(names) > most else ():
            with suppress(FileNotFoundError):  # another process was faster
                found = os.stat(name, dir_fd=place, follow_symlinks=False)
                ages.append((found.st_mtime_ns, name))
        for _, name in sorted(ages)[: len(ages) - most if ages else 0]:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=place)
    finally:
        os.close(place)


def _open_folder(path: Path, *, make: bool) -> int:
    """Open a folder that only this user can write to, from the root down, as a descriptor.

    ``make``: make missing folders, for this user alone.

    Raises: OSError, FileNotFoundError among them; PermissionError for a folder of others.
    """
    flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    left, num_links, seen = [*reversed(path.parts)], 0, Path()
    here = os.open(left[-1], flags)
    try:
        while left:
            part = left.pop()
            try:
                found = os.stat(part, dir_fd=here, follow_symlinks=False)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):  # another process was faster
                    os.mkdir(part, 0o700, dir_fd=here)
                found = os.stat(part, dir_fd=here, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                _require_safe(found, seen / part)
                num_links += 1
                if num_links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                left += reversed(Path(os.readlink(part, dir_fd=here)).parts)
                continue
            inner, outer = os.open(part, flags, dir_fd=here), here
            here, seen = inner, seen / part
            os.close(outer)
            _require_safe(os.fstat(here), seen)
        _require_own(os.fstat(here), seen)
    except BaseException:
        os.close(here)
        raise
    return here


def _require_own(found: os.stat_result, path: Path) -> None:
    """Check that no other user can write there. Raises: PermissionError."""
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}: {_CHOOSE}"
        )
    if found.st_mode & _OTHERS_WRITE:
        raise PermissionError(f"other users can write to {path}: chmod go-w {path}, or {_CHOOSE}")


def _require_safe(found: os.stat_result, path: Path) -> None:
    """Check that no other user can say what lies in a folder, or where a link leads.

    In a sticky folder, as /tmp is, each user renames only what is that user's own.

    Raises: PermissionError.
    """
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(
            f"{path} belongs to user {found.st_uid}, who can exchange what it leads to: {_CHOOSE}"
        )
    if stat.S_ISLNK(found.st_mode):  # its mode means nothing
        return
    if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        raise PermissionError(
            f"other users can exchange what lies in {path}: chmod go-w {path}, or {_CHOOSE}"
        )
