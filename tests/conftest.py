"""How every test runs: one thread, offline, seeded, and in CI with the same examples each time."""

import os
import random
import shutil
import tempfile

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

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Weights and samples that a test does not seed itself are the same in every order of tests."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["QUIRE_CACHE_DIR"], ignore_errors=True)
