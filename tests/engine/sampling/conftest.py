"""Each test that takes ``way`` is run for every one of them."""

from collections.abc import Iterator

import pytest

from engine.sampling.cases import WAYS, sampler_of


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with sampler_of.taken(request.param):
        yield request.param
