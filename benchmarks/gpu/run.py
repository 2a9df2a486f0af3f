"""All that a GPU can say of Quire, in one call: ``make test-gpu`` and ``make bench-gpu``.

The parts (``parts``) run in order of worth, each in processes of its own with a time of its own.
What they say goes to the screen and to ``log.txt``, what they found to ``results.json``, in the
folder that ``--keep`` names. Another call with that folder goes on with what is missing, and does
then what failed. At the end: a table of the parts, and a JSON object a line for each claim.

This program needs nothing but Python: what is missing or broken, its parts say. ``--emulated``
runs every part small on the CPU, with Triton's interpreter, FlashInfer pretended and the driver
emulated: its times mean nothing.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu import process
from benchmarks.gpu.parts import ENVIRONMENT, PARTS, told

ROOT = process.ROOT
LIMIT_S = 480.0
LEAST_S = 15.0  # with less left, no part is begun
MOST_RESTARTS = 20
MOST_LOGGED_BYTES = 2**20  # of a part
WRITTEN = ("HOME", "TRITON_CACHE_DIR", "QUIRE_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME")
RECORDED = {"outcome", "why", "seconds", "tests", "tail", "claims", "made_of"}
Record = dict[str, Any]


class Kept:
    """Results and log in a folder; where nothing can be written there, on the screen alone."""

    def __init__(self, folder: Path) -> None:
        self._results, self._lock = folder / "results.json", threading.Lock()
        self.parts: dict[str, Record] = {}
        self._log: Any = None
        self._logged = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._log = (folder / "log.txt").open("a")
            if self._results.exists():
                found = json.loads(self._results.read_text())["parts"]
                self.parts = {x: found[x] for x in PARTS if found.get(x, {}).keys() >= RECORDED}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.say(
                f"{folder}: {error}: what is found is "
                + ("begun anew" if self._log else "not kept")
            )

    def say(self, line: str = "", *, screen: bool = True) -> None:
        """Put a line on the screen and into the log, of which a part may fill only so much."""
        with self._lock:
            if screen:
                print(line, flush=True)
            self._logged += len(line) + 1
            if self._log is not None and self._logged <= MOST_LOGGED_BYTES:
                with contextlib.suppress(OSError):
                    self._log.write(line + "\n")
                    self._log.flush()

    def begin(self) -> None:
        """Begin a part's share of the log."""
        self._logged = 0

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def keep(self, name: str, record: Record) -> None:
        """Keep the record of a part."""
        self.parts[name] = record
        if self._log is None:
            return
        try:
            unfinished = self._results.with_suffix(".new")
            unfinished.write_text(json.dumps({"parts": self.parts}))
            unfinished.replace(self._results)
        except OSError as error:
            self.say(f"{self._results}: {error}: the result of {name} is not kept")


