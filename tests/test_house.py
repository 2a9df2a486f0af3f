"""What the documents promise holds: commands, links, code blocks and examples."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
)
AREA = "benchmarks.AREA.NAME"  # how benchmarks are run, said once
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_EXAMPLE_LINES, MAX_PLUGIN_LINES = 40, 80
PLUGINS = ("attention_backend", "eviction_policy")  # whole ones, which guides explain

# A block below this line is run, not only compiled. It must end by itself, offline, in seconds.
RUNS = "<!-- this block is run by the tests -->"
BLOCK = re.compile(
    r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```", re.DOTALL | re.MULTILINE
)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:|#)(?P<target>[^)#\s]+)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path) -> list[tuple[int, str, bool]]:
    """Each python block of a document: (line, code, whether it is to be run)."""
    text = path.read_text(encoding="utf-8")
    return [
        (
            text.count("\n", 0, match.start()) + 1,
            re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE),
            text[: match.start()].rstrip().endswith(RUNS),
        )
        for match in BLOCK.finditer(text)
    ]


# Has imported what every file needs, which takes seconds, and forks a process to run each.
RUNNER = """
import json, os, runpy, signal, sys
import quire
from quire.models.loader import load

for name in quire.__all__:
    getattr(quire, name)
load()  # with all that it imports of Transformers
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)
        os.chdir(job["cwd"])
        sys.argv, sys.path[0] = [job["path"]], os.path.dirname(job["path"])
        for number, name in enumerate(("/dev/null", "stdout", "stderr")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
        runpy.run_path(job["path"], run_name="__main__")
        sys.stdout.flush()
        os._exit(0)  # to take the libraries apart takes longer than what was run
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

Run = Callable[[Path, Path], tuple[int, str, str]]


@pytest.fixture(scope="module")
def run_python() -> Iterator[Run]:
    """Of a file, in a folder: (exit code, what it prints, and its errors)."""
    command = [sys.executable, "-c", RUNNER]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(command, env=env, text=True, **pipes) as runner:
        assert runner.stdin
        assert runner.stdout

        def run(path: Path, cwd: Path) -> tuple[int, str, str]:
            print(json.dumps({"path": str(path), "cwd": str(cwd)}), file=runner.stdin, flush=True)
            code = int(runner.stdout.readline())
            return code, (cwd / "stdout").read_text(), (cwd / "stderr").read_text()

        yield run


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_command_in_a_document_exists(path: Path) -> None:
    from quire.cli import COMMANDS

    text = path.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):(?!=)", makefile, re.MULTILINE))
    # Commands stand at the beginning of a line or of a code span; prose may say "make" elsewhere.
    verbs = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    commands = set(re.findall(r"(?:^|`)quire ([a-z-]+)", text, re.MULTILINE))
    assert verbs <= targets, f"the Makefile has no {', '.join(sorted(verbs - targets))}"
    unknown = commands - COMMANDS.keys()
    assert not unknown, f"quire has no command {', '.join(sorted(unknown))}"
    programs = set(re.findall(r"\bpython (?:-m )?([\w/.]*\bbenchmarks\b[\w/.]+)", text))
    files = {name if "/" in name else f"{name.replace('.', '/')}.py" for name in programs - {AREA}}
    absent = sorted(name for name in files if not (ROOT / name).is_file())
    assert not absent, f"there is no {', '.join(absent)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_link_to_a_file_leads_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = [match["target"] for match in LINK.finditer(text)]
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert not missing, f"{name_of(path)} links to what is not there: {', '.join(missing)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_python_block_compiles_and_some_run(
    path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for line, code, runs in blocks(path):
        where = f"{name_of(path)}:{line}"
        try:
            compile(code, where, "exec")
        except SyntaxError as error:
            pytest.fail(f"{where}: the block is not Python: {error}", pytrace=False)
        if runs:
            run: Run = request.getfixturevalue("run_python")
            block, folder = tmp_path / f"block_{line}.py", tmp_path / str(line)
            block.write_text(code, encoding="utf-8")
            folder.mkdir()
            exit_code, _, errors = run(block, folder)
            assert exit_code == 0, f"{where}: the block fails:\n{errors}"


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_every_example_is_short_and_runs(path: Path, tmp_path: Path, run_python: Run) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    most = MAX_PLUGIN_LINES if path.stem in PLUGINS else MAX_EXAMPLE_LINES
    assert num_lines <= most, f"{num_lines} lines: it has at most {most}, to be read at a glance"
    exit_code, shown, errors = run_python(path, tmp_path)
    assert exit_code == 0, errors
    assert shown.strip(), "an example prints what it shows"


def test_no_test_is_marked_slow() -> None:
    slow = [
        f"{name_of(path)}:{number}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"mark\.slow\b", line)
    ]
    assert not slow, f"a test that is not run proves nothing; make it fast: {', '.join(slow)}"
