"""A server for one terminal, in a process of its own, at a Unix socket in a private folder.

It ends with this process, however that ends.
"""

import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

_LOOK_S = 0.05  # between two looks whether it is up
_END_S = 10.0  # that it gets to end
# The pipe at its standard input ends with the process that holds the other end.
_SERVE = """
import os, signal, threading

def end_with_parent():
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
from quire.cli import main
main()
"""


@contextmanager
def own_server(model: str | None) -> Iterator[tuple[str, str]]:
    """Its address and its key, once it answers; what it waits for it says on standard error.

    Raises: typer.Exit with its exit code, where it ends before: it has said why.
    """
    with tempfile.TemporaryDirectory(prefix="quire-chat-") as folder:
        path, key = Path(folder) / "socket", secrets.token_urlsafe()
        key_file = Path(folder) / "key"
        key_file.write_text(key, encoding="utf-8")
        flags = ("--uds", str(path), "--api-key", f"@{key_file}", "--shutdown-timeout", "0")
        logs = ("--uvicorn-log-level", "warning", "--disable-log-stats")
        with subprocess.Popen(
            [sys.executable, "-c", _SERVE, "serve", *flags, *logs, *([model] if model else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C stops an answer here, and not the server
        ) as child:
            try:
                while not _is_open(path):
                    if (code := child.poll()) is not None:
                        raise typer.Exit(code or 1)
                    time.sleep(_LOOK_S)
                yield f"unix:{path}", key
            finally:
                child.terminate()
                try:
                    child.wait(_END_S)
                except subprocess.TimeoutExpired:
                    child.kill()


def _is_open(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
