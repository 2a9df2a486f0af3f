"""``WorkerGroup``: the other ranks' processes, as rank 0 speaks with them.

They are started without running the user's script again, live in a session of their own (a Ctrl-C
is rank 0's), and end with rank 0, however it ends. Where one of them ends, or does not answer, the
others are ended and nothing waits for ever: ``RankLost`` says which it was. What they do,
``follower`` knows.
"""

import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar, final

from quire.engine.parallel.messages import EXCHANGES, Answer, Failed, Heard, Join, Leave, Message
from quire.engine.parallel.process_group import (
    abort,
    compute_with,
    join,
    leave,
    refuse_ranks,
    share_of_threads,
)
from quire.errors import RankLost

log = logging.getLogger(__name__)
T = TypeVar("T")

GRACE_S = 60.0  # for an answer, after rank 0's own part has failed; and to end
EXCHANGE_S = 600.0  # for one exchange of a step; a kernel may have to be compiled meanwhile
_LOADING_S = 7200.0  # for what reads files, or takes all memory
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from quire.engine.parallel.worker import main; "
    "main({channel}, {lifeline}, {folder!r}, {grace_s!r})"
)


@final
class WorkerGroup:
    """Ranks 1 … ``num_ranks`` - 1. One thread at a time tells them something."""

    def __init__(self, num_ranks: int, device_type: str = "cpu", grace_s: float = GRACE_S) -> None:
        self.num_ranks, self.device_type = num_ranks, device_type
        self._grace_s = grace_s
        self._lock = threading.RLock()
        self._names = count(1)
        self._members: list[_Member] = []
        self._fate = _Fate(self._members)
        self._finalizer: weakref.finalize[..., WorkerGroup] | None = None

    def start(self) -> "WorkerGroup":
        """Start them, and let all of them meet.

        Raises: ConfigError where there cannot be so many; RankLost where one does not come up.
        """
        refuse_ranks(self.num_ranks, self.device_type)
        folder = tempfile.mkdtemp(prefix="quire-ranks-")
        ours, theirs = os.pipe()[::-1]  # nothing is written there: it ends when rank 0 does
        undo = ExitStack()  # last of all
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        self._finalizer = weakref.finalize(self, _end, self._members, self._fate, ours, undo)
        _in_forks(weakref.WeakMethod(self._leave_to_parent), ours)
        share = share_of_threads(self.num_ranks) if self.device_type == "cpu" else None
        try:
            for rank in range(1, self.num_ranks):
                self._members.append(self._start(rank, theirs, folder))
            self._fate.watch()
            for member in self._members:  # each says when it is there, before all of them meet
                self._answer(member, EXCHANGE_S)
            if share is not None:
                undo.callback(compute_with(share))
            self._meet(Path(folder) / "store", share)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(theirs)
        return self

    def new_name(self) -> int:
        """For a model or an engine."""
        return next(self._names)

    def together(self, message: Message, own: Callable[[], T]) -> T:
        """Let the others do what a message says, while rank 0 does its ``own`` part of it.

        Raises: what rank 0's part raises; else what another rank's part did, and rank 0's is done;
        RankLost where one has ended or does not answer.
        """
        return self.all_of(message, own)[0]

    def all_of(self, message: Message, own: Callable[[], T]) -> tuple[T, list[Answer]]:
        """As ``together``, with all answers, among them those that say that it is not done.

        Raises: what rank 0's part raises; RankLost.
        """
        with self._lock, self._fate.shared_by_all():
            self._tell(message)
            try:
                value = own()
            except Exception:
                waits = isinstance(message, EXCHANGES)  # perhaps for rank 0, and so for ever
                self._answers(message, self._grace_s if waits else _LOADING_S)
                raise
            return value, self._answers(message, _LOADING_S)

    def required(self, message: Message, own: Callable[[], T]) -> T:
        """``all_of``, where an answer that says that it is not done is raised."""
        value, answers = self.all_of(message, own)
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer.error
        return value

    def try_tell(self, message: Message) -> None:
        """For what is given back: nothing is raised, for a lost rank has nothing any more."""
        if self.lost is None:
            try:
                self.required(message, _nothing)
            except Exception as error:
                log.debug("the ranks are not told: %r", error)

    @property
    def lost(self) -> str | None:
        """Why they are of no use any more, if so."""
        return self._fate.reason

    @property
    def pids(self) -> list[int]:
        return [member.process.pid for member in self._members]

    def close(self) -> None:
        """End them, and be in no group any more. A second call does nothing."""
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()

    def _leave_to_parent(self, lifeline: int) -> None:
        """In a forked child: the ranks are its parent's, and do not live for its sake."""
        if self._finalizer is None or self._finalizer.detach() is None:
            return
        self._lock = threading.RLock()  # of a thread that is not here, perhaps
        self._fate.leave_to_parent()
        os.close(lifeline)
        for member in self._members:
            member.channel.close()

    def _start(self, rank: int, lifeline: int, folder: str) -> "_Member":
        ours, theirs = socket.socketpair()
        with theirs:
            start = _START.format(
                path=sys.path,
                channel=theirs.fileno(),
                lifeline=lifeline,
                folder=folder,
                grace_s=self._grace_s,
            )
            process = subprocess.Popen(
                [sys.executable, "-c", start],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,
            )
        return _Member(rank, process, Connection(ours.detach()))

    def _meet(self, store: Path, num_threads: int | None) -> None:
        def message(rank: int) -> Join:
            return Join(
                rank=rank,
                num_ranks=self.num_ranks,
                store=store,
                device_type=self.device_type,
                timeout_s=EXCHANGE_S,
                num_threads=num_threads,
            )

        for member in self._members:
            member.tell(message(member.rank))
        try:
            join(message(0))
        except Exception as error:
            self._fate.give_up(f"the ranks do not find each other ({error})")
        for answer in self._answers(message(0), self._grace_s):
            if isinstance(answer, Failed):
                self._fate.give_up(f"the ranks do not find each other ({answer.error})")
        self._refuse_if_lost()

    def _tell(self, message: Message) -> None:
        self._refuse_if_lost()
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for member in self._members:
            try:
                member.channel.send_bytes(data)
            except OSError:
                self._fate.wait_for(member)
                self._refuse_if_lost()

    def _answers(self, message: Message, patience_s: float) -> list[Answer]:
        answers = [self._answer(member, patience_s) for member in self._members]
        if isinstance(message, EXCHANGES):
            for member, answer in zip(self._members, answers, strict=True):
                # It waits to hear that no rank waits for it; or one did, and it has ended.
                if isinstance(answer, Failed) and not member.tell(Heard()):
                    self._fate.wait_for(member)
                    self._refuse_if_lost(f" (it had failed: {answer.error})")
        return answers

    def _answer(self, member: "_Member", patience_s: float) -> Answer:
        """Raises: RankLost."""
        try:
            if not member.channel.poll(patience_s):
                self._fate.give_up(
                    f"{member} has not answered for {patience_s:g} s and was ended: it may still "
                    f"have been waiting for the others in the middle of a step"
                )
                self._refuse_if_lost()
            answer: Answer = pickle.loads(member.channel.recv_bytes())
        except (EOFError, OSError):
            self._fate.wait_for(member)
            self._refuse_if_lost()
            raise AssertionError("a channel ends with its process") from None
        return answer

    def _refuse_if_lost(self, why: str = "") -> None:
        """Raises: RankLost."""
        if self.lost is not None:
            raise RankLost(
                f"{self.lost}{why}: a model on {self.num_ranks} ranks cannot go on without one of "
                f"them; make a new LLM, or set tensor_parallel_size=1"
            )


