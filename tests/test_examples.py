"""Each example is short, says how to run it, runs on the demo model, and is in the table."""

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from forks import run_program

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
MAX_LINES, MAX_PLUGIN_LINES = 40, 90
PLUGINS = ("attention_backend", "eviction_policy", "tier")  # whole ones, which guides explain


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short_and_runs(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    num_lines = len(text.splitlines())
    most = MAX_PLUGIN_LINES if path.stem in PLUGINS else MAX_LINES
    assert num_lines <= most, f"{num_lines} lines: it has at most {most}, to be read at a glance"
    assert f"\nRun: python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")
    done = run_program(path, cwd=tmp_path, timeout=300)
    if path.stem == "evaluate" and find_spec("lm_eval") is None:
        assert done.returncode == 1
        assert 'pip install "lm-eval[api]"' in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example prints what it shows"


def test_it_takes_a_model_and_a_file(tmp_path: Path) -> None:
    asked = tmp_path / "in.jsonl"
    asked.write_text('{"prompt": "def f(x):", "max_tokens": 2}\n{"prompt": "a = "}\n')
    model = ROOT / "src" / "quire" / "demo_model"
    done = run_program(FOLDER / "batch.py", str(model), str(asked), cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["line"] for answer in answers] == [1, 2]  # the short one ends first
    assert all(answer["finish_reason"] == "length" for answer in answers)


def test_the_table_of_examples_is_whole() -> None:
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(\S+\.py)\]\(\1\)", table, re.MULTILINE)
    assert sorted(listed) == [path.name for path in EXAMPLES]
