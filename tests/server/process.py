"""A server in a process of its own, asked over its socket."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from forks import start

COMMAND = "from quire.cli import main; main()"
# Its engine thinks that computing takes for ever, so that it waits for tiers on a busy machine too.
PATIENT = f"""
from quire.engine.scheduling.step_costs import Costs
Costs.note_step = lambda *_: None
{COMMAND}
"""


class Process:
    """``lines`` is what it has said so far."""

    def __init__(self, *flags: str, script: str = COMMAND) -> None:
        reads, writes = os.pipe()
        self._said_by_it = os.fdopen(reads)
        with open(os.devnull, "w") as nowhere:
            self.child = start(
                script, "serve", "--port", "0", *flags, stdout=nowhere.fileno(), stderr=writes
            )
        os.close(writes)
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._said_by_it:
            with self._said:
                self.lines.append(line)
                self._said.notify_all()
        with self._said:
            self.lines.append("(the end)")
            self._said.notify_all()

    @property
    def url(self) -> str:
        """Once it is up."""
        self.wait_for("memory page")
        found = re.search(r"http://\S+:\d+", self.log)
        return found[0] if found else "http://socket"

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str) -> None:
        """Until it says that; a process that has ended says nothing more."""
        with self._said:
            self._said.wait_for(lambda: text in self.log or "(the end)" in self.lines, timeout=60)
        assert text in self.log, self.log

    def end(self) -> int:
        """Its exit code, once it has ended by itself."""
        code = self.child.wait(60)
        self._reader.join(10)
        return code

    def kill(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        self._reader.join(10)
        self._said_by_it.close()


@contextmanager
def running(*flags: str, script: str = COMMAND) -> Iterator[Process]:
    """One that is up, and is no more in the end."""
    process = Process(*flags, script=script)
    try:
        process.wait_for("memory page")
        yield process
    finally:
        process.kill()


def body(prompt: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }


def events(response: httpx.Response) -> Iterator[dict[str, Any] | None]:
    """Each event; None for [DONE]."""
    for line in response.iter_lines():
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            yield None if data == "[DONE]" else json.loads(data)
