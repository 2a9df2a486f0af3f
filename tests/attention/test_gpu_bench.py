"""The benchmark of a GPU runs where there is none, every part of it, as far as that goes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench_gpu import PARTS, app
from typer.testing import CliRunner, Result

ROOT = Path(__file__).parents[2]


def here(*options: str) -> Result:
    """In this process, which has imported what it needs."""
    return CliRunner().invoke(app, options)


def run(*options: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_gpu.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    said = here("--claims")
    assert said.exit_code == 0
    assert "There is no GPU" in said.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_tests_say_so() -> None:
    command = [sys.executable, str(ROOT / "tools" / "gpu_tests.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "test-gpu: NOTHING WAS RUN: torch" in done.stdout


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(name, marks=[] if name == "session" else pytest.mark.full)
        for name in PARTS
        if name != "engine"
    ],
)
def test_a_part_runs_where_all_is_emulated(part: str, tmp_path: Path) -> None:
    """And claims nothing about speed."""
    out = run("--emulated", "--claims", "--only", part, "--keep", str(tmp_path))
    assert "The times mean nothing" in out
    claims = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert all(claim["emulated"] for claim in claims)
    assert all(claim["holds"] in (True, None) for claim in claims), claims
    assert bool(claims) == (part != "bandwidth")
    assert (tmp_path / "emulated" / f"{part}.json").exists()


@pytest.mark.full
def test_the_engines_run_where_all_is_emulated(tmp_path: Path) -> None:
    out = run("--emulated", "--claims", "--only", "engine", "--keep", str(tmp_path))
    (claim,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert claim["holds"] is None
    assert claim["ours"] > 0 < claim["peer"]


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    folder = tmp_path / "emulated"
    folder.mkdir()
    empty = {"tables": [], "notes": ["found where it was kept"], "claims": []}
    for part in PARTS:
        (folder / f"{part}.json").write_text(json.dumps(empty))
    said = here("--emulated", "--keep", str(tmp_path))
    assert said.output.count("found where it was kept") == len(PARTS)


def test_an_unknown_part_is_refused() -> None:
    said = here("--only", "decoding", "--emulated")
    assert said.exit_code == 2
    assert "known parts are bandwidth, decode" in " ".join(said.output.replace("│", " ").split())
