"""How every test runs: one thread, offline, seeded, and in CI with the same examples each time."""

import atexit
import gc
import logging
import os
import random
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

# Before torch and Transformers are imported, and inherited by processes that tests start. Tiny
# models lose on two threads: where both cores were busy, generate() took 19-23 s against 0.7-1.2 s.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# Machine code is kept from one session to the next, apart from the user's own: to compile it takes
# a minute. A name covers the sources and the compiler, so what another source made is not found.
os.environ["QUIRE_CACHE_DIR"] = str(
    Path(tempfile.gettempdir()) / f"quire-kernels-of-tests-{os.getuid()}"
)

# A worker has told all that it found when it ends: to take the libraries apart takes seconds. What
# other modules do at the end comes before this.
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)
    gc.disable()  # what imports make, stays

import numpy as np
import pytest
import torch
from hypothesis import settings

import target
from conformance import covering, named
from quire.errors import ConfigError

gc.enable()

settings.register_profile("dev", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        help="where suites marked `device` run: cpu, cuda, cuda:1 (make test-gpu), emulated",
    )
    for option, suites in (("--strategy", "accounting and storage"), ("--provider", "memory")):
        parser.addoption(
            option,
            help=f"run the conformance suites of {suites} alone, on what has this name: one of "
            f"Quire's own, or one that an installed package adds",
        )
    for name in ("--attention-backend", "--eviction-policy"):
        parser.addoption(
            name, help="the registered name that tests/conformance asks, instead of Quire's own"
        )
    parser.addoption(
        "--tier", help="the address of a tier that tests/conformance asks, instead of Quire's own"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Triton's kernels run in its interpreter, but for the tests that are asked to use a GPU.

    The choice is made for good when Triton is imported, which no test does that does not need it.
    """
    os.environ[target.OPTION] = config.getoption("--device")
    covering.run_all("not full" not in config.getoption("markexpr"))
    try:
        named.choose({option: config.getoption(option) for option in named.OPTIONS})
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error
    if not target.on_gpu():
        os.environ["TRITON_INTERPRET"] = "1"
    if target.on_gpu() and (why := target.why_no_gpu()) is not None:
        raise pytest.UsageError(f"--device {target.device()}: {why}")


@pytest.hookimpl(tryfirst=True)  # before those marked `full` are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in covering.beyond_samples(items):
        item.add_marker(pytest.mark.full)
    if named.is_chosen():
        others = [item for item in items if not named.concerns(item)]
        items[:] = [item for item in items if named.concerns(item)]
        config.hook.pytest_deselected(items=others)
    if target.on_gpu():
        return
    skip = pytest.mark.skip(reason="needs a GPU: make test-gpu, where there is one")
    for item in items:
        needs = item.get_closest_marker("gpu")
        emulated = target.name() == target.EMULATED
        if needs and not (emulated and needs.kwargs.get("emulated")):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # what imports and collects makes, stays
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    _keep_what_is_there()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is not None and nextitem.path != item.path:
        _keep_what_is_there()  # a file imports more, and a server's end unfreezes all of it


def _keep_what_is_there() -> None:
    """It stays to the end, and to look through it would take a collection half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _waited_for(request: pytest.FixtureRequest) -> Iterator[None]:
    """``device(default=True)``: what a test makes without saying where, it makes there."""
    marked = request.node.get_closest_marker("device")
    by_default = target.on_gpu() and marked and marked.kwargs.get("default")
    with target.waited_for(), target.device() if by_default else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Weights and samples that a test does not seed itself are the same in every order of tests."""
    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed() asks every kind of device besides, which takes longer than many a test.
    torch.manual_seed(0) if target.on_gpu() else torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _logging_as_found() -> Iterator[None]:
    """`quire serve` sets the process's logging up: in a test's process, for that test only."""
    names = ("quire", "uvicorn", "uvicorn.error", "uvicorn.access")
    loggers = [logging.getLogger(name) for name in names]
    found = [(x.level, x.propagate, [*x.handlers], [*x.filters]) for x in loggers]
    yield
    for x, (level, propagate, handlers, filters) in zip(loggers, found, strict=True):
        if x.level != level:  # to set it forgets what all loggers know
            x.setLevel(level)
        x.propagate, x.handlers, x.filters = propagate, handlers, filters


@pytest.hookimpl(trylast=True)  # after pytest's own, which looks through all of it five times
def pytest_unconfigure() -> None:
    gc.unfreeze()  # so that a library that counts what is left finds nothing
    week_ago_s = time.time() - 7 * 86_400
    for file in Path(os.environ["QUIRE_CACHE_DIR"]).glob("*"):
        with suppress(OSError):  # another session's hand was quicker
            if file.stat().st_mtime < week_ago_s:
                file.unlink()
