"""One engine for the tests of a file that leave it as it was: what is refused costs it nothing."""

from collections.abc import Iterator

import pytest

from quire import AsyncLLM
from server.asking import engine


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    own = engine()
    yield own
    own.close()
