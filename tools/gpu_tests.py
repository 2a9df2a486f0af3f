"""Everything that a GPU can be tested with: ``make test-gpu``. Where there is none, it says so.

    python tools/gpu_tests.py [OPTIONS OF PYTEST]

It runs the tests that are marked ``gpu``, and those marked ``device``, which follow ``--device``:
the conformance suites with the real driver's memory and the real kernels, and the engine against
``generate()`` with each strategy. It needs torch for CUDA, Transformers, pytest and hypothesis, in
any environment; no other test is so much as imported.
"""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"pytest\.mark\.(gpu|device)\b")
DEVICE = "cuda"


def main(options: list[str]) -> int:
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    try:
        import torch

        target = import_module("target")  # of the tests
    except ImportError as error:
        print(f"test-gpu: {error}, so nothing was run. Python: {sys.executable}", file=sys.stderr)
        return 1
    if (why := target.why_no_gpu()) is not None:
        print(f"test-gpu: NOTHING WAS RUN: {why}.")
        return 0
    print(f"test-gpu: {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(ROOT / "src"), str(ROOT / "tests"), *([inherited] if inherited else [])]
    return subprocess.call(
        [
            *(sys.executable, "-m", "pytest", "--device", DEVICE, "-m", "gpu or device"),
            # Other releases warn of other things; what they compute is what counts here.
            *("-W", "default", "-p", "no:cacheprovider", "-q", "--durations", "10"),
            *options,
            *marked_files(),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def marked_files() -> list[str]:
    """Those with such a mark: others may need what is not installed there."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path) for path in found if MARKED.search(path.read_text())]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
