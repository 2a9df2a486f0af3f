"""``WorkerGroup``: the processes of the other ranks, and how rank 0 calls them.

The processes are started without running the user's script again. They live in a session of their
own, so that Ctrl-C reaches rank 0 alone, and they end with rank 0, however it ends. Where one ends
or does not answer, the others are ended and ``RankLost`` names it. ``worker`` has what they do.
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

from quire.engine.parallel.messages import Answer, Call, Failed, Heard, Leave
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

GRACE_S = 60.0  # for an answer after rank 0's own part has failed, and for a process to end
EXCHANGE_S = 600.0  # for one exchange of a step, in which a kernel may be compiled
_LOADING_S = 7200.0  # for a call that reads files, or takes all memory
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from quire.engine.parallel.worker import main; "
    "main({channel}, {lifeline}, {folder!r}, {grace_s!r})"
)


@final
class WorkerGroup:
    """Ranks 1 … ``num_ranks`` - 1. One thread at a time calls them."""

    def __init__(self, num_ranks: int, device_type: str = "cpu", grace_s: float = GRACE_S) -> None:
        self.num_ranks, self.device_type = num_ranks, device_type
        self._grace_s = grace_s
        self._lock = threading.RLock()
        self._names = count(1)
        self._members: list[_Member] = []
        self._fate = _Fate(self._members)
        self._finalizer: weakref.finalize[..., WorkerGroup] | None = None

    def start(self) -> "WorkerGroup":
        """Start the processes, and let all ranks meet.

        Raises: ConfigError for too many ranks; RankLost where one does not start.
        """
        refuse_ranks(self.num_ranks, self.device_type)
        folder = tempfile.mkdtemp(prefix="quire-ranks-")
        ours, theirs = os.pipe()[::-1]  # never written to: the pipe ends with rank 0
        undo = ExitStack()
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        self._finalizer = weakref.finalize(self, _end, self._members, self._fate, ours, undo)
        _in_forks(weakref.WeakMethod(self._leave_to_parent), ours)
        share = share_of_threads(self.num_ranks) if self.device_type == "cpu" else None
        try:
            for rank in range(1, self.num_ranks):
                self._members.append(self._start(rank, theirs, folder))
            self._fate.watch()
            for member in self._members:  # each answers once when it is ready
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
        """Return a number for a model or an engine."""
        return next(self._names)

    def all_of(self, call: Call, own: Callable[[], T]) -> tuple[T, list[Answer]]:
        """Have the other ranks carry out a call while rank 0 carries out its ``own`` part.

        Return what that part returned, and all answers. Raises: what rank 0's part raises; RankLost
        where a rank has ended or does not answer.
        """
        with self._lock, self._fate.shared_by_all():
            self._tell(call)
            try:
                value = own()
            except Exception:
                # In an exchange a rank may wait for rank 0's part, which will not come.
                self._answers(call, self._grace_s if call.is_exchange else _LOADING_S)
                raise
            return value, self._answers(call, _LOADING_S)

    def required(self, call: Call, own: Callable[[], T]) -> T:
        """Call as ``all_of`` does. Raises: what any rank raises; RankLost."""
        value, answers = self.all_of(call, own)
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer.error
        return value

    def try_tell(self, call: Call) -> None:
        """Call what gives something back. It raises nothing: a lost rank has nothing left."""
        if self.lost is None:
            try:
                self.required(call, nothing)
            except Exception as error:
                log.debug("the ranks are not told: %r", error)

    @property
    def lost(self) -> str | None:
        """Why the ranks cannot be called any more, or None."""
        return self._fate.reason

    @property
    def pids(self) -> list[int]:
        return [member.process.pid for member in self._members]

    def close(self) -> None:
        """End the processes, and leave their process group. A second call does nothing."""
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()

    def _leave_to_parent(self, lifeline: int) -> None:
        """Close a forked child's copies of the channels: the ranks are its parent's."""
        if self._finalizer is None or self._finalizer.detach() is None:
            return
        self._lock = threading.RLock()  # a thread of the parent may hold the old one
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
        shared = self.num_ranks, store, self.device_type, EXCHANGE_S
        for member in self._members:
            member.tell(Call("join", (member.rank, *shared, num_threads)))
        try:
            join(0, *shared)
        except Exception as error:
            self._fate.give_up(f"the ranks do not find each other ({error})")
        for answer in self._answers(Call("join"), self._grace_s):
            if isinstance(answer, Failed):
                self._fate.give_up(f"the ranks do not find each other ({answer.error})")
        self._refuse_if_lost()

    def _tell(self, call: Call) -> None:
        self._refuse_if_lost()
        data = pickle.dumps(call, pickle.HIGHEST_PROTOCOL)
        for member in self._members:
            try:
                member.channel.send_bytes(data)
            except OSError:
                self._fate.wait_for(member)
                self._refuse_if_lost()

    def _answers(self, call: Call, patience_s: float) -> list[Answer]:
        answers = [self._answer(member, patience_s) for member in self._members]
        if call.is_exchange:
            for member, answer in zip(self._members, answers, strict=True):
                # A rank that failed waits for ``Heard``, unless it has ended.
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


def nothing() -> None:
    """Do nothing: rank 0 has no part in the call."""


@final
class _Member:
    """One of the other ranks."""

    def __init__(
        self, rank: int, process: "subprocess.Popen[bytes]", channel: "Connection[bytes, bytes]"
    ) -> None:
        self.rank, self.process, self.channel = rank, process, channel

    def tell(self, message: Call | Heard | Leave) -> bool:
        """Send a message. Return False if the process has ended."""
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
    """Whether all ranks live. Where one ends, the others are ended, so that none waits for it."""

    def __init__(self, members: list[_Member]) -> None:
        self._members = members
        self._lock = threading.Lock()
        self.reason: str | None = None
        self.is_over = False  # ended on purpose

    def watch(self) -> None:
        """Watch every process in a thread of its own."""
        for member in self._members:
            threading.Thread(
                target=self._watch, args=(member,), name=f"quire-rank-{member.rank}", daemon=True
            ).start()

    def give_up(self, reason: str) -> None:
        """End all ranks, and the exchange that rank 0 is in."""
        with self._lock:
            if self.is_over or self.reason is not None:
                return
            self.reason = reason
        log.error("%s", reason)
        for member in self._members:
            member.process.kill()
        abort()

    def leave_to_parent(self) -> None:
        """Count the ranks as lost in a forked child."""
        self._lock = threading.Lock()
        self.reason = f"process {os.getpid()} is a fork, and the ranks are its parent's"

    @contextmanager
    def shared_by_all(self) -> Iterator[None]:
        """Give up the ranks after an interrupt between a call and its answers.

        It is not known then to which call the next answer belongs.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.give_up("rank 0 was interrupted in the middle of a step")
            raise

    def wait_for(self, member: _Member) -> None:
        """Wait for the end of a member whose channel has ended, and note it."""
        try:
            self._note_end(member, member.process.wait(GRACE_S))
        except subprocess.TimeoutExpired:
            self.give_up(f"{member} has closed its channel and does not end")

    def _watch(self, member: _Member) -> None:
        self._note_end(member, member.process.wait())

    def _note_end(self, member: _Member, code: int) -> None:
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        self.give_up(f"{member} {how}")


def _in_forks(leave: "weakref.WeakMethod[Callable[[int], None]]", lifeline: int) -> None:
    """Call a method in each child that is forked while the method's object lives."""

    def in_child() -> None:
        if (method := leave()) is not None:
            method(lifeline)

    os.register_at_fork(after_in_child=in_child)


def _end(members: list[_Member], fate: _Fate, lifeline: int, undo: ExitStack) -> None:
    """End all ranks. It raises nothing."""
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
