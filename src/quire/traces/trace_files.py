"""Read the bytes of a trace from a file or a web address, compressed or not.

They are read as a stream, so that files may have any size. The first bytes tell the compression,
not the name.
"""

import gzip
import io
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from stat import S_ISREG
from typing import IO, Any, Final, final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from quire.errors import ConfigError
from quire.units import format_bytes

OnProgress = Callable[[int, int | None], None]  # bytes read, and all bytes (None: unknown)
MAX_LINE_BYTES: Final = 64 * 2**20
_BUFFER_BYTES = 2**18
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_TIMEOUT_S = 30


def is_address(source: str | Path) -> bool:
    """Return whether a source is a web address."""
    return isinstance(source, str) and source.lower().startswith(("http://", "https://"))


@contextmanager
def opened(source: str | Path, on_progress: OnProgress | None = None) -> Iterator[IO[bytes]]:
    """Open a source; yields its decompressed bytes as a stream with ``peek``.

    Raises: ConfigError with the source, here and while it is read.
    """
    with ExitStack() as stack:
        stack.enter_context(_told_as(source))
        counted = stack.enter_context(_Counted(*_raw(source, stack), on_progress))
        buffered = io.BufferedReader(counted, _BUFFER_BYTES)
        first = buffered.peek(4)
        if first.startswith(_GZIP):
            unpacked: Any = gzip.GzipFile(fileobj=buffered)
            yield io.BufferedReader(unpacked, _BUFFER_BYTES)
        elif first.startswith(_ZSTD):
            yield io.BufferedReader(_unpacked(source, buffered, counted, stack), _BUFFER_BYTES)
        else:
            yield buffered


def lines_of(source: str | Path, data: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each line, from 1 on, and the line; empty lines are left out.

    Raises: ConfigError for a line of more than 64 MiB.
    """
    number = 0
    while line := data.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            raise ConfigError(
                f"trace {source}, line {number} is longer than {format_bytes(MAX_LINE_BYTES)}: a "
                "trace has one request per line"
            )
        if not line.isspace():
            yield number, line


@contextmanager
def _told_as(source: str | Path) -> Iterator[None]:
    """Raise errors of reading as ConfigError."""
    try:
        yield
    except HTTPError as error:
        error.close()
        raise ConfigError(
            f"trace {source}: the server answers {error.code} {error.reason}"
        ) from error
    except (OSError, EOFError, HTTPException) as error:
        what = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(f"trace {source} cannot be read: {what}") from error


def _raw(source: str | Path, stack: ExitStack) -> tuple[Any, int | None]:
    """Open a source without decompression. Returns: the reader, and its number of bytes."""
    if not is_address(source):
        status = Path(source).stat()
        if not S_ISREG(status.st_mode):
            raise ConfigError(f"trace {source} is not a regular file, which is read more than once")
        file = stack.enter_context(open(source, "rb", buffering=0))  # noqa: SIM115 - the stack closes it
        return file, status.st_size
    try:
        request = Request(str(source), headers={"User-Agent": "quire"})
    except ValueError as error:
        raise ConfigError(f"trace {source} is not a valid address: {error}") from error
    answer = stack.enter_context(urlopen(request, timeout=_TIMEOUT_S))
    length = answer.headers.get("Content-Length")
    return answer, int(length) if length and length.isdigit() else None


@final
class _Counted(io.RawIOBase):
    """A reader that counts its bytes, and fails if the stream ends early."""

    def __init__(self, raw: Any, total: int | None, on_progress: OnProgress | None) -> None:
        self._raw, self._total, self._on_progress = raw, total, on_progress
        self.num_read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        count: int = self._raw.readinto(buffer) or 0
        self.tell_read(self.num_read + count)
        if not count and self._total is not None and self.num_read < self._total:
            raise EOFError(f"it ends after {self.num_read:,} of {self._total:,} bytes")
        return count

    def tell_read(self, num_read: int) -> None:
        """Report progress."""
        if self._on_progress is not None and num_read != self.num_read:
            self._on_progress(num_read, self._total)
        self.num_read = num_read


# -- zstd ----------------------------------------------------------------------------------------


def _unpacked(source: str | Path, data: IO[bytes], counted: _Counted, stack: ExitStack) -> Any:
    """Decompress zstd with the package ``zstandard``, or with the program ``zstd`` for a file."""
    if find_spec("zstandard") is not None:
        return (
            import_module("zstandard").ZstdDecompressor(max_window_size=2**31).stream_reader(data)
        )
    if which("zstd") is None or is_address(source):
        raise ConfigError(
            f"trace {source} is compressed with zstd: pip install zstandard, or decompress it "
            "(zstd -d --long=31)"
        )
    file = stack.enter_context(open(source, "rb", buffering=0))  # noqa: SIM115 - the stack closes it
    program = subprocess.Popen(
        ["zstd", "-dc", "--long=31"],
        stdin=file,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    stack.callback(program.wait)
    assert program.stdout is not None
    assert program.stderr is not None
    stack.enter_context(program.stderr)
    stack.enter_context(program.stdout)
    return stack.enter_context(_FromProgram(program, file, counted))


@final
class _FromProgram(io.RawIOBase):
    """The output of a program that reads ``file``, whose position there is the progress."""

    def __init__(
        self, program: "subprocess.Popen[bytes]", file: IO[bytes], counted: _Counted
    ) -> None:
        self._program, self._file, self._counted = program, file, counted

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        assert self._program.stdout is not None
        count: int = self._program.stdout.readinto(buffer) or 0  # type: ignore[attr-defined]
        if not self._file.closed:
            self._counted.tell_read(self._file.tell())
        if not count and self._program.wait():
            assert self._program.stderr is not None
            said = self._program.stderr.read(2000).decode(errors="replace").strip()
            raise EOFError(said or "zstd fails")
        return count
