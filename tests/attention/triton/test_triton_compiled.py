"""Every kernel compiles for GPUs that are not here, fits there, and keeps its numbers in registers.

That is Triton's compiler and NVIDIA's assembler, without a device: nothing has run. Each
architecture is compiled for in a process of its own, one that is not interpreted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="no triton here: it is made for Linux")

from attention.triton.compiling import KINDS, SHARED_BYTES

TESTS = Path(__file__).parents[2]
OTHER_TRITON = TESTS.parent / ".venv-triton-3.6"  # torch 2.11's: make test-triton fetches it
# Of a thread, on the stack. A few are kept there around the loop; more would be moved within it.
MOST_SPILLED_BYTES = 64


def compile_for(
    architecture: int, kinds: list[str], cache: Path, triton: Path | None
) -> list[dict[str, Any]]:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    first = [str(triton)] if triton else []
    environment["PYTHONPATH"] = os.pathsep.join([*first, str(TESTS), *filter(None, sys.path)])
    program = Path(__file__).with_name("compiling.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", program, str(architecture), *kinds],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(architecture: int, kinds: list[str], cache: Path, triton: Path | None = None) -> None:
    rows = compile_for(architecture, kinds, cache, triton)
    assert {row["triton"].startswith("3.6.") for row in rows} == {triton is not None}
    assert {row["kind"] for row in rows} == set(kinds)
    for row in rows:
        assert row["shared_bytes"] <= SHARED_BYTES[architecture], row
        assert row["spilled_bytes"] <= MOST_SPILLED_BYTES, row
        assert 32 * row["num_warps"] * row["registers"] <= 65536, row
        if row["kernel"] == "attend" and not row["kind"].startswith("float32"):
            assert row["copies_ahead"], row
            assert row["tensor_cores"], row


@pytest.mark.full
@pytest.mark.parametrize(
    ("architecture", "kinds"),
    [
        (90, ["int8"]),
        pytest.param(80, ["fp8"], marks=pytest.mark.full),
        pytest.param(100, ["llama"], marks=pytest.mark.full),
    ],
)
def test_the_kernels_compile_and_fit(architecture: int, kinds: list[str], tmp_path: Path) -> None:
    check(architecture, kinds, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("triton", [None, OTHER_TRITON], ids=["the-one-here", "3.6"])
def test_every_kind_compiles_for_hopper(triton: Path | None, tmp_path: Path) -> None:
    """``make test-triton``, which CI runs."""
    if triton is not None and not (triton / "triton").is_dir():
        pytest.skip("there is no Triton 3.6 (make test-triton fetches it)")
    check(90, list(KINDS), tmp_path, triton)


@pytest.mark.full
@pytest.mark.parametrize("architecture", sorted({*SHARED_BYTES} - {90}))
def test_every_kind_compiles_for_every_gpu(architecture: int, tmp_path: Path) -> None:
    check(architecture, list(KINDS), tmp_path)
