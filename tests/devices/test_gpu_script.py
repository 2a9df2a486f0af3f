"""The script for a GPU where there is none: its parts emulated, and whatever goes wrong with one.

What goes wrong is done by a part of the tests' own, in the place of ``benchmarks.gpu.part``.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import check, environment, process, run, throughput
from benchmarks.gpu.attention import DECODE, ERROR, Checked, small, step
from benchmarks.gpu.parts import ENVIRONMENT, PARTS, Part
from benchmarks.gpu.setting import Setting
from quire.attention import ReferenceAttention

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
MARKED = re.compile(r"pytest\.mark\.(gpu|device)\b")


def test_what_is_marked_for_a_device_belongs_to_one_part() -> None:
    """Also where a fixture has the mark: ``way`` of the samplers, a module of whose is marked."""
    tests = {path: path.read_text() for path in TESTS.rglob("test_*.py")}
    ways = TESTS / "engine" / "sampling"
    assert MARKED.search((ways / "cases.py").read_text())
    others = [x for x in TESTS.rglob("*.py") if x not in tests and MARKED.search(x.read_text())]
    assert others == [ways / "cases.py"]
    marked = {path for path, text in tests.items() if MARKED.search(text)}
    marked |= {path for path in ways.glob("test_*.py") if re.search(r'"way"|\(way', tests[path])}
    divided = {
        "conformance/test_attention_gpu.py": ["flashinfer", "not flashinfer"],
        # On a GPU it asks FlashInfer for nothing: its kernels know other widths.
        "conformance/test_attention.py": ["not flashinfer"],
    }
    wanted = [
        (name, select)
        for name in (str(path.relative_to(TESTS)) for path in marked)
        for select in divided.get(name, [""])
    ]
    of_parts = [(name, part.select) for part in PARTS.values() for name in part.files]
    assert sorted(of_parts) == sorted(wanted)


# -- whatever goes wrong -------------------------------------------------------------------------

PART = """
import faulthandler, json, os, signal, subprocess, sys, time
faulthandler.register(signal.SIGUSR1)
from benchmarks.gpu.parts import ENVIRONMENT, tell
asked = json.load(sys.stdin)
name, done = asked["part"], asked["done"]
facts = {"torch": None, "GPU": None, **json.loads(os.environ["FACTS"])}
if name == ENVIRONMENT:
    for fact, missing in facts.items():
        tell(fact=fact, value=missing or "here", missing=missing)
    sys.exit()
