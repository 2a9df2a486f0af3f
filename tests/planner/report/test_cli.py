"""``quire simulate --report``: a file, or a sentence that says why not."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli import command_line
from quire.errors import QuireError


def trace(folder: Path, *, with_ids: bool = True) -> str:
    path = folder / "trace.jsonl"
    rows = [
        {"timestamp": 40 * n, "input_length": 100 + n, "output_length": 10, "hash_ids": [n % 3]}
        for n in range(12)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def options(source: str, report: Path) -> list[str]:
    return [
        *("simulate", source, "--device", "h100", "--cache", "contiguous,paged"),
        *("--max-model-len", "512", "--kv-cache-memory-bytes", "256MB", "--report", str(report)),
    ]


def test_a_page_of_both_strategies(tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    result = CliRunner().invoke(command_line(["simulate"]), options(trace(tmp_path), page))
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    assert "trace.jsonl on demo" in text
    for section in ("memory", "utilization", "generated", "latency", "work", "prefixes"):
        assert f'<h2 id="{section}">' in text
    assert "a roofline of h100" in text


@pytest.mark.parametrize("name", ["no/folder/out.html", "."])
def test_a_file_that_cannot_be_is_said_before_the_work(tmp_path: Path, name: str) -> None:
    asked = options("no trace at all", tmp_path / name)
    result = CliRunner().invoke(command_line(["simulate"]), asked)
    assert result.exit_code
    assert isinstance(result.exception, QuireError)
    assert "--report" in str(result.exception)
