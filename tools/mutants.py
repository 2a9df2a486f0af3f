"""Plant known errors in the source, one at a time, and see that the tests named for each fail.

    python tools/mutants.py [NAME ...] [--jobs 2] [--list]

Each error of ``tools/mutants.toml`` replaces one passage of one file under src/quire, in a copy of
the tree, and the tests that must notice it are run there. An error that no test notices survives;
a passage that is not found exactly once is stale: the code has moved on, and the error has to be
written anew. Tests that take too long are late. Each of these ends the run with exit code 1.
Without names all are tried, which takes some minutes; a name may be the beginning of several.

Tests run in forks of one process that has imported the large libraries, and nothing of ours: most
of them take less time than those imports.
"""

import argparse
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ERRORS = ROOT / "tools" / "mutants.toml"
MOST_SECONDS = 300  # of one error's tests
_LIBRARIES = ("hypothesis", "numpy", "pytest", "torch", "transformers")
# Plugins are among what is imported before pytest could rewrite it, which does no harm.
_REWRITING = "ignore::pytest.PytestAssertRewriteWarning"
_OPTIONS = ("-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-W", _REWRITING)
# What pytest ends with where all tests have passed, and where some have failed. Any other code says
# that they could not be run as they are named here.
_PASSED, _FAILED, _BROKEN = 0, 1, 70
_FOLDERS = ("src", "tests", "tools", "docs", "examples", "benchmarks")
_FILES = ("pyproject.toml", "README.md", "constraints.txt", "Makefile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted error, and the tests of which at least one must fail."""

    name: str
    file: str  # under src/quire
    old: str
    new: str
    tests: tuple[str, ...]  # as pytest takes them

    @property
    def path(self) -> Path:
        return Path("src/quire") / self.file

    def mutated(self, source: str) -> str:
        """The file's text with the error. Raises: ValueError if it is stale."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.path} has the passage {count} times: write the error anew")
        return source.replace(self.old, self.new)

    def plant(self, root: Path) -> str:
        """Put the error into the file below ``root``; its text before. Raises: ValueError."""
        path = root / self.path
        own = path.read_text(encoding="utf-8")
        changed = self.mutated(own)
        try:
            compile(changed, self.file, "exec")  # or any test would notice it
        except SyntaxError as error:
            raise ValueError(f"{self.path} is no Python with it: {error}") from error
        path.write_text(changed, encoding="utf-8")
        return own


def read_mutants(path: Path = ERRORS) -> list[Mutant]:
    """All planted errors, in the order of the file."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    mutants = [Mutant(**{**each, "tests": tuple(each["tests"])}) for each in entries]
    names = [mutant.name for mutant in mutants]
    assert len(set(names)) == len(names), "two errors have one name"
    return mutants


@dataclass(slots=True)
class Trial:
    """One error planted in a copy of the tree, and the process that runs its tests there."""

    mutant: Mutant
    root: Path
    own: str = field(init=False)  # the file's text without the error
    started_s: float = field(init=False)
    process: int = field(init=False)

    def begin(self) -> None:
        """Raises: ValueError if the error is stale."""
        self.own = self.mutant.plant(self.root)
        self.started_s = time.monotonic()
        self.process = os.fork()
        if not self.process:
            os.setpgid(0, 0)
            self._test()

    def ended(self) -> tuple[str, str] | None:
        """«killed», «SURVIVED», «STALE» or «LATE», and what pytest said; None while it runs."""
        process, status = os.waitpid(self.process, os.WNOHANG)
        late = time.monotonic() - self.started_s > MOST_SECONDS
        if not process and not late:
            return None
        if not process:
            os.killpg(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
            verdict, said = "LATE", f"not done after {MOST_SECONDS} s: name tests that fail at once"
        else:
            code = os.waitstatus_to_exitcode(status)
            # A process that dies of a signal has noticed, too.
            killed = code == _FAILED or code < 0
            verdict = "killed" if killed else "SURVIVED" if code == _PASSED else "STALE"
            said = self._said()
        (self.root / self.mutant.path).write_text(self.own, encoding="utf-8")
        return verdict, said

    @property
    def _output(self) -> Path:
        return self.root / "output"

    def _said(self) -> str:
        """The test that failed, or the last line."""
        lines = [line for line in self._output.read_text(encoding="utf-8").splitlines() if line]
        failed = (line for line in reversed(lines) if line.startswith(("FAILED", "ERROR")))
        return next(failed, lines[-1] if lines else "")

    def _test(self) -> None:
        """Run pytest in this process, up to the first failure, and leave."""
        code = _BROKEN
        try:
            output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.chdir(self.root)
            sys.path.insert(0, str(self.root / "src"))
            os.environ["PYTHONPATH"] = str(self.root / "src")  # for processes that tests start
            pytest = importlib.import_module("pytest")
            code = int(pytest.main([*_OPTIONS, *self.mutant.tests]))
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(mutants: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, str, str, float]]:
    """Try them all, ``jobs`` at once: of each the verdict, what was said, and seconds."""
    waiting, running = mutants[::-1], list[Trial]()
    with ExitStack() as stack:
        free = [stack.enter_context(tree_copy()) for _ in range(min(jobs, len(mutants)))]
        while waiting or running:
            while waiting and free:
                trial = Trial(waiting.pop(), free[-1])
                try:
                    trial.begin()
                except ValueError as error:
                    yield trial.mutant, "STALE", str(error), 0.0
                    continue
                free.pop()
                running.append(trial)
            for trial in running.copy():
                if (verdict := trial.ended()) is not None:
                    running.remove(trial)
                    free.append(trial.root)
                    yield trial.mutant, *verdict, time.monotonic() - trial.started_s
            time.sleep(0.05)


@contextmanager
def tree_copy() -> Iterator[Path]:
    """A copy of what the tests need, to be changed."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder)
        for name in _FOLDERS:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in _FILES:
            shutil.copy(ROOT / name, root / name)
        yield root


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at once")
    parser.add_argument("--list", action="store_true", help="name them, and run nothing")
    options = parser.parse_args()
    mutants = [m for m in read_mutants() if m.name.startswith(tuple(options.names or [""]))]
    if not mutants:
        parser.error(f"no error's name begins with {' or '.join(options.names)}: see --list")
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:56} {mutant.file}")
        return 0
    # Random tests try the same examples each time, and no error of equal length is missed because
    # the compiled file of another one is taken for its.
    os.environ |= {"CI": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    for name in _LIBRARIES:
        importlib.import_module(name)
    gc.freeze()  # a fork need not look through it, which also copies it
    start, killed = time.monotonic(), 0
    for mutant, verdict, said, seconds in run(mutants, options.jobs):
        killed += verdict == "killed"
        print(f"{verdict:8} {mutant.name:56} {seconds:5.1f} s  {said[:160]}", flush=True)
    print(f"{killed} of {len(mutants)} noticed, {time.monotonic() - start:.0f} s")
    return int(killed < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
