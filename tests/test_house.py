"""What the documents promise holds: commands, links, code blocks and figures."""

import re
from pathlib import Path

import pytest

from forks import run_program

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "benchmarks", "examples")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))]
)
AREA = "benchmarks.AREA.NAME"  # how benchmarks are run, said once

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
def test_every_python_block_compiles_and_some_run(path: Path, tmp_path: Path) -> None:
    for line, code, runs in blocks(path):
        where = f"{name_of(path)}:{line}"
        try:
            compile(code, where, "exec")
        except SyntaxError as error:
            pytest.fail(f"{where}: the block is not Python: {error}", pytrace=False)
        if runs:
            block, folder = tmp_path / f"block_{line}.py", tmp_path / str(line)
            block.write_text(code, encoding="utf-8")
            folder.mkdir()
            done = run_program(block, cwd=folder, timeout=300)
            assert done.returncode == 0, f"{where}: the block fails:\n{done.stderr}"


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