def test(name, outcome="passed"):
    if name in done:
        return
    tell(begun=name)
    if outcome == "dies":
        print("about to fault", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if outcome == "hangs":
        subprocess.Popen(["sh", "-c", "sleep 60; : " + os.environ["KEEP"]])
        time.sleep(60)
    tell(test=name, outcome="failed" if outcome == "lost" else outcome, why="", seconds=0.1)
    tell(finished=name)
    if outcome == "lost":
        tell(lost="an illegal memory access was encountered")
        sys.exit(2)
for step in json.loads(os.environ["SCENE"]).get(name, []):
    match step:
        case ["test", *rest]: test(*rest)
        case ["say", text]: print(text, end="", flush=True)
        case ["tell", found]: tell(**found)
        case ["end", code]: sys.exit(code)
        case ["hang"]: time.sleep(60)
        case ["leave"]: subprocess.Popen(["sleep", "60"])
        case ["given", name]: tell(note=f"{name}={os.environ.get(name)}")
        case ["last"]: tell(note=f"last: {asked['last']}")
        case ["flood"]: print(("x" * 100 + chr(10)) * 11_000, flush=True)
"""
CHECK, SPEED = Part(limit_s=60, quiet_s=9.0, files=("some.py",)), Part(limit_s=60)


class Scene:
    """The script with parts that do what a test says."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._patch, self.keep = patch, folder / "keep"
        (folder / "part_of_the_test.py").write_text(PART)
        path = os.pathsep.join([str(folder), str(ROOT)])
        self._patch.setattr(process, "PART", "part_of_the_test")
        self._patch.setattr(
            run, "_environment", lambda *_: {**os.environ, "PYTHONPATH": path, **self._env}
        )
        self._patch.setattr(run, "_tree", lambda: self.tree)
        self._patch.setattr(run, "LEAST_S", 0.0)
        self.tree, self.facts, self._env = "a tree", {}, {}

    def play(self, parts: dict[str, Part], scene: dict[str, Any], *options: str) -> int:
        known = {ENVIRONMENT: Part(limit_s=20, needs=()), **parts}
        for module in (run, sys.modules["benchmarks.gpu.parts"]):
            self._patch.setattr(module, "PARTS", MappingProxyType(known))
        self._env = {"SCENE": json.dumps(scene), "FACTS": json.dumps(self.facts)}
        self._env["KEEP"] = str(self.keep)
        return run.main(["--keep", str(self.keep), *options])

    @property
    def kept(self) -> dict[str, Any]:
        return json.loads((self.keep / "results.json").read_text())["parts"]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def outcomes(out: str) -> dict[str, list[str]]:
    """The table at the end: its rows, by the part's name."""
    lines = out[out.rindex("\npart ") + 1 :].splitlines()
    rows = [line.split() for line in lines[1:] if line and not line.startswith("{")]
    return {name: rest for name, *rest in rows}


def test_one_that_dies_or_hangs_takes_one_test_with_it(scene: Scene, capfd: Any) -> None:
    told = [
        ["test", "a"], ["test", "b", "dies"], ["test", "c", "lost"], ["test", "d", "hangs"],
        ["test", "e"], ["test", "f", "skipped"],
    ]  # fmt: skip
    hangs = Part(limit_s=60, quiet_s=2.0, files=("some.py",))
    assert scene.play({"one": hangs, "two": CHECK}, {"one": told, "two": [["test", "x"]]}) == 1
    out = capfd.readouterr().out
    assert scene.kept["one"]["tests"] == {
        "a": ["passed", 0.1, ""],
        "b": ["failed", 0.0, "died of SIGSEGV"],
        "c": ["failed", 0.1, ""],
        "d": ["failed", 0.0, "hung: no output for 2 s"],
        "e": ["passed", 0.1, ""],
        "f": ["skipped", 0.1, ""],
    }
    assert outcomes(out)["one"][0] == "failed"
    assert outcomes(out)["one"][2:5] == ["2", "3", "1"]
    assert outcomes(out)["two"][0] == "passed"
    assert "-- the last lines of one:\n  | about to fault" in out
    claims = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [(claim["ours"], claim["holds"]) for claim in claims] == [(3, False), (0, True)]


def test_another_call_does_what_is_missing_and_then_what_failed(scene: Scene, capfd: Any) -> None:
    parts = {"first": CHECK, "second": CHECK, "speed": SPEED}
    bad = [["test", "a"], ["test", "b", "failed"]]
    claim = {"claim": "fast", "holds": True}
    everything = {"first": bad, "second": [["test", "c"]], "speed": [["tell", {"claim": claim}]]}
    assert scene.play(parts, everything, "--only", "first") == 1
    capfd.readouterr()
    mended = {**everything, "first": [["test", "a"], ["test", "b"]]}
    assert scene.play(parts, mended, "--checks") == 0
    out = capfd.readouterr().out
    assert out.index("-- second (") < out.index("-- first (")
    assert set(outcomes(out)) == {ENVIRONMENT, "first", "second"}
    assert scene.kept["first"]["tests"] == {"a": ["passed", 0.1, ""], "b": ["passed", 0.1, ""]}
    assert scene.play(parts, everything) == 0  # `first` has passed: it is not done again
    out = capfd.readouterr().out
    assert "-- first (" not in out
    assert outcomes(out)["first"][-1] == "kept"
    assert json.dumps(claim) in out
    scene.tree = "another"
    assert scene.play(parts, everything) == 1
    assert "-- first (" in capfd.readouterr().out
    log = (scene.keep / "log.txt").read_text()
    assert log.count("PASSED c") == 2
    assert sorted(path.name for path in scene.keep.iterdir()) == ["log.txt", "results.json"]


@pytest.mark.full
def test_each_part_has_a_time_of_its_own(scene: Scene, capfd: Any) -> None:
    parts = {
        "late": Part(limit_s=2, quiet_s=60, files=("some.py",)),
        "silent": Part(limit_s=60, quiet_s=2),
        "loud": SPEED,
        "ends": SPEED,
    }
    told = {
        "late": [["test", "a"], ["test", "b", "hangs"]],
        "silent": [["tell", {"note": "half"}], ["say", "no end of line"], ["hang"]],
        "loud": [["flood"]],
        "ends": [["say", "a sentence why"], ["end", 3]],
    }
    assert scene.play(parts, told) == 1
    out = capfd.readouterr().out
    assert 'part_of_the_test.py", line' in out  # where it was when it was ended
    rows = outcomes(out)
    assert " ".join(rows["late"]).endswith("1 0 0 timed out after 2 s, at b")
    assert " ".join(rows["silent"]).endswith("hung: no output for 2 s")
    assert scene.kept["silent"]["notes"] == ["half"]
    assert rows["loud"][0] == "passed"
    assert " ".join(rows["ends"]).endswith("ended with 3: a sentence why")
    assert (scene.keep / "log.txt").stat().st_size < 1.1 * run.MOST_LOGGED_BYTES


@pytest.mark.full
def test_what_a_part_leaves_running_is_not_waited_for(scene: Scene) -> None:
    assert scene.play({"one": CHECK}, {"one": [["test", "a"], ["leave"]]}) == 0
    assert scene.kept["one"]["seconds"] < 9


def test_what_another_tree_did_comes_after_what_failed_on_this_one(
    scene: Scene, capfd: Any
) -> None:
    parts, told = {"a": CHECK, "b": CHECK}, {"a": [["test", "x"]], "b": [["test", "y", "failed"]]}
    assert scene.play(parts, told, "--only", "a") == 0
    scene.tree = "another"
    assert scene.play(parts, told, "--only", "b") == 1
    capfd.readouterr()
    assert scene.play(parts, told) == 1
    out = capfd.readouterr().out
    assert out.index("-- b (") < out.index("-- a (")
    assert scene.play(parts, told) == 1
    assert "-- a (" not in capfd.readouterr().out
    assert scene.play(parts, told, "--again") == 1
    assert "-- a (" in capfd.readouterr().out


def test_a_tree_is_all_that_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ROOT", tmp_path)
    names = {run._tree()}
    for folder in ("src", "tests", "benchmarks/gpu"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "some.py").write_text("")
        names.add(run._tree())
        (tmp_path / folder / "some.py").write_text("1")
        names.add(run._tree())
    assert len(names) == 7


def test_one_that_hangs_leaves_time_for_the_others() -> None:
    """Each call would otherwise end at the same test."""
    for name, part in PARTS.items():
        assert not part.is_check or part.quiet_s <= part.limit_s - 60, name


@pytest.mark.full
def test_what_was_cut_off_or_failed_comes_last_the_next_time(scene: Scene) -> None:
    parts = {"late": Part(limit_s=2, quiet_s=60, files=("some.py",))}
    told = [["last"], ["test", "a"], ["test", "b", "failed"], ["test", "c", "hangs"]]
    assert scene.play(parts, {"late": told}) == 1
    assert scene.kept["late"]["notes"] == ["last: []"]
    assert scene.play(parts, {"late": told}) == 1
    assert scene.kept["late"]["notes"] == ["last: ['b', 'c']"]
    items: Any = [SimpleNamespace(nodeid=name) for name in "abcde"]
    asked = {"done": ["d"], "last": ["b", "c"], "shard": (0, 1), "emulated": False}
    check.Telling(asked).pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["a", "e", "b", "c"]


def test_of_a_file_the_first_and_the_last_test_are_run_where_all_is_emulated() -> None:
    def item(file: str, name: str) -> Any:
        skipped = object() if name.startswith("skipped") else None
        return SimpleNamespace(path=file, name=name, get_closest_marker=lambda _: skipped)

    names = {"x": ["skipped", "1", "2", "3"], "y": ["1"], "z": ["skipped", "skipped too"]}
    items = [item(file, name) for file, several in names.items() for name in several]
    chosen = [(each.path, each.name) for each in check.few(items)]
    assert chosen == [("x", "1"), ("x", "3"), ("y", "1"), ("z", "skipped")]


def test_tests_compute_with_one_thread_of_the_host_and_measurements_as_users_do(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch reads it when it is imported, which is before the tests' own setting."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    told = [["given", "OMP_NUM_THREADS"], ["test", "a"]]
    assert scene.play({"one": CHECK, "two": SPEED}, {"one": told, "two": told}) == 0
    assert scene.kept["one"]["notes"] == ["OMP_NUM_THREADS=1"]
    assert scene.kept["two"]["notes"] == ["OMP_NUM_THREADS=None"]


def test_a_measurement_that_finds_something_wrong_has_failed(scene: Scene, capfd: Any) -> None:
    """And is done again by another call; a speed that is not reached is only told."""
    wrong = {"claim": "the kernel beside torch", "holds": False, "timed": False}
    slow = {"claim": "beside a copy", "holds": False, "timed": True}
    parts = {"slow": SPEED, "wrong": SPEED}
    told = {"slow": [["tell", {"claim": slow}]], "wrong": [["tell", {"claim": wrong}]]}
    assert scene.play(parts, told) == 1
    rows = outcomes(capfd.readouterr().out)
    assert rows["slow"][0] == "passed"
    assert " ".join(rows["wrong"]).endswith("it does not hold: the kernel beside torch")
    scene.play(parts, told)
    assert "-- wrong (" in capfd.readouterr().out


def test_without_quire_there_is_no_throughput() -> None:
    load = throughput.Load(prompts=[[1]], answer_tokens=1, max_model_len=2, seed=0, emulated=True)
    with pytest.raises(RuntimeError, match="failed: its process ended"):
        throughput._compare(load, {"quire": "failed: its process ended with 1"}, {"quire": []})


def test_a_machine_is_known_again_whatever_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing that was kept would count."""
    facts = SimpleNamespace(
        name="A GPU", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    said = set()
    for free in (70 * 2**30, 60 * 2**30):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 80 * 2**30))
        said.add(environment._gpu(emulated=False))
    assert said == {"A GPU, capability 9.0, 132 processors, 80 GiB, CUDA 13.0"}
    assert environment._free(emulated=False) == "60.0 of 80.0 GiB"


@pytest.mark.full
def test_an_interrupted_call_leaves_nothing_running(scene: Scene, capfd: Any) -> None:
    """``timeout`` sends SIGTERM, on which the script ends as on ``sys.exit``."""

    class Seen(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Seen

    before = signal.signal(signal.SIGALRM, stop)
    hangs = {"one": [["tell", {"note": "here"}], ["test", "a", "hangs"]]}
    try:
        signal.setitimer(signal.ITIMER_REAL, 2.0)
        with pytest.raises(Seen):
            scene.play({"one": Part(limit_s=60, files=("some.py",))}, hangs)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert "here" in capfd.readouterr().out
    for other in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            assert str(scene.keep) not in other.read_text()


def test_without_time_nothing_is_begun(scene: Scene, capfd: Any) -> None:
    scene._patch.setattr(run, "LEAST_S", 1e9)
    assert scene.play({"one": CHECK, "two": SPEED}, {}) == 1
    rows = outcomes(capfd.readouterr().out)
    assert rows["one"][:2] == rows["two"][:2] == ["not", "begun"]
    assert "one" not in scene.kept


def test_without_a_gpu_it_says_so(scene: Scene, capfd: Any) -> None:
    scene.facts = {"GPU": "torch is a build without CUDA"}
    assert scene.play({"one": CHECK}, {}) == 0
    assert "NOTHING WAS RUN: torch is a build without CUDA." in capfd.readouterr().out
    scene.facts["torch"] = "No module named 'torch'"
    assert scene.play({"one": CHECK}, {}) == 1
    assert "NOTHING WAS RUN: torch: No module named 'torch'." in capfd.readouterr().out


def test_what_needs_a_package_that_is_missing_is_left_out(scene: Scene, capfd: Any) -> None:
    scene.facts = {"hypothesis": "No module named 'hypothesis'"}
    parts = {"one": Part(limit_s=9, needs=("hypothesis",), files=("x",)), "two": SPEED}
    assert scene.play(parts, {}) == 1
    rows = outcomes(capfd.readouterr().out)
    assert " ".join(rows["one"][5:]) == "it needs hypothesis (No module named 'hypothesis')"
    assert rows["two"][0] == "passed"


def test_results_that_cannot_be_read_are_made_anew(scene: Scene, capfd: Any) -> None:
    scene.keep.mkdir()
    (scene.keep / "results.json").write_text("{")
    assert scene.play({"two": SPEED}, {}) == 0
    assert "is begun anew" in capfd.readouterr().out
    assert scene.kept["two"]["outcome"] == "passed"


def test_an_unknown_part_is_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        run.main(["--only", "decoding"])
    assert "--only decoding: known parts are environment, memory" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e6])
def test_a_kernel_that_gives_no_numbers_is_wrong(wrong: float) -> None:
    setting, shape = Setting(emulated=True, seed=0, rounds=1), small(DECODE[0])
    q, view, batch = step(setting, shape)
    checked = Checked(setting, shape, q, view, batch, 0.1)
    right = ReferenceAttention()
    assert checked.error(right) <= ERROR

    class Wrong:
        def attend(self, *given: Any, **options: Any) -> torch.Tensor:
            out = right.attend(*given, **options)
            out[0, 0, 0] = wrong
            return out

    assert checked.error(Wrong()) > ERROR


# -- emulated, from end to end -------------------------------------------------------------------


def emulated(keep: Path, *options: str, **environment: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "benchmarks.gpu.run", "--emulated"]
    outer = {name: x for name, x in os.environ.items() if not name.startswith("TRITON")}
    done = subprocess.run(
        [*command, "--keep", str(keep), *options],
        capture_output=True,
        text=True,
        env={**outer, **environment},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.mark.full  # CI runs the script itself
def test_it_runs_where_all_is_emulated(tmp_path: Path) -> None:
    """From end to end. And it claims nothing about speed."""
    code, out = emulated(tmp_path)
    rows = outcomes(out)
    assert code == 0, out
    assert set(rows) == {*PARTS}
    needs_one = {"graphs", "sampling", "ranks"}
    for name in rows:
        assert rows[name][0] == ("skipped" if name in needs_one else "passed"), out
    assert int(rows["kernels"][2]) > 2  # the formula's own tests; and FlashInfer's, pretended
    assert "The times mean nothing" in out
    claims = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert len(claims) > len(PARTS)
    assert all(claim["emulated"] for claim in claims)
    assert all(
        claim["holds"] in (True, None) or claim["claim"].startswith(tuple(needs_one))
        for claim in claims
    ), claims


LACKING = "raise ImportError('planted: no such package')"
OLD = "import sys; sys.modules[__name__].__version__ = '0'"  # nothing else that is asked of it


@pytest.mark.parametrize(
    ("lacks", "parts"),
    [
        pytest.param({"torch": LACKING}, {"kernels": "skipped", "bytes": "skipped"}, id="torch"),
        *(
            pytest.param(lacks, parts, id=" ".join(lacks), marks=pytest.mark.full)
            for lacks, parts in [
                ({"triton": LACKING, "cuda": LACKING}, {"memory": "passed", "prefill": "passed"}),
                ({"triton": OLD, "transformers": OLD}, {"kernels": "passed", "prefill": "passed"}),
                ({"torch": OLD}, {"bytes": "failed", "kernels": "failed"}),
                ({"transformers": LACKING}, {"engine": "skipped", "bytes": "passed"}),
                ({"pytest": LACKING}, {"kernels": "skipped", "bytes": "passed"}),
                ({"hypothesis": LACKING}, {"kernels": "skipped", "bytes": "passed"}),
                ({"typer": LACKING, "rich": LACKING}, {"kernels": "passed", "bytes": "passed"}),
                ({"flashinfer": OLD}, {"kernels": "passed", "prefill": "passed"}),
            ]
        ),
    ],
)
def test_it_runs_what_it_can(lacks: dict[str, str], parts: dict[str, str], tmp_path: Path) -> None:
    for name, text in lacks.items():
        (tmp_path / "lacking" / name).mkdir(parents=True)
        (tmp_path / "lacking" / name / "__init__.py").write_text(text)
    path = str(tmp_path / "lacking")
    code, out = emulated(tmp_path / "keep", "--only", ",".join(parts), PYTHONPATH=path)
    rows = outcomes(out)
    assert {name: rows[name][0] for name in parts} == parts, out
    assert code == (0 if {*parts.values()} == {"passed"} else 1)
    for name, text in lacks.items():
        assert text is OLD or re.search(rf"{name}\S*: ImportError: planted: no such package", out)


@pytest.mark.full
def test_it_needs_no_folder_to_write_to(tmp_path: Path) -> None:
    nowhere = {"HOME": "/proc/home", "TMPDIR": "/proc/tmp", "TRITON_CACHE_DIR": "/proc/triton"}
    code, out = emulated(Path("/proc/keep"), "--only", "bytes", **nowhere, PATH="/nowhere")
    assert code == 0, out
    assert "HOME: /proc/home cannot be written to" in out
    assert "TRITON_CACHE_DIR: /proc/triton cannot be written to" in out
    assert "/proc/keep: [Errno 2]" in out
    assert "what is found is not kept" in out
    assert "C compiler: not found (CC, cc, gcc, clang)" in out
