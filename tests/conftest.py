"""How every test runs: one thread, offline, seeded, and in CI with the same examples each time."""

import logging
import os
import random
import shutil
import tempfile
from collections.abc import Iterator

# Before torch and Transformers are imported, and inherited by processes that tests start. Tiny
# models lose on two threads: where both cores were busy, generate() took 19-23 s against 0.7-1.2 s.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# Machine code of this session: nothing is found that another one compiled, and nothing is left.
os.environ["QUIRE_CACHE_DIR"] = tempfile.mkdtemp(prefix="quire-kernels-")

import numpy as np
import pytest
import torch
from hypothesis import settings

# Kernels in Triton: on a GPU where there is one, else in the interpreter, which is chosen for good
# when Triton is imported. That is not before a test asks for it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_configure(config: pytest.Config) -> None:
    """Triton's kernels run in its interpreter, but for the tests that are asked to use a GPU.

    The choice is made for good when Triton is imported, which no test does that does not need it.
    """
    if not str(config.getoption("--device", "cpu")).startswith("cuda"):
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Weights and samples that a test does not seed itself are the same in every order of tests."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _logging_as_found() -> Iterator[None]:
    """`quire serve` sets the process's logging up: in a test's process, for that test only."""
    names = ("quire", "uvicorn", "uvicorn.error", "uvicorn.access")
    loggers = [logging.getLogger(name) for name in names]
    found = [(x.level, x.propagate, [*x.handlers], [*x.filters]) for x in loggers]
    yield
    for x, (level, propagate, handlers, filters) in zip(loggers, found, strict=True):
        x.setLevel(level)
        x.propagate, x.handlers, x.filters = propagate, handlers, filters


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["QUIRE_CACHE_DIR"], ignore_errors=True)
