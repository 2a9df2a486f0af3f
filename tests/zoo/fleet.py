"""Many classes, each in a process of its own that may fail, run out of memory or never end.

Results are kept in a file, by class, so that one can be computed again.
"""

import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from transformers.utils import logging as hf_logging

from zoo.check import check
from zoo.finding import Finding, one_line

NUM_WORKERS = 2
_SECONDS, _BYTES = 900, 12 << 30


@dataclass(frozen=True, slots=True)
class _Child:
    """One class being judged."""

    name: str
    process: BaseProcess
    answer: Connection
    start: float  # seconds on the monotonic clock


Check = Callable[[str], Finding]


def run(names: Iterable[str], store: Path, check: Check = check) -> dict[str, Finding]:
    """What is found of each class; ``store`` keeps it beside what was found before."""
    known, made = load(store), {}
    for found, seconds in _judged(names, check):
        known[found.model_type] = made[found.model_type] = found
        _save(store, known)
        apart = "" if found.deviation is None else f"{found.deviation:.0e}"
        told = f"{found.model_type:26} {found.verdict:10} {apart:6} {seconds:4.1f} s"
        reason = found.not_built or found.not_generated or found.reason
        print(f"{told}  {reason[:150]}".rstrip(), flush=True)
    return made


def load(store: Path) -> dict[str, Finding]:
    """What the file holds, if it is of today's form."""
    if not store.is_file():
        return {}
    kept = json.loads(store.read_text())
    names = {field.name for field in fields(Finding)}
    return {name: Finding(**facts) for name, facts in kept.items() if facts.keys() == names}


def _save(store: Path, known: dict[str, Finding]) -> None:
    store.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: known[name].as_dict() for name in sorted(known)}, indent=1)
    store.write_text(text)


def _judged(names: Iterable[str], check: Check) -> Iterator[tuple[Finding, float]]:
    """Each finding and the seconds that it took, as they come."""
    waiting, running = list(reversed(list(names))), list[_Child]()
    while waiting or running:
        while waiting and len(running) < NUM_WORKERS:
            running.append(_start(waiting.pop(), check))
        wait([child.answer for child in running], timeout=1)
        for child in list(running):
            seconds = time.monotonic() - child.start
            if child.answer.poll() or seconds > _SECONDS:
                running.remove(child)
                yield _result(child), seconds


def _start(name: str, check: Check) -> _Child:
    """A fork: what is imported here is imported there."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_answer, args=(name, sender, check)
    )
    process.start()
    sender.close()
    return _Child(name, process, receiver, time.monotonic())


def _answer(name: str, sender: Connection, check: Check) -> None:
    """What a child does."""
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    torch.set_num_threads(1)
    hf_logging.set_verbosity_error()
    try:
        found = check(name)
    except BaseException as error:  # MemoryError, and what is wrong with the check itself
        found = _failed(name, one_line(error))
    sender.send(found.as_dict())


def _result(child: _Child) -> Finding:
    """What a child has said, or why it says nothing."""
    try:
        if child.answer.poll():
            return Finding(**child.answer.recv())
        return _failed(child.name, f"not done after {_SECONDS} s")
    except EOFError:
        child.process.join()
        return _failed(child.name, f"its process ended with {child.process.exitcode}")
    finally:
        child.process.kill()
        child.process.join()
        child.answer.close()


def _failed(name: str, reason: str) -> Finding:
    return Finding(model_type=name, class_name="", verdict="fails", reason=reason)
