"""One engine for the tests that leave it as it was: to make one takes longer than many a test."""

from collections.abc import Iterator

import pytest

from quire import AsyncLLM
from server.asking import engine


@pytest.fixture(scope="session")
def llm() -> Iterator[AsyncLLM]:
    own = engine()
    yield own
    own.close()
