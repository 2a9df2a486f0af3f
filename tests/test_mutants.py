"""The planted errors of tools/mutants.py can be planted, and the tests that notice them are there.

That they are noticed is tried by hand: it takes some minutes.
"""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


def test_no_planted_error_is_stale(tool: ModuleType) -> None:
    mutants = tool.read_mutants()
    assert len(mutants) >= 60
    for mutant in mutants:
        source = (ROOT / mutant.path).read_text(encoding="utf-8")
        changed = mutant.mutated(source)
        assert changed != source, f"{mutant.name} changes nothing"
        assert mutant.tests, f"{mutant.name} names no test"
        for test in mutant.tests:
            file, _, name = test.partition("::")
            tests = (ROOT / file).read_text(encoding="utf-8")
            if file.startswith("tests/tiers/"):  # some cases are those of all shared tiers
                tests += (ROOT / "tests/tiers/shared_tier_cases.py").read_text(encoding="utf-8")
            name = name.partition("[")[0].rpartition("::")[2]
            assert re.search(rf"^ *def {name}\(", tests, re.M) or not name, f"{test} is not there"


def test_a_passage_that_is_not_there_once_is_stale(tool: ModuleType) -> None:
    mutant = tool.Mutant(name="", file="units.py", old="a", new="b", tests=())
    assert mutant.mutated("a") == "b"
    for source in ("", "aa"):
        with pytest.raises(ValueError, match=rf"units.py has the passage {len(source)} times"):
            mutant.mutated(source)
