"""The benchmark of a GPU's memory runs where there is none, as far as that goes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "bench_cuda_memory.py"


def run(*options: str) -> str:
    command = [sys.executable, str(PROGRAM), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    assert "There is no GPU here" in run("--claims")


def test_all_of_it_runs_on_the_emulator() -> None:
    lines = run("--emulated", "--claims", "--rounds", "1").splitlines()
    assert "No GPU is used" in lines[0]
    claims = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(claims) == 4
    assert all(claim["holds"] for claim in claims)
    text = "\n".join(lines)
    for layers in (1, 4, 6, 12):
        assert f"{layers} layers a page" in text
