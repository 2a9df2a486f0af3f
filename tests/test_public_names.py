"""What users may rely on. A commit that changes it says so in CHANGELOG.md."""

import importlib
import subprocess
import sys

import pytest

import quire
from quire import errors

PUBLIC = [
    "AsyncLLM",
    "BeamSearchParams",
    "CacheRetention",
    "LLM",
    "ModelSpec",
    "PoolingParams",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "cache",
]
ERRORS = [
    "ConfigError",
    "MemoryUnavailable",
    "ModelNotLoadable",
    "OutOfKVMemory",
    "QuireError",
    "RankLost",
    "RequestError",
    "RequestTooLong",
    "UnsupportedModel",
]


def test_the_public_names_are_these() -> None:
    assert sorted(quire.__all__) == PUBLIC, "update PUBLIC here, and CHANGELOG.md"


@pytest.mark.parametrize("name", PUBLIC)
def test_each_can_be_had_and_explains_itself(name: str) -> None:
    value = getattr(quire, name)
    assert name.startswith("__") or (value.__doc__ or "").strip(), f"quire.{name} has no docstring"


def test_the_errors_are_these() -> None:
    found = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert sorted(found) == ERRORS, "update ERRORS here, the tree in errors.py, and CHANGELOG.md"
    assert all(issubclass(getattr(errors, name), errors.QuireError) for name in ERRORS)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'cashe'"):
        quire.cashe  # noqa: B018


def test_names_are_loaded_on_first_use() -> None:
    """Importing quire is cheap; the heavy names load when asked for, and stay themselves."""
    script = (
        "import sys, quire\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'loaded by import quire'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    importlib.import_module("quire.kv")
    drop_in = importlib.import_module("quire.models.drop_in")
    assert quire.cache is drop_in.cache, "a module has taken its name"
    assert quire.LLM is importlib.import_module("quire.engine.llm").LLM
