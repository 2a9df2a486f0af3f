"""What the documents promise holds: commands, links, code blocks and examples."""

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from forks import run_fork

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "benchmarks", "examples")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))]
)
AREA = "benchmarks.AREA.NAME"  # how benchmarks are run, said once
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_EXAMPLE_LINES, MAX_PLUGIN_LINES = 40, 90
PLUGINS = ("attention_backend", "eviction_policy", "tier")  # whole ones, which guides explain

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
            done = run_fork(RUN, str(block), cwd=folder, timeout=300)
            assert done.returncode == 0, f"{where}: the block fails:\n{done.stderr}"


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_every_example_is_short_and_runs(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    num_lines = len(text.splitlines())
    most = MAX_PLUGIN_LINES if path.stem in PLUGINS else MAX_EXAMPLE_LINES
    assert num_lines <= most, f"{num_lines} lines: it has at most {most}, to be read at a glance"
    assert f"\nRun: python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")
    done = run_fork(RUN, str(path), cwd=tmp_path, timeout=300)
    if path.stem == "evaluate" and find_spec("lm_eval") is None:
        assert done.returncode == 1
        assert 'pip install "lm-eval[api]"' in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example prints what it shows"


def test_an_example_takes_a_model(tmp_path: Path) -> None:
    folder = ROOT / "src" / "quire" / "demo_model"
    asked = tmp_path / "in.jsonl"
    asked.write_text('{"prompt": "def f(x):", "max_tokens": 2}\n{"prompt": "a = "}\n')
    batch = str(ROOT / "examples" / "batch.py")
    done = run_fork(RUN, batch, str(folder), str(asked), cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["line"] for answer in answers] == [1, 2]  # the short one ends first
    assert all(answer["finish_reason"] == "length" for answer in answers)


def test_the_table_of_examples_is_whole() -> None:
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(\S+\.py)\]\(\1\)", table, re.MULTILINE)
    assert sorted(listed) == [path.name for path in EXAMPLES]


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
