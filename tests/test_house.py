"""The documents' commands and links lead somewhere, and figures are those that were measured."""

import re
from pathlib import Path

import pytest

from documents import DOCUMENTS, ROOT, name_of

AREA = "benchmarks.AREA.NAME"  # how benchmarks are run, said once

LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:|#)(?P<target>[^)#\s]+)")


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


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_no_merge_was_left_half_done(path: Path) -> None:
    left = re.findall(r"^(?:<{7} |={7}$|>{7} ).*", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert not left, f"{name_of(path)} has {left[0]!r}"


def test_the_figures_of_the_readme_are_those_of_the_measurements() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[\w[^|]*\]\((benchmarks/\S+)\)(.*)\|$", readme, re.MULTILINE)
    assert len(rows) > 4
    for page, row in rows:
        measured = (ROOT / page).read_text(encoding="utf-8")
        _, ours, theirs, command, _ = row.split("|")
        for figure in re.findall(r"[\d.,]*\d(?: (?:MiB|GiB|ms))?", ours + theirs):
            assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", measured), figure
        area = Path(page).parent.name
        for given in re.findall(r"`(.+)`", command):
            assert f"python -m benchmarks.{area}.{given}" in measured, given


def test_no_test_is_marked_slow() -> None:
    slow = [
        f"{name_of(path)}:{number}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"mark\.slow\b", line)
    ]
    assert not slow, f"a test that is not run proves nothing; make it fast: {', '.join(slow)}"