def _nothing() -> None:
    """Rank 0 has no part in it."""


@final
class _Member:
    """One of the others."""

    def __init__(
        self, rank: int, process: "subprocess.Popen[bytes]", channel: "Connection[bytes, bytes]"
    ) -> None:
        self.rank, self.process, self.channel = rank, process, channel

    def tell(self, message: Message) -> bool:
        """False if it is gone: the call that waits for its answer finds out."""
        try:
            self.channel.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError as error:
            log.debug("%s is not told: %s", self, error)
            return False
        return True

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"


@final
class _Fate:
    """Whether all of them live. One that dies takes the others along, so that none waits for it."""

    def __init__(self, members: list[_Member]) -> None:
        self._members = members
        self._lock = threading.Lock()
        self.reason: str | None = None
        self.is_over = False  # as it should be

    def watch(self) -> None:
        """From now on."""
        for member in self._members:
            threading.Thread(
                target=self._watch, args=(member,), name=f"quire-rank-{member.rank}", daemon=True
            ).start()

    def give_up(self, reason: str) -> None:
        """End all of them, and every exchange that rank 0 is in."""
        with self._lock:
            if self.is_over or self.reason is not None:
                return
            self.reason = reason
        log.error("%s", reason)
        for member in self._members:
            member.process.kill()
        abort()

    def leave_to_parent(self) -> None:
        """In a forked child, for which they are lost."""
        self._lock = threading.Lock()
        self.reason = f"process {os.getpid()} is a fork, and the ranks are its parent's"

    @contextmanager
    def shared_by_all(self) -> Iterator[None]:
        """For a message and its answers. After an interrupt it is not known how far the others are,
        and to which message the next answer belongs.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.give_up("rank 0 was interrupted in the middle of a step")
            raise

    def wait_for(self, member: _Member) -> None:
        """A member whose channel has ended has ended, or is about to."""
        try:
            self._note_end(member, member.process.wait(GRACE_S))
        except subprocess.TimeoutExpired:
            self.give_up(f"{member} does not speak any more")

    def _watch(self, member: _Member) -> None:
        self._note_end(member, member.process.wait())

    def _note_end(self, member: _Member, code: int) -> None:
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        self.give_up(f"{member} {how}")


def _in_forks(leave: "weakref.WeakMethod[Callable[[int], None]]", lifeline: int) -> None:
    """Call a method in each child that is forked from now on, while its object is there."""

    def in_child() -> None:
        if (method := leave()) is not None:
            method(lifeline)

    os.register_at_fork(after_in_child=in_child)


def _end(members: list[_Member], fate: _Fate, lifeline: int, undo: ExitStack) -> None:
    """All of them, without an error."""
    in_order = fate.reason is None
    fate.is_over = True
    for member in members:
        member.tell(Leave())
    if in_order:
        leave()
    else:
        abort()
    os.close(lifeline)
    for member in members:
        try:
            member.process.wait(GRACE_S if in_order else 0.0)
        except subprocess.TimeoutExpired:
            member.process.kill()
            member.process.wait()
        member.channel.close()
    undo.close()