class Run:
    """One part, in as many processes as it takes."""

    def __init__(self, name: str, asked: Record, environment: dict[str, str], kept: Kept) -> None:
        self.part, self.name = PARTS[name], name
        # On the host its tests compute what is tiny, and several processes share the cores.
        threads = (
            {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} if self.part.is_check else {}
        )
        self._asked, self._environment, self._kept = asked, {**environment, **threads}, kept
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._tail: deque[str] = deque(maxlen=15)
        self._tests: dict[str, list[Any]] = {}
        self._last: list[str] = []  # which failed before, or were cut off: the others come first
        self._cut_off: list[str] = []
        self._told: dict[str, list[Any]] = {kind: [] for kind in ("fact", "table", "note", "claim")}

    def run(self, limit_s: float, before: Record | None) -> Record:
        """Run the part for ``limit_s`` seconds at most.

        ``before``: a record of the same part on the same tree, whose passed tests stand.
        """
        begun = time.monotonic()
        if before is not None:
            self._tests = {k: v for k, v in before["tests"].items() if v[0] == "passed"}
            failed = [k for k, v in before["tests"].items() if v[0] == "failed"]
            self._last = failed + before.get("cut off", [])
        num_shards = 1 if self._asked["emulated"] else self.part.shards
        shards = [(number, num_shards) for number in range(num_shards)]
        with ThreadPoolExecutor(num_shards) as pool:
            try:
                ends = list(pool.map(lambda shard: self._shard(shard, begun + limit_s), shards))
            except BaseException:
                self._stop.set()
                raise
        why = "; ".join(dict.fromkeys(filter(None, ends)))
        counts = Counter(outcome for outcome, *_ in self._tests.values())
        # A speed that is not reached is told; what is wrong or was left behind is a failure.
        wrong = [x["claim"] for x in self._told["claim"] if not (x["holds"] or x.get("timed"))]
        if why:
            outcome = "timed out" if "timed out" in why else "failed"
        elif wrong:
            outcome, why = "failed", f"it does not hold: {'; '.join(wrong)}"[:160]
        elif self.part.is_check and not counts:
            outcome, why = "failed", "no test was found"
        elif counts["failed"]:
            outcome = "failed"
        elif self.part.is_check and not counts["passed"]:
            outcome, why = "skipped", "; ".join({v[2] for v in self._tests.values()})[:160]
        else:
            outcome = "passed"
        return {
            "outcome": outcome,
            "why": why,
            "seconds": round(time.monotonic() - begun, 1),
            "tests": self._tests,
            "tail": [] if outcome in ("passed", "skipped") else [*self._tail],
            "cut off": self._cut_off,
            **{f"{kind}s": found for kind, found in self._told.items()},
        }

    def _shard(self, shard: tuple[int, int], until: float) -> str | None:
        """Where a test takes its process or the device with it, another process does the rest."""
        for _ in range(MOST_RESTARTS):
            state: Record = {}
            asked = {**self._asked, "part": self.name, "shard": shard}
            asked |= {"done": [*self._tests], "last": self._last}
            ended = process.run(
                asked,
                self._environment,
                limit_s=max(1.0, until - time.monotonic()),
                quiet_s=self.part.quiet_s,
                hear=lambda line, state=state: self._hear(line, state),
                stop=self._stop,
            )
            if ended is not None and ended.startswith("ended with") and self._tail:
                ended = f"{ended}: {self._tail[-1].strip()[:200]}"
            current = state.get("begun")
            if ended is not None and current and not self.part.is_check:
                return f"{ended}, at {current}"
            if ended is not None and ended.startswith(("timed out", "interrupted")):
                self._cut_off += [current] if current else []
                return f"{ended}, at {current}" if current else ended
            if ended is not None and current:
                self._take(current, "failed", ended)
            elif "lost" not in state:
                return ended
            if until - time.monotonic() < LEAST_S:
                return "timed out: no time is left for the tests after those that died"
        return f"more than {MOST_RESTARTS} tests took their process with them"

    def _take(self, test: str, outcome: str, why: str, seconds: float = 0.0) -> None:
        with self._lock:
            self._tests[test] = [outcome, seconds, why]
        failed = outcome == "failed"
        self._kept.say(f"{outcome.upper()} {test} {why if failed else ''}".rstrip(), screen=failed)

    def _hear(self, line: str, state: Record) -> None:
        if (found := told(line)) is None:
            if line.strip():
                self._tail.append(line)
                self._kept.say(line)
            return
        state |= {key: found[key] for key in ("begun", "lost") if key in found}
        if "finished" in found:
            state.pop("begun", None)
        with self._lock:
            for kind, several in self._told.items():
                if kind in found:
                    several.append(found if kind == "fact" else found[kind])
        if "test" in found:
            self._take(found["test"], found["outcome"], found["why"], found["seconds"])
        elif "fact" in found:
            self._kept.say(f"  {found['fact']}: {found['value']}")
        elif "note" in found:
            self._kept.say(found["note"])
        elif "table" in found:
            for text in _table(**found["table"]):
                self._kept.say(text)


def main(options: Sequence[str]) -> int:
    """Run the parts that the options name."""
    given = _options(options)
    keep = given.keep or ROOT / "build" / ("gpu-emulated" if given.emulated else "gpu")
    with contextlib.closing(Kept(keep)) as kept, _scratch(kept) as scratch:
        asked = dict(emulated=given.emulated, seed=given.seed, rounds=given.rounds)
        environment = _environment(scratch, given.emulated, kept)
        until = time.monotonic() + given.limit_s
        if given.emulated:
            kept.say("No GPU is used: kernels and driver are emulated. The times mean nothing.")

        def do(name: str, before: Record | None) -> Record:
            left = until - time.monotonic()
            kept.begin()
            kept.say(f"-- {name} ({left:.0f} s left)")
            record = Run(name, asked, environment, kept).run(min(PARTS[name].limit_s, left), before)
            kept.say(f"-- {name}: {record['outcome']} {record['why']}".rstrip())
            return record

        here = do(ENVIRONMENT, None)
        facts = {fact["fact"]: fact for fact in here["facts"]}
        machine = "; ".join(facts[x]["value"] for x in ("GPU", "torch", "triton") if x in facts)
        made_of = {"tree": _tree(), "machine": machine, **asked}
        kept.keep(ENVIRONMENT, {**here, "made_of": made_of})
        missing = {name: fact["missing"] for name, fact in facts.items() if fact["missing"]}
        if "GPU" in missing and not given.emulated:
            torch = f"torch: {missing['torch']}" if "torch" in missing else missing["GPU"]
            kept.say(f"NOTHING WAS RUN: {torch}.")
            return 1 if "torch" in missing else 0
        outcomes = {ENVIRONMENT: here}
        for name in _in_order(given, kept, made_of):
            before = kept.parts.get(name)
            same = before is not None and before["made_of"] == made_of and not given.again
            if same and before["outcome"] == "passed" and not given.only:
                outcomes[name] = {**before, "why": "kept"}
            elif lacks := [f"{x} ({missing[x]})" for x in PARTS[name].needs if x in missing]:
                outcomes[name] = _not_run("skipped", f"it needs {', '.join(lacks)}")
            elif until - time.monotonic() < LEAST_S:
                outcomes[name] = _not_run("not begun", "no time was left: run the same again")
            else:
                outcomes[name] = do(name, before if same else None)
                kept.keep(name, {**outcomes[name], "made_of": made_of})
        return _end(outcomes, given.emulated, kept)


