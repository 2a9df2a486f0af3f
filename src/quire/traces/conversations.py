"""Read kv-cache-tester's conversations: JSON files in a folder, in an archive, or alone.

Source: callanjfox/kv-cache-tester. A conversation has its own clock and its own hash ids (of
``block_size`` tokens, each of which covers all tokens before it). The files do not tell when
conversations start. So they start in the order of the files, at times of a Poisson process, and the
ids of two conversations never agree. Only conversations that have begun and not ended are in
memory.

A request of type ``subagent`` is a conversation inside another, whose requests have their own
times.
"""

import tarfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import IO, ClassVar, Final, TypeAlias, final

import numpy as np
from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

from quire.errors import ConfigError
from quire.traces.trace import BadRow, Found, TraceRequest
from quire.traces.trace_files import OnProgress, is_address, opened

_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257
_MOST_BYTES = 2**30  # of one conversation
_MOST_IDS = 2**40  # ids per conversation; those of the next one begin there
Member: TypeAlias = tuple[str, bytes]


class _Request(Struct, rename={"asked": "in", "made": "out"}):
    t: float
    asked: int = 0
    made: int = 0
    hash_ids: Raw = Raw(b"[]")  # parsed late: as text they take a sixth of the memory
    think_time: float | None = None
    requests: "tuple[_Request, ...]" = ()  # those of a subagent
    agent_id: str = ""


class _Conversation(Struct):
    id: str
    block_size: int
    requests: tuple[_Request, ...]


_CONVERSATION: Final = Decoder(_Conversation)
_IDS: Final = Decoder(tuple[int, ...])


def is_tar(data: IO[bytes]) -> bool:
    """Return whether the bytes are a tar archive."""
    head: bytes = data.peek(_TAR_MAGIC_AT + len(_TAR_MAGIC))  # type: ignore[attr-defined]
    return head[_TAR_MAGIC_AT:].startswith(_TAR_MAGIC)


def knows_conversation(first: bytes) -> bool:
    """Return whether a file with this first line may be a conversation."""
    return first.lstrip().startswith(b"{") and (
        first.strip() == b"{" or all(name in first for name in (b'"block_size"', b'"requests"'))
    )


@final
class Conversations:
    """The conversations of a source, merged by time."""

    WANTED: ClassVar[str] = "id, block_size, and requests with t, in, out, hash_ids"

    def __init__(
        self,
        source: str | Path,
        *,
        seed: int,
        interval_s: float,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._source, self._seed, self._interval_s = source, seed, interval_s
        self._on_progress = on_progress

    @contextmanager
    def reading(self) -> Iterator[Iterator[Found]]:
        """Open the source; yields its requests. Raises: ConfigError."""
        if not is_address(self._source) and Path(self._source).is_dir():
            yield self._merged(self._of_folder(Path(self._source)))
            return
        with opened(self._source, self._on_progress) as data:
            try:
                yield self._merged(self._of_file(data))
            except tarfile.TarError as error:
                raise ConfigError(f"trace {self._source} cannot be unpacked: {error}") from error

    def _merged(self, members: Iterator[Member]) -> Iterator[Found]:
        gaps = np.random.default_rng(self._seed)
        under_way: dict[int, _UnderWay] = {}
        waiting: list[tuple[float, int]] = []  # a heap: the time of a conversation's next request
        begins_s = 0.0

        def take() -> Found:
            _, number = heappop(waiting)
            conversation = under_way[number]
            found = conversation.take()
            if conversation.due:
                heappush(waiting, (conversation.due[0][0], number))
            else:
                del under_way[number]
            return found

        for number, (name, text) in enumerate(members):
            while waiting and waiting[0][0] < begins_s:
                yield take()
            try:
                conversation = _begun(name, text, begins_s, number * _MOST_IDS)
            except (DecodeError, RecursionError) as error:
                yield name, BadRow(str(error))
                continue
            begins_s += gaps.exponential(self._interval_s)
            if conversation.due:
                under_way[number] = conversation
                heappush(waiting, (conversation.due[0][0], number))
        while waiting:
            yield take()

    # -- files -----------------------------------------------------------------------------------

    def _of_folder(self, folder: Path) -> Iterator[Member]:
        files = sorted(folder.rglob("*.json"))
        for number, file in enumerate(files, 1):
            try:
                if file.stat().st_size > _MOST_BYTES:
                    raise ConfigError(f"trace {file} is larger than a conversation may be, 1 GiB")
                text = file.read_bytes()
            except OSError as error:
                raise ConfigError(f"trace {file} cannot be read: {error.strerror}") from error
            yield str(file.relative_to(folder)), text
            if self._on_progress is not None:
                self._on_progress(number, len(files))

    def _of_file(self, data: IO[bytes]) -> Iterator[Member]:
        if not is_tar(data):
            text = data.read(_MOST_BYTES + 1)
            if len(text) > _MOST_BYTES:
                raise ConfigError(
                    f"trace {self._source} is larger than a conversation may be, 1 GiB"
                )
            yield Path(str(self._source)).name, text
            return
        with tarfile.open(fileobj=data, mode="r|") as archive:
            for member in archive:
                if not member.isfile() or not member.name.endswith(".json"):
                    continue
                if member.size > _MOST_BYTES:
                    raise ConfigError(
                        f"trace {self._source}, {member.name}: larger than a conversation may be, "
                        f"1 GiB"
                    )
                file = archive.extractfile(member)
                if file is not None:
                    yield member.name, file.read()


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    """The remaining requests of a conversation, in order of time."""

    name: str
    id_tokens: int
    first_id: int
    due: deque[tuple[float, str, _Request]]  # time, session, request

    def take(self) -> Found:
        """Take the next request."""
        at_s, session, request = self.due.popleft()
        try:
            ids = _IDS.decode(request.hash_ids)
        except DecodeError as error:
            return self.name, BadRow(f"hash_ids: {error}")
        if ids and not 0 <= min(ids) <= max(ids) < _MOST_IDS:
            return self.name, BadRow(f"a hash id that is not from 0 to {_MOST_IDS - 1:,}")
        return self.name, TraceRequest(
            at_s=at_s,
            input_tokens=request.asked,
            output_tokens=request.made,
            hash_ids=tuple([self.first_id + each for each in ids]),
            id_tokens=self.id_tokens,
            session=session,
            think_s=request.think_time,
        )


def _begun(name: str, text: bytes, begins_s: float, first_id: int) -> _UnderWay:
    """Parse a conversation. Raises: DecodeError."""
    conversation = _CONVERSATION.decode(text)
    due: list[tuple[float, str, _Request]] = []
    for request in conversation.requests:
        if not request.requests:
            due.append((request.t, conversation.id, request))
        session = f"{conversation.id}/{request.agent_id}"
        due += [(request.t + inner.t, session, inner) for inner in request.requests]
    due.sort(key=lambda each: each[0])
    offset_s = begins_s - (due[0][0] if due else 0)
    return _UnderWay(
        name=name,
        id_tokens=conversation.block_size,
        first_id=first_id,
        due=deque((offset_s + at_s, session, request) for at_s, session, request in due),
    )
