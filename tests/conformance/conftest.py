"""What this room's suites share, and whom they ask: Quire's own, or the name that an option has."""

from collections.abc import Callable, Iterator

import pytest
import torch

from plugged import installed_examples

_OPTION = {"backends": "attention_backend", "policies": "eviction_policy", "tiers": "tier"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of ``backends(…)`` and the like once for each name, or for the one asked."""
    for kind, option in _OPTION.items():
        if mark := metafunc.definition.get_closest_marker(kind):
            asked = metafunc.config.getoption(option)
            metafunc.parametrize("name", [asked] if asked else mark.args)


@pytest.fixture(scope="session", autouse=True)
def _with_examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed_examples(tmp_path_factory.mktemp("installed")):
        yield


@pytest.fixture
def use_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
