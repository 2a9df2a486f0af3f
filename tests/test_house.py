"""The documents' commands and links lead somewhere, examples run, and no test is left out."""

import re
from pathlib import Path

import pytest

from documents import DOCUMENTS, ROOT, name_of
from forks import run_fork

AREA = "benchmarks.AREA.NAME"  # how benchmarks are run, said once
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_EXAMPLE_LINES, MAX_PLUGIN_LINES = 40, 90
PLUGINS = ("attention_backend", "eviction_policy", "tier")  # whole ones, which guides explain

LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:|#)(?P<target>[^)#\s]+)")


RUN = "import os, runpy, sys\nsys.path.insert(0, os.path.dirname(sys.argv[1]))\nsys.argv.pop(0)\n"
RUN += "runpy.run_path(sys.argv[0], run_name='__main__')\nsys.stdout.flush()\n"
RUN += "os._exit(0)  # to take the libraries apart takes longer than what was run"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_command_in_a_document_exists(path: Path) -> None:
    from quire.cli import COMMANDS

    text = path.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):(?!=)", makefile, re.MULTILINE))
    # Commands stand at the beginning of a line or of a code span; prose may say "make" elsewhere.
    verbs = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    commands = set(re.findall(r"(?:^|`)quire ([a-z][a-z-]*)", text, re.MULTILINE))
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


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_every_example_is_short_and_runs(path: Path, tmp_path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    most = MAX_PLUGIN_LINES if path.stem in PLUGINS else MAX_EXAMPLE_LINES
    assert num_lines <= most, f"{num_lines} lines: it has at most {most}, to be read at a glance"
    done = run_fork(RUN, str(path), cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example prints what it shows"


def test_no_test_is_marked_slow() -> None:
    slow = [
        f"{name_of(path)}:{number}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"mark\.slow\b", line)
    ]
    assert not slow, f"a test that is not run proves nothing; make it fast: {', '.join(slow)}"