def _options(options: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Check and time all that runs on a GPU.",
        epilog=f"Parts, in order of worth: {', '.join(PARTS)}.",
    )
    parser.add_argument("--checks", action="store_true", help="the checks alone, no speeds")
    parser.add_argument("--only", default="", metavar="PART,PART", help="these, and anew")
    parser.add_argument("--again", action="store_true", help="also what has passed")
    parser.add_argument("--emulated", action="store_true", help="all of it, small, without a GPU")
    parser.add_argument("--keep", type=Path, help="folder of the results (build/gpu)")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for all (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of candidates (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (%(default)s)")
    given = parser.parse_args(options)
    if unknown := sorted({*filter(None, given.only.split(","))} - {*PARTS}):
        parser.error(f"--only {', '.join(unknown)}: known parts are {', '.join(PARTS)}")
    if given.emulated:
        given.rounds = 1
    return given


def _in_order(given: argparse.Namespace, kept: Kept, made_of: Record) -> list[str]:
    """What was never done, in order of worth; then what failed; then what another tree did."""

    def turn(name: str) -> int:
        before = kept.parts.get(name)
        if before is None or given.again or given.only:
            return 0
        return 1 if before["made_of"] == made_of else 2

    chosen = given.only.split(",") if given.only else [*PARTS]
    wanted = [x for x in chosen if x != ENVIRONMENT and (not given.checks or PARTS[x].is_check)]
    return sorted(wanted, key=turn)


def _not_run(outcome: str, why: str) -> Record:
    return {"outcome": outcome, "why": why, "seconds": 0.0, "tests": {}, "claims": [], "tail": []}


def _end(outcomes: dict[str, Record], emulated: bool, kept: Kept) -> int:
    rows, claims, good = [], [], True
    for name, record in outcomes.items():
        counts = Counter(outcome for outcome, *_ in record["tests"].values())
        tests = [str(counts[kind]) for kind in ("passed", "failed", "skipped")]
        tests = tests if PARTS[name].is_check else [""] * 3
        rows.append([name, record["outcome"], f"{record['seconds']:.0f}", *tests, record["why"]])
        claims += record["claims"]
        done = record["outcome"] == "passed"
        if PARTS[name].is_check:
            good &= done or (record["outcome"] == "skipped" and bool(record["tests"]))
            claims.append(_claim(name, counts, done))
        else:
            good &= record["outcome"] in ("passed", "skipped", "not begun")
        if record["tail"]:
            kept.say(f"-- the last lines of {name}:")
        for line in record["tail"]:
            kept.say(f"  | {line}")
    kept.begin()
    kept.say()
    for line in _table("", ("part", "outcome", "s", "passed", "failed", "skipped", "why"), rows):
        kept.say(line)
    for claim in claims:
        timed = claim.pop("timed", False)
        if emulated:
            claim |= {"emulated": True} | ({"holds": None} if timed else {})
        kept.say(json.dumps(claim))
    return 0 if good else 1


def _claim(name: str, counts: Counter[str], done: bool) -> Record:
    return {
        "claim": f"{name}: tests that failed, of {sum(counts.values())}",
        "ours": counts["failed"],
        "peer": None,
        "unit": "tests",
        "ratio": None,
        "goal": "== 0, and all ran",
        "holds": done,
    }


def _table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    lines = [[*columns], *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if title:
        yield title
    for line in lines:
        yield "  ".join(x.ljust(width) for x, width in zip(line, widths, strict=True)).rstrip()


def _tree() -> str:
    """What was run: the same text, the same name."""
    said = hashlib.sha256()
    for folder in ("src", "tests", "benchmarks/gpu"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            said.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return said.hexdigest()[:16]


@contextlib.contextmanager
def _scratch(kept: Kept) -> Iterator[Path | None]:
    """A folder for what has to be written and has no place; None where there is none at all."""
    for folder in (None, ROOT / "build", Path("/dev/shm"), Path("/tmp"), Path("/var/tmp")):
        with contextlib.suppress(OSError):
            made = Path(tempfile.mkdtemp(prefix="quire-gpu-", dir=folder))
            break
    else:
        kept.say("No folder can be written to: what needs one fails.")
        yield None
        return
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _environment(scratch: Path | None, emulated: bool, kept: Kept) -> dict[str, str]:
    """Of every part: Quire and its tests from this tree; folders that can be written to."""
    own = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]
    inherited = os.environ.get("PYTHONPATH")
    made = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*own, *([inherited] if inherited else [])]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        **({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if emulated else {}),
    }
    if scratch is None:
        return made
    made["TMPDIR"] = str(scratch)
    for name in WRITTEN:
        at = os.environ.get(name, str(Path.home()) if name == "HOME" else None)
        if at is not None and not _can_be_written(Path(at)):
            kept.say(f"{name}: {at} cannot be written to: {scratch / name} is taken")
            (scratch / name).mkdir()
            made[name] = str(scratch / name)
    return made


def _can_be_written(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends what is running, too
    sys.exit(main(sys.argv[1:]))
