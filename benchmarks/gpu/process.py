"""One process of a part: a group of its own, heard line by line, and ended when it is late."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 5.0
PART = "benchmarks.gpu.part"
Lines = queue.SimpleQueue[str | None]  # None: there are no more


def run(
    asked: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    limit_s: float,
    quiet_s: float,
    hear: Callable[[str], None],
    stop: threading.Event,
) -> str | None:
    """Do what is asked, each line of output to ``hear``. How it ended, None if well.

    Whatever it started is ended with it.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", PART],  # -P: nothing is found beside its own file
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        cwd=ROOT,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    lines: Lines = queue.SimpleQueue()
    threading.Thread(target=_ask, args=(process, json.dumps(asked)), daemon=True).start()
    threading.Thread(target=_listen, args=(process, lines), daemon=True).start()
    ended = None
    try:
        ended = _wait(process, lines, limit_s, quiet_s, hear, stop)
        if ended is not None:
            process.send_signal(signal.SIGUSR1)  # it says where each of its threads is
            _hear_all(lines, hear, 1.0)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    _hear_all(lines, hear, 1.0)
    if process.returncode is None:
        return f"{ended or 'its output ended'}, and it cannot be killed: it waits in the driver"
    return ended or _in_words(process.returncode)


def _ask(process: subprocess.Popen[str], asked: str) -> None:
    assert process.stdin
    with contextlib.suppress(OSError), process.stdin as stdin:  # it may have ended already
        stdin.write(asked)


def _listen(process: subprocess.Popen[str], lines: Lines) -> None:
    assert process.stdout
    with process.stdout as output:
        for line in output:
            lines.put(line.rstrip("\n"))
    lines.put(None)


def _wait(
    process: subprocess.Popen[str],
    lines: Lines,
    limit_s: float,
    quiet_s: float,
    hear: Callable[[str], None],
    stop: threading.Event,
) -> str | None:
    """Why it has to be ended; None if it has ended."""
    until, heard = time.monotonic() + limit_s, time.monotonic()
    while not stop.is_set():
        now = time.monotonic()
        if now >= until:
            return f"timed out after {limit_s:.0f} s"
        if now >= heard + quiet_s:
            return f"hung: no output for {quiet_s:.0f} s"
        try:
            line = lines.get(timeout=min(1.0, until - now))
        except queue.Empty:
            if process.poll() is not None:  # what it started holds the other end
                return None
            continue
        if line is None:
            lines.put(None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
                return None
            return "its output ended, and it did not"
        heard = time.monotonic()
        hear(line)
    return "interrupted"


def _hear_all(lines: Lines, hear: Callable[[str], None], within_s: float) -> None:
    until = time.monotonic() + within_s
    with contextlib.suppress(queue.Empty):
        while (line := lines.get(timeout=max(0.0, until - time.monotonic()))) is not None:
            hear(line)
    if not lines.empty():
        hear("(more was said)")


def _in_words(code: int) -> str | None:
    if code >= 0:
        return None if code == 0 else f"ended with {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"
